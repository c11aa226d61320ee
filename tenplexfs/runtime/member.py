"""What a node does: makes its part of new snapshots, shows what the head says, lets go of what is past.

Belongs to the trio thread, but for `Member.open_arrays`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from tenplexfs.core.snapshot import Head, JobName, NodeName, SnapshotId, TxId
from tenplexfs.core.transaction import is_older, settle
from tenplexfs.errors import ConflictError, CorruptError, NotFoundError, PreconditionError, TenplexError
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.fetching import Fetcher, Handles
from tenplexfs.runtime.leases import LeaseTable
from tenplexfs.runtime.namespace import Namespace
from tenplexfs.runtime.orders import Description, StageOrder
from tenplexfs.runtime.planning import Expanded, StagePart, expand, stage_part
from tenplexfs.runtime.protocols import ArraySource, PeerReader
from tenplexfs.runtime.snapshot import LocalArrays, NoArrays, Snapshot, rank_nodes
from tenplexfs.runtime.staging import Base, ScatterFactory, Staging
from tenplexfs.storage.store import Store, StoredSnapshot

__all__ = ["Member", "Shown"]

log = logging.getLogger(__name__)

_SWEEP_S = 0.5


@dataclass(frozen=True)
class Shown:
    """What the mount shows of a job.

    Attributes:
        slot: Of the namespace.
        stored: Whether a part of it is in this node's store.
    """

    head: Head
    view: Snapshot
    slot: int
    stored: bool
    settings_json: bytes
    survives_node_losses: int


@dataclass
class _Retired:
    """A snapshot that was shown, and whose bytes somebody may still need."""

    shown: Shown
    job: JobName
    since_s: float
    released: bool  # all nodes show the next one
    held_on: tuple[NodeName, ...]  # where bytes are kept for handles of this node


class Member:
    """This node's part of every job.

    Args:
        describe: Asks the nodes of a head for its layout, where this node stores none of it.
        read_timeout_s: How long a read waits for another node.
        retain_s: How long a replaced snapshot is kept for others that do not say they are done with it.
    """

    def __init__(
        self,
        *,
        node: NodeName,
        store: Store,
        tree: Namespace,
        peers: PeerReader,
        scatter: ScatterFactory,
        handles: Handles,
        leases: LeaseTable,
        compute: Compute,
        read_timeout_s: float,
        retain_s: float,
        remote_reads: bool,
    ) -> None:
        self.node = node
        self.store = store
        self._tree = tree
        self._peers = peers
        self._scatter = scatter
        self._handles = handles
        self._leases = leases
        self._compute = compute
        self._read_timeout_s = read_timeout_s
        self._retain_s = retain_s
        self._remote_reads = remote_reads
        self._shown: dict[JobName, Shown] = {}
        self._retired: dict[TxId, _Retired] = {}
        self._sources: dict[TxId, ArraySource] = {}
        self._expanded: dict[TxId, Expanded] = {}
        self._staging: dict[TxId, tuple[JobName, trio.CancelScope]] = {}
        self._locks: dict[JobName, trio.Lock] = {}

    # What others ask about.

    def shown(self) -> Mapping[JobName, Shown]:
        """Returns what the mount shows now."""
        return self._shown

    def is_staging(self, job: JobName) -> bool:
        """Returns whether a next snapshot of ``job`` is being made here."""
        return any(other == job for other, _ in self._staging.values())

    def retired(self) -> list[tuple[JobName, SnapshotId]]:
        """Returns the snapshots that are past, and still held."""
        return [(retired.job, retired.shown.head.snapshot) for retired in self._retired.values()]

    def holds(self, job: JobName, txid: TxId) -> bool:
        """Returns whether this node can send bytes of a snapshot."""
        return txid in self._sources or txid in self._stored(job)

    def describe(self, job: JobName, txid: TxId | None) -> Description:
        """Returns what is stored here of a snapshot; of the one that is shown when ``txid`` is None.

        Raises:
            NotFoundError: Nothing.
        """
        if txid is None and job in self._shown:
            txid = self._shown[job].head.snapshot.txid
        stored = self._stored(job).get(txid) if txid is not None else None
        if stored is None:
            raise NotFoundError(f"node {self.node}: stores no snapshot {txid or ''} of job {job}")
        return Description(
            stored.id, stored.layout_json, stored.settings_json, stored.created_ns, stored.committed
        )

    @contextmanager
    def open_arrays(self, job: JobName, txid: TxId) -> Iterator[ArraySource]:
        """Gives the local arrays of a snapshot, committed or staged. For worker threads.

        Raises:
            NotFoundError: There is no such snapshot here (any more).
        """
        source = self._sources.get(txid)
        if source is not None:
            yield source
            return
        stored = self._stored(job).get(txid)
        if stored is None:
            raise NotFoundError(f"node {self.node}: stores no snapshot {txid} of job {job}")
        with self.store.arrays(stored) as arrays:
            yield arrays

    @contextmanager
    def serving(self, txid: TxId, source: ArraySource) -> Iterator[None]:
        """Serves ``source`` as the snapshot ``txid``, to this node and others, while entered."""
        self._sources[txid] = source
        try:
            yield
        finally:
            del self._sources[txid]

    # What coordinators ask for.

    async def stage(self, order: StageOrder, report: Callable[[int, int], None]) -> None:
        """Makes this node's part of a new snapshot; returns once it is staged, also when it was already.

        Raises:
            TenplexError: It could not be made; nothing of it is left.
        """
        job, txid = order.job, order.snapshot.txid
        if txid in self._staging:
            raise ConflictError(f"node {self.node}: job {job}: {txid} is being staged already")
        with trio.CancelScope() as scope:
            self._staging[txid] = (job, scope)
            try:
                await self._stage(order, report)
            finally:
                del self._staging[txid]
        if scope.cancelled_caught:
            raise ConflictError(f"node {self.node}: job {job}: {txid} was dropped while it was staged")

    async def _stage(self, order: StageOrder, report: Callable[[int, int], None]) -> None:
        stored = self._stored(order.job)
        for txid, old in stored.items():
            # The lock is the coordinator's, so a stage that is neither its base nor its own was abandoned.
            if not old.committed and txid not in (order.base_txid, order.snapshot.txid):
                await trio.to_thread.run_sync(self.store.drop, order.job, txid)
        if order.snapshot.txid in stored:
            return
        part: StagePart | None = None
        if order.base_txid is None:
            expanded = await self._compute(expand, order.new_layout_json)
        else:
            part = await self._compute(
                stage_part, order.old_layout_json, order.new_layout_json, order.drop, self.node
            )
            expanded = part.expanded
        ingest = self.store.ingest(
            order.job,
            order.snapshot,
            order.new_layout_json,
            order.created_ns,
            settings_json=order.settings_json,
        )
        try:
            if part is not None and order.base_txid is not None:
                with self._base(order.job, order.base_txid) as base:
                    await Staging(ingest, part, base, self._peers, self._scatter, report).run()
            else:
                await trio.to_thread.run_sync(ingest.seal, {})
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(ingest.drop)
        self._expanded[order.snapshot.txid] = expanded

    @contextmanager
    def _base(self, job: JobName, txid: TxId) -> Iterator[Base]:
        stored = self._stored(job).get(txid)
        if stored is None:
            yield Base(job, txid, self._sources.get(txid) or NoArrays(), {})
            return
        with self.store.arrays(stored) as arrays:
            yield Base(job, txid, arrays, stored.arrays)

    async def drop(self, job: JobName, txid: TxId) -> None:
        """Lets go of a snapshot that is staged, or no longer the head; what is not here is gone already.

        Raises:
            PreconditionError: The job shows it.
        """
        shown = self._shown.get(job)
        if shown is not None and shown.head.snapshot.txid == txid:
            raise PreconditionError(f"node {self.node}: job {job}: {txid} is what it shows")
        self._expanded.pop(txid, None)
        if txid in self._staging:
            self._staging[txid][1].cancel()
        elif txid in self._retired:
            self._retired[txid].released = True
            await self.sweep()
        else:
            await trio.to_thread.run_sync(self.store.drop, job, txid)

    async def show(
        self, job: JobName, head: Head, describe: Callable[[JobName, Head], Awaitable[Description]]
    ) -> None:
        """Lets the mount show ``head``; returns once fresh opens see it. Older news changes nothing.

        Raises:
            TenplexError: It could not be shown; what was shown stays.
        """
        async with self._lock(job):
            before = self._shown.get(job)
            if before is not None and (
                before.head.snapshot.txid == head.snapshot.txid or is_older(head, before.head.snapshot)
            ):
                return
            stored = self._stored(job)
            found = settle(head, {txid: each.committed for txid, each in stored.items()})
            mine = stored[found.show] if found.show is not None else None
            known = self.describe(job, mine.id.txid) if mine is not None else await describe(job, head)
            expanded = self._expanded.get(head.snapshot.txid)
            if expanded is None:
                expanded = await self._compute(expand, known.layout_json)
            if expanded.digest != head.layout_digest:
                raise CorruptError(
                    f"job {job}: the layout of {head.snapshot} has digest {expanded.digest}, "
                    f"the head says {head.layout_digest}"
                )
            with trio.CancelScope(shield=True):
                if found.commit:
                    await trio.to_thread.run_sync(self.store.commit, job, head.snapshot.txid)
                await self._publish(job, head, known, expanded, mine)
                self._expanded.pop(head.snapshot.txid, None)
                for txid in found.drop:
                    if txid not in self._retired and txid not in self._staging:
                        await trio.to_thread.run_sync(self.store.drop, job, txid)

    async def _publish(
        self, job: JobName, head: Head, known: Description, expanded: Expanded, stored: StoredSnapshot | None
    ) -> None:
        arrays: LocalArrays = NoArrays() if stored is None else self.store.arrays(stored)
        ptc = expanded.ptc
        fetcher = Fetcher(
            job=job,
            txid=head.snapshot.txid,
            rank_nodes=rank_nodes(ptc),
            here=self.node,
            peers=self._peers,
            handles=self._handles,
            timeout_s=self._read_timeout_s,
            allowed=self._remote_reads,
        )
        view = Snapshot(
            job=job,
            snapshot=head.snapshot,
            layout_json=known.layout_json,
            layout_digest=head.layout_digest,
            ptc=ptc,
            created_ns=known.created_ns,
            arrays=arrays,
            fetcher=fetcher,
        )
        shows_state = head.snapshot.step is not None
        slot = await self._tree.publish_and_invalidate(job, view, ptc if shows_state else None)
        before = self._shown.get(job)
        self._shown[job] = Shown(
            head, view, slot, stored is not None, known.settings_json, expanded.survives_node_losses
        )
        if before is not None:
            self._retire(job, before, released=False)
            # Before the coordinator hears that this node has switched, and lets the others drop the old one.
            await self._handles.settle()
        log.info("job %s: shows %s", job, head.snapshot)

    async def show_last(self, job: JobName) -> None:
        """Lets the mount show the newest committed snapshot of the store: the registry is away.

        Raises:
            NotFoundError: There is none.
        """
        committed = [each for each in self._stored(job).values() if each.committed]
        if not committed:
            raise NotFoundError(f"node {self.node}: no committed snapshot of job {job}")
        newest = max(
            committed, key=lambda each: (each.id.generation, -1 if each.id.step is None else each.id.step)
        )
        expanded = await self._compute(expand, newest.layout_json)
        nodes = tuple(NodeName(node) for node, ranks in sorted(expanded.ptc.nodes.items()) if ranks)
        head = Head(newest.id, expanded.digest, nodes)
        async with self._lock(job):
            if job not in self._shown:
                with trio.CancelScope(shield=True):
                    await self._publish(job, head, self.describe(job, newest.id.txid), expanded, newest)

    async def remove(self, job: JobName) -> None:
        """Takes a job out of the mount and the store; open files keep their bytes."""
        async with self._lock(job):
            with trio.CancelScope(shield=True):
                shown = self._shown.pop(job, None)
                if shown is not None:
                    await self._tree.retract_and_invalidate(job)
                    self._retire(job, shown, released=True)
                for retired in self._retired.values():
                    retired.released = retired.released or retired.job == job
                for txid in self._stored(job):
                    if txid in self._staging:
                        self._staging[txid][1].cancel()
                    elif txid not in self._retired:
                        await trio.to_thread.run_sync(self.store.drop, job, txid)
                await self.sweep()

    # What happens behind.

    def _retire(self, job: JobName, shown: Shown, *, released: bool) -> None:
        handles = self._tree.open_handles(shown.slot)
        # Whoever has a file or directory open goes on reading there, also what is on other nodes.
        held_on = shown.view.fetcher.others() if handles.files or handles.directories else ()
        shown.view.fetcher.hold(held_on)
        txid = shown.head.snapshot.txid
        self._retired[txid] = _Retired(shown, job, trio.current_time(), released, held_on)

    async def sweep(self) -> None:
        """Frees what is past and what nobody holds."""
        now_s = trio.current_time()
        for txid, retired in list(self._retired.items()):
            expired = now_s - retired.since_s > self._retain_s
            handles = self._tree.open_handles(retired.shown.slot)
            waited_for = not retired.released or handles.directories or self._leases.count(txid)
            is_held = handles.files or (waited_for and not expired)
            if is_held or self._retired.get(txid) is not retired:  # another sweep may have been quicker
                continue
            del self._retired[txid]
            retired.shown.view.fetcher.drop(retired.held_on)
            self._tree.free(retired.shown.slot)
            retired.shown.view.arrays.release()
            await trio.to_thread.run_sync(self.store.drop, retired.job, txid)

    async def run(self) -> None:
        """Sweeps now and then, until cancelled."""
        while True:
            await trio.sleep(_SWEEP_S)
            try:
                await self.sweep()
            except TenplexError as error:
                log.warning("freeing what is past: %s", error)

    def _stored(self, job: JobName) -> dict[TxId, StoredSnapshot]:
        return {stored.id.txid: stored for stored in self.store.snapshots(job)}

    def _lock(self, job: JobName) -> trio.Lock:
        return self._locks.setdefault(job, trio.Lock())
