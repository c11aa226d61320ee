"""Steps that are uploaded file by file, by processes that do not say who they are: when one is complete.

Tenplex's ``save`` asks for the listing of its rank's directory, deletes what is listed, uploads file by file,
and then writes the number of the step to ``iter``, each rank for itself. So each ``iter`` says that one rank
more is done, and a step is complete here once as many have come as ranks began in that way, at least one, and
all ranks of this node have all tensors of the layout. Who uploads for all ranks, and asks for no listing,
writes ``iter`` once. From then on it is a save like any other: sealed, then committed when all nodes are.

What a run left behind that ended in the middle must not become a part of what the next one saves, and no
connection tells that it ended. So what ranks that began in that way have brought is given up when it cannot
be of one run: a rank begins again, or asks for what is committed, as a run does when it starts, and others
have been silent for longer than a start takes; or a rank began a minute after another one had brought its
last file. The same is so when the job was changed meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import trio

from tenplexfs.core.snapshot import JobName, NodeName, SnapshotId, TxId
from tenplexfs.errors import ConflictError, NotFoundError, PreconditionError, TenplexError, TimedOutError
from tenplexfs.formats.tenplex_files import directories, is_below
from tenplexfs.runtime.attempts import Attempt, Base, RankSave, SaveRequest
from tenplexfs.runtime.past import job_memory_bytes
from tenplexfs.runtime.saving import Saves
from tenplexfs.runtime.tasks import run_all
from tenplexfs.runtime.upload import Upload, plan_of_layout
from tenplexfs.runtime.upload_step import RESTART_S, SKEW_S, UploadStep
from tenplexfs.storage.store import Store

__all__ = ["Incoming"]

log = logging.getLogger(__name__)

_RUN = "http"
_IDLE_S = 600.0
_SWEEP_S = 30.0
_ALONE_S = 60.0


@dataclass(frozen=True)
class _Sealed:
    """What is complete here, and not yet on other nodes."""

    attempt: Attempt
    since_s: float


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
        self._steps: dict[JobName, UploadStep] = {}
        self._saving: dict[JobName, int] = {}
        self._sealed: dict[JobName, _Sealed] = {}

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
            await self._drop_old(step, base)
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
    async def _locked(self, job: JobName) -> AsyncIterator[UploadStep]:
        """Gives the step that is being brought now; one that is there no more by then is not it."""
        while True:
            step = self._steps.get(job, UploadStep())
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
        await self._begun_again(job)
        now_s = trio.current_time()
        return Upload(job, rank, base, plan, ingest, room, now_s, now_s)

    def found(self, job: JobName) -> Mapping[int, Upload]:
        """Returns what is there of a job, by rank."""
        step = self._steps.get(job)
        return {} if step is None else step.uploads

    async def listed(self, job: JobName, rank: int) -> None:
        """The directory of a rank was asked for, as Tenplex does before it uploads."""
        if (upload := self.found(job).get(rank)) is not None:
            upload.was_listed = True
        elif (base := self._base(job)) is not None and rank in base.ptc.nodes.get(self._node, ()):
            self._steps.setdefault(job, UploadStep()).own.add(rank)
            await self._begun_again(job)

    async def started(self, job: JobName) -> None:
        """What is committed of a rank was asked for, as by a run that starts: the one before is no more."""
        now_s = trio.current_time()
        if (step := self._steps.get(job)) is not None:
            await step.give_up(step.idle(now_s), "a run began to load after this was brought")
        sealed = self._sealed.get(job)
        if sealed is not None and sealed.since_s < now_s - RESTART_S:
            await self._begun_again(job)

    async def _begun_again(self, job: JobName) -> None:
        """Gives up what waits for ranks of other nodes: its own are at another one."""
        if (sealed := self._sealed.pop(job, None)) is not None:
            why = f"job {job}: {sealed.attempt.snapshot}: a rank of node {self._node} began again"
            await self._saves.forget(sealed.attempt, ConflictError(why))

    async def _drop_old(self, step: UploadStep, base: Base) -> None:
        """Gives up what was brought for another layout, or another generation."""
        old = [
            each
            for each in step.uploads.values()
            if each.base.ptc is not base.ptc
            or each.base.head.snapshot.generation != base.head.snapshot.generation
        ]
        await step.give_up(old, "the job was changed since this was begun")

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
            upload.touched_s = trio.current_time()
            return counts
        step = self._steps[job]
        step.unsay(upload)
        if upload.was_listed and upload.failure is None:
            idle = step.idle(trio.current_time(), but=rank)
            await step.give_up(idle, f"rank {rank} began the step again after this was brought")
        if step.uploads.get(rank) is upload:
            del step.uploads[rank]
        if upload.was_listed:
            step.own.add(rank)
        await upload.give_up("was deleted")
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
            await self._drop_old(step, base)
            await step.give_up(
                step.left_over(), f"another rank began {SKEW_S:g} s and more after this was brought"
            )
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
            if not ranks:
                raise PreconditionError(
                    f"job {job}: has no rank on node {self._node}; say it where it has some"
                )
            lacks = await self._lacks(step, ranks)
            if len(step.said_s) + 1 > list(lacks.values()).count(None):
                raise PreconditionError(f"job {job}: step {number}: {_said(lacks)}")
            step.number = number
            step.said_s.append(trio.current_time())
            if any(lacks.values()):
                return f"step {number}: waits: {_said(lacks)}"
            if unsaid := step.unsaid_count():
                return f"step {number}: waits: {unsaid} more of its ranks are to say that they are done"
            del self._steps[job]
            self._saving[job] = number
        return await self._save(job, number, [step.uploads[rank] for rank in ranks])

    async def _lacks(self, step: UploadStep, ranks: Sequence[int]) -> dict[int, str | None]:
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
        self._sealed[job] = _Sealed(attempt, trio.current_time())
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
            sealed = self._sealed.get(attempt.job)
            if sealed is not None and sealed.attempt is attempt:
                del self._sealed[attempt.job]

    async def run(self) -> None:
        """Frees what nobody goes on with, until cancelled."""
        while True:
            await trio.sleep(_SWEEP_S)
            before_s = trio.current_time() - _IDLE_S
            for job, step in list(self._steps.items()):
                gone = self._base(job) is None
                old = [each for each in step.uploads.values() if gone or each.touched_s < before_s]
                await step.give_up(
                    [each for each in old if each.failure is None and not each.users_count],
                    "its job is gone" if gone else f"nothing more came within {_IDLE_S:g} s",
                )
                if gone and not any(each.users_count for each in old):
                    del self._steps[job]


def _said(lacks: Mapping[int, str | None]) -> str:
    return "; ".join(f"rank {rank}: {why}" for rank, why in lacks.items() if why)[:1000]
