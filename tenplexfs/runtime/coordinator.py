"""The transaction of every switch, run by the daemon that was asked: lock, plan, stage, commit, announce.

The compare-and-set of the head is the commit; there is no other. Whatever fails before it leaves nothing
behind; a reply that is lost at it is resolved by reading the head; whatever fails after it catches up by the
registry's watch.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import trio

from tenplexfs.core.snapshot import Head, JobName, NodeName, SnapshotId, TxId
from tenplexfs.core.transaction import check_expected, next_snapshot
from tenplexfs.errors import (
    ConflictError,
    ExistsError,
    InvalidError,
    NotFoundError,
    TenplexError,
    UnavailableError,
)
from tenplexfs.formats.dataset_settings import begin_datasets, plain_settings, plan_datasets
from tenplexfs.formats.requests import add_request, has_request, request_key
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.heads import HeadMover
from tenplexfs.runtime.orders import Description, NodeCalls, Progress, Report, StageOrder
from tenplexfs.runtime.planning import Resolved, Target, plan_summary, regroup_values, resolve
from tenplexfs.runtime.protocols import Lock, Registry
from tenplexfs.runtime.tasks import run_all

__all__ = ["Change", "Coordinator", "Saved", "State"]

log = logging.getLogger(__name__)

_DROP_S = 10.0
_SAVE_S = 5.0  # how long a save, which is quick, may have the lock before others give up
_SWITCH_S = 600.0  # how long a save waits for what else switches the job
_GUEST_S = 2.0  # how long a node that holds nothing of the job keeps the answer waiting


@dataclass(frozen=True)
class Change:
    """What somebody asks for.

    Attributes:
        target: The layout that is wanted.
        drop: Patterns of tensors that the new layout may lack.
        expected_generation: Of the job when it was asked; None is any.
        request_id: The same one is the same transaction; empty for none.
    """

    job: JobName
    target: Target
    drop: tuple[str, ...] = ()
    expected_generation: int | None = None
    request_id: str = ""


@dataclass(frozen=True)
class State:
    """State from outside that replaces what a job has: a snapshot of one rank, on this node.

    Attributes:
        txid: By which this node serves it as a base.
        layout_json: Its layout.
    """

    txid: TxId
    layout_json: bytes
    step: int


@dataclass(frozen=True)
class Saved:
    """A step that all ranks have saved.

    Attributes:
        wanted: The layout that they saved under.
        values: What they hold beside tensors.
    """

    job: JobName
    snapshot: SnapshotId
    wanted: Resolved
    settings_json: bytes
    values: bytes


@dataclass(frozen=True)
class _Base:
    """Where the bytes of a new snapshot come from."""

    txid: TxId
    layout_json: bytes


class Coordinator:
    """Switches jobs. One for each daemon; any daemon can be asked.

    Args:
        node: This one.
        endpoints: The nodes that are known now, this one too, and where they listen.
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
        new_txid: Callable[[], TxId],
        clock_ns: Callable[[], int],
    ) -> None:
        self._node = node
        self._heads = HeadMover(registry)
        self._calls = calls
        self._compute = compute
        self._endpoints = endpoints
        self._new_txid = new_txid
        self._clock_ns = clock_ns

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
            return await self._switch(
                lock, None, snapshot, wanted, None, (), settings_json, Progress("staging"), _mute
            )

        return await self._heads.under_lock(job, f"{self._node}:{txid}", body)

    async def reconfigure(
        self, change: Change, report: Report, *, stop: Callable[[Head], Awaitable[None]] | None = None
    ) -> Head:
        """Moves a job to another layout; returns the head, at once when the job is so already.

        Args:
            change: What is wanted.
            report: Gets the progress.
            stop: Stops the ranks of the job, when there is something to change.

        Raises:
            NotFoundError, InvalidError, ConflictError, NoRoomError, UnavailableError: Nothing changed.
        """
        report(Progress("planning"))
        job, request = change.job, request_key(change.job, change.request_id)
        if stop is not None:
            # Without the lock, for what they save on their way commits under it.
            now = _existing(job, await self._heads.current(job))
            known = await self.describe(job, now)
            found = await self._wanted(change, now, known)
            if not has_request(known.settings_json, request) and found.digest != now.layout_digest:
                check_expected(now, change.expected_generation)
                self._check_known(found)
                await stop(now)
                report(Progress("planning"))

        async def body(lock: Lock, head: Head | None) -> Head:
            head = _existing(job, head)
            base = await self.describe(job, head)
            if has_request(base.settings_json, request):
                return head
            wanted = await self._wanted(change, head, base)
            if wanted.digest == head.layout_digest:
                return head
            check_expected(head, change.expected_generation)
            self._check_known(wanted)
            snapshot = next_snapshot(head, self._txid(request, head), step=head.snapshot.step)
            datasets = await self._planned_datasets(base, head, wanted)
            base = await self._begun(base, head, head.snapshot.step, wanted)
            source = None if head.snapshot.step is None else _Base(head.snapshot.txid, base.layout_json)
            planned = Progress("staging")
            if source is not None:
                summary = await self._compute(plan_summary, base.layout_json, wanted.layout_json, change.drop)
                planned = replace(planned, plan={**summary, "dataset": datasets})
            values = base.values
            if values:
                values = await self._compute(regroup_values, values, wanted.layout_json)
            return await self._switch(
                lock,
                head,
                snapshot,
                wanted,
                source,
                change.drop,
                add_request(base.settings_json, request),
                planned,
                report,
                values=values,
            )

        return await self._heads.under_lock(job, self._owner(request), body, patience_s=_SAVE_S)

    async def commit_save(self, saved: Saved) -> Head:
        """Commits a step that all ranks have saved; returns the head.

        Raises:
            ConflictError: The job is of another generation by now, or past that step.
            TenplexError: A node lost its part. Nothing changed.
        """
        snapshot = saved.snapshot

        async def body(lock: Lock, head: Head | None) -> Head:
            head = _existing(saved.job, head)
            if head.snapshot == snapshot:
                return head
            now = head.snapshot
            is_past = now.step is not None and snapshot.step is not None and now.step >= snapshot.step
            if now.generation != snapshot.generation or is_past or head.layout_digest != saved.wanted.digest:
                raise ConflictError(f"job {saved.job}: is at {now} by now, {snapshot} comes too late")
            return await self._switch(
                lock,
                head,
                snapshot,
                saved.wanted,
                None,
                (),
                saved.settings_json,
                Progress("staging"),
                _mute,
                values=saved.values,
                is_save=True,
            )

        owner = f"{self._node}:{snapshot.txid}"
        return await self._heads.under_lock(saved.job, owner, body, patience_s=_SWITCH_S)

    async def plan(self, change: Change, *, operations: bool) -> dict[str, object]:
        """Returns what `reconfigure` would move, as ``plan --json`` prints it; changes nothing."""
        head = _existing(change.job, await self._heads.current(change.job))
        base = await self.describe(change.job, head)
        wanted = await self._wanted(change, head, base)
        summary = await self._compute(
            plan_summary, base.layout_json, wanted.layout_json, change.drop, operations=operations
        )
        return {**summary, "dataset": await self._planned_datasets(base, head, wanted)}

    async def _wanted(self, change: Change, head: Head, base: Description) -> Resolved:
        return await self._compute(
            resolve,
            change.target,
            base.layout_json,
            self._node,
            has_state=head.snapshot.step is not None,
            drop=change.drop,
        )

    async def replace_state(
        self,
        job: JobName,
        request_id: str,
        load: Callable[[Description], Awaitable[State]],
        report: Report,
    ) -> Head:
        """Gives a job the state that ``load`` makes for its layout; returns the head.

        Raises:
            NotFoundError: No such job.
            TenplexError: As ``load`` or the nodes refuse it. Nothing changed.
        """
        report(Progress("planning"))
        request = request_key(job, request_id)

        async def body(lock: Lock, head: Head | None) -> Head:
            head = _existing(job, head)
            known = await self.describe(job, head)
            if has_request(known.settings_json, request):
                return head
            state = await load(known)
            wanted = await self._compute(resolve, Target(layout_json=known.layout_json), None, self._node)
            self._check_known(wanted)
            summary = await self._compute(plan_summary, state.layout_json, wanted.layout_json, ())
            snapshot = next_snapshot(head, self._txid(request, head), step=state.step)
            known = await self._begun(known, head, state.step, wanted)
            source = _Base(state.txid, state.layout_json)
            planned = Progress("staging", plan=summary)
            return await self._switch(
                lock,
                head,
                snapshot,
                wanted,
                source,
                (),
                add_request(known.settings_json, request),
                planned,
                report,
            )

        return await self._heads.under_lock(job, self._owner(request), body)

    async def change_settings(
        self,
        job: JobName,
        request_id: str,
        change: Callable[[Description, Head], Awaitable[bytes]],
        report: Report,
    ) -> Head:
        """Gives a job the settings that ``change`` makes, in a new generation with the same state.

        Raises:
            NotFoundError: No such job.
            TenplexError: As ``change`` or the nodes refuse it. Nothing changed.
        """
        request = request_key(job, request_id)

        async def body(lock: Lock, head: Head | None) -> Head:
            head = _existing(job, head)
            known = await self.describe(job, head)
            if has_request(known.settings_json, request):
                return head
            wanted = await self._compute(resolve, Target(layout_json=known.layout_json), None, self._node)
            settings_json = add_request(await change(known, head), request)
            snapshot = next_snapshot(head, self._txid(request, head), step=head.snapshot.step)
            source = None if head.snapshot.step is None else _Base(head.snapshot.txid, known.layout_json)
            planned = Progress("staging")
            return await self._switch(
                lock,
                head,
                snapshot,
                wanted,
                source,
                (),
                settings_json,
                planned,
                report,
                values=known.values,
            )

        return await self._heads.under_lock(job, self._owner(request), body)

    async def _begun(self, base: Description, head: Head, step: int | None, wanted: Resolved) -> Description:
        """Returns ``base`` with its datasets begun anew, for a generation from ``step`` on."""
        began = await self._compute(
            begin_datasets, base.settings_json, head.snapshot.step, step, wanted.layout_json
        )
        return replace(base, settings_json=began)

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
            await self._announce(job, None, (self._node, *(head.nodes if head is not None else ())))
            return head

        return await self._heads.under_lock(job, f"{self._node}:{txid}", body)

    async def describe(self, job: JobName, head: Head) -> Description:
        """Returns the committed layout of a job, from this node or from one that holds it.

        Raises:
            UnavailableError: No node that holds the job answers.
        """
        failure: TenplexError | None = None
        for node in sorted(head.nodes, key=lambda each: each != self._node):
            try:
                return await self._calls.describe(node, job, head.snapshot.txid)
            except TenplexError as error:
                failure = error
        raise UnavailableError(f"job {job}: none of its nodes {', '.join(head.nodes)} answers: {failure}")

    async def _switch(
        self,
        lock: Lock,
        head: Head | None,
        snapshot: SnapshotId,
        wanted: Resolved,
        base: _Base | None,
        drop: tuple[str, ...],
        settings_json: bytes,
        planned: Progress,
        report: Report,
        *,
        values: bytes = b"",
        is_save: bool = False,
    ) -> Head:
        job = lock.job
        order = StageOrder(
            job=job,
            snapshot=snapshot,
            base_txid=base.txid if base is not None else None,
            old_layout_json=base.layout_json if base is not None else b"",
            new_layout_json=wanted.layout_json,
            settings_json=settings_json,
            coordinator=self._node,
            drop=drop,
            endpoints=self._endpoints(),
            created_ns=self._clock_ns(),
            values=values,
            is_save=is_save,
        )
        new = Head(snapshot, wanted.digest, wanted.nodes)
        try:
            staged = await self._stage(order, wanted.nodes, planned, report)
        except BaseException as error:
            why = error.message if isinstance(error, TenplexError) else ""
            with trio.move_on_after(_DROP_S, shield=True):
                await self._drop(job, snapshot.txid, wanted.nodes, why)
            raise
        report(replace(staged, phase="committing"))
        try:
            await self._heads.commit(lock, head, new)
        except ConflictError as error:
            with trio.move_on_after(_DROP_S, shield=True):
                await self._drop(job, snapshot.txid, wanted.nodes, error.message)
            raise
        # From here on the switch is a fact, whoever goes away.
        with trio.CancelScope(shield=True):
            before = head.nodes if head is not None else ()
            late = await self._announce(job, new, (self._node, *before, *wanted.nodes))
            if head is not None and not late:
                await self._drop(job, head.snapshot.txid, before)
        message = f"not yet seen by {', '.join(late)}" if late else ""
        report(replace(staged, phase="committing", message=message))
        return new

    async def _stage(
        self, order: StageOrder, nodes: tuple[NodeName, ...], planned: Progress, report: Report
    ) -> Progress:
        done = dict.fromkeys(nodes, (0, 0))
        report(replace(planned, nodes=dict(done)))

        async def stage(node: NodeName) -> None:
            def count(bytes_done: int, bytes_total: int) -> None:
                done[node] = (bytes_done, bytes_total)
                report(replace(planned, nodes=dict(done)))

            try:
                await self._calls.stage(node, order, count)
            except TenplexError as error:
                raise type(error)(f"node {node}: {error.message}", **error.details) from error

        await run_all(partial(stage, node) for node in nodes)
        return replace(planned, nodes=dict(done))

    async def _announce(
        self, job: JobName, head: Head | None, members: tuple[NodeName, ...]
    ) -> list[NodeName]:
        """Tells every known node; returns the members that did not acknowledge."""
        late: list[NodeName] = []

        async def tell(node: NodeName) -> None:
            why = "no answer"
            with trio.move_on_after(math.inf if node in members else _GUEST_S):
                try:
                    await self._calls.switch(node, job, head)
                except TenplexError as error:
                    why = error.message
                else:
                    return
            log.warning("job %s: node %s has not switched yet: %s", job, node, why)
            if node in members:
                late.append(node)

        await run_all(partial(tell, node) for node in sorted({*members, *self._endpoints()}))
        return sorted(late)

    async def _drop(self, job: JobName, txid: TxId, nodes: tuple[NodeName, ...], reason: str = "") -> None:
        async def drop(node: NodeName) -> None:
            try:
                await self._calls.drop(node, job, txid, reason)
            except TenplexError as error:  # it settles with the head by itself
                log.warning("job %s: node %s has not dropped %s: %s", job, node, txid, error)

        await run_all(partial(drop, node) for node in nodes)

    def _check_known(self, wanted: Resolved) -> None:
        known = self._endpoints()
        unknown = [node for node in wanted.nodes if node not in known]
        if unknown:
            raise InvalidError(
                f"nodes: {', '.join(unknown)} in the layout: no such node is known; "
                f"known: {', '.join(sorted(known))}"
            )

    def _txid(self, request: str, head: Head) -> TxId:
        """Returns the name of what ``request`` makes of ``head``: no other snapshot of the job has it."""
        if not request:
            return self._new_txid()
        text = f"{request}\0{head.snapshot.txid}"
        return TxId(hashlib.blake2b(text.encode(), digest_size=8).hexdigest())

    def _owner(self, request: str) -> str:
        return f"{self._node}:{request or self._new_txid()}"


def _existing(job: JobName, head: Head | None) -> Head:
    if head is None:
        raise NotFoundError(f"job {job}: no such job")
    return head


def _mute(progress: Progress) -> None:
    """Nobody watches."""
