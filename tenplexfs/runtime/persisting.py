"""Writing steps to a directory or object store, behind the back of training.

The node of rank 0 leads: it asks every node for its share, and writes the manifest when all shares are there.
Until then the step is not there; what was written of it is not sent again. What fails is tried again, with
the step that is the newest then. Saves are never held up: a node gives its share up when a save needs the
room that it holds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import trio
import xxhash

from tenplexfs.core.datasets import DatasetState
from tenplexfs.core.snapshot import JobName, NodeName, SnapshotId, TxId
from tenplexfs.errors import CorruptError, NotFoundError, TenplexError, UnavailableError, internal
from tenplexfs.formats.checkpoint import (
    INDEXES,
    LAYOUT,
    MANIFEST,
    VALUES,
    Checkpoint,
    CheckpointFile,
    directory_name,
    snapshot_of_directory,
)
from tenplexfs.formats.dataset_settings import datasets_of
from tenplexfs.formats.keep_settings import persist_of
from tenplexfs.formats.lineage import is_past_of
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.jobs import JobTable
from tenplexfs.runtime.member import Member
from tenplexfs.runtime.past import Shown
from tenplexfs.runtime.shares import shares_of
from tenplexfs.runtime.tasks import run_all
from tenplexfs.storage.checkpoint_reader import find_steps
from tenplexfs.storage.checkpoint_writer import ShareWriter
from tenplexfs.storage.places import Place

__all__ = ["PersistCalls", "Persister", "Shares", "newest_past"]

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_TELL_S = 0.1
_TELL_NODE_S = 3.0
_RETRY_S = 1.0
_RETRY_MAX_S = 60.0


class PersistCalls(Protocol):
    """What a leader asks of nodes, its own too."""

    async def persist(
        self, node: NodeName, job: JobName, txid: TxId, url: str, report: Callable[[int, int], None]
    ) -> tuple[CheckpointFile, ...]:
        """Returns the files that the node has written; ``report`` gets bytes done and bytes in all."""
        ...

    async def persisted(self, node: NodeName, job: JobName, step: int) -> None:
        """Tells the node which step is the newest that is persisted."""
        ...


class Shares:
    """This node's shares of steps that are persisted. Belongs to the trio thread.

    Attributes:
        newest: Of each job, the newest step that is persisted, as its leader said.
    """

    def __init__(self, member: Member, compute: Compute) -> None:
        self.newest: dict[JobName, int] = {}
        self._member = member
        self._compute = compute
        self._running: dict[trio.CancelScope, tuple[JobName, TxId, trio.Event]] = {}

    async def persist(
        self, job: JobName, txid: TxId, url: str, report: Callable[[int, int], None]
    ) -> tuple[CheckpointFile, ...]:
        """Writes this node's share of a snapshot; returns its files.

        Raises:
            NotFoundError: The snapshot is not here any more.
            TenplexError: It could not be written; asked again, it goes on where it was.
        """
        stored = {each.id.txid: each for each in self._member.store.snapshots(job)}.get(txid)
        if stored is None:
            raise NotFoundError(f"node {self._member.node}: stores no snapshot {txid} of job {job}")
        with self._member.store.arrays(stored) as arrays, trio.CancelScope() as scope:
            self._running[scope] = job, txid, (ended := trio.Event())
            shares = await self._compute(shares_of, stored.layout_json, self._member.node)
            stop = threading.Event()
            token = trio.lowlevel.current_trio_token()
            told_s = [0.0]

            def count(nbytes: int) -> None:
                if (now_s := time.monotonic()) > told_s[0] + _TELL_S:
                    told_s[0] = now_s
                    with suppress(trio.RunFinishedError):
                        token.run_sync_soon(report, nbytes, writer.total_bytes)

            writer = ShareWriter(Place(url), arrays, shares, count, stop)
            try:
                files = await trio.to_thread.run_sync(writer.run, abandon_on_cancel=True)
            finally:
                stop.set()
                del self._running[scope]
                ended.set()
            report(writer.total_bytes, writer.total_bytes)
            return tuple(files)
        raise UnavailableError(f"job {job}: {txid} is not persisted: a save needs the room that it holds")

    async def relieve(self) -> bool:
        """Gives up the share of a snapshot that nobody else holds, and returns whether there was one."""
        for scope, (job, txid, ended) in self._running.items():
            if all(each.id.txid != txid for each in self._member.store.snapshots(job)):
                scope.cancel()
                await ended.wait()
                await trio.lowlevel.checkpoint()  # the arrays are let go of by now
                return True
        return False


@dataclass
class _State:
    """What a leader knows of a job.

    Attributes:
        to: Where they are persisted.
        steps: That are persisted there, and the names of their directories; None before it looked.
    """

    to: str = ""
    steps: dict[SnapshotId, str] | None = None
    running: SnapshotId | None = None
    nodes: dict[NodeName, tuple[int, int]] = field(default_factory=dict)
    failure: str | None = None
    wait_s: float = 0.0
    next_s: float = 0.0


class Persister:
    """Leads, for the jobs whose rank 0 is on this node.

    Args:
        index_file: Returns the file of the index of a dataset.
        clock_ns: Wall clock.
    """

    def __init__(
        self,
        *,
        member: Member,
        table: JobTable,
        shares: Shares,
        calls: PersistCalls,
        index_file: Callable[[str], Path],
        clock_ns: Callable[[], int],
    ) -> None:
        self._member = member
        self._table = table
        self._shares = shares
        self._calls = calls
        self._index_file = index_file
        self._clock_ns = clock_ns
        self._states: dict[JobName, _State] = {}

    def status(self, job: JobName) -> Mapping[str, object] | None:
        """Returns what ``status.json`` says, or None where the job is not persisted."""
        shown = self._member.shown().get(job)
        persist = persist_of(shown.settings_json) if shown is not None else None
        if shown is None or persist is None:
            return None
        state = self._states.get(job, _State())
        return {
            "to": persist.to,
            "every": persist.every,
            "keep": persist.keep,
            "by": shown.view.ptc.node_of(0),
            "last_step": self._shares.newest.get(job),
            "step": state.running.step if state.running is not None else None,
            "bytes_done": sum(done for done, _ in state.nodes.values()),
            "bytes_total": sum(total for _, total in state.nodes.values()),
            "failure": state.failure,
        }

    async def run(self) -> None:
        """Leads until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                changed = self._table.changed
                for job, shown in list(self._member.shown().items()):
                    state = self._states.setdefault(job, _State())
                    if self._is_due(job, shown, state):
                        state.running = shown.head.snapshot
                        nursery.start_soon(self._lead, job, shown, state)
                for job in self._states.keys() - self._member.shown().keys():
                    del self._states[job]
                with trio.move_on_after(_LOOK_S):
                    await changed.wait()

    def _is_due(self, job: JobName, shown: Shown, state: _State) -> bool:
        persist, step = persist_of(shown.settings_json), shown.head.snapshot.step
        if shown.view.ptc.node_of(0) != self._member.node:
            state.steps = None  # somebody else leads, and writes
            return False
        if persist is None or step is None or state.running is not None:
            return False
        if state.to != persist.to:
            state.to, state.steps, state.failure = persist.to, None, None
            state.wait_s = state.next_s = 0.0
        if trio.current_time() < state.next_s or state.steps is None:
            return trio.current_time() >= state.next_s
        newest = newest_past(shown.settings_json, state.steps)
        return persist.is_due(step, None if newest is None else newest.step)

    async def _lead(self, job: JobName, shown: Shown, state: _State) -> None:
        try:
            await self._persist(job, shown, state)
            state.failure, state.wait_s = None, 0.0
        except (TenplexError, OSError) as raised:
            error = internal(raised)
            if state.failure != error.message:
                log.warning("job %s: %s is not persisted: %s", job, shown.head.snapshot, error)
            state.failure = error.message
            state.wait_s = min(max(2 * state.wait_s, _RETRY_S), _RETRY_MAX_S)
            state.next_s = trio.current_time() + state.wait_s
        finally:
            state.running = None
            state.nodes.clear()
            self._table.touch()

    async def _persist(self, job: JobName, shown: Shown, state: _State) -> None:
        persist, snapshot = persist_of(shown.settings_json), shown.head.snapshot
        assert persist is not None
        place = Place(persist.to) / job
        if state.steps is None:
            state.steps = await trio.to_thread.run_sync(find_steps, place, abandon_on_cancel=True)
            await self._tell(job, shown, state.steps)
            return  # the next look says whether the step is due
        known = self._member.describe(job, snapshot.txid)
        name = directory_name(snapshot)
        files: dict[NodeName, tuple[CheckpointFile, ...]] = {}

        async def ask(node: NodeName) -> None:
            def count(done: int, total: int) -> None:
                state.nodes[node] = done, total

            try:
                url = f"{place.url}/{name}"
                files[node] = await self._calls.persist(node, job, snapshot.txid, url, count)
            except TenplexError as error:
                raise type(error)(f"node {node}: {error.message}", **error.details) from error

        await run_all(partial(ask, node) for node in shown.head.nodes)
        every = tuple(file for node in sorted(files) for file in files[node])
        checkpoint = Checkpoint(
            job,
            snapshot,
            self._clock_ns(),
            known.settings_json,
            xxhash.xxh3_64_intdigest(known.layout_json),
            xxhash.xxh3_64_intdigest(known.values),
            every,
        )
        indexes = {state.digest: self._index_file(state.digest) for state in _datasets(known.settings_json)}
        write = partial(_finish, place, name, checkpoint, known.layout_json, known.values, indexes)
        await trio.to_thread.run_sync(write, abandon_on_cancel=True)
        state.steps[snapshot] = name
        log.info("job %s: %s is persisted: %d files", job, snapshot, len(every))
        await self._tell(job, shown, state.steps)
        kept = kept_of(known.settings_json, state.steps, persist.keep)
        await trio.to_thread.run_sync(_tidy, place, snapshot, kept, abandon_on_cancel=True)
        state.steps = kept

    async def _tell(self, job: JobName, shown: Shown, steps: Mapping[SnapshotId, str]) -> None:
        newest = newest_past(shown.settings_json, steps)
        if newest is None or newest.step is None:
            return
        step = newest.step

        async def tell(node: NodeName) -> None:
            with suppress(TenplexError), trio.move_on_after(_TELL_NODE_S):
                await self._calls.persisted(node, job, step)

        await run_all(partial(tell, node) for node in shown.head.nodes)


def newest_past(settings_json: bytes, steps: Iterable[SnapshotId]) -> SnapshotId | None:
    """Returns the newest of ``steps`` that a job with these settings came from, or None."""
    past = [each for each in steps if is_past_of(settings_json, each.generation, each.step or 0)]
    return max(past, key=_age, default=None)


def kept_of(settings_json: bytes, steps: Mapping[SnapshotId, str], count: int) -> dict[SnapshotId, str]:
    """Returns the ``count`` newest of ``steps``; those that a job left behind go before all others."""

    def order(snapshot: SnapshotId) -> tuple[bool, int, int]:
        return is_past_of(settings_json, snapshot.generation, snapshot.step or 0), *_age(snapshot)

    return {each: steps[each] for each in sorted(steps, key=order)[-count:]}


def _age(snapshot: SnapshotId) -> tuple[int, int]:
    return snapshot.generation, snapshot.step or 0


def _datasets(settings_json: bytes) -> Iterable[DatasetState]:
    return datasets_of(settings_json).values()


def _finish(
    place: Place,
    name: str,
    checkpoint: Checkpoint,
    layout_json: bytes,
    values: bytes,
    indexes: Mapping[str, Path],
) -> None:
    """Writes what is beside the arrays, and last of all the manifest."""
    for digest, file in indexes.items():
        if place.size(f"{INDEXES}/{digest}") != file.stat().st_size:
            place.put(f"{INDEXES}/{digest}", partial(_read, file))
    step = place / name
    step.put(LAYOUT, layout_json)
    step.put(VALUES, values)
    for each in checkpoint.files:
        size = step.size(each.name)
        if size is None:
            raise NotFoundError(
                f"{step.url}/{each.name}: was written, and is not there: share it on all nodes"
            )
        if size != each.nbytes:
            raise CorruptError(f"{step.url}/{each.name}: has {size} bytes, should have {each.nbytes}")
    step.remove_halves()
    step.put(MANIFEST, checkpoint.encode())


def _tidy(place: Place, now: SnapshotId, kept: Mapping[SnapshotId, str]) -> None:
    """Removes older steps that are not kept, manifests first, and what is left of those never finished."""
    for name in place.directories():
        snapshot = snapshot_of_directory(name)
        if snapshot is not None and snapshot not in kept and _age(snapshot) < _age(now):
            (place / name).remove(MANIFEST)
            (place / name).remove_all()


def _read(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while data := opened.read(1 << 20):
            yield data
