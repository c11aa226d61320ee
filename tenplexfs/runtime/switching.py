"""Carrying a switch out: every node stages, the head moves, every node shows it.

The compare-and-set of the head is the commit; there is no other. Whatever fails before it leaves nothing
behind; a reply that is lost at it is resolved by reading the head; whatever fails after it catches up by the
registry's watch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import trio

from tenplexfs.core.snapshot import Head, JobName, NodeName, SnapshotId, TxId
from tenplexfs.errors import ConflictError, TenplexError
from tenplexfs.runtime.heads import HeadMover
from tenplexfs.runtime.orders import NodeCalls, Progress, Report, StageOrder
from tenplexfs.runtime.planning import Resolved
from tenplexfs.runtime.protocols import Lock
from tenplexfs.runtime.tasks import run_all

__all__ = ["Base", "Switch", "Switcher", "mute"]

log = logging.getLogger(__name__)

_DROP_S = 10.0
_GUEST_S = 2.0  # how long a node that holds nothing of the job keeps the answer waiting


@dataclass(frozen=True)
class Base:
    """Where the bytes of a new snapshot come from.

    Attributes:
        txid: By which the nodes of its layout serve them.
        layout_json: Its layout.
        source: The URL of a persisted step, where they come from there and no node serves them.
    """

    txid: TxId
    layout_json: bytes
    source: str = ""


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
        is_save: Whether its bytes were saved before.
        planned: What the progress says while nodes stage.
    """

    snapshot: SnapshotId
    wanted: Resolved
    settings_json: bytes
    base: Base | None = None
    drop: tuple[str, ...] = ()
    values: bytes = b""
    is_save: bool = False
    planned: Progress = field(default_factory=lambda: Progress("staging"))


class Switcher:
    """Carries switches out for the coordinator of this node.

    Args:
        node: This one.
        endpoints: The nodes that are known now, this one too, and where they listen.
        clock_ns: Wall clock.
    """

    def __init__(
        self,
        *,
        node: NodeName,
        heads: HeadMover,
        calls: NodeCalls,
        endpoints: Callable[[], Mapping[NodeName, str]],
        clock_ns: Callable[[], int],
    ) -> None:
        self._node = node
        self._heads = heads
        self._calls = calls
        self._endpoints = endpoints
        self._clock_ns = clock_ns

    async def switch(self, lock: Lock, head: Head | None, to: Switch, report: Report) -> Head:
        """Moves ``lock.job`` from ``head`` to what ``to`` says; returns the new head.

        Raises:
            TenplexError: Nothing changed, and nothing of it is left on the nodes that answer.
        """
        job, nodes = lock.job, to.wanted.nodes
        order = StageOrder(
            job=job,
            snapshot=to.snapshot,
            base_txid=to.base.txid if to.base is not None else None,
            old_layout_json=to.base.layout_json if to.base is not None else b"",
            new_layout_json=to.wanted.layout_json,
            settings_json=to.settings_json,
            coordinator=self._node,
            drop=to.drop,
            endpoints=self._endpoints(),
            created_ns=self._clock_ns(),
            values=to.values,
            is_save=to.is_save,
            source=to.base.source if to.base is not None else "",
        )
        new = Head(to.snapshot, to.wanted.digest, nodes)
        try:
            staged = await self._stage(order, nodes, to.planned, report)
        except BaseException as error:
            why = error.message if isinstance(error, TenplexError) else ""
            with trio.move_on_after(_DROP_S, shield=True):
                await self._drop(job, to.snapshot.txid, nodes, why)
            raise
        report(replace(staged, phase="committing"))
        try:
            await self._heads.commit(lock, head, new)
        except ConflictError as error:
            with trio.move_on_after(_DROP_S, shield=True):
                await self._drop(job, to.snapshot.txid, nodes, error.message)
            raise
        # From here on the switch is a fact, whoever goes away.
        with trio.CancelScope(shield=True):
            before = head.nodes if head is not None else ()
            late = await self.announce(job, new, (self._node, *before, *nodes))
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

    async def announce(
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


def mute(progress: Progress) -> None:
    """Nobody watches."""
