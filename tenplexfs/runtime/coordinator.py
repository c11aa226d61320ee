"""What switches a job, as decided under its lock by the daemon that was asked; `switching` carries it out."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from itertools import count

from tenplexfs.core.snapshot import Head, JobName, NodeName, TxId
from tenplexfs.core.transaction import check_expected, next_snapshot
from tenplexfs.errors import (
    ConflictError,
    ExistsError,
    InvalidError,
    TenplexError,
    UnavailableError,
)
from tenplexfs.formats.dataset_settings import begin_datasets, plain_settings, plan_datasets
from tenplexfs.formats.lineage import branch_off
from tenplexfs.formats.pauses import with_paused
from tenplexfs.formats.requests import Request, add_request, has_request, with_birth
from tenplexfs.runtime.asking import describe_any
from tenplexfs.runtime.changes import Change, Saved, State
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.heads import HeadMover, existing
from tenplexfs.runtime.orders import Description, NodeCalls, Progress, Report
from tenplexfs.runtime.planning import Resolved, Target, plan_summary, regroup_values, resolve
from tenplexfs.runtime.protocols import Lock, Registry
from tenplexfs.runtime.recovery import Recovery, Wish
from tenplexfs.runtime.switching import Base, SourcesLostError, Switch, Switcher, mute

__all__ = ["Change", "Coordinator", "Saved", "State"]

log = logging.getLogger(__name__)

_SAVE_S = 5.0  # how long a save, which is quick, may have the lock before others give up
_SWITCH_S = 600.0  # how long a save waits for what else switches the job


class Coordinator:
    """Switches jobs. One for each daemon; any daemon can be asked.

    Args:
        node: This one.
        endpoints: The nodes that are known now, this one too, and where they listen.
        living: The nodes that the registry says are alive.
        new_txid: Makes a fresh name for a transaction.
        clock_ns: Wall clock.
    """

    def __init__(
        self,
        *,
        node: NodeName,
        registry: Registry,
        calls: NodeCalls,
        compute: Compute,
        endpoints: Callable[[], Mapping[NodeName, str]],
        living: Callable[[], Collection[NodeName]],
        new_txid: Callable[[], TxId],
        clock_ns: Callable[[], int],
    ) -> None:
        self._node = node
        self._heads = HeadMover(registry)
        self._calls = calls
        self._switcher = Switcher(
            node=node,
            heads=self._heads,
            calls=calls,
            endpoints=endpoints,
            living=living,
            clock_ns=clock_ns,
        )
        self.recovery = Recovery(calls=calls, compute=compute, living=living)
        self._living = living
        self._compute = compute
        self._endpoints = endpoints
        self._new_txid = new_txid

    async def create(self, job: JobName, layout_json: bytes, settings_json: bytes) -> Head:
        """Makes a job without state; returns its head, also when it is there already with the same layout.

        Raises:
            InvalidError: The layout is refused.
            ExistsError: There is a job of this name with another layout.
        """
        wanted = await self._compute(resolve, Target(layout_json=layout_json), None, self._node)
        self._check_known(wanted)
        txid = self._new_txid()

        async def body(lock: Lock, head: Head | None) -> Head:
            if head is not None:
                known = await self.describe(job, head)
                if (
                    head.layout_digest == wanted.digest
                    and plain_settings(known.settings_json) == settings_json
                ):
                    return head
                raise ExistsError(
                    f"job {job}: there already, at {head.snapshot}, with another layout or settings"
                )
            snapshot = next_snapshot(None, txid, step=None)
            to = Switch(snapshot, wanted, with_birth(settings_json, txid))
            return await self._switcher.switch(lock, None, to, mute)

        return await self._heads.under_lock(job, f"{self._node}:{txid}", body)

    async def reconfigure(
        self, change: Change, report: Report, *, stop: Callable[[Head], Awaitable[None]] | None = None
    ) -> Head:
        """Moves a job to another layout; returns the head, at once when the job is so already.

        A job that is paused goes on, in a new generation, also where the layout stays.

        Args:
            change: What is wanted.
            report: Gets the progress.
            stop: Stops the ranks of the job, when there is something to change.

        Raises:
            NotFoundError, InvalidError, ConflictError, NoRoomError, UnavailableError: Nothing changed.
        """
        report(Progress("planning"))
        job, request = change.job, Request(change.job, change.request_id, change.arguments)
        told: dict[Head, Description] = {}
        if stop is not None:
            # Without the lock, for what they save on their way commits under it.
            now = existing(job, await self._heads.current(job))
            told[now] = known = await self.describe(job, now)
            found = await self._wanted(change, now, known)
            if not has_request(known.settings_json, request) and not change.is_so(found, now, known):
                check_expected(now, change.expected_generation)
                self._check_known(found)
                if not await self.recovery.has_lost_ranks(job, now, needed=found.nodes):
                    await stop(now)
                report(Progress("planning"))

        async def body(lock: Lock, head: Head | None) -> Head:
            head = existing(job, head)
            known = told.get(head) or await self.describe(job, head)
            if has_request(known.settings_json, request):
                return head
            wanted = await self._wanted(change, head, known)
            survey = await self.recovery.survey(job, head, needed=wanted.nodes)
            if survey.lost:
                wanted = await self._wanted(change, head, known, lost=survey.lost)
            if change.is_so(wanted, head, known) and not survey.empty:
                return head
            check_expected(head, change.expected_generation)
            self._check_known(wanted)
            lost = survey.lost
            for attempt in count():
                to = await self._moved(change, head, known, wanted, lost, survey.silent, request)
                try:
                    return await self._switcher.switch(lock, head, replace(to, attempt=attempt), report)
                except SourcesLostError as error:
                    if error.nodes <= lost:
                        raise
                    log.warning("job %s: %s; planning again", job, error)
                    report(Progress("planning", f"{error.message}; planning again"))
                    lost |= error.nodes
            raise AssertionError("it ends when no more nodes are lost")

        return await self._heads.under_lock(job, self._owner(request), body, patience_s=_SAVE_S)

    async def _moved(
        self,
        change: Change,
        head: Head,
        known: Description,
        wanted: Resolved,
        lost: frozenset[NodeName],
        silent: frozenset[NodeName],
        request: Request,
    ) -> Switch:
        """Returns what moves a job to the layout ``wanted``, without ``lost`` nodes of its head."""
        base, planned = None, Progress("staging")
        wish = Wish(change.job, head, known, wanted, lost, tuple(change.drop))
        datasets = await self._planned_datasets(known, head, wanted)
        if head.snapshot.step is not None:
            found = await self.recovery.base_for(wish, silent=silent)
            base, known = found.base, found.known
            planned = Progress("staging", found.message, plan={**found.plan, "dataset": datasets})
        step = known.snapshot.step

        async def can_do_without(gone: frozenset[NodeName]) -> bool:
            return await self.recovery.has_replicas(replace(wish, lost=lost | gone))

        began = await self._begun(known, step, step, wanted)
        values = await self._regrouped(known.values, wanted)
        return Switch(
            next_snapshot(head, self._new_txid(), step=step),
            wanted,
            add_request(with_paused(began.settings_json, change.paused), request),
            base,
            drop=change.drop,
            values=values,
            planned=planned,
            can_do_without=can_do_without,
        )

    async def commit_save(self, saved: Saved, report: Report) -> Head:
        """Commits a step that all ranks have saved; returns the head.

        Raises:
            ConflictError: The job is of another generation by now, or past that step.
            TenplexError: A node lost its part. Nothing changed.
        """
        snapshot = saved.snapshot

        async def body(lock: Lock, head: Head | None) -> Head:
            head = existing(saved.job, head)
            if head.snapshot == snapshot:
                return head
            now = head.snapshot
            is_past = now.step is not None and snapshot.step is not None and now.step >= snapshot.step
            if now.generation != snapshot.generation or is_past or head.layout_digest != saved.wanted.digest:
                raise ConflictError(f"job {saved.job}: is at {now} by now, {snapshot} comes too late")
            to = Switch(snapshot, saved.wanted, saved.settings_json, values=saved.values, leader=saved.leader)
            return await self._switcher.switch(lock, head, to, report)

        owner = f"{self._node}:{snapshot.txid}"
        return await self._heads.under_lock(saved.job, owner, body, patience_s=_SWITCH_S)

    async def plan(self, change: Change, *, operations: bool) -> dict[str, object]:
        """Returns what `reconfigure` would move, as ``plan --json`` prints it; changes nothing."""
        head = existing(change.job, await self._heads.current(change.job))
        base = await self.describe(change.job, head)
        wanted = await self._wanted(change, head, base)
        summary = await self._compute(
            plan_summary,
            base.layout_json,
            wanted.layout_json,
            change.drop,
            operations=operations,
            values=base.values,
        )
        return {**summary, "dataset": await self._planned_datasets(base, head, wanted)}

    async def _wanted(
        self, change: Change, head: Head, base: Description, *, lost: Collection[NodeName] = ()
    ) -> Resolved:
        return await self._compute(
            resolve,
            change.target,
            base.layout_json,
            self._node,
            has_state=head.snapshot.step is not None,
            drop=change.drop,
            lost=tuple(sorted(lost)),
        )

    async def replace_state(
        self,
        job: JobName,
        request_id: str,
        load: Callable[[Description], Awaitable[State]],
        report: Report,
        *,
        arguments: bytes = b"",
        lost: Description | None = None,
    ) -> Head:
        """Gives a job the state that ``load`` makes for its layout; returns the head.

        With ``lost``, of a head that its nodes have lost, that is taken for what they would say.

        Raises:
            NotFoundError: No such job.
            TenplexError: As ``load`` or the nodes refuse it. Nothing changed.
        """
        report(Progress("planning"))
        request = Request(job, request_id, arguments)

        async def body(lock: Lock, head: Head | None) -> Head:
            head = existing(job, head)
            if lost is not None and lost.snapshot != head.snapshot:
                raise ConflictError(f"job {job}: is at {head.snapshot} by now")
            known = lost or await self.describe(job, head)
            if has_request(known.settings_json, request):
                return head
            state = await load(known)
            wanted = await self._compute(resolve, Target(layout_json=known.layout_json), None, self._node)
            self._check_known(wanted)
            summary = await self._compute(plan_summary, state.layout_json, wanted.layout_json, ())
            snapshot = next_snapshot(head, self._new_txid(), step=state.step)
            old_step = head.snapshot.step
            if state.settings_json is not None:
                known, old_step = replace(known, settings_json=state.settings_json), state.step
            known = await self._begun(known, old_step, state.step, wanted)
            gone = frozenset(head.nodes if lost is not None else ())
            source = Base(state.txid, state.layout_json, state.source, lost=gone)
            planned = Progress("staging", plan=summary)
            then = (state.past.generation, state.past.step) if state.past is not None else (0, None)
            settings_json = branch_off(known.settings_json, snapshot.generation, *then)
            settings_json = add_request(settings_json, request)
            values = await self._regrouped(state.values, wanted)
            to = Switch(snapshot, wanted, settings_json, source, values=values, planned=planned)
            return await self._switcher.switch(lock, head, to, report)

        return await self._heads.under_lock(job, self._owner(request), body, patience_s=_SAVE_S)

    async def change_settings(
        self,
        job: JobName,
        request_id: str,
        change: Callable[[Description, Head], Awaitable[bytes]],
        report: Report,
        *,
        arguments: bytes = b"",
    ) -> Head:
        """Gives a job the settings that ``change`` makes, in a new generation with the same state.

        Where they stay as they are, nothing happens.

        Raises:
            NotFoundError: No such job.
            TenplexError: As ``change`` or the nodes refuse it. Nothing changed.
        """
        request = Request(job, request_id, arguments)

        async def body(lock: Lock, head: Head | None) -> Head:
            head = existing(job, head)
            known = await self.describe(job, head)
            if has_request(known.settings_json, request):
                return head
            wanted = await self._compute(resolve, Target(layout_json=known.layout_json), None, self._node)
            changed = await change(known, head)
            if changed == known.settings_json:
                return head
            settings_json = add_request(changed, request)
            snapshot = next_snapshot(head, self._new_txid(), step=head.snapshot.step)
            source = None if head.snapshot.step is None else Base(head.snapshot.txid, known.layout_json)
            to = Switch(snapshot, wanted, settings_json, source, values=known.values)
            return await self._switcher.switch(lock, head, to, report)

        return await self._heads.under_lock(job, self._owner(request), body, patience_s=_SAVE_S)

    async def _begun(
        self, base: Description, old_step: int | None, step: int | None, wanted: Resolved
    ) -> Description:
        """Returns ``base``, which was at ``old_step``, with its datasets begun anew, from ``step`` on."""
        began = await self._compute(begin_datasets, base.settings_json, old_step, step, wanted.layout_json)
        return replace(base, settings_json=began)

    async def _regrouped(self, values: bytes, wanted: Resolved) -> bytes:
        return await self._compute(regroup_values, values, wanted.layout_json) if values else values

    async def _planned_datasets(self, base: Description, head: Head, wanted: Resolved) -> dict[str, object]:
        return await self._compute(
            plan_datasets, base.settings_json, head.snapshot.step, base.layout_json, wanted.layout_json
        )

    async def remove(self, job: JobName) -> Head | None:
        """Removes a job and its bytes, also leftovers of one that is gone; returns what its head was."""
        txid = self._new_txid()

        async def body(lock: Lock, head: Head | None) -> Head | None:
            if head is not None:
                await self._heads.commit(lock, head, None)
            await self._switcher.announce(job, None, (self._node, *(head.nodes if head is not None else ())))
            return head

        return await self._heads.under_lock(job, f"{self._node}:{txid}", body)

    async def current(self, job: JobName) -> tuple[Head, Description]:
        """Returns the head of a job as the registry has it, and what its nodes store of it.

        Raises:
            NotFoundError: No such job.
        """
        head = existing(job, await self._heads.current(job))
        return head, await self.describe(job, head)

    async def describe(self, job: JobName, head: Head) -> Description:
        """Returns the committed layout of a job, from this node or from one that holds it.

        Raises:
            UnavailableError: No node that holds the job answers.
        """
        nodes = sorted(head.nodes, key=lambda each: (each != self._node, each not in self._living()))
        try:
            return await describe_any(self._calls, nodes, job, head.snapshot.txid)
        except TenplexError as error:
            names = ", ".join(head.nodes)
            raise UnavailableError(f"job {job}: none of its nodes {names} answers: {error}") from error

    def _check_known(self, wanted: Resolved) -> None:
        known = self._endpoints()
        unknown = [node for node in wanted.nodes if node not in known]
        if unknown:
            raise InvalidError(
                f"nodes: {', '.join(unknown)} in the layout: no such node is known; "
                f"known: {', '.join(sorted(known))}"
            )

    def _owner(self, request: Request) -> str:
        return f"{self._node}:{request.key or self._new_txid()}"
