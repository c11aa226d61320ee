"""Saving a rank's state: the daemon hands out files, the tensors are written straight into them."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from tenplexfs.client.arrays import Source, source_of
from tenplexfs.client.connection import Connection, Place, parse_place, patiently, socket_of
from tenplexfs.client.copying import Copier, Placed, Task
from tenplexfs.client.session import loaded_from, process_name, remember, run_name
from tenplexfs.client.staging import lanes_of
from tenplexfs.errors import InvalidError, TimedOutError, UnavailableError
from tenplexfs.formats import npy
from tenplexfs.formats.frames import MAX_FDS
from tenplexfs.formats.structure import Flat, flatten

__all__ = ["Save", "save", "save_held"]

log = logging.getLogger(__name__)

_JOB_BYTES = 8 << 20
_MAX_THREADS = 4
_SAY_S = 20.0  # until a save says whom it waits for
_AHEAD = 2  # batches of descriptors that are open at the same time


class _Given(NamedTuple):
    """What `save` was given beside the state."""

    consumed: int | None
    snapshot: str | None
    run: str | None


class _Copied(NamedTuple):
    """A save that is copied: the connection that holds it, and what it says when it is sealed."""

    connection: Connection
    seal: Mapping[str, object]


class Save:
    """A save whose state is copied; the training loop may change it.

    Attributes:
        step: Of the save.
        snapshot: What it became, once it is done.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.snapshot: str | None = None
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        self._connection: Connection | None = None

    def done(self) -> bool:
        """Returns whether it ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> str:
        """Returns the snapshot, once every rank has saved and it is committed.

        Raises:
            TimedOutError: Not within ``timeout_s``; it goes on.
            TenplexError: It failed; the step before stays.
        """
        if not self._ended.wait(timeout_s):
            raise TimedOutError(f"save of step {self.step}: not done within {timeout_s:g} s")
        if self._failure is not None:
            raise self._failure
        assert self.snapshot is not None
        return self.snapshot

    def ended_within(self, timeout_s: float) -> bool:
        """Returns whether it ended, well or not, after waiting for it."""
        return self._ended.wait(timeout_s)

    def abandon(self) -> None:
        """Gives it up, if it is not committed yet: another rank cannot save its part."""
        if self._connection is not None:
            self._connection.shut_down()

    def _end(self, snapshot: str | None, failure: BaseException | None = None) -> None:
        self.snapshot, self._failure = snapshot, failure
        self._ended.set()


def save(
    state: object,
    path: str | os.PathLike[str],
    *,
    step: int,
    wait: bool = True,
    allow_pickle: bool = False,
    consumed: int | None = None,
    snapshot: str | None = None,
    run: str | None = None,
) -> Save:
    """Saves the state of one rank as its part of a step; the step commits when all ranks have saved theirs.

    Args:
        state: Any nesting of maps and lists, of numpy's or torch's tensors and plain values.
        path: ``<mount>/<job>/model/<rank>``.
        step: Must be past the newest one that is committed.
        wait: Whether to return when the step is committed, else once the state is copied.
        allow_pickle: Whether other objects are kept, pickled.
        consumed: How many samples of the epoch are consumed, where that is not steps times the global batch.
        snapshot: What the job was loaded from; default ``TENPLEXFS_SNAPSHOT``, else what this process last
            loaded or saved, else none, which only a job without state accepts.
        run: What ranks have in common that save the same step together; default, what torchrun says.

    Raises:
        InvalidError: The state does not fit the layout, or holds what cannot be kept; nothing changed.
        PreconditionError, ConflictError: The job is of another generation, or past that step.
        NoRoomError: The store is full; the step before stays.
        UnavailableError: The daemon stayed away.
    """
    place = _place(path, step)
    flat = flatten(state, source_of, allow_pickle=allow_pickle)
    made, finish = _start(flat, place, step, _Given(consumed, snapshot, run))
    if wait:
        finish(True)
        made.wait()
    else:
        _aside(step, lambda: finish(False))
    return made


def save_held(
    flat: Flat[Source],
    path: str | os.PathLike[str],
    *,
    step: int,
    consumed: int | None,
    snapshot: str | None,
    run: str,
) -> Save:
    """Does as `save`, for who waits in another way and leaves what is in ``flat`` as it is until that ended.

    Returns once the state is copied. When the daemon is restarted before the commit, it is saved once more.
    """
    made, finish = _start(flat, _place(path, step), step, _Given(consumed, snapshot, run))
    _aside(step, lambda: finish(True))
    return made


def _aside(step: int, finish: Callable[[], None]) -> None:
    # No daemon thread: the process must not end before what it saved is safe.
    threading.Thread(target=finish, name=f"tenplexfs-save-{step}", daemon=False).start()


def _place(path: str | os.PathLike[str], step: int) -> Place:
    place = parse_place(path)
    if place.rank is None or place.step is not None:
        raise InvalidError(f"save {path}: need <mount>/<job>/model/<rank>")
    if type(step) is not int or step < 0:
        raise InvalidError(f"save: step {step!r}: need a whole number >= 0")
    return place


def _start(flat: Flat[Source], place: Place, step: int, given: _Given) -> tuple[Save, Callable[[bool], None]]:
    """Returns a save whose state is copied, and what ends it; that is told whether it may copy once more."""
    begin = {
        "job": place.job,
        "rank": place.rank,
        "step": step,
        "snapshot": given.snapshot or loaded_from(place.mount, place.job),
        # One that failed may be tried again: what it failed of is not what the next try fails of.
        "process": f"{process_name()}-{secrets.token_hex(4)}",
        "run": run_name() if given.run is None else given.run,
        **_columns(flat.tensors),
        "ties": dict(flat.ties),
        "document": flat.document,
        "consumed": given.consumed,
        "world": int(os.environ.get("WORLD_SIZE", "1")),
    }
    made = Save(step)
    copied = patiently(lambda: _send(place, begin, flat))
    return made, lambda again: _finish(made, copied, place, begin, flat, again=again)


def _columns(tensors: Mapping[str, Source]) -> dict[str, object]:
    """Returns the tensors as ``save.begin`` wants them: paths, distinct kinds, and which is of which."""
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    of = [kinds.setdefault((source.dtype, source.shape), len(kinds)) for source in tensors.values()]
    return {"paths": list(tensors), "kinds": list(kinds), "of": np.array(of, np.uint32).tobytes()}


def _send(place: Place, begin: Mapping[str, object], flat: Flat[Source]) -> _Copied:
    """Copies everything."""
    connection = Connection(socket_of(place.mount))
    try:
        begun = connection.ask("save.begin", **begin)
        remember(place.mount, place.job, begun["base"])
        threads = min(_MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // begun["ranks"]))
        copier = Copier(lanes_of(flat.tensors.values()))
        _write_files(connection, begun["save"], _placed(flat, begun), threads, copier)
    except BaseException:
        connection.close()
        raise
    return _Copied(connection, {"save": begun["save"], **_sum_columns(copier.sums, len(flat.tensors))})


def _sum_columns(sums: Mapping[int, int], count: int) -> dict[str, object]:
    """Returns what ``save.seal`` says of the sums: that of each tensor, and whether it is known."""
    known, found = np.zeros(count, np.bool_), np.zeros(count, np.uint64)
    where = np.fromiter(sums, np.int64, len(sums))
    known[where] = True
    found[where] = np.fromiter(sums.values(), np.uint64, len(sums))
    return {"sums": found.tobytes(), "summed": known.tobytes()}


def _finish(
    made: Save,
    copied: _Copied,
    place: Place,
    begin: Mapping[str, object],
    flat: Flat[Source],
    *,
    again: bool,
) -> None:
    """Seals, and waits for the commit; with ``again``, saves once more when the daemon was restarted."""
    try:
        while True:
            made._connection = copied.connection
            try:
                with copied.connection as connection:
                    connection.ask("save.seal", **copied.seal)
                    snapshot = _wait(connection, place, begin)
                break
            except UnavailableError:
                found = patiently(lambda: _committed(place, begin))
                if found is not None:
                    snapshot = found
                    break
                if not again:  # the state may have changed by now
                    raise
                copied = patiently(lambda: _send(place, begin, flat))
        remember(place.mount, place.job, snapshot)
        made._end(snapshot)
    except BaseException as error:  # raised again where the save is waited for
        made._end(None, error)


def _wait(connection: Connection, place: Place, begin: Mapping[str, object]) -> str:
    asked_s = time.monotonic()
    said = ""
    while True:
        answer = connection.ask("save.wait", job=place.job, step=begin["step"])
        if answer["snapshot"] is not None:
            return str(answer["snapshot"])
        who = ", ".join(map(str, answer["missing"])) or "of other nodes"
        if who != said and time.monotonic() - asked_s > _SAY_S:
            log.warning("save of %s, step %d: waits for ranks %s", place.job, begin["step"], who)
            said = who


def _committed(place: Place, begin: Mapping[str, object]) -> str | None:
    """Returns the snapshot of the step if it was committed before the daemon ended."""
    with Connection(socket_of(place.mount)) as connection:
        fields = {name: begin[name] for name in ("job", "rank", "step", "process", "run")}
        found = connection.ask("save.outcome", **fields)["snapshot"]
    return None if found is None else str(found)


def _placed(flat: Flat[Source], begun: Mapping[str, Any]) -> list[list[Placed]]:
    """Returns for each file what goes into it, in the order of the offsets."""
    files: list[list[Placed]] = [[] for _ in range(begun["files"])]
    places = np.frombuffer(begun["places"], np.int64).reshape(-1, 2).tolist()
    for number, ((file, offset), source) in enumerate(zip(places, flat.tensors.values(), strict=True)):
        if file >= 0:
            files[file].append(Placed(offset, npy.header(source.shape, source.dtype), source, number))
    for each in files:
        each.sort(key=lambda placed: placed.offset)
    return files


def _write_files(
    connection: Connection,
    name: int,
    files: Sequence[Sequence[Placed]],
    threads: int,
    copier: Copier,
) -> None:
    """Writes into the files that the daemon hands out, some at a time."""
    with ThreadPoolExecutor(threads, thread_name_prefix="tenplexfs-copy") as pool, ExitStack() as stack:
        batches: deque[tuple[list[int], list[Future[None]]]] = deque()
        for first in range(0, len(files), MAX_FDS):
            batch = files[first : first + MAX_FDS]
            _, fds = connection.ask_fds("save.files", save=name, first=first, count=len(batch))
            futures: list[Future[None]] = []
            batches.append((fds, futures))
            stack.callback(_end_batch, fds, futures)
            tasks = chain.from_iterable(map(copier.tasks, fds, batch))
            futures.extend(pool.submit(_run, job) for job in _jobs(tasks))
            while len(batches) >= _AHEAD:
                _end_batch(*batches.popleft())


def _jobs(tasks: Iterable[tuple[int, Task]]) -> Iterator[list[Task]]:
    """Yields tasks together that are worth a thread's while."""
    job: list[Task] = []
    size = 0
    for nbytes, task in tasks:
        job.append(task)
        size += nbytes
        if size >= _JOB_BYTES:
            yield job
            job, size = [], 0
    if job:
        yield job


def _run(job: Sequence[Task]) -> None:
    for task in job:
        task()


def _end_batch(fds: list[int], futures: list[Future[None]]) -> None:
    """Waits until all is written, and closes the files; a second time does nothing."""
    failures = [error for future in futures if (error := future.exception()) is not None]
    for fd in fds:
        os.close(fd)
    fds.clear()
    futures.clear()
    if failures:
        raise failures[0]
