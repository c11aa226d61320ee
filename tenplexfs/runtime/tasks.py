"""Running several things at once, and failing as one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import trio

from tenplexfs.errors import TenplexError

__all__ = ["run_all"]


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
