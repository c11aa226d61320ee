"""Where the bytes of a job's next snapshot come from, also when nodes that had them are lost.

In this order, always as a whole: from those nodes of the head that still have their part, as far as their
replicas reach; else from what `Beyond` finds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import trio

from tenplexfs.core.snapshot import Head, JobName, NodeName, TxId
from tenplexfs.errors import NoReplicaError, NotFoundError, TimedOutError, UnavailableError
from tenplexfs.runtime.asking import REFUSED_S
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.orders import Description, InventoryCalls
from tenplexfs.runtime.planning import Resolved, plan_summary
from tenplexfs.runtime.switching import Base
from tenplexfs.runtime.tasks import run_all

__all__ = ["Beyond", "Found", "Recovery", "Survey", "Wish"]

log = logging.getLogger(__name__)

_DEAD_S = 1.0  # how long a node is waited for that the registry does not know as alive
_SLOW_S = 2.0  # the same of one that takes calls and answers none
_LOOK_S = 0.1


@dataclass(frozen=True)
class Survey:
    """What became of the nodes of a head.

    Attributes:
        empty: Nodes that answer and have lost their part: their store began anew.
        gone: Nodes that nobody can reach, or that do not answer and are not alive for the registry.
        slow: Nodes that have not answered soon enough, and may yet.
    """

    empty: frozenset[NodeName]
    gone: frozenset[NodeName]
    slow: frozenset[NodeName]

    @property
    def silent(self) -> frozenset[NodeName]:
        """Nodes that do not answer: they may have their part."""
        return self.gone | self.slow

    @property
    def lost(self) -> frozenset[NodeName]:
        """Nodes that cannot send their part, as far as anybody can tell now."""
        return self.empty | self.silent


@dataclass(frozen=True)
class Wish:
    """A layout that a job is to have, and what is left of what it is.

    Attributes:
        head: What it is now.
        known: What its nodes store of that.
        wanted: The new layout.
        lost: Nodes of ``head`` that cannot send their part.
        drop: Patterns of tensors that the new layout may lack.
    """

    job: JobName
    head: Head
    known: Description
    wanted: Resolved
    lost: frozenset[NodeName]
    drop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """What the next snapshot of a job is made of.

    Attributes:
        base: Where its bytes come from.
        known: The snapshot that they are of: its step, its settings with the cursors, its values.
        plan: The summary of the plan.
        message: What to tell people of it, if anything.
    """

    base: Base
    known: Description
    plan: Mapping[str, Any]
    message: str = ""


class Beyond(Protocol):
    """Looks further, when the nodes of a head that are left do not have all of it."""

    async def copies(self, wish: Wish) -> Found | None:
        """Returns the head from copies on other nodes, where they have what is missing."""
        ...

    async def older(self, wish: Wish) -> Found:
        """Returns an older step instead.

        Raises:
            UnavailableError: None is left.
        """
        ...


class Recovery:
    """Looks for the bytes of jobs.

    Args:
        living: The nodes that the registry says are alive; none while it has said nothing.

    Attributes:
        beyond: Looks further; set once it is made.
    """

    beyond: Beyond | None = None

    def __init__(
        self, *, calls: InventoryCalls, compute: Compute, living: Callable[[], Collection[NodeName]]
    ) -> None:
        self._calls = calls
        self._compute = compute
        self._living = living

    async def survey(self, job: JobName, head: Head, *, needed: Collection[NodeName] = ()) -> Survey:
        """Asks every node of ``head``, all at once, whether it has its part.

        Args:
            job: Name of the job.
            head: What it is now.
            needed: Nodes that nothing can be done without: a daemon that is being restarted, or is slow, is
                waited for as long as the registry knows it as alive. The others soon count as silent.
        """
        return await self._survey(job, head.snapshot.txid, frozenset(head.nodes), frozenset(needed))

    async def has_lost_ranks(self, job: JobName, head: Head, *, needed: Collection[NodeName]) -> bool:
        """Returns whether ranks of ``head`` are gone with their node: the others finish no step without."""
        gone = (await self.survey(job, head, needed=needed)).gone
        if gone:
            log.warning("job %s: not stopped: %s is gone", job, ", ".join(sorted(gone)))
        return bool(gone)

    async def _survey(
        self, job: JobName, txid: TxId, nodes: frozenset[NodeName], needed: frozenset[NodeName]
    ) -> Survey:
        waiting, empty, gone = set(nodes), set[NodeName](), set[NodeName]()
        begin_s = trio.current_time()

        async def ask(node: NodeName) -> None:
            patience_s = None if node in needed else REFUSED_S
            try:
                parts = await self._calls.inventory(node, job, patience_s=patience_s)
            except TimedOutError:
                return  # it takes calls
            except (NotFoundError, UnavailableError):
                gone.add(node)
            else:
                if all(part.snapshot.txid != txid or part.copies_of for part in parts):
                    empty.add(node)
            waiting.discard(node)

        async def watch(scope: trio.CancelScope) -> None:
            while True:
                if not any(self._is_waited_for(node, begin_s, needed) for node in waiting):
                    scope.cancel()
                await trio.sleep(_LOOK_S)

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch, scope)
                await run_all(partial(ask, node) for node in nodes)
                nursery.cancel_scope.cancel()
        gone |= self._missed(waiting)
        return Survey(frozenset(empty), frozenset(gone), frozenset(waiting - gone))

    def _is_waited_for(self, node: NodeName, begin_s: float, needed: Collection[NodeName]) -> bool:
        waited_s = trio.current_time() - begin_s
        if self._missed((node,)):
            return waited_s < _DEAD_S
        return node in needed or waited_s < _SLOW_S

    def _missed(self, nodes: Collection[NodeName]) -> set[NodeName]:
        """Returns which of ``nodes`` the registry does not know as alive."""
        living = self._living()
        return {*nodes} - {*living} if living else set()

    async def base_for(self, wish: Wish, *, silent: frozenset[NodeName] = frozenset()) -> Found:
        """Returns what a job's next snapshot, under the new layout, is made of.

        Args:
            wish: Which job and layout; of ``lost``, nodes that are none of the head do not count.
            silent: Those of ``lost`` that have not said so: before the job goes back to an older step, they
                are waited for as long as the registry knows them as alive.

        Raises:
            UnavailableError: Something that is wanted is nowhere any more; names it.
        """
        job, head, known = wish.job, wish.head, wish.known
        gone = wish.lost & {*head.nodes}
        wish = replace(wish, lost=gone)
        try:
            plan = await self._plan(wish)
        except NoReplicaError:
            if self.beyond is None:
                raise
            found = await self.beyond.copies(wish)
            if found is None:
                if back := await self._returned(job, head, gone & silent):
                    return await self.base_for(replace(wish, lost=gone - back))
                found = await self.beyond.older(wish)
            log.warning("job %s: %s", job, found.message)
            return found
        senders = frozenset(map(NodeName, plan["matrix"]))
        base = Base(head.snapshot.txid, known.layout_json, lost=gone, senders=senders)
        if not gone:
            return Found(base, known, plan)
        names = ", ".join(sorted(gone))
        log.warning("job %s: %s is taken from replicas, without %s", job, head.snapshot, names)
        return Found(base, known, plan, f"without {names}: from replicas")

    async def _returned(self, job: JobName, head: Head, silent: frozenset[NodeName]) -> frozenset[NodeName]:
        """Returns which of ``silent`` have their part after all, once the others are missed for sure."""
        if not silent:
            return silent
        log.warning("job %s: waiting for %s, which alone may have its bytes", job, ", ".join(sorted(silent)))
        return silent - (await self._survey(job, head.snapshot.txid, silent, silent)).lost

    async def has_replicas(self, wish: Wish) -> bool:
        """Returns whether the nodes that are not ``lost`` have all that is wanted, copies counted."""
        try:
            await self._plan(wish)
        except NoReplicaError:
            if self.beyond is None:
                return False
            return await self.beyond.copies(wish) is not None
        return True

    async def _plan(self, wish: Wish) -> dict[str, Any]:
        return await self._compute(
            plan_summary,
            wish.known.layout_json,
            wish.wanted.layout_json,
            wish.drop,
            lost=tuple(sorted(wish.lost)),
            values=wish.known.values,
        )
