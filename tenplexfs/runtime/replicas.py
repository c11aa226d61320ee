"""Copies of other nodes' state, so that a node may be lost that nobody replicates.

With ``replicas: n`` each node keeps the state of the n nodes before it, in the order of the job's node names
and round, at the newest committed step. A set is brought up behind the back of training, by a plan of the
layout in which those ranks are here too: what this node holds already is shared, and so is what is as it was
in the last set. That goes when every node has its new one, so that some step is always whole.

Belongs to the trio thread.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

import trio

from tenplexfs.core.snapshot import COPIES, JobName, NodeName, SnapshotId, TxId, copies_of
from tenplexfs.errors import NoRoomError, NotFoundError, TenplexError, internal
from tenplexfs.formats import npy
from tenplexfs.formats.keep_settings import replicas_of
from tenplexfs.runtime.array_sums import decode_array_sums, owners_in
from tenplexfs.runtime.asking import take_stock
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.copying import (
    check_sums,
    copying,
    having_of,
    owners_of,
    shared,
    survives_with,
    unchanged,
)
from tenplexfs.runtime.jobs import JobTable
from tenplexfs.runtime.member import Member
from tenplexfs.runtime.orders import InventoryCalls
from tenplexfs.runtime.past import Shown, job_memory_bytes
from tenplexfs.runtime.planning import StagePart
from tenplexfs.runtime.protocols import PeerReader
from tenplexfs.runtime.staging import Base, ScatterFactory, Staging
from tenplexfs.storage.store import ArrayRef, Key, StoredSnapshot

__all__ = ["ReplicaCalls", "Replicas"]

log = logging.getLogger(__name__)

_SETTLING_S = 0.5
_SETTLED_S = 10.0


class ReplicaCalls(InventoryCalls, Protocol):
    """What is asked of other nodes."""

    async def sums(self, node: NodeName, job: JobName, txid: TxId) -> bytes:
        """Returns the sums of the arrays that the node stores of a snapshot."""
        ...


@dataclass
class _State:
    running: trio.CancelScope | None = None
    ended: trio.Event | None = None
    failure: str | None = None
    survives: tuple[TxId, int] | None = None
    is_settled: bool = False
    next_s: float = 0.0


class Replicas:
    """The copies that this node keeps, and what losses jobs survive.

    Args:
        living: The nodes that the registry says are alive; none while it has said nothing.
    """

    def __init__(
        self,
        *,
        member: Member,
        table: JobTable,
        calls: ReplicaCalls,
        compute: Compute,
        peers: PeerReader,
        scatter: ScatterFactory,
        living: Callable[[], Collection[NodeName]],
        clock_ns: Callable[[], int],
    ) -> None:
        self._member = member
        self._store = member.store
        self._table = table
        self._calls = calls
        self._compute = compute
        self._peers = peers
        self._scatter = scatter
        self._living = living
        self._clock_ns = clock_ns
        self._states: dict[JobName, _State] = {}

    # What others ask about.

    def survives(self, job: JobName) -> int | None:
        """Returns how many node losses the newest snapshot survives now, or None where its layout says it."""
        shown, state = self._member.shown().get(job), self._states.get(job)
        known = state.survives if state is not None else None
        # Of another snapshot nothing is known yet: nothing is copied.
        return known[1] if known is not None and shown and known[0] == shown.head.snapshot.txid else None

    def status(self, job: JobName) -> Mapping[str, object] | None:
        """Returns what ``status.json`` says, or None where nothing is copied."""
        shown = self._member.shown().get(job)
        count = replicas_of(shown.settings_json) if shown is not None else 0
        if shown is None or not count:
            return None
        state = self._states.get(job, _State())
        owners = owners_of(shown.head.nodes, self._member.node, count)
        steps = [each.id.step for each in self._sets(job)]
        return {
            "wanted": count,
            "comes_to": min(count, len(shown.head.nodes) - 1),
            "of": list(owners),
            "step": steps[-1] if steps else None,
            "is_complete": not owners or self._has(job, shown.head.snapshot.txid, owners),
            "failure": state.failure,
        }

    # What happens behind.

    async def run(self) -> None:
        """Brings up what is missing, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                changed = self._table.changed
                wait_s = _SETTLED_S
                for job, shown in list(self._member.shown().items()):
                    if shown.head.snapshot.step is None:
                        continue
                    state = self._states.setdefault(job, _State())
                    if state.running is None and trio.current_time() >= state.next_s:
                        state.running, state.ended = trio.CancelScope(), trio.Event()
                        nursery.start_soon(self._look, job, shown, state)
                    if not state.is_settled:
                        wait_s = _SETTLING_S
                for job in self._copied_jobs() - self._member.shown().keys():
                    self._states.pop(job, None)
                    is_known = job in self._table.jobs() or self._table.registry_away is not None
                    if not is_known:  # it was removed
                        await self._drop_all(job, self._sets(job))
                with trio.move_on_after(wait_s):
                    await changed.wait()

    async def _look(self, job: JobName, shown: Shown, state: _State) -> None:
        assert state.running is not None and state.ended is not None
        before = state.failure
        try:
            with state.running:
                state.is_settled = await self._settle(job, shown, state)
                state.failure = None
        except (TenplexError, OSError) as raised:
            error = internal(raised)
            if state.failure != error.message:
                log.warning("job %s: copies of %s: %s", job, shown.head.snapshot, error)
            state.failure, state.is_settled = error.message, False
        finally:
            state.ended.set()
            state.running = state.ended = None
            state.next_s = trio.current_time() + (0.0 if state.is_settled else _SETTLING_S)
            if state.failure != before:
                self._table.touch()

    async def _settle(self, job: JobName, shown: Shown, state: _State) -> bool:
        """Does what there is to do; returns whether every node of the job has its set."""
        snapshot, nodes = shown.head.snapshot, shown.head.nodes
        count = replicas_of(shown.settings_json)
        if not count:
            await self._drop_all(job, self._sets(job))
            await self._count_living(shown, state)
            return True
        # What is whole nowhere any more is of no use but for what did not change since then.
        await self._drop_all(job, self._useless(job)[:-1])
        owners = owners_of(nodes, self._member.node, count)
        failure: TenplexError | None = None
        if shown.stored and owners and not self._has(job, snapshot.txid, owners):
            try:
                await self._bring_up(job, snapshot, owners)
            except TenplexError as error:
                failure = error
            else:
                await self._drop_all(job, self._useless(job))
        stock = await take_stock(self._calls, nodes, job)
        having = having_of(snapshot, stock)
        keepers = {node: frozenset(each for each in having if node in having[each]) for node in nodes}
        await self._count(shown, state, keepers)
        if failure is not None:
            raise failure
        wanted = {node: owners_of(nodes, node, count) for node in nodes}
        if any(not having.get(node, frozenset()) >= {*wanted[node]} for node in nodes):
            return False
        await self._drop_all(job, [each for each in self._sets(job) if each.id != snapshot])
        return True

    async def _count_living(self, shown: Shown, state: _State) -> None:
        """Takes note of what a job without copies survives, where a node of it is missed."""
        living = self._living()
        missed = {*shown.head.nodes} - {*living} if living else set[NodeName]()
        if missed:
            await self._count(shown, state, {node: {node} - missed for node in shown.head.nodes})
        elif state.survives is not None:
            state.survives = None
            self._table.touch()

    async def _count(
        self, shown: Shown, state: _State, keepers: Mapping[NodeName, Collection[NodeName]]
    ) -> None:
        number = await self._compute(survives_with, shown.view.layout_json, keepers)
        found = shown.head.snapshot.txid, number
        if state.survives != found:
            state.survives = found
            self._table.touch()

    async def _bring_up(self, job: JobName, snapshot: SnapshotId, owners: tuple[NodeName, ...]) -> None:
        mine = {each.id.txid: each for each in self._store.snapshots(job)}.get(snapshot.txid)
        if mine is None:
            raise NotFoundError(f"{snapshot} is not here any more")
        # What a daemon that died left half-way; one set is brought up at a time.
        halves = [each for each in self._sets(job, committed=False) if not each.committed]
        await self._drop_all(job, halves)
        made = await self._compute(copying, mine.layout_json, self._member.node, owners)
        sums: dict[Key, tuple[int, ...]] = {}
        for owner in owners:
            sums.update(decode_array_sums(await self._calls.sums(owner, job, snapshot.txid)))
        with ExitStack() as stack:
            arrays = stack.enter_context(self._store.arrays(mine))
            refs = dict(mine.arrays)
            for before in self._sets(job)[-1:]:
                stack.enter_context(self._store.arrays(before))  # so that its files stay
                refs |= unchanged(before, made, sums)
            part = replace(made.part, part=replace(made.part.part, targets=shared(made, refs)))
            self._check_room(job, part, refs, mine.settings_json)
            ingest = self._store.ingest(
                copies_of(job),
                snapshot,
                made.layout_json,
                self._clock_ns(),
                settings_json=json.dumps({"copies_of": owners}).encode(),
            )
            base = Base(job, snapshot.txid, arrays, refs)
            try:
                staging = Staging(ingest, part, base, self._peers, self._scatter, _mute, txid=snapshot.txid)
                await staging.run()
            finally:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(ingest.drop)
        check_sums(self._sets(job, committed=False)[-1], made, sums)
        await trio.to_thread.run_sync(self._store.commit, copies_of(job), snapshot.txid)
        log.info("job %s: has copies of %s at %s", job, ", ".join(owners), snapshot)

    def _check_room(
        self, job: JobName, part: StagePart, refs: Mapping[Key, ArrayRef], settings_json: bytes
    ) -> None:
        """Refuses what would have something else freed: copies come last."""
        fresh = [each for each in part.part.targets if each.kept_from is None or each.kept_from not in refs]
        needed = sum(npy.file_size(each.shard.local_shape, each.dtype) for each in fresh)
        room = self._store.room_bytes(job, job_memory_bytes(settings_json))
        if needed > room:
            raise NoRoomError(
                f"{needed} bytes needed on node {self._member.node}, {room} are free: "
                f"raise the memory, or do with fewer replicas",
                needed_bytes=needed,
                free_bytes=room,
            )

    async def relieve(self) -> bool:
        """Frees one set of copies, the oldest first, and returns whether there was one. Saves go first."""
        for job, state in list(self._states.items()):
            if state.running is not None and state.ended is not None and self._is_copying(job):
                ended = state.ended
                state.running.cancel()
                await ended.wait()
                return True
            for each in self._sets(job)[:1]:
                state.failure, state.is_settled = "given up: a save needed the room", False
                await self._drop_all(job, [each])
                return True
        return False

    def _is_copying(self, job: JobName) -> bool:
        return any(not each.committed for each in self._store.snapshots(copies_of(job)))

    def _copied_jobs(self) -> set[JobName]:
        names = {each.job for each in self._store.snapshots() if COPIES in each.job}
        return {*self._states, *(JobName(name.removesuffix(COPIES)) for name in names)}

    def _sets(self, job: JobName, *, committed: bool = True) -> list[StoredSnapshot]:
        """Returns the sets that are here, the oldest first."""
        return [each for each in self._store.snapshots(copies_of(job)) if each.committed or not committed]

    def _useless(self, job: JobName) -> list[StoredSnapshot]:
        """Returns the sets of snapshots of which this node has no part any more."""
        own = {each.id.txid for each in self._store.snapshots(job)}
        return [each for each in self._sets(job) if each.id.txid not in own]

    def _has(self, job: JobName, txid: TxId, owners: Collection[NodeName]) -> bool:
        return any(each.id.txid == txid and {*owners_in(each)} >= {*owners} for each in self._sets(job))

    async def _drop_all(self, job: JobName, sets: Sequence[StoredSnapshot]) -> None:
        for each in sets:
            await trio.to_thread.run_sync(self._store.drop, each.job, each.id.txid)
        if sets:
            self._table.touch()


def _mute(done: int, total: int) -> None:
    """Nobody watches."""
