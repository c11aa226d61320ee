"""What a node does: makes its part of new snapshots, shows what the head says, lets go of what is past.

What it does about what it hears is `core.membership`'s to say. Belongs to the trio thread, but for
`Member.open_arrays`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import trio

from tenplexfs.core.membership import Mandate, Membership, Standing
from tenplexfs.core.ptc import PTC
from tenplexfs.core.snapshot import Head, JobName, NodeName, TxId, copies_of
from tenplexfs.core.transaction import age, kept_steps
from tenplexfs.errors import ConflictError, CorruptError, NotFoundError, TenplexError
from tenplexfs.runtime.array_sums import parts_of
from tenplexfs.runtime.authority import Authority
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.datasets import Datasets
from tenplexfs.runtime.fetching import Handles
from tenplexfs.runtime.leases import LeaseTable
from tenplexfs.runtime.making import Maker
from tenplexfs.runtime.namespace import Namespace
from tenplexfs.runtime.orders import Description, StageOrder
from tenplexfs.runtime.past import GRACE_S, Held, Past, Relief, Shown, keep_steps, step_name
from tenplexfs.runtime.planning import Expanded, expand
from tenplexfs.runtime.protocols import PeerReader
from tenplexfs.runtime.saving import Saves
from tenplexfs.runtime.snapshot import Snapshot
from tenplexfs.runtime.staging import MAX_BYTES, ScatterFactory
from tenplexfs.runtime.stock import Stock
from tenplexfs.runtime.views import Views
from tenplexfs.storage.store import Store, StoredSnapshot

__all__ = ["Member", "Shown"]

log = logging.getLogger(__name__)

_SWEEP_S = 0.5


class Member:
    """This node's part of every job.

    Args:
        look: Asks this node's registry what a job is, and who has its lock.
        read_timeout_s: How long a read waits for another node.
        transfer_bytes: What transfers may hold in memory.
        retain_s: How long a replaced snapshot is kept for others that do not say they are done with it.
        grace_s: How long it is kept at least, for walks that are under way.
        spill: A directory on a disk, for open files of the past when there is no room.

    Attributes:
        saves: Of this node; set once they are made, where training processes save.
        persisted: Returns what reads from the URL of a persisted step; set once it is made.
        open_arrays, serving: Of `Maker`.
        jobs, inventory, sums: Of `Stock`.
    """

    saves: Saves | None = None
    persisted: Callable[[str], PeerReader]

    def __init__(
        self,
        *,
        node: NodeName,
        store: Store,
        look: Callable[[JobName], Awaitable[Standing]],
        tree: Namespace,
        peers: PeerReader,
        scatter: ScatterFactory,
        handles: Handles,
        leases: LeaseTable,
        compute: Compute,
        read_timeout_s: float,
        retain_s: float,
        remote_reads: bool,
        transfer_bytes: int = MAX_BYTES,
        grace_s: float = GRACE_S,
        spill: Path | None = None,
        datasets: Datasets | None = None,
    ) -> None:
        self.datasets = datasets
        self.node = node
        self.store = store
        self._authority = Authority(node, look)
        self._tree = tree
        self._handles = handles
        self._compute = compute
        self._views = Views(node, store, peers, handles, read_timeout_s, remote_reads, datasets)
        self._maker = Maker(
            node=node,
            store=store,
            peers=peers,
            scatter=scatter,
            compute=compute,
            views=self._views,
            transfer_bytes=transfer_bytes,
        )
        self._stock = Stock(node, store)
        self.jobs, self.inventory, self.sums = self._stock.jobs, self._stock.inventory, self._stock.sums
        self.open_arrays = self._maker.open_arrays
        self.serving = self._maker.serving
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

    def is_past(self, txid: TxId) -> bool:
        """Returns whether a snapshot was shown and is no more, and is here for who reads it still."""
        return txid in self._past

    def past(self) -> list[Held]:
        """Returns the snapshots that are the newest no more, and still here."""
        return list(self._past.held())

    def holders(self) -> list[str]:
        """Returns the processes that hold files of the past. For a worker thread: it reads ``/proc``."""
        return self._past.holders()

    def holds(self, job: JobName, txid: TxId) -> bool:
        """Returns whether this node can send bytes of a snapshot."""
        return self._maker.serves(txid) or bool(parts_of(self.store, job, txid))

    def describe(self, job: JobName, txid: TxId | None) -> Description:
        """Returns what is stored here of a snapshot; of the one that is shown when ``txid`` is None.

        Raises:
            NotFoundError: Nothing.
        """
        if txid is None and job in self._shown:
            txid = self._shown[job].head.snapshot.txid
        return self._stock.describe(job, txid or TxId(""))

    def relieve_also(self, relieve: Callable[[], Awaitable[bool]]) -> None:
        """Has ``relieve`` asked, too, when the store has no room for something else; see `Relief`."""
        self._relief.others.append(relieve)

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
        job, snapshot = order.job, order.snapshot
        async with self._authority.judging(job) as now:
            found = self._membership(job).stage(snapshot, order.by, now)
            self._authority.fences[job] = order.by.fence
            for txid in found.drop:
                await trio.to_thread.run_sync(self.store.drop, job, txid)
        if order.leader and self.saves is not None:
            await self.saves.stage(order)
        elif not found.is_there:
            persisted = self.persisted(order.source) if order.source else None
            self._expanded[snapshot.txid] = await self._maker.make(order, report, persisted)

    async def drop(self, job: JobName, txid: TxId, by: Mandate | None, reason: str = "") -> None:
        """Lets go of a snapshot that is staged, or no longer the head; what is not here is gone already.

        Args:
            job: Name of the job.
            txid: Of the snapshot.
            by: None: only what no coordinator was promised is given up.
            reason: For those who wait for it.

        Raises:
            PreconditionError: The job is at it, or shows it.
            ConflictError, UnavailableError: Who ordered it has no lock, or nobody can tell. Whoever takes the
                lock next drops it.
        """
        if self.saves is not None:
            await self.saves.give_up(job, txid, by, reason)
        if by is None:
            return
        async with self._authority.judging(job) as now:
            self._membership(job).check_drop(txid, by, now)
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
        self,
        job: JobName,
        head: Head,
        describe: Callable[[JobName, Head], Awaitable[Description]],
    ) -> None:
        """Lets the mount show ``head``; returns once fresh opens see it. Older news changes nothing.

        Args:
            job: Name of the job.
            head: What this node's registry says, or said.
            describe: Asks the nodes of a head for its layout, where this node stores none of it.

        Raises:
            TenplexError: It could not be shown; what was shown stays.
        """
        async with self._lock(job):
            if not await self._may_show(job, head, describe):
                return
            found = self._membership(job).show(head)
            if found is None:
                return
            before = self._shown.get(job)
            mine = self._stock.own(job)[found.show] if found.show is not None else None
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
                # By now some of them may be kept as steps.
                for txid in sorted(set(found.drop) - self._membership(job).in_use):
                    await trio.to_thread.run_sync(self.store.drop, job, txid)

    async def _may_show(
        self, job: JobName, head: Head, describe: Callable[[JobName, Head], Awaitable[Description]]
    ) -> bool:
        """Returns whether ``head`` is no late news; what an earlier job of the name left here is removed."""
        newer = self._membership(job).beyond(head)
        if newer is None:
            return True
        stored = self._stock.own(job).get(newer.txid)
        settings = self._shown[job].settings_json if stored is None else stored.settings_json
        if not await self._authority.has_remade(job, head, newer, settings, describe):
            return False
        log.warning("job %s: %s is of another job than %s, which is removed", job, head.snapshot, newer)
        await self._remove(job)
        return True

    def has_staged(self, job: JobName) -> bool:
        """Returns whether something is staged here that nobody works on in this process."""
        return self._membership(job).has_idle_stages()

    async def tidy(self, job: JobName, by: Mandate) -> None:
        """Drops what was staged for nobody, under the job's lock.

        Raises:
            ConflictError: It is lost.
        """
        async with self._authority.judging(job) as now:
            for each in self._membership(job).abandoned(by, now):
                log.info("job %s: drops %s, which was staged and given up", job, each)
                await trio.to_thread.run_sync(self.store.drop, job, each)

    def _membership(self, job: JobName) -> Membership:
        shown, stored = self._shown.get(job), self._stock.parts(job)
        promised = [] if self.saves is None else [t for t in stored if self.saves.is_promised(job, t)]
        in_use = {*promised, *(t for t in stored if t in self._past or t in self._staging)}
        now = None if shown is None else shown.head.snapshot
        return Membership(now, stored, frozenset(in_use), self._authority.fences.get(job, 0))

    async def _publish(
        self, job: JobName, head: Head, known: Description, expanded: Expanded, stored: StoredSnapshot | None
    ) -> None:
        step = head.snapshot.step
        view = await self._views.make(job, head, known, expanded.ptc, stored)
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
            self.datasets.show(view.datasets, view.fetcher.rank_nodes)
        log.info("job %s: shows %s", job, head.snapshot)

    async def _keep(self, job: JobName) -> None:
        """Shows the steps of the store that are kept and not shown yet: after a restart."""
        shown, stored = self._shown[job], self._stock.own(job)
        past = [each.id for each in stored.values() if each.committed]
        kept = kept_steps(shown.head.snapshot, past, count=keep_steps(shown.settings_json))
        for txid in sorted(kept):
            if txid in self._past or (step := stored[txid].id.step) is None:
                continue
            known = self.describe(job, txid)
            expanded = await self._compute(expand, known.layout_json)
            head = Head(known.snapshot, expanded.digest, _holding_nodes(expanded.ptc))
            view = await self._views.make(job, head, known, expanded.ptc, stored[txid])
            slot = await self._tree.publish_and_invalidate(step_name(job, step), view, expanded.ptc)
            losses = expanded.survives_node_losses
            older = Shown(head, view, slot, slot, True, known.settings_json, losses)
            await self._past.add(job, older, released=True)

    async def show_last(self, job: JobName) -> None:
        """Lets the mount show the newest committed snapshot of the store: the registry is away.

        Raises:
            NotFoundError: There is none.
        """
        committed = [each for each in self._stock.own(job).values() if each.committed]
        if not committed:
            raise NotFoundError(f"node {self.node}: no committed snapshot of job {job}")
        newest = max(committed, key=lambda each: age(each.id))
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
            await self._remove(job)

    async def _remove(self, job: JobName) -> None:
        with trio.CancelScope(shield=True):
            shown = self._shown.pop(job, None)
            if self.saves is not None:
                self.saves.settle(job, None)
            if shown is not None:
                await self._tree.retract_and_invalidate(job)
                await self._past.add(job, shown, released=True)
            self._past.release(job)
            for txid in self._stock.own(job):
                if txid in self._staging:
                    self._staging[txid][1].cancel()
                elif txid not in self._past:
                    await trio.to_thread.run_sync(self.store.drop, job, txid)
            for txid in self._stock.copies(job):
                await trio.to_thread.run_sync(self.store.drop, copies_of(job), txid)
            await self._past.sweep()

    # What happens behind.

    async def sweep(self) -> None:
        """Frees what is past and what nobody holds, and the indexes that nothing names any more."""
        await self._past.sweep()
        # Else some snapshot is being made whose indexes are here already.
        is_quiet = not self._staging and not any(lock.locked() for lock in self._locks.values())
        if self.datasets is not None and is_quiet:
            stored = [each.settings_json for each in self.store.snapshots()]
            self.datasets.keep([*stored, *self._past.settings()])

    async def run(self) -> None:
        """Sweeps now and then, until cancelled."""
        while True:
            await trio.sleep(_SWEEP_S)
            try:
                await self.sweep()
            except (TenplexError, OSError) as error:  # the next sweep comes to what is left
                log.warning("freeing what is past: %s", error)

    def _lock(self, job: JobName) -> trio.Lock:
        return self._locks.setdefault(job, trio.Lock())


def _holding_nodes(ptc: PTC) -> tuple[NodeName, ...]:
    return tuple(NodeName(node) for node, ranks in sorted(ptc.nodes.items()) if ranks)
