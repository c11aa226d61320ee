"""Where the bytes of a job's next snapshot come from, also when nodes that had them are lost.

In this order, always as a whole: from those nodes of the head that still have their part, as far as their
replicas reach; else from what `Beyond` finds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import trio

from tenplexfs.core.snapshot import Head, JobName, NodeName
from tenplexfs.errors import NoReplicaError, NotFoundError, TenplexError, TimedOutError, UnavailableError
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.orders import Description, NodeCalls
from tenplexfs.runtime.planning import Resolved, plan_summary
from tenplexfs.runtime.switching import Base
from tenplexfs.runtime.tasks import run_all

__all__ = ["Beyond", "Found", "Recovery", "Survey"]

log = logging.getLogger(__name__)

_DEAD_S = 2.0  # how long a node is waited for that the registry does not know as alive


@dataclass(frozen=True)
class Survey:
    """What became of the nodes of a head.

    Attributes:
        known: What those that answer store of it.
        empty: Nodes that answer and have lost their part: their store began anew.
        silent: Nodes that do not answer.
    """

    known: Description
    empty: frozenset[NodeName]
    silent: frozenset[NodeName]

    @property
    def lost(self) -> frozenset[NodeName]:
        """Nodes that cannot send their part."""
        return self.empty | self.silent


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

    async def find(
        self,
        job: JobName,
        head: Head,
        known: Description,
        wanted: Resolved,
        lost: frozenset[NodeName],
        drop: Sequence[str],
    ) -> Found:
        """Returns what the next snapshot is made of instead.

        Raises:
            UnavailableError: Nothing is left.
        """
        ...

    async def has_copies(
        self,
        job: JobName,
        head: Head,
        known: Description,
        wanted: Resolved,
        lost: frozenset[NodeName],
        drop: Sequence[str],
    ) -> bool:
        """Returns whether copies on other nodes have what is missing."""
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
        self, *, calls: NodeCalls, compute: Compute, living: Callable[[], Collection[NodeName]]
    ) -> None:
        self._calls = calls
        self._compute = compute
        self._living = living

    async def survey(self, job: JobName, head: Head) -> Survey:
        """Asks every node of ``head`` whether it has its part.

        Raises:
            UnavailableError: None has, or none answers.
        """
        answers: dict[NodeName, Description | TenplexError] = {}
        living = self._living()

        async def ask(node: NodeName) -> None:
            answers[node] = UnavailableError("no answer")
            is_dead = bool(living) and node not in living
            with trio.move_on_after(_DEAD_S if is_dead else float("inf")):
                try:
                    answers[node] = await self._calls.describe(node, job, head.snapshot.txid)
                except (NotFoundError, UnavailableError, TimedOutError) as error:
                    answers[node] = error

        await run_all(partial(ask, node) for node in head.nodes)
        found = [each for each in answers.values() if isinstance(each, Description)]
        failures = {node: each for node, each in answers.items() if isinstance(each, TenplexError)}
        if not found:
            why = "; ".join(f"{node}: {error.message}" for node, error in sorted(failures.items()))
            raise UnavailableError(f"job {job}: no node has {head.snapshot}: {why}")
        empty = frozenset(node for node, error in failures.items() if isinstance(error, NotFoundError))
        return Survey(found[0], empty, frozenset(failures) - empty)

    async def base_for(
        self,
        job: JobName,
        head: Head,
        known: Description,
        wanted: Resolved,
        lost: frozenset[NodeName],
        *,
        drop: Sequence[str] = (),
    ) -> Found:
        """Returns what a job's next snapshot, under the layout ``wanted``, is made of.

        Args:
            job: Name of the job.
            head: What it is now.
            known: What its nodes store of that.
            wanted: The new layout.
            lost: Nodes of ``head`` that cannot send their part.
            drop: Patterns of tensors that the new layout may lack.

        Raises:
            UnavailableError: Something that is wanted is nowhere any more; names it.
        """
        gone = lost & {*head.nodes}
        try:
            plan = await self._plan(known, wanted, gone, drop)
        except NoReplicaError:
            if self.beyond is None:
                raise
            found = await self.beyond.find(job, head, known, wanted, gone, drop)
            log.warning("job %s: %s", job, found.message)
            return found
        senders = frozenset(map(NodeName, plan["matrix"]))
        base = Base(head.snapshot.txid, known.layout_json, lost=gone, senders=senders)
        if not gone:
            return Found(base, known, plan)
        names = ", ".join(sorted(gone))
        log.warning("job %s: %s is taken from replicas, without %s", job, head.snapshot, names)
        return Found(base, known, plan, f"without {names}: from replicas")

    async def has_replicas(
        self,
        job: JobName,
        head: Head,
        known: Description,
        wanted: Resolved,
        lost: frozenset[NodeName],
        *,
        drop: Sequence[str] = (),
    ) -> bool:
        """Returns whether the nodes that are not ``lost`` have all that is wanted, copies counted."""
        try:
            await self._plan(known, wanted, lost, drop)
        except NoReplicaError:
            if self.beyond is None:
                return False
            return await self.beyond.has_copies(job, head, known, wanted, lost, drop)
        return True

    async def _plan(
        self, known: Description, wanted: Resolved, lost: frozenset[NodeName], drop: Sequence[str]
    ) -> dict[str, Any]:
        return await self._compute(
            plan_summary,
            known.layout_json,
            wanted.layout_json,
            tuple(drop),
            lost=tuple(sorted(lost)),
            values=known.values,
        )
