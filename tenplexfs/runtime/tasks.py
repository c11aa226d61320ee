"""Running several things at once, and failing as one, or having one answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import trio

from tenplexfs.errors import TenplexError

__all__ = ["first_answer", "run_all"]

T = TypeVar("T")


async def run_all(jobs: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Runs ``jobs`` concurrently; the first one that fails cancels the others.

    Raises:
        TenplexError: The first failure, as it is, not in a group.
    """
    failures: list[TenplexError] = []
    async with trio.open_nursery() as nursery:

        async def run(job: Callable[[], Awaitable[None]]) -> None:
            try:
                await job()
            except TenplexError as error:
                failures.append(error)
                nursery.cancel_scope.cancel()

        for job in jobs:
            nursery.start_soon(run, job)
    if failures:
        raise failures[0]


async def first_answer(asks: Sequence[Callable[[], Awaitable[T]]], *, patience_s: float) -> T:
    """Returns what the first of ``asks`` that succeeds returns, and cancels the others.

    Each begins when the one before it has failed, or has been silent for ``patience_s``.

    Raises:
        TenplexError: All have failed: as the one that did so last.
    """
    answers: list[T] = []
    failures: list[TenplexError] = []
    async with trio.open_nursery() as nursery:

        async def ask(number: int, failed: trio.Event) -> None:
            try:
                answers.append(await asks[number]())
            except TenplexError as error:
                failures.append(error)
                failed.set()
            else:
                nursery.cancel_scope.cancel()

        for number in range(len(asks)):
            failed = trio.Event()
            nursery.start_soon(ask, number, failed)
            with trio.move_on_after(patience_s):
                await failed.wait()
    if not answers:
        raise failures[-1]
    return answers[0]
