"""What a training process asks of its job: whether to stop, and what it is to be started with."""

from __future__ import annotations

import os
import time
from typing import Any

from tenplexfs.client.connection import Connection, parse_place, patiently, socket_of
from tenplexfs.client.session import loaded_from, process_name
from tenplexfs.errors import InvalidError, TimedOutError

__all__ = ["env", "should_stop", "wait"]


def should_stop(
    path: str | os.PathLike[str],
    step: int,
    *,
    rank: int | None = None,
    for_all: bool = False,
    snapshot: str | None = None,
) -> bool:
    """Returns whether to save this step and end with `EXIT_RECONFIGURE`. Ask once a step, on each rank.

    All ranks get the same answer for the same step. While a stop is being agreed on, it waits for it.

    Args:
        path: ``<mount>/<job>``, or ``<mount>/<job>/model/<rank>``.
        step: The one that is being finished; it never goes back.
        rank: Of this process; default that of ``path``, else the variable ``RANK``.
        for_all: This rank asks for all, and tells the others the answer.
        snapshot: As for `save`.

    Raises:
        NotFoundError: There is no such job.
        UnavailableError: The daemon stayed away.
    """
    place = parse_place(path)
    own = rank if rank is not None else place.rank
    if own is None:
        given = os.environ.get("RANK", "")
        if not given.isdecimal():
            raise InvalidError(
                f"should_stop {path}: which rank asks? give rank=, or <mount>/<job>/model/<rank>"
            )
        own = int(given)
    fields = {
        "job": place.job,
        "rank": own,
        "step": step,
        "for_all": for_all,
        "process": process_name(),
        "snapshot": snapshot or loaded_from(place.mount, place.job),
    }

    def ask() -> bool | None:
        with Connection(socket_of(place.mount)) as connection:
            answer = connection.ask("should_stop", **fields)["stop"]
        return None if answer is None else bool(answer)

    while (answer := patiently(ask)) is None:  # held: the stop is being agreed on
        pass
    return answer


def env(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns what a launcher needs to know of a job: generation, step, snapshot, mesh, nodes, ranks here.

    Raises:
        NotFoundError: There is no such job.
    """
    place = parse_place(path)

    def ask() -> dict[str, Any]:
        with Connection(socket_of(place.mount)) as connection:
            return connection.ask("env", job=place.job)

    return {**patiently(ask), "mount": str(place.mount)}


def wait(
    path: str | os.PathLike[str],
    *,
    state: str = "ready",
    generation: int | None = None,
    step: int | None = None,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Returns `env` once the job is in ``state``, at least of ``generation`` and at ``step``.

    Raises:
        TimedOutError: Not within ``timeout_s``.
    """
    place = parse_place(path)
    end = None if timeout_s is None else time.monotonic() + timeout_s
    fields = {"job": place.job, "state": state, "generation": generation, "step": step}

    def ask() -> dict[str, Any] | None:
        left_s = None if end is None else max(end - time.monotonic(), 0.0)
        with Connection(socket_of(place.mount)) as connection:
            found: dict[str, Any] | None = connection.ask("wait", left_s=left_s, **fields)["job"]
        return found

    while (found := patiently(ask)) is None:
        if end is not None and time.monotonic() >= end:
            raise TimedOutError(f"job {place.job}: not {state} within {timeout_s:g} s")
    return {**found, "mount": str(place.mount)}
