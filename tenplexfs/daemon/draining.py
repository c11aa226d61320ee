"""Moving jobs off a node that is to go: the warning of a spot instance, an eviction, maintenance.

The ranks of each job stop at an agreed step and save, as for any reconfiguration, within the first half of
the time. Ranks that are late are waited for no more. Then, and where the new layout moves more than a slow
link carries in the time that is left, what the node alone holds of the newest complete step is moved first,
wherever that moves least, and only then the job gets its new layout. Where no layout fits what is left, the
state is moved all the same, and the job pauses.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import trio

from tenplexfs.core.snapshot import Head, JobName, NodeName
from tenplexfs.daemon.clients import Clients
from tenplexfs.daemon.deciding import Deciding
from tenplexfs.errors import InvalidError, PreconditionError, TimedOutError
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.coordinator import Change, Coordinator
from tenplexfs.runtime.orders import Progress, Report
from tenplexfs.runtime.parallelizing import Decision, held_devices
from tenplexfs.runtime.planning import Target

__all__ = ["Draining"]

log = logging.getLogger(__name__)

_DEADLINE_S = 90.0
_LINK_BYTES_PER_S = 1e8  # of a node, 1 Gbit/s: nobody knows what it really is


class Draining:
    """Moves jobs off nodes.

    Args:
        living: The nodes that live now; none while the registry is away.
        heads: Those of all jobs.
    """

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        compute: Compute,
        clients: Clients,
        deciding: Deciding,
        living: Callable[[], Collection[NodeName]],
        heads: Callable[[], Mapping[JobName, Head]],
    ) -> None:
        self._coordinator = coordinator
        self._compute = compute
        self._clients = clients
        self._deciding = deciding
        self._living = living
        self._heads = heads

    async def drain(self, job: JobName, node: NodeName, deadline_s: float, report: Report) -> Head:
        """Moves ``job`` off ``node``; returns its head, at once when it is not there.

        Args:
            job: Name of the job.
            node: It is to have nothing of the job.
            deadline_s: How long the node still lives; 0 for the default.
            report: Gets the progress.

        Raises:
            PreconditionError: There is no other node.
            TenplexError: Nothing more changed.
        """
        report(Progress("planning"))
        head, known = await self._coordinator.current(job)
        if node not in head.nodes:
            return head
        held = await self._compute(held_devices, known.layout_json)
        others, spare = self._left(held, node)
        stop_s = (deadline_s or _DEADLINE_S) / 2
        decision = Decision(None, "its parallelizer does not answer")
        try:
            with trio.move_on_after(stop_s / 2):
                decision = await self._deciding.decide(job, head, known, {**others, **spare})
        except (InvalidError, TimedOutError) as error:
            decision = Decision(None, error.message)

        async def switch(stop: Callable[[Head], Awaitable[None]]) -> Head:
            begin_s = trio.current_time()
            await stop(head)
            took_s = trio.current_time() - begin_s
            # Each node keeps its own, and may take all others: each goes where most of it is already.
            displaced = sum(held.values()) - sum(others.values())
            roomy = {each: others.get(each, 0) + displaced for each in (*others, *spare)}
            why = f"{node} is drained: {decision.why or 'it moves on'}"
            rescue = Change(job, Target(mesh={}, nodes=roomy, together=()), paused=why)
            if decision.target is None:
                moved = await self._coordinator.reconfigure(rescue, report)
                report(Progress("committing", f"paused: {why}"))
                return moved
            change = Change(job, decision.target)
            nbytes, link_s = await self._cost(change)
            is_late = took_s >= stop_s or link_s > 2 * stop_s - took_s
            if is_late and (await self._cost(rescue))[0] < nbytes:
                log.info("job %s: moving what only %s has", job, node)
                await self._coordinator.reconfigure(rescue, report)
            return await self._coordinator.reconfigure(change, report)

        return await self._clients.stopped(job, stop_s, report, switch)

    async def _cost(self, change: Change) -> tuple[int, float]:
        """Returns the bytes that cross the network for it, and the seconds that they take on a slow link."""
        summary: Mapping[str, Any] = await self._coordinator.plan(change, operations=False)
        busiest = max((max(each["sends"], each["receives"]) for each in summary["nodes"].values()), default=0)
        return int(summary["bytes"]["moved"]), busiest / _LINK_BYTES_PER_S

    def _left(
        self, held: Mapping[NodeName, int], node: NodeName
    ) -> tuple[dict[NodeName, int], dict[NodeName, int]]:
        """Returns the devices of the job's other nodes, and of an idle node that could take the place."""
        living = self._living()
        others = {n: count for n, count in held.items() if n != node and (n in living or not living)}
        busy = {each for head in self._heads().values() for each in head.nodes}
        idle = sorted(set(living) - busy - {node})
        spare = dict.fromkeys(idle[:1], held[node])
        if not others and not spare:
            raise PreconditionError(f"node {node}: no other node lives that could take what it has")
        return others, spare
