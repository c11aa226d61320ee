"""What keeps the state of jobs beyond their newest snapshot: older steps, and steps that are persisted."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import trio

from tenplexfs.core.snapshot import Head, JobName, NodeName, check_job_name
from tenplexfs.daemon.config import Config
from tenplexfs.daemon.node_calls import Nodes
from tenplexfs.errors import InvalidError, NotFoundError, PreconditionError, TenplexError, UnavailableError
from tenplexfs.formats.dataset_settings import plain_settings
from tenplexfs.formats.keep_settings import persist_of
from tenplexfs.formats.pauses import with_paused
from tenplexfs.formats.requests import Request, has_request
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.coordinator import Coordinator, State
from tenplexfs.runtime.datasets import Datasets
from tenplexfs.runtime.going_back import PastSteps, Rollback
from tenplexfs.runtime.jobs import JobTable
from tenplexfs.runtime.ladder import Ladder
from tenplexfs.runtime.member import Member
from tenplexfs.runtime.orders import Description, Report
from tenplexfs.runtime.past import Shown
from tenplexfs.runtime.persisting import Persister, Shares
from tenplexfs.runtime.planning import Target, resolve
from tenplexfs.runtime.protocols import PeerReader
from tenplexfs.runtime.replicas import Replicas
from tenplexfs.runtime.restoring import (
    Found,
    PersistedPeers,
    find_step,
    own_steps,
    settings_with,
    state_of,
    take_indexes,
)
from tenplexfs.runtime.staging import ScatterFactory
from tenplexfs.runtime.switching import mute
from tenplexfs.storage.places import Place

__all__ = ["Keeping", "Restore"]

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_RETRY_MAX_S = 30.0
_MADE_S = 2.0


@dataclass(frozen=True)
class Restore:
    """What somebody asks for.

    Attributes:
        url: Where steps were persisted.
        step: None: the newest.
        target: The layout of a job that is not there, or lost; None: as persisted.
        request_id: The same one is the same transaction; empty for none.
        arguments: What it asks for, in whatever form.
        only_new: A job that has a state by now keeps it.
        replace: Whatever nodes still have of the job goes, its layout too.
    """

    job: JobName
    url: str
    step: int | None = None
    target: Target | None = None
    request_id: str = ""
    arguments: bytes = b""
    only_new: bool = False
    replace: bool = False


class Keeping:
    """Composes the parts; belongs to the trio thread.

    Attributes:
        shares: This node's shares of steps that are persisted.
    """

    def __init__(
        self,
        *,
        config: Config,
        member: Member,
        table: JobTable,
        coordinator: Coordinator,
        compute: Compute,
        nodes: Nodes,
        client: PeerReader,
        scatter: ScatterFactory,
        datasets: Datasets,
        living: Callable[[], Collection[NodeName]],
        clock_ns: Callable[[], int],
    ) -> None:
        self._restore_from = config.restore_from
        self._member = member
        self._table = table
        self._coordinator = coordinator
        self._compute = compute
        self._datasets = datasets
        self._steps = PastSteps(nodes, compute, endpoints=nodes.endpoints, persisted=self._persisted)
        self.shares = nodes.shares = Shares(member, compute)
        self._persister = Persister(
            member=member,
            table=table,
            shares=self.shares,
            calls=nodes,
            index_file=datasets.index_file,
            clock_ns=clock_ns,
        )
        member.persisted = lambda url: PersistedPeers(url, client, compute)

        def reachable() -> list[NodeName]:
            alive = living()
            return [node for node in nodes.endpoints() if not alive or node in alive]

        coordinator.recovery.beyond = Ladder(nodes, compute, reachable)
        member.relieve_also(self.shares.relieve)
        self._replicas = Replicas(
            member=member,
            table=table,
            calls=nodes,
            compute=compute,
            peers=client,
            scatter=scatter,
            living=living,
            clock_ns=clock_ns,
        )
        member.relieve_also(self._replicas.relieve)

    async def run(self) -> None:
        """Keeps, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._persister.run)
            nursery.start_soon(self._replicas.run)
            if self._restore_from is not None:
                nursery.start_soon(self._restore_new, self._restore_from)

    def status(self, job: JobName) -> Mapping[str, object]:
        """Returns what ``status.json`` says of it."""
        said = {"persist": self._persister.status(job), "replicas": self._replicas.status(job)}
        return {name: each for name, each in said.items() if each is not None}

    def survives(self, job: JobName, shown: Shown) -> int:
        """Returns how many node losses a job survives at this moment."""
        found = self._replicas.survives(job)
        return shown.survives_node_losses if found is None else found

    async def roll_back(
        self, asked: Rollback, report: Report, stop: Callable[[Head], Awaitable[None]]
    ) -> Head:
        """Gives a job the state of an earlier step; returns the head."""
        head = self._head(asked.job)
        return await self._steps.roll_back(asked, self._coordinator, report, head=head, stop=stop)

    async def history(self, job: JobName) -> dict[str, object]:
        """Returns the steps that ``job`` can go back to, the newest first, as ``job history`` prints them."""
        head = self._head(job)
        known = await self._coordinator.describe(job, head)
        kept = await self._steps.kept(job, known)
        message = None
        persisted: Mapping[int, Found] = {}
        try:
            persisted = await self._persisted(job, known.settings_json)
        except TenplexError as error:
            message = error.message
        steps = []
        for step in sorted({*kept, *persisted}, reverse=True):
            snapshot = kept[step] if step in kept else persisted[step].snapshot
            steps.append(
                {
                    "step": step,
                    "generation": snapshot.generation,
                    "txid": snapshot.txid,
                    "current": snapshot == head.snapshot,
                    "kept": step in kept,
                    "persisted": persisted[step].place.url if step in persisted else None,
                }
            )
        return {"job": job, "steps": steps, "message": message}

    async def _persisted(self, job: JobName, settings_json: bytes) -> Mapping[int, Found]:
        persist = persist_of(settings_json)
        return await trio.to_thread.run_sync(own_steps, persist, job, settings_json)

    async def restore(self, asked: Restore, report: Report) -> Head:
        """Makes a job of a persisted step, or gives it its state; returns the head.

        Raises:
            NotFoundError: There is no such step.
            TenplexError: Nothing changed; or a job was made, and is empty.
        """
        head = self._table.heads().get(asked.job)
        if head is not None and (made := await self._made(asked)) is not None:
            return made
        is_gone = head is not None and (asked.replace or await self._is_lost(asked.job, head))
        found = await trio.to_thread.run_sync(find_step, asked.url, asked.job, asked.step)
        state, opened = await state_of(found, self._compute)
        then = opened.manifest.settings_json
        layout, settings = opened.layout_json, with_paused(plain_settings(then), None)
        lost: Description | None = None
        if head is not None and not is_gone:
            if asked.target is not None:
                raise InvalidError(
                    f"job {asked.job}: is there, with a layout; restore it, then reconfigure it"
                )
        elif asked.target is not None:
            layout = (await self._compute(resolve, asked.target, layout, self._member.node)).layout_json
        if head is None:
            await self._coordinator.create(asked.job, layout, settings)
        elif is_gone:
            lost = Description(head.snapshot, layout, settings, 0, committed=True)

        async def load(known: Description) -> State:
            if asked.only_new and lost is None and known.snapshot.step is not None:
                raise PreconditionError(f"job {asked.job}: has a state by now")
            persist = persist_of(known.settings_json)
            is_own = persist is not None and (Place(persist.to) / asked.job).url == found.siblings.url
            settings = settings_with(known.settings_json, opened, is_own=is_own)
            past = found.snapshot if is_own else None
            return replace(state, settings_json=settings, past=past)

        with self._datasets.building():
            await trio.to_thread.run_sync(take_indexes, found, then, self._datasets.indexes)
            return await self._coordinator.replace_state(
                asked.job, asked.request_id, load, report, arguments=asked.arguments, lost=lost
            )

    async def _made(self, asked: Restore) -> Head | None:
        """Returns the head of the job where this very request has made it; else None."""
        with trio.move_on_after(_MADE_S), suppress(UnavailableError):
            head, known = await self._coordinator.current(asked.job)
            if has_request(known.settings_json, Request(asked.job, asked.request_id, asked.arguments)):
                return head
        return None

    async def _is_lost(self, job: JobName, head: Head) -> bool:
        """Returns whether no node of a head has its part any more, as far as anybody will ever know.

        Raises:
            PreconditionError: Some do not answer: they are missed by the others, or may have their part.
        """
        survey = await self._coordinator.recovery.survey(job, head, needed=head.nodes)
        silent = ", ".join(sorted(survey.silent))
        if survey.lost == {*head.nodes}:
            if survey.slow:
                raise PreconditionError(
                    f"job {job}: {silent} may have its state, and has not answered; wait for it, "
                    "or take the persisted one instead (--replace)"
                )
            return True
        if silent:
            raise PreconditionError(
                f"job {job}: {silent} is lost, the other nodes have their part: reconfigure it without, "
                "or take the persisted state instead of theirs (--replace)"
            )
        return False

    async def _restore_new(self, url: str) -> None:
        """Makes the jobs that are persisted below ``url`` and that nobody knows; ends when all are there."""
        wait_s, said = _RETRY_S, ""
        while True:
            try:
                names = await trio.to_thread.run_sync(Place(url).directories, abandon_on_cancel=True)
                for name in names:
                    await self._restore_if_new(name, url)
            except PreconditionError:  # another node was quicker
                await trio.sleep(wait_s)
                continue
            except TenplexError as error:
                if said != error.message:
                    log.warning("restoring from %s: %s", url, error)
                said = error.message
                await trio.sleep(wait_s)
                wait_s = min(2 * wait_s, _RETRY_MAX_S)
                continue
            return

    async def _restore_if_new(self, name: str, url: str) -> None:
        try:
            job = check_job_name(name)
            await trio.to_thread.run_sync(find_step, f"{url}/{name}", job, None)
        except (InvalidError, NotFoundError) as error:
            log.info("restoring from %s: %s is no job: %s", url, name, error)
            return
        head = self._table.heads().get(job)
        if head is None or head.snapshot.step is None or await self._is_lost(job, head):
            made = await self.restore(Restore(job, url, only_new=True), mute)
            log.info("job %s: restored from %s: %s", job, url, made.snapshot)

    def _head(self, job: JobName) -> Head:
        shown = self._member.shown().get(job)
        if shown is None:
            raise NotFoundError(f"job {job}: is not shown here")
        return shown.head
