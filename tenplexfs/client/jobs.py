"""What a training process asks of its job: whether to stop, and what it is to be started with."""

from __future__ import annotations

import os
import time
from typing import Any

from tenplexfs.client.connection import PATIENCE_S, Connection, Place, parse_place, patiently, socket_of
from tenplexfs.client.session import kept, loaded_from, process_name
from tenplexfs.errors import InvalidError, NotFoundError, TimedOutError

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
        # Kept open: its end tells the daemon that this process is gone.
        with kept(
            f"{place.mount}/{place.job}/{own}", lambda: Connection(socket_of(place.mount))
        ) as connection:
            answer = connection.ask("should_stop", **fields)["stop"]
        return None if answer is None else bool(answer)

    while (answer := patiently(ask)) is None:  # held: the stop is being agreed on
        pass
    return answer


def env(
    path: str | os.PathLike[str], *, socket: str | None = None, patience_s: float = PATIENCE_S
) -> dict[str, Any]:
    """Returns what a launcher needs to know of a job: generation, step, snapshot, mesh, nodes, ranks here.

    Args:
        path: ``<mount>/<job>``.
        socket: Of the daemon; ``path`` may be the name of the job alone then.
        patience_s: How long to wait for a daemon that is away.

    Raises:
        NotFoundError: There is no such job.
        UnavailableError: The daemon stayed away.
    """
    place = parse_place(path)

    def ask() -> dict[str, Any]:
        with Connection(socket or socket_of(place.mount)) as connection:
            return connection.ask("env", job=place.job)

    return _with_mount(patiently(ask, patience_s=patience_s), place, socket)


def wait(
    path: str | os.PathLike[str],
    *,
    state: str | None = "ready",
    generation: int | None = None,
    step: int | None = None,
    timeout_s: float | None = None,
    socket: str | None = None,
) -> dict[str, Any]:
    """Returns `env` once the job is in ``state``, at least of ``generation`` and at ``step``.

    A job that is not there is waited for.

    Args:
        path: ``<mount>/<job>``.
        state: "empty", "ready", "reconfiguring", "undecided", "paused" or "failed"; None: any.
        generation: The lowest that will do.
        step: The lowest that will do.
        timeout_s: For how long; default: for ever.
        socket: As for `env`.

    Raises:
        InvalidError: There is no such state.
        TimedOutError: Not within ``timeout_s``.
        UnavailableError: The daemon stayed away.
    """
    place = parse_place(path)
    end = None if timeout_s is None else time.monotonic() + timeout_s
    fields = {"job": place.job, "state": state, "generation": generation, "step": step}

    def left_s() -> float:
        return PATIENCE_S if end is None else max(end - time.monotonic(), 0.0)

    def ask() -> dict[str, Any] | None:
        with Connection(socket or socket_of(place.mount)) as connection:
            found: dict[str, Any] | None = connection.ask("wait", left_s=left_s(), **fields)["job"]
        return found

    while (found := patiently(ask, patience_s=min(PATIENCE_S, left_s()))) is None:
        if end is not None and time.monotonic() >= end:
            wanted = {"state": state, "generation": generation, "step": step}
            text = ", ".join(f"{name} {value}" for name, value in wanted.items() if value is not None)
            why = "" if _is_there(place, socket) else ": there is no such job"
            raise TimedOutError(f"job {place.job}: not at {text or 'hand'} within {timeout_s:g} s{why}")
    return _with_mount(found, place, socket)


def _is_there(place: Place, socket: str | None) -> bool:
    try:
        with Connection(socket or socket_of(place.mount)) as connection:
            connection.ask("env", job=place.job)
    except NotFoundError:
        return False
    return True


def _with_mount(found: dict[str, Any], place: Place, socket: str | None) -> dict[str, Any]:
    """Returns ``found`` with the mount as this process sees it, else as the daemon does."""
    return found if socket else {**found, "mount": str(place.mount)}
