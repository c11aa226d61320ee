"""From devices to a layout: what a scheduler says there is, and what the job becomes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tenplexfs.core.parallelizers import Answer, Command, Parallelizer
from tenplexfs.core.snapshot import Head, JobName, NodeName
from tenplexfs.daemon.clients import Clients
from tenplexfs.errors import InvalidError
from tenplexfs.formats.parallelizer_json import parse_answer, parse_parallelizer
from tenplexfs.formats.requests import Request, has_request
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.coordinator import Change, Coordinator
from tenplexfs.runtime.orders import Description, Progress, Report
from tenplexfs.runtime.parallelizing import Decision, ask_program, decide, question
from tenplexfs.runtime.planning import Target

__all__ = ["Deciding"]


class Deciding:
    """Asks the parallelizers of jobs, and reconfigures or pauses the jobs."""

    def __init__(
        self, *, node: NodeName, coordinator: Coordinator, compute: Compute, clients: Clients
    ) -> None:
        self._node = node
        self._coordinator = coordinator
        self._compute = compute
        self._clients = clients

    async def notify(
        self, request: Request, nodes: Mapping[NodeName, int], report: Report, *, stop_timeout_s: float = 0.0
    ) -> Head:
        """Makes the job of ``request`` what its parallelizer says for ``nodes``; returns the head.

        Args:
            request: Names the job.
            nodes: Node -> devices, all that there are for it.
            report: Gets the progress.
            stop_timeout_s: How long the ranks may take to stop; 0 for the default.

        Raises:
            TenplexError: Nothing changed.
        """
        report(Progress("planning"))
        job = JobName(request.job)
        head, known = await self._coordinator.current(job)
        if has_request(known.settings_json, request):
            return head
        given = {node: devices for node, devices in nodes.items() if devices}
        decision = Decision(None, "there are no devices")
        if given:
            try:
                decision = await self.decide(job, head, known, given)
            except InvalidError as error:
                raise InvalidError(f"job {job}: {error.message}", **error.details) from error
        if decision.target is None:
            return await self.pause(request, decision.why, report, stop_timeout_s=stop_timeout_s)
        change = Change(job, decision.target, (), head.snapshot.generation, request.id, request.arguments)
        return await self._clients.stopped(
            job,
            stop_timeout_s,
            report,
            lambda stop: self._coordinator.reconfigure(change, report, stop=stop),
        )

    async def decide(
        self, job: JobName, head: Head, known: Description, nodes: Mapping[NodeName, int]
    ) -> Decision:
        """Returns what the job's parallelizer says for ``nodes``, each with devices.

        Raises:
            InvalidError: It fails, or what it says is no layout of the job.
            TimedOutError: It does not answer.
        """
        devices = {str(node): count for node, count in nodes.items()}
        setting = json.loads(known.settings_json or b"{}").get("parallelizer")
        found = None if setting is None else parse_parallelizer(setting)
        asked: Parallelizer | Answer | None
        if isinstance(found, Command):
            text = await self._compute(question, job, known.layout_json, devices, head.snapshot.step)
            asked = await self._compute(parse_answer, await ask_program(found, text))
        else:
            asked = found
        return await self._compute(
            decide,
            asked,
            known.layout_json,
            devices,
            self._node,
            has_state=head.snapshot.step is not None,
        )

    async def pause(self, request: Request, why: str, report: Report, *, stop_timeout_s: float = 0.0) -> Head:
        """Stops the ranks of a job, and says so in a generation of its own; returns the head."""
        job = JobName(request.job)
        _, known = await self._coordinator.current(job)
        target = Target(layout_json=known.layout_json)
        change = Change(job, target, request_id=request.id, arguments=request.arguments, paused=why)
        head = await self._clients.stopped(
            job,
            stop_timeout_s,
            report,
            lambda stop: self._coordinator.reconfigure(change, report, stop=stop),
        )
        report(Progress("committing", f"paused: {why}"))
        return head
