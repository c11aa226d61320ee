"""Carrying a switch out: every node stages, the head moves, every node shows it.

What to do when is `core.coordination`'s to say; here it is done. The compare-and-set of the head is the
commit; there is no other. Whatever fails before it leaves nothing behind; a reply that is lost at it is
resolved by reading the head; whatever fails after it catches up by the registry's watch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import trio

from tenplexfs.core.coordination import (
    Action,
    Commit,
    Coordination,
    Drop,
    End,
    Stage,
    Tell,
    Verdict,
)
from tenplexfs.core.membership import Mandate
from tenplexfs.core.snapshot import Head, JobName, NodeName, SnapshotId, TxId
from tenplexfs.errors import ConflictError, TenplexError, UnavailableError
from tenplexfs.runtime.heads import HeadMover
from tenplexfs.runtime.orders import SOURCE, NodeCalls, Progress, Report, StageOrder
from tenplexfs.runtime.planning import Resolved
from tenplexfs.runtime.protocols import Lock
from tenplexfs.runtime.tasks import run_all

__all__ = ["Base", "SourcesLostError", "Switch", "Switcher", "mute"]

log = logging.getLogger(__name__)

_DROP_S = 10.0
_LOOK_S = 0.5
_GUEST_S = 2.0  # how long a node that holds nothing of the job keeps the answer waiting
_MISSED_S = 0.2  # the same of one that is lost, or that the registry does not know as alive


@dataclass(frozen=True)
class Base:
    """Where the bytes of a new snapshot come from.

    Attributes:
        txid: By which the nodes of its layout serve them.
        layout_json: Its layout.
        source: The URL of a persisted step, where they come from there and no node serves them.
        lost: Nodes of its layout that do not.
        senders: Nodes that send something, by the plan.
    """

    txid: TxId
    layout_json: bytes
    source: str = ""
    lost: frozenset[NodeName] = frozenset()
    senders: frozenset[NodeName] = frozenset()


@dataclass(frozen=True)
class Switch:
    """What a job is switched to.

    Attributes:
        snapshot: What it will be.
        wanted: Its layout.
        settings_json: Settings that go with it.
        base: Where its bytes come from; None where there are none, or where they are there already (a save).
        drop: Patterns of tensors that the new layout may lack.
        values: What it holds beside tensors.
        leader: The process of rank 0 whose save its bytes are; empty: it is none.
        planned: What the progress says while nodes stage.
        attempt: How often it was tried before, under the same lock.
        can_do_without: Says whether there is a plan without nodes that have died meanwhile.
    """

    snapshot: SnapshotId
    wanted: Resolved
    settings_json: bytes
    base: Base | None = None
    drop: tuple[str, ...] = ()
    values: bytes = b""
    leader: str = ""
    planned: Progress = field(default_factory=lambda: Progress("staging"))
    attempt: int = 0
    can_do_without: Callable[[frozenset[NodeName]], Awaitable[bool]] | None = None


class SourcesLostError(UnavailableError):
    """Nodes that should have sent something did not; nothing changed.

    Attributes:
        nodes: They.
    """

    def __init__(self, message: str, nodes: frozenset[NodeName]) -> None:
        super().__init__(message, lost=sorted(nodes))
        self.nodes = nodes


class Switcher:
    """Carries switches out for the coordinator of this node.

    Args:
        node: This one.
        endpoints: The nodes that are known now, this one too, and where they listen.
        living: The nodes that the registry says are alive.
        clock_ns: Wall clock.
    """

    def __init__(
        self,
        *,
        node: NodeName,
        heads: HeadMover,
        calls: NodeCalls,
        endpoints: Callable[[], Mapping[NodeName, str]],
        living: Callable[[], Collection[NodeName]],
        clock_ns: Callable[[], int],
    ) -> None:
        self.node = node
        self.heads = heads
        self.calls = calls
        self.living = living
        self._endpoints = endpoints
        self._clock_ns = clock_ns

    async def switch(self, lock: Lock, head: Head | None, to: Switch, report: Report) -> Head:
        """Moves ``lock.job`` from ``head`` to what ``to`` says; returns the new head.

        Raises:
            SourcesLostError: It may be tried again, planned without them.
            TenplexError: Nothing changed, and nothing of it is left on the nodes that answer.
        """
        return await _Carrying(self, lock, head, to, self._order(lock, to), report).run()

    def _order(self, lock: Lock, to: Switch) -> StageOrder:
        base = to.base
        return StageOrder(
            job=lock.job,
            by=Mandate(lock.owner, lock.token, to.attempt),
            snapshot=to.snapshot,
            base_txid=base.txid if base is not None else None,
            old_layout_json=base.layout_json if base is not None else b"",
            new_layout_json=to.wanted.layout_json,
            settings_json=to.settings_json,
            coordinator=self.node,
            drop=to.drop,
            endpoints=self._endpoints(),
            created_ns=self._clock_ns(),
            values=to.values,
            leader=to.leader,
            source=base.source if base is not None else "",
            lost=tuple(sorted(base.lost)) if base is not None else (),
        )

    async def announce(
        self,
        job: JobName,
        head: Head | None,
        members: tuple[NodeName, ...],
        *,
        lost: Collection[NodeName] = (),
    ) -> list[NodeName]:
        """Tells every known node; returns those that did not acknowledge, of guests only the living ones.

        Guests are not waited for. One that has not switched yet may still open what was, on other nodes.
        """
        late: list[NodeName] = []
        living = self.living()

        async def tell(node: NodeName) -> None:
            why = "no answer"
            is_missed = node in lost or (living and node not in living)
            guest_s = _MISSED_S if is_missed else _GUEST_S
            with trio.move_on_after(math.inf if node in members else guest_s):
                try:
                    await self.calls.switch(node, job, head)
                except TenplexError as error:
                    why = error.message
                else:
                    return
            log.warning("job %s: node %s has not switched yet: %s", job, node, why)
            if node in members or (node in living and node not in lost):
                late.append(node)

        await run_all(partial(tell, node) for node in sorted({*members, *self._endpoints()}))
        return sorted(late)

    async def drop(self, order: StageOrder, txid: TxId, nodes: tuple[NodeName, ...], reason: str) -> None:
        """Lets nodes let go of a snapshot; those that do not answer settle with the head by themselves."""
        job = order.job

        async def drop(node: NodeName) -> None:
            try:
                await self.calls.drop(node, job, txid, order.by, reason)
            except TenplexError as error:
                log.warning("job %s: node %s has not dropped %s: %s", job, node, txid, error)

        await run_all(partial(drop, node) for node in nodes)


class _Carrying:
    """One switch, carried out as its `Coordination` says."""

    def __init__(
        self, by: Switcher, lock: Lock, head: Head | None, to: Switch, order: StageOrder, report: Report
    ) -> None:
        self._by = by
        self._lock = lock
        self._head = head
        self._new = Head(to.snapshot, to.wanted.digest, to.wanted.nodes)
        self._to = to
        self._order = order
        self._report = report
        self._bytes = dict.fromkeys(to.wanted.nodes, (0, 0))
        self._failure: TenplexError | None = None
        lost = to.base.lost if to.base is not None else ()
        self._machine = Coordination(by.node, head, self._new, lost=lost)

    async def run(self) -> Head:
        """Returns the new head; raises as `Switcher.switch`."""
        actions = self._machine.begin()
        try:
            while not isinstance(end := actions[-1], End):
                actions = await self._do(actions[-1])
                for action in actions[:-1]:
                    await self._do(action)
        except BaseException:
            for action in self._machine.given_up()[:-1]:
                await self._do(action)
            raise
        if end.verdict is Verdict.DONE:
            late = f"not yet seen by {', '.join(end.late)}" if end.late else ""
            self._report(self._progress("committing", late))
            return self._new
        assert self._failure is not None  # why it gave up
        if end.verdict is Verdict.SOURCES_LOST:
            raise SourcesLostError(self._failure.message, end.lost) from self._failure
        raise self._failure

    async def _do(self, action: Action) -> tuple[Action, ...]:
        """Does what there is to do; returns what to do then."""
        match action:
            case Stage(nodes):
                return await self._stage(nodes)
            case Commit():
                return await self._commit()
            case Tell(nodes):
                # From here on the switch is a fact, whoever goes away.
                with trio.CancelScope(shield=True):
                    return await self._tell(nodes)
            case Drop(txid, nodes):
                why = self._failure.message if self._failure is not None else ""
                with trio.move_on_after(_DROP_S, shield=True):
                    await self._by.drop(self._order, txid, nodes, why)
        return ()

    async def _stage(self, nodes: tuple[NodeName, ...]) -> tuple[Action, ...]:
        """Returns what the first event leads to that leads to anything; the rest is cancelled."""
        following: list[Action] = []
        self._report(self._progress("staging"))
        async with trio.open_nursery() as nursery:

            def lead_on(actions: tuple[Action, ...]) -> None:
                if actions and not following:
                    following.extend(actions)
                    nursery.cancel_scope.cancel()

            async def stage(node: NodeName) -> None:
                def count(bytes_done: int, bytes_total: int) -> None:
                    self._bytes[node] = (bytes_done, bytes_total)
                    self._report(self._progress("staging"))

                try:
                    await self._by.calls.stage(node, self._order, count)
                except TenplexError as error:
                    self._failure = self._failure or _at(node, error)
                    source = error.details.get(SOURCE)
                    lead_on(self._machine.stage_failed({NodeName(str(source))} if source else ()))
                else:
                    lead_on(self._machine.staged(node))

            async def watch() -> None:
                gone = await self._sources_that_died()
                self._failure = UnavailableError(f"{_named(gone)} died while the others took bytes from it")
                lead_on(self._machine.sources_gone(gone))

            for node in nodes:
                nursery.start_soon(stage, node)
            nursery.start_soon(watch)
        return tuple(following)

    async def _sources_that_died(self) -> frozenset[NodeName]:
        """Returns which senders are alive no more, once there is a plan without them."""
        able, base = self._to.can_do_without, self._to.base
        if able is None or base is None:
            await trio.sleep_forever()
        senders = (base.senders & frozenset(self._by.living())) - frozenset(self._new.nodes)
        asked: frozenset[NodeName] = frozenset()
        while True:
            await trio.sleep(_LOOK_S)
            gone = senders - frozenset(self._by.living())
            if gone != asked and (asked := gone) and await able(gone):
                return gone

    async def _commit(self) -> tuple[Action, ...]:
        self._report(self._progress("committing"))
        try:
            await self._by.heads.commit(self._lock, self._head, self._new, undecided=self._undecided)
        except ConflictError as error:
            self._failure = error
            return self._machine.refused()
        return self._machine.committed()

    def _undecided(self, why: str) -> None:
        message = f"undecided until the registry answers: {why}"
        self._report(replace(self._progress("committing", message), is_undecided=True))

    async def _tell(self, nodes: tuple[NodeName, ...]) -> tuple[Action, ...]:
        late = await self._by.announce(self._lock.job, self._new, nodes, lost=self._order.lost)
        following: tuple[Action, ...] = ()
        for node in sorted({*late, *nodes}, key=lambda each: each in nodes):  # guests first
            following = self._machine.told(node, acknowledged=node not in late)
        return following

    def _progress(self, phase: str, message: str = "") -> Progress:
        message = message or self._to.planned.message
        return replace(self._to.planned, phase=phase, message=message, nodes=dict(self._bytes))


def _at(node: NodeName, error: TenplexError) -> TenplexError:
    where = f"node {node}" if SOURCE in error.details else f"node {node} of the new layout"
    return type(error)(f"{where}: {error.message}", **error.details)


def _named(nodes: Iterable[NodeName]) -> str:
    return ", ".join(f"node {node}" for node in sorted(nodes))


def mute(progress: Progress) -> None:
    """Nobody watches."""
