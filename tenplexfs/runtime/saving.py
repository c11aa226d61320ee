"""A node's part of saves: what its ranks write, checked, joined, and held until the step commits.

Belongs to the trio thread. A save lives as long as the connections of its ranks: when one ends before the
node promised its part to the coordinator, the step is dropped here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import trio

from tenplexfs.core.membership import Mandate
from tenplexfs.core.ptc import PTC
from tenplexfs.core.snapshot import Head, JobName, NodeName, SnapshotId, TxId, parse_snapshot
from tenplexfs.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    PreconditionError,
    TenplexError,
)
from tenplexfs.formats.values import Values
from tenplexfs.runtime.attempts import Attempt, Base, RankSave, SavePart, SaveRequest, save_txid
from tenplexfs.runtime.orders import StageOrder
from tenplexfs.runtime.past import job_memory_bytes
from tenplexfs.runtime.save_parts import RankPlan, join_replicas, plan_rank
from tenplexfs.runtime.tasks import run_all
from tenplexfs.storage.store import RankFiles, SaveIngest, Store

__all__ = ["Reserve", "Saves"]

log = logging.getLogger(__name__)

_WRITER_TRIES_S = (0.0, 0.01, 0.05, 0.2)
_MAX_SUM_TASKS = 4  # of one rank
_NO_SUMS: Mapping[int, int] = {}

Reserve = Callable[[SaveIngest, RankPlan], RankFiles]
"""Takes room for the tensors of a rank in a save."""


def _reserve(ingest: SaveIngest, plan: RankPlan) -> RankFiles:
    return ingest.reserve(plan.arrangement)


class Saves:
    """All saves of this node.

    Args:
        base: Returns what a job is now, or None.
        lead: Commits an attempt whose rank 0 is here, once this node's ranks are sealed; runs in ``nursery``.
    """

    def __init__(
        self,
        *,
        node: NodeName,
        store: Store,
        base: Callable[[JobName], Base | None],
        lead: Callable[[Attempt], Awaitable[Head]],
        nursery: trio.Nursery,
        clock_ns: Callable[[], int],
    ) -> None:
        self._node = node
        self._store = store
        self._base = base
        self._lead = lead
        self._nursery = nursery
        self._clock_ns = clock_ns
        self._attempts: dict[tuple[JobName, int], Attempt] = {}
        self._generations: dict[JobName, int] = {}
        self._plans: dict[tuple[JobName, int], RankPlan] = {}

    # What training processes do.

    async def begin(self, request: SaveRequest, reserve: Reserve = _reserve) -> RankSave:
        """Takes room for a rank's tensors, by ``reserve``, in a thread.

        Raises:
            InvalidError: They do not fit the layout; every one that does not is named.
            PreconditionError, ConflictError: The job is not what the rank thinks.
            NoRoomError: The store is full; the whole step is given up.
        """
        base = self._checked_base(request)
        plan = await self._plan(base.ptc, request)
        while (now := self._checked_base(request)).head != base.head:  # it went on meanwhile
            base, plan = now, await self._plan(now.ptc, request)
        attempt = self._attempt(base, request)
        ranks_here = len(base.ptc.nodes[self._node])
        rank = attempt.ranks[request.rank] = RankSave(attempt, request, plan, ranks_here)
        try:
            attempt.check()
            attempt.reserving_count += 1
            try:
                rank.files = await trio.to_thread.run_sync(reserve, attempt.ingest, plan)
            finally:
                attempt.reserving_count -= 1
                attempt.touch()
        except TenplexError as error:
            await self.fail(attempt, error)
            raise
        return rank

    async def _plan(self, ptc: PTC, request: SaveRequest) -> RankPlan:
        """Returns where the tensors go; a rank saves the same ones again and again."""
        where = request.job, request.rank
        known = self._plans.get(where)
        tensors = request.tensors

        def find() -> RankPlan:
            if known is not None and known.fits(ptc, request.rank, tensors):
                return known
            return plan_rank(ptc, request.job, request.rank, tensors)

        found = self._plans[where] = await trio.to_thread.run_sync(find)
        return found

    def _checked_base(self, request: SaveRequest) -> Base:
        """Returns what the job is now, if that is what the rank thinks."""
        base = self._base(request.job)
        if base is None:
            raise NotFoundError(f"job {request.job}: no such job; `tenplexfs job create` makes it")
        head, job = base.head.snapshot, request.job
        if not 0 <= request.rank < base.ptc.world_size:
            raise InvalidError(f"job {job}: no rank {request.rank}: it has {base.ptc.world_size}")
        node = base.ptc.node_of(request.rank)
        if node != self._node:
            raise PreconditionError(
                f"job {job}: rank {request.rank} is on node {node}, this is {self._node}; save there"
            )
        if request.snapshot is None and head.step is not None:
            raise PreconditionError(
                f"job {job}: is at {head}; say what this run was loaded from: load first, or snapshot="
            )
        if request.snapshot is not None:
            loaded = parse_snapshot(request.snapshot)
            if loaded.generation != head.generation:
                raise ConflictError(
                    f"job {job}: this run was loaded from generation {loaded.generation}, "
                    f"the job is at {head.generation}; end, and load again"
                )
        if head.step is not None and request.step <= head.step:
            raise PreconditionError(f"job {job}: step {request.step}: is at step {head.step} already")
        return base

    def _attempt(self, base: Base, request: SaveRequest) -> Attempt:
        where = request.job, request.step
        found = self._attempts.get(where)
        snapshot = base.head.snapshot
        txid = save_txid(request.job, base.settings_json, snapshot.generation, request.step, request.run)
        if found is not None and not found.is_over:
            if found.snapshot.txid == txid and request.rank not in found.ranks:
                return found
            if found.is_promised:
                raise ConflictError(f"job {request.job}: step {request.step} is being committed")
            self._fail_now(found, ConflictError(f"job {request.job}: step {request.step} was begun again"))
        new = SnapshotId(snapshot.generation, request.step, txid)
        ingest = self._store.save_ingest(
            request.job,
            new,
            base.layout_json,
            self._clock_ns(),
            settings_json=base.settings_json,
            limit_bytes=job_memory_bytes(base.settings_json),
        )
        made = self._attempts[where] = Attempt(base, new, request.run, ingest, request.job)
        return made

    async def seal(self, rank: RankSave, sums: Mapping[int, int] = _NO_SUMS) -> None:
        """Takes a rank's part as it is now, with the sums that it made of what it wrote, by tensor number.

        Returns when nothing of it can change any more.

        Raises:
            InvalidError: Something has not been written.
            PreconditionError: It was sealed before.
        """
        attempt, files = rank.attempt, rank.files
        attempt.check()
        if rank.is_sealed:
            raise PreconditionError(f"save: rank {rank.request.rank} is sealed already")
        assert files is not None
        missing = len(files.names) - len(files.handed)
        if missing:
            raise InvalidError(f"save: {missing} files of {len(files.names)} were never asked for")
        files.given = {rank.plan.slots[number]: known for number, known in sums.items()}
        numbers = range(len(files.names))
        tasks = min(_MAX_SUM_TASKS, max(1, len(os.sched_getaffinity(0)) // rank.ranks_here))
        try:
            await run_all([partial(self._close, attempt, files, numbers[i::tasks]) for i in range(tasks)])
        except TenplexError as error:
            await self.fail(attempt, error)
            raise
        attempt.check()
        rank.is_sealed = True
        await self._finish(attempt)

    async def _close(self, attempt: Attempt, files: RankFiles, numbers: Sequence[int]) -> None:
        """Takes files back from their client, and sums up what is in them."""
        ingest = attempt.ingest

        late = list(numbers)
        for pause_s in _WRITER_TRIES_S:
            await trio.sleep(pause_s)
            try:
                late = await trio.to_thread.run_sync(ingest.settle, files, late)
            except (FileNotFoundError, PreconditionError):
                attempt.check()  # it was given up meanwhile
                raise
            if not late:
                return
        # Somebody was forked in the middle of it, or does not close: what is there now is copied away.
        log.warning(
            "job %s: %d files of %s have other writers; copying", attempt.job, len(late), attempt.snapshot
        )
        for number in late:
            await trio.to_thread.run_sync(ingest.copy_out, files, number)
        await trio.to_thread.run_sync(ingest.settle, files, late)

    async def _finish(self, attempt: Attempt) -> None:
        here = attempt.base.ptc.nodes.get(self._node, ())
        if attempt.part is not None or not all(
            rank in attempt.ranks and attempt.ranks[rank].is_sealed for rank in here
        ):
            return
        ranks = [(each.plan, each.files) for each in attempt.ranks.values() if each.files is not None]
        try:
            async with attempt.lock:
                known = await trio.to_thread.run_sync(join_replicas, attempt.ingest, ranks)
        except TenplexError as error:
            await self.fail(attempt, error)
            raise
        values = Values(
            {rank: save.request.document for rank, save in attempt.ranks.items()},
            next(
                (s.request.consumed for s in attempt.ranks.values() if s.request.consumed is not None), None
            ),
        )
        attempt.part = SavePart(values, known)
        attempt.touch()
        if 0 in here:
            attempt.leader = attempt.ranks[0].request.process
            self._nursery.start_soon(self._lead_on, attempt)

    async def _lead_on(self, attempt: Attempt) -> None:
        try:
            await self._lead(attempt)
        except TenplexError as error:
            await self.fail(attempt, error)

    async def wait(self, attempt: Attempt, patience_s: float) -> Head | None:
        """Returns the head that a save became, or None after ``patience_s``.

        Raises:
            TenplexError: It failed.
        """
        with trio.move_on_after(patience_s):
            while not attempt.is_over:
                await attempt.changed.wait()
        attempt.check()
        return attempt.committed

    async def leave(self, rank: RankSave) -> None:
        """The connection of a rank ended; before its node has promised its part, the step ends with it."""
        attempt = rank.attempt
        if attempt.committed is not None:
            attempt.ranks.pop(rank.request.rank, None)
            if not attempt.ranks:
                await self._drop(attempt)  # what was begun again before this node heard of the commit
        if attempt.is_over or attempt.is_promised or attempt.ranks.get(rank.request.rank) is not rank:
            return
        await self.fail(
            attempt,
            ConflictError(
                f"job {attempt.job}: step {attempt.snapshot.step}: "
                f"the process of rank {rank.request.rank} ended in its save"
            ),
        )

    async def fail(self, attempt: Attempt, error: TenplexError) -> None:
        """Gives a step up."""
        self._fail_now(attempt, error)
        await self._drop(attempt)

    async def forget(self, attempt: Attempt, error: TenplexError) -> None:
        """Does as `fail`, unless it is promised, and lets who asks for the step wait for another try."""
        if not attempt.is_promised:
            where = attempt.job, attempt.snapshot.step or 0
            if self._attempts.get(where) is attempt:
                del self._attempts[where]
            await self.fail(attempt, error)

    async def _drop(self, attempt: Attempt) -> None:
        while attempt.reserving_count:
            await attempt.changed.wait()
        async with attempt.lock:
            await trio.to_thread.run_sync(attempt.ingest.drop)

    def _fail_now(self, attempt: Attempt, error: TenplexError) -> None:
        if attempt.is_over:
            return
        log.warning("job %s: %s is given up: %s", attempt.job, attempt.snapshot, error)
        attempt.failure = error
        attempt.touch()
        self._nursery.start_soon(self._drop, attempt)

    # What coordinators do.

    async def collect(
        self, job: JobName, snapshot: SnapshotId, leader: str, patience_s: float
    ) -> SavePart | None:
        """Returns this node's part of a save, or None when it is not there within ``patience_s``.

        Raises:
            TenplexError: It failed here.
        """
        with trio.move_on_after(patience_s):
            while True:
                attempt = self._attempts.get((job, snapshot.step or 0))
                if (
                    attempt is None
                    or attempt.snapshot != snapshot
                    or (attempt.failure is not None and attempt.leader not in (None, leader))
                ):
                    await trio.sleep(0.02)
                    continue
                if attempt.leader not in (None, leader) and not attempt.is_over:
                    # Another process is rank 0 by now: what was saved beside the old one is not its step.
                    await self.fail(attempt, ConflictError(f"job {job}: rank 0 began {snapshot} again"))
                    continue
                attempt.leader = leader
                attempt.check()
                if attempt.part is not None:
                    return attempt.part
                await attempt.changed.wait()
        return None

    async def stage(self, order: StageOrder) -> None:
        """Promises this node's part: from here on only the coordinator drops it.

        Raises:
            NotFoundError: There is none, or not complete, or not the one that was collected.
            ConflictError: It was promised to another one.
        """
        attempt = self._attempts.get((order.job, order.snapshot.step or 0))
        if attempt is None or attempt.snapshot != order.snapshot or attempt.part is None:
            raise NotFoundError(f"node {self._node}: job {order.job}: no complete save of {order.snapshot}")
        attempt.check()
        if attempt.leader != order.leader:
            raise NotFoundError(
                f"node {self._node}: job {order.job}: {order.snapshot} was saved anew since it was collected"
            )
        if attempt.promised_to == order.by:
            return
        if attempt.promised_to is not None:
            raise ConflictError(f"node {self._node}: job {order.job}: {order.snapshot} is being committed")
        attempt.promised_to = order.by
        attempt.ingest.set_values(order.values, order.settings_json, order.by.fence)
        try:
            async with attempt.lock:  # who gives it up meanwhile must not drop files that the manifest names
                attempt.check()
                await trio.to_thread.run_sync(attempt.ingest.seal)
        except TenplexError as error:
            attempt.promised_to = None
            await self.fail(attempt, error)
            raise

    def is_promised(self, job: JobName, txid: TxId) -> bool:
        """Returns whether a staged snapshot is a save that its coordinator still works on."""
        return any(
            each.is_promised and not each.is_over and each.job == job and each.snapshot.txid == txid
            for each in self._attempts.values()
        )

    async def give_up(self, job: JobName, txid: TxId, by: Mandate | None, reason: str) -> None:
        """A coordinator gives a save up: what was promised to it, or to nobody. What is staged stays."""
        await self._give_up(job, txid, reason, lambda attempt: attempt.promised_to in (None, by))

    async def drop(self, job: JobName, txid: TxId, reason: str) -> None:
        """What is staged of a save is dropped: it is over, whoever it was promised to."""
        await self._give_up(job, txid, reason, lambda attempt: True)

    async def _give_up(self, job: JobName, txid: TxId, reason: str, which: Callable[[Attempt], bool]) -> None:
        for attempt in list(self._attempts.values()):
            is_it = attempt.job == job and attempt.snapshot.txid == txid and not attempt.is_over
            if is_it and which(attempt):
                why = reason or "its coordinator gave it up"
                await self.fail(attempt, ConflictError(f"job {job}: {attempt.snapshot}: {why}"))

    def settle(self, job: JobName, head: Head | None) -> None:
        """The job shows ``head`` from now on, or is gone."""
        generation = head.snapshot.generation if head is not None else 0
        if self._generations.get(job, generation) != generation:  # other ranks have other sizes
            for where in [each for each in self._plans if each[0] == job]:
                del self._plans[where]
        self._generations[job] = generation
        for where, attempt in list(self._attempts.items()):
            if attempt.job != job:
                continue
            now = head.snapshot if head is not None else None
            if now == attempt.snapshot:
                attempt.committed = head
                attempt.touch()
            elif (
                now is None
                or now.generation != attempt.snapshot.generation
                or (now.step is not None and now.step >= (attempt.snapshot.step or 0))
            ):
                attempt.promised_to = None
                self._fail_now(attempt, ConflictError(f"job {job}: is at {now}, past {attempt.snapshot}"))
            if attempt.is_over:
                self._attempts.pop(where, None)
