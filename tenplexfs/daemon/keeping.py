"""What keeps the state of jobs beyond their newest snapshot: steps to go back to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tenplexfs.core.snapshot import Head, JobName
from tenplexfs.daemon.node_calls import Nodes
from tenplexfs.errors import NotFoundError
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.coordinator import Coordinator
from tenplexfs.runtime.going_back import PastSteps, Rollback
from tenplexfs.runtime.member import Member
from tenplexfs.runtime.orders import Report

__all__ = ["Keeping"]


class Keeping:
    """Composes the parts; belongs to the trio thread."""

    def __init__(self, *, member: Member, coordinator: Coordinator, compute: Compute, nodes: Nodes) -> None:
        self._member = member
        self._coordinator = coordinator
        self._steps = PastSteps(nodes, compute, endpoints=nodes.endpoints)

    async def roll_back(
        self, asked: Rollback, report: Report, stop: Callable[[Head], Awaitable[None]]
    ) -> Head:
        """Gives a job the state of an earlier step; returns the head."""
        head = self._head(asked.job)
        return await self._steps.roll_back(asked, self._coordinator, report, head=head, stop=stop)

    async def history(self, job: JobName) -> list[dict[str, object]]:
        """Returns the steps that ``job`` can go back to, the newest first, as ``job history`` prints them."""
        head = self._head(job)
        kept = await self._steps.kept(job, await self._coordinator.describe(job, head))
        return [
            {
                "step": step,
                "generation": kept[step].generation,
                "txid": kept[step].txid,
                "current": kept[step] == head.snapshot,
                "kept": True,
            }
            for step in sorted(kept, reverse=True)
        ]

    def _head(self, job: JobName) -> Head:
        shown = self._member.shown().get(job)
        if shown is None:
            raise NotFoundError(f"job {job}: is not shown here")
        return shown.head
