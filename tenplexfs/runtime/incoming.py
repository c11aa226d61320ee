"""Steps that are uploaded file by file, by processes that do not say who they are: when one is complete.

Tenplex's ``save`` asks for the listing of its rank's directory, deletes what is listed, uploads file by file,
and then writes the number of the step to ``iter``, each rank for itself. So each ``iter`` says that one rank
more is done, and a step is complete here once as many have come as ranks began in that way, at least one, and
all ranks of this node have all tensors of the layout. Who uploads for all ranks, and asks for no listing,
writes ``iter`` once. From then on it is a save like any other: sealed, then committed when all nodes are.

A rank that deletes what it brought begins the step again: what the others had brought before is good for
nothing then, for nobody can tell whether it was whole. The same is so after a change of generation.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import trio

from tenplexfs.core.snapshot import JobName, NodeName, SnapshotId, TxId
from tenplexfs.errors import (
    ConflictError,
    NotFoundError,
    PreconditionError,
    TenplexError,
    TimedOutError,
)
from tenplexfs.formats.tenplex_files import directories, is_below
from tenplexfs.runtime.attempts import Attempt, Base, RankSave, SaveRequest
from tenplexfs.runtime.past import job_memory_bytes
from tenplexfs.runtime.saving import Saves
from tenplexfs.runtime.tasks import run_all
from tenplexfs.runtime.upload import Upload, plan_of_layout
from tenplexfs.storage.store import Store

__all__ = ["Incoming"]

log = logging.getLogger(__name__)

_RUN = "http"
_IDLE_S = 600.0
_SWEEP_S = 30.0
_ALONE_S = 60.0


@dataclass(eq=False)
class _Step:
    """What the ranks of a job bring.

    Attributes:
        uploads: By rank.
        begun: Ranks that began as Tenplex's do, and so say by themselves when they are done.
        done_count: How many said so.
        number: Of the step, once one said so.
    """

    uploads: dict[int, Upload] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    done_count: int = 0
    number: int | None = None
    lock: trio.Lock = field(default_factory=trio.Lock)


class Incoming:
    """What is uploaded to this node. Belongs to the trio thread.

    Args:
        base: Returns what a job is now, or None.
        new_token: Returns a name that was never given before.
        patience_s: How long the last ``iter`` waits for ranks of other nodes.
    """

    def __init__(
        self,
        *,
        node: NodeName,
        store: Store,
        saves: Saves,
        base: Callable[[JobName], Base | None],
        nursery: trio.Nursery,
        clock_ns: Callable[[], int],
        new_token: Callable[[], str],
        patience_s: float = 1.0,
    ) -> None:
        self._node = node
        self._store = store
        self._saves = saves
        self._base = base
        self._nursery = nursery
        self._clock_ns = clock_ns
        self._new_token = new_token
        self._patience_s = patience_s
        self._steps: dict[JobName, _Step] = {}
        self._saving: dict[JobName, int] = {}

    def base(self, job: JobName) -> Base:
        """Returns what a job is.

        Raises:
            NotFoundError: There is none.
        """
        found = self._base(job)
        if found is None:
            raise NotFoundError(f"job {job}: no such job; `tenplexfs job create` makes it")
        return found

    @asynccontextmanager
    async def upload(self, job: JobName, rank: int) -> AsyncIterator[Upload]:
        """Gives what a rank brings to who brings more; the first file takes room for all tensors.

        Raises:
            NotFoundError: No such job or rank.
            PreconditionError: The rank is on another node.
            ConflictError: What it brought before is good for nothing any more; it is to be deleted first.
            NoRoomError: The store is full.
        """
        base = self._checked(job, rank)
        async with self._locked(job) as step:
            self._steps[job] = step
            found = step.uploads.get(rank)
            if found is None:
                found = step.uploads[rank] = await self._begin(base, job, rank)
            elif found.base.head.snapshot.generation != base.head.snapshot.generation:
                await found.give_up(
                    "the job was changed since this was begun; delete it, and upload it again"
                )
            found.check()
            found.users_count += 1
        try:
            yield found
        finally:
            found.users_count -= 1
            found.touched_s = trio.current_time()
            if not (found.files or found.users_count or found.failure):  # all that came was refused
                if step.uploads.get(rank) is found:
                    del step.uploads[rank]
                await found.give_up("nothing came")

    @asynccontextmanager
    async def _locked(self, job: JobName) -> AsyncIterator[_Step]:
        """Gives the step that is being brought now; one that is there no more by then is not it."""
        while True:
            step = self._steps.get(job, _Step())
            async with step.lock:
                if self._steps.get(job, step) is step:
                    yield step
                    return

    def _checked(self, job: JobName, rank: int) -> Base:
        base = self.base(job)
        if not 0 <= rank < base.ptc.world_size:
            raise NotFoundError(f"job {job}: no rank {rank}: it has {base.ptc.world_size}")
        node = base.ptc.node_of(rank)
        if node != self._node:
            raise PreconditionError(
                f"job {job}: rank {rank} is on node {node}, this is {self._node}; upload it there"
            )
        return base

    async def _begin(self, base: Base, job: JobName, rank: int) -> Upload:
        head = base.head.snapshot
        plan = await trio.to_thread.run_sync(plan_of_layout, base, job, rank)
        ingest = self._store.save_ingest(
            job,
            SnapshotId(head.generation, head.step, TxId(self._new_token())),
            base.layout_json,
            self._clock_ns(),
            settings_json=base.settings_json,
            limit_bytes=job_memory_bytes(base.settings_json),
        )
        try:
            room = await trio.to_thread.run_sync(ingest.reserve, plan.arrangement)
        except BaseException:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(ingest.drop)
            raise
        return Upload(job, rank, base, plan, ingest, room, trio.current_time())

    def found(self, job: JobName) -> Mapping[int, Upload]:
        """Returns what is there of a job, by rank."""
        step = self._steps.get(job)
        return {} if step is None else step.uploads

    def listed(self, job: JobName, rank: int) -> None:
        """The directory of a rank was asked for, as Tenplex does before it uploads."""
        if (upload := self.found(job).get(rank)) is not None:
            upload.was_listed = True
        elif (base := self._base(job)) is not None and rank in base.ptc.nodes.get(self._node, ()):
            self._steps.setdefault(job, _Step()).begun.add(rank)

    async def delete(self, job: JobName, rank: int, name: str) -> tuple[int, int]:
        """Deletes a file, or a directory, or all of a rank where ``name`` is empty.

        Returns:
            How many files and directories are gone.

        Raises:
            NotFoundError: There is nothing.
            ConflictError: Something of it is coming in now.
        """
        upload = self.found(job).get(rank)
        names = [] if upload is None else [each for each in upload.files if is_below(each, name)]
        if upload is None or (name and not names):
            raise NotFoundError(f"job {job}, rank {rank}: nothing was uploaded{name and f' as {name}'}")
        if upload.users_count:
            raise ConflictError(f"job {job}, rank {rank}: a file is coming in")
        counts = len(names), len(directories(names, name))
        if name:
            for each in names:
                upload.remove(each)
            return counts
        step = self._steps[job]
        del step.uploads[rank]
        was_good = upload.failure is None
        await upload.give_up("was deleted")
        if was_good:
            step.begun.clear()
            step.done_count, step.number = 0, None
            for other in list(step.uploads.values()):
                await other.give_up(
                    f"rank {rank} began the step again after this was brought; delete it, and upload it again"
                )
        if upload.was_listed:
            step.begun.add(rank)
        return counts

    # A step that is complete.

    async def done(self, job: JobName, number: int) -> str:
        """One rank more is done with a step; when all of this node are, it is saved.

        Returns:
            A line that says what became of it.

        Raises:
            PreconditionError: It is past, another one, or fewer ranks are complete than said so.
            TenplexError: It could not be saved; what was uploaded is gone.
        """
        base = self.base(job)
        head = base.head.snapshot
        async with self._locked(job) as step:
            good = [each for each in step.uploads.values() if each.failure is None]
            if not good and head.step == number:
                return f"step {number}: is the newest"
            if not good and self._saving.get(job) == number:
                return f"step {number}: is being saved"
            if head.step is not None and number <= head.step:
                raise PreconditionError(f"job {job}: step {number}: is at step {head.step} already")
            if step.number not in (None, number):
                raise PreconditionError(f"job {job}: step {number}: another rank said step {step.number}")
            ranks = base.ptc.nodes.get(self._node, ())
            lacks = await self._lacks(step, ranks)
            if step.done_count + 1 > list(lacks.values()).count(None):
                raise PreconditionError(f"job {job}: step {number}: {_said(lacks)}")
            step.done_count, step.number = step.done_count + 1, number
            more = max(1, len(step.begun)) - step.done_count
            if any(lacks.values()):
                return f"step {number}: waits: {_said(lacks)}"
            if more > 0:
                return f"step {number}: waits: {more} ranks more are to say that they are done"
            del self._steps[job]
            self._saving[job] = number
        return await self._save(job, number, [step.uploads[rank] for rank in ranks])

    async def _lacks(self, step: _Step, ranks: Sequence[int]) -> dict[int, str | None]:
        """Returns what each rank lacks, as it is in one moment."""
        while True:
            found = {rank: step.uploads.get(rank) for rank in ranks}
            lacks = {
                rank: "nothing was uploaded" if upload is None else await upload.lacks()
                for rank, upload in found.items()
            }
            if all(lacks[rank] or (upload and upload.is_whole) for rank, upload in found.items()):
                return lacks

    async def _save(self, job: JobName, number: int, uploads: Sequence[Upload]) -> str:
        begun: list[RankSave] = []
        try:
            for each in uploads:
                request = SaveRequest(
                    job=job,
                    rank=each.rank,
                    step=number,
                    snapshot=each.base.head.snapshot.text,
                    process=f"http-{self._new_token()}",
                    run=_RUN,
                    tensors=each.plan.tensors,
                    document=(await each.flat()).document,
                    consumed=None,
                )
                begun.append(await self._saves.begin(request, each.hand_over))
            sealing = zip(begun, uploads, strict=True)
            await run_all([partial(self._saves.seal, rank, each.sums()) for rank, each in sealing])
        except BaseException:
            with trio.CancelScope(shield=True):
                for rank in begun:
                    await self._saves.leave(rank)
            self._saving.pop(job, None)
            raise
        finally:
            for each in uploads:
                await each.give_up("is saved, or failed to be")
        attempt = begun[0].attempt
        self._nursery.start_soon(self._watch, attempt)
        is_alone = set(attempt.base.head.nodes) == {self._node}
        head = await self._saves.wait(attempt, _ALONE_S if is_alone else self._patience_s)
        if head is None:
            return f"step {number}: the ranks of node {self._node} are there; waits for other nodes"
        return f"step {number}: is committed, {head.snapshot.text}"

    async def _watch(self, attempt: Attempt) -> None:
        """Gives a step up that other nodes do not complete: no connection ends that would tell."""
        try:
            if await self._saves.wait(attempt, _IDLE_S) is None and not attempt.is_promised:
                why = f"job {attempt.job}: {attempt.snapshot}: not complete within {_IDLE_S:g} s"
                await self._saves.fail(attempt, TimedOutError(why))
        except TenplexError:
            pass  # whoever found out has said so
        finally:
            self._saving.pop(attempt.job, None)

    async def run(self) -> None:
        """Frees what nobody goes on with, until cancelled."""
        while True:
            await trio.sleep(_SWEEP_S)
            before_s = trio.current_time() - _IDLE_S
            for upload in [each for step in self._steps.values() for each in step.uploads.values()]:
                if upload.touched_s < before_s and not upload.users_count and upload.failure is None:
                    log.warning("job %s: rank %d: nothing more came: given up", upload.job, upload.rank)
                    await upload.give_up(
                        f"nothing more came within {_IDLE_S:g} s; delete it, and begin again"
                    )


def _said(lacks: Mapping[int, str | None]) -> str:
    return "; ".join(f"rank {rank}: {why}" for rank, why in lacks.items() if why)[:1000]
