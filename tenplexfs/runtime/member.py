"""What a node does: makes its part of new snapshots, shows what the head says, lets go of what is past.

Belongs to the trio thread, but for `Member.open_arrays`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import trio

from tenplexfs.core.ptc import PTC
from tenplexfs.core.snapshot import Head, JobName, NodeName, TxId
from tenplexfs.core.transaction import is_older, kept_steps, settle
from tenplexfs.errors import ConflictError, CorruptError, NotFoundError, PreconditionError, TenplexError
from tenplexfs.runtime.array_sums import encode_array_sums
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.dataset_view import DatasetView
from tenplexfs.runtime.datasets import Datasets
from tenplexfs.runtime.fetching import Fetcher, Handles
from tenplexfs.runtime.leases import LeaseTable
from tenplexfs.runtime.namespace import Namespace
from tenplexfs.runtime.orders import Description, StageOrder, StoredPart
from tenplexfs.runtime.past import GRACE_S, Held, Past, Relief, Shown, job_memory_bytes, keep_steps, step_name
from tenplexfs.runtime.planning import Expanded, StagePart, expand, stage_part
from tenplexfs.runtime.protocols import ArraySource, PeerReader
from tenplexfs.runtime.saving import Saves
from tenplexfs.runtime.snapshot import LocalArrays, NoArrays, Snapshot, rank_nodes
from tenplexfs.runtime.staging import Base, ScatterFactory, Staging
from tenplexfs.storage.store import Store, StoredSnapshot

__all__ = ["Member", "Shown"]

log = logging.getLogger(__name__)

_SWEEP_S = 0.5


class Member:
    """This node's part of every job.

    Args:
        describe: Asks the nodes of a head for its layout, where this node stores none of it.
        read_timeout_s: How long a read waits for another node.
        retain_s: How long a replaced snapshot is kept for others that do not say they are done with it.
        grace_s: How long it is kept at least, for walks that are under way.
        spill: A directory on a disk, for open files of the past when there is no room.

    Attributes:
        saves: Of this node; set once they are made, where training processes save.
        persisted: Returns what reads from the URL of a persisted step; set once it is made.
    """

    saves: Saves | None = None
    persisted: Callable[[str], PeerReader]

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
        grace_s: float = GRACE_S,
        spill: Path | None = None,
        datasets: Datasets | None = None,
    ) -> None:
        self.datasets = datasets
        self.node = node
        self.store = store
        self._tree = tree
        self._peers = peers
        self._scatter = scatter
        self._handles = handles
        self._compute = compute
        self._read_timeout_s = read_timeout_s
        self._remote_reads = remote_reads
        self._shown: dict[JobName, Shown] = {}
        self._past = Past(
            store=store,
            tree=tree,
            leases=leases,
            retain_s=retain_s,
            grace_s=grace_s,
            spill=spill,
            shown=self._shown,
        )
        self._relief = Relief(self._past)
        store.relieve_by(self._relief)
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

    def view(self, job: JobName, *, step: int | None = None, txid: TxId | None = None) -> Snapshot:
        """Returns a snapshot that is here: the newest one, that of a kept step, or the one of a txid.

        Raises:
            NotFoundError: There is no such job, step or snapshot (any more).
        """
        shown = self._shown.get(job)
        if shown is None:
            raise NotFoundError(f"job {job}: no such job")
        for view in self.views(job):
            if step in (None, view.id.step) and txid in (None, view.id.txid):
                return view
        what = f"step {step}" if step is not None else f"snapshot {txid}"
        raise NotFoundError(f"job {job}: {what} is not here; the job is at {shown.head.snapshot}")

    def views(self, job: JobName) -> list[Snapshot]:
        """Returns the snapshots of ``job`` that are here, the newest first."""
        shown = self._shown.get(job)
        return [] if shown is None else [each.view for each in (shown, *self._past.shown_of(job))]

    def past(self) -> list[Held]:
        """Returns the snapshots that are the newest no more, and still here."""
        return list(self._past.held())

    def holders(self) -> list[str]:
        """Returns the processes that hold files of the past. For a worker thread: it reads ``/proc``."""
        return self._past.holders()

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
            stored.id,
            stored.layout_json,
            stored.settings_json,
            stored.created_ns,
            stored.committed,
            stored.values,
        )

    def inventory(self, job: JobName) -> tuple[StoredPart, ...]:
        """Returns what is stored here of ``job``."""
        return tuple(StoredPart(each.id, each.committed) for each in self.store.snapshots(job))

    def sums(self, job: JobName, txid: TxId) -> bytes:
        """Returns the sums of the arrays that are here of a snapshot. For worker threads.

        Raises:
            NotFoundError: There is no such snapshot here.
        """
        stored = self._stored(job).get(txid)
        if stored is None:
            raise NotFoundError(f"node {self.node}: stores no snapshot {txid} of job {job}")
        return encode_array_sums(stored)

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

    def relieve_also(self, relieve: Callable[[], Awaitable[bool]]) -> None:
        """Has ``relieve`` asked, too, when the store has no room for something else; see `Relief`."""
        self._relief.others.append(relieve)

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
            abandoned = not old.committed and txid not in (order.base_txid, order.snapshot.txid)
            if abandoned and not self._is_promised(order.job, txid):
                await trio.to_thread.run_sync(self.store.drop, order.job, txid)
        if order.is_save and self.saves is not None:
            await self.saves.stage(order)
            return
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
        # Before anything is staged: an index that cannot be had refuses the switch.
        await self._datasets_of(order.settings_json, expanded.ptc, order.snapshot.step)
        ingest = self.store.ingest(
            order.job,
            order.snapshot,
            order.new_layout_json,
            order.created_ns,
            settings_json=order.settings_json,
            values=order.values,
            limit_bytes=job_memory_bytes(order.settings_json),
        )
        try:
            if part is not None and order.base_txid is not None:
                with self._base(order.job, order.base_txid) as base:
                    txid = order.snapshot.txid
                    peers = self.persisted(order.source) if order.source else self._peers
                    staging = Staging(ingest, part, base, peers, self._scatter, report, txid=txid)
                    with self.serving(txid, staging.board):  # to nodes that have it passed on to them
                        await staging.run()
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

    async def drop(self, job: JobName, txid: TxId, reason: str = "") -> None:
        """Lets go of a snapshot that is staged, or no longer the head; what is not here is gone already.

        Args:
            job: Name of the job.
            txid: Of the snapshot.
            reason: For those who wait for it.

        Raises:
            PreconditionError: The job shows it.
        """
        shown = self._shown.get(job)
        if shown is not None and shown.head.snapshot.txid == txid:
            raise PreconditionError(f"node {self.node}: job {job}: {txid} is what it shows")
        self._expanded.pop(txid, None)
        if self.saves is not None:
            await self.saves.drop(job, txid, reason)
        if txid in self._staging:
            self._staging[txid][1].cancel()
        elif txid in self._past:
            self._past.release(job, txid)
            await self._past.sweep()
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
            if before is not None and before.head.layout_digest == head.layout_digest:  # a save
                expanded = Expanded(before.view.ptc, head.layout_digest, before.survives_node_losses)
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
                await self._keep(job)
                for txid in found.drop:
                    if (
                        txid not in self._past
                        and txid not in self._staging
                        and not self._is_promised(job, txid)
                    ):
                        await trio.to_thread.run_sync(self.store.drop, job, txid)

    def _is_promised(self, job: JobName, txid: TxId) -> bool:
        return self.saves is not None and self.saves.is_promised(job, txid)

    async def _publish(
        self, job: JobName, head: Head, known: Description, expanded: Expanded, stored: StoredSnapshot | None
    ) -> None:
        step = head.snapshot.step
        datasets = await self._datasets_of(known.settings_json, expanded.ptc, step)
        view = self._view(job, head, known, expanded.ptc, stored, datasets)
        slot = await self._tree.publish_and_invalidate(job, view, None if step is None else expanded.ptc)
        step_slot = None if step is None else await self._tree.add_name(step_name(job, step), slot)
        before = self._shown.get(job)
        losses = expanded.survives_node_losses
        self._shown[job] = Shown(head, view, slot, step_slot, stored is not None, known.settings_json, losses)
        if before is not None:
            await self._past.add(job, before, released=False)
            # Before the coordinator hears that this node has switched, and lets the others drop the old one.
            await self._handles.settle()
        if self.saves is not None:
            self.saves.settle(job, head)
        if self.datasets is not None:
            self.datasets.show(datasets, view.fetcher.rank_nodes)
        log.info("job %s: shows %s", job, head.snapshot)

    async def _datasets_of(self, settings_json: bytes, ptc: PTC, step: int | None) -> tuple[DatasetView, ...]:
        if self.datasets is None:
            return ()
        return await self.datasets.views(settings_json, ptc.layout, step)

    def _view(
        self,
        job: JobName,
        head: Head,
        known: Description,
        ptc: PTC,
        stored: StoredSnapshot | None,
        datasets: tuple[DatasetView, ...],
    ) -> Snapshot:
        arrays: LocalArrays = NoArrays() if stored is None else self.store.arrays(stored)
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
        return Snapshot(
            job=job,
            snapshot=head.snapshot,
            layout_json=known.layout_json,
            layout_digest=head.layout_digest,
            ptc=ptc,
            created_ns=known.created_ns,
            arrays=arrays,
            fetcher=fetcher,
            datasets=datasets,
            values=known.values,
        )

    async def _keep(self, job: JobName) -> None:
        """Shows the steps of the store that are kept and not shown yet: after a restart."""
        shown, stored = self._shown[job], self._stored(job)
        past = [each.id for each in stored.values() if each.committed]
        kept = kept_steps(shown.head.snapshot, past, count=keep_steps(shown.settings_json))
        for txid in sorted(kept):
            if txid in self._past or (step := stored[txid].id.step) is None:
                continue
            known = self.describe(job, txid)
            expanded = await self._compute(expand, known.layout_json)
            head = Head(known.snapshot, expanded.digest, _holding_nodes(expanded.ptc))
            datasets = await self._datasets_of(known.settings_json, expanded.ptc, step)
            view = self._view(job, head, known, expanded.ptc, stored[txid], datasets)
            slot = await self._tree.publish_and_invalidate(step_name(job, step), view, expanded.ptc)
            losses = expanded.survives_node_losses
            older = Shown(head, view, slot, slot, True, known.settings_json, losses)
            await self._past.add(job, older, released=True)

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
        head = Head(newest.id, expanded.digest, _holding_nodes(expanded.ptc))
        async with self._lock(job):
            if job not in self._shown:
                with trio.CancelScope(shield=True):
                    await self._publish(job, head, self.describe(job, newest.id.txid), expanded, newest)
                    await self._keep(job)

    async def remove(self, job: JobName) -> None:
        """Takes a job out of the mount and the store; open files keep their bytes."""
        async with self._lock(job):
            with trio.CancelScope(shield=True):
                shown = self._shown.pop(job, None)
                if self.saves is not None:
                    self.saves.settle(job, None)
                if shown is not None:
                    await self._tree.retract_and_invalidate(job)
                    await self._past.add(job, shown, released=True)
                self._past.release(job)
                for txid in self._stored(job):
                    if txid in self._staging:
                        self._staging[txid][1].cancel()
                    elif txid not in self._past:
                        await trio.to_thread.run_sync(self.store.drop, job, txid)
                await self._past.sweep()

    # What happens behind.

    async def sweep(self) -> None:
        """Frees what is past and what nobody holds."""
        await self._past.sweep()

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


def _holding_nodes(ptc: PTC) -> tuple[NodeName, ...]:
    return tuple(NodeName(node) for node, ranks in sorted(ptc.nodes.items()) if ranks)
