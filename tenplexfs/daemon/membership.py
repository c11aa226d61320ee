"""The nodes: which live, what they have, how one goes and how one comes."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial

import trio

from tenplexfs._pb import control_pb2, members_pb2
from tenplexfs.core.snapshot import Head, JobName, NodeName, check_node_name
from tenplexfs.daemon.config import Config
from tenplexfs.daemon.draining import Draining
from tenplexfs.daemon.node_calls import Nodes
from tenplexfs.daemon.transactions import Transaction, Transactions, Work
from tenplexfs.daemon.view import View, progress_message
from tenplexfs.errors import ConflictError, InvalidError, NotFoundError, PreconditionError, TenplexError
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.jobs import JobTable
from tenplexfs.runtime.living import Living
from tenplexfs.runtime.member import Member
from tenplexfs.runtime.orders import Report
from tenplexfs.runtime.planning import sole_copies
from tenplexfs.runtime.tasks import run_all

__all__ = ["Meeting", "Members"]

_MOST_NEWS = 64
_TELL_S = 5.0
_MOST_DEADLINE_S = 24 * 3600.0

News = tuple[JobName, control_pb2.Progress]


class Members:
    """Implements `rpc.handlers.MembersHandler`."""

    def __init__(
        self,
        *,
        config: Config,
        nodes: Nodes,
        living: Living,
        member: Member,
        table: JobTable,
        compute: Compute,
        transactions: Transactions,
        view: View,
        draining: Draining,
        nursery: trio.Nursery,
    ) -> None:
        self._config = config
        self._nodes = nodes
        self._living = living
        self._member = member
        self._table = table
        self._compute = compute
        self._transactions = transactions
        self._view = view
        self._draining = draining
        self._nursery = nursery

    async def list(self, request: members_pb2.ListNodesRequest) -> members_pb2.ListNodesReply:
        """Returns every node that is known or should hold something, by name."""
        jobs = {job: (shown, self._view.job(job)) for job, shown in self._member.shown().items()}
        sole = {}
        for job, (shown, message) in jobs.items():
            if not message.survives_node_losses:  # else nothing is anywhere alone; copies are kept elsewhere
                sole[job] = await self._compute(sole_copies, shown.view.layout_json)
        living, endpoints = self._living.nodes(), self._nodes.endpoints()
        having = {NodeName(name) for _, message in jobs.values() for name in message.nodes}
        found = {
            name: members_pb2.Node(name=name, endpoint=endpoints.get(name, ""))
            for name in sorted({*endpoints, *living, *self.busy(), *having})
        }
        for info in living.values():
            node = found[info.node]
            node.endpoint, node.incarnation, node.version = info.endpoint, info.incarnation, info.version
        for job, (_, message) in jobs.items():
            for name, held in message.nodes.items():
                if held.ranks:
                    node = found[NodeName(name)]
                    node.ranks[job].CopyFrom(held)
                    node.sole_bytes[job] = sole.get(job, {}).get(NodeName(name), 0)
        for name, node in found.items():
            node.state = "living" if name in living else "lost" if self._is_missed(name) else "known"
            node.registry = name == self._config.registry
        return members_pb2.ListNodesReply(nodes=found.values(), registry_away=self._table.registry_away or "")

    async def drain(self, request: members_pb2.DrainRequest) -> AsyncIterator[members_pb2.DrainProgress]:
        """Moves every job off a node; yields how far each is."""
        node = check_node_name(request.node)
        self._nodes.check_known([node])
        if not 0 <= request.deadline_s <= _MOST_DEADLINE_S:  # also what is no number
            raise InvalidError(f"deadline: need 0 to {_MOST_DEADLINE_S:g} s, got {request.deadline_s}")
        jobs = [job for job, head in self._table.heads().items() if node in head.nodes]
        send, receive = trio.open_memory_channel[News](_MOST_NEWS)

        async def follow() -> None:
            with send:
                await run_all([partial(self._drain, job, node, request.deadline_s, send) for job in jobs])

        self._nursery.start_soon(follow)
        with receive:
            async for job, progress in receive:
                yield members_pb2.DrainProgress(job=job, progress=progress)
        message = f"{node} has nothing of any job any more"
        if left := [job for job, head in self._table.heads().items() if node in head.nodes]:
            message = f"{node} still has ranks of {', '.join(left)}"
        elif node == self._config.registry:
            message += "; it serves the registry: nothing switches while it is away"
        last = control_pb2.Progress(phase="failed" if left else "done", message=message)
        yield members_pb2.DrainProgress(progress=last)

    async def _drain(
        self, job: JobName, node: NodeName, deadline_s: float, news: trio.MemorySendChannel[News]
    ) -> None:
        """Drains one job, in a transaction of its own, after the one that runs; says how it went."""

        async def work(report: Report) -> Head:
            return await self._draining.drain(job, node, deadline_s, report)

        def tell(progress: control_pb2.Progress) -> None:
            try:
                news.send_nowait((job, progress))
            except (trio.WouldBlock, trio.BrokenResourceError):
                return  # nobody looks, or not fast enough

        try:
            transaction = await self._started(job, work, deadline_s)
            async for progress in transaction.watch():
                tell(progress_message(progress))
        except TenplexError as error:
            last = control_pb2.Progress(phase="failed", message=error.message)
        else:
            last = progress_message(transaction.progress, self._view.job(job))
            last.phase = "done"
        try:
            await news.send((job, last))
        except trio.BrokenResourceError:
            return

    async def _started(self, job: JobName, work: Work, deadline_s: float) -> Transaction:
        with trio.move_on_after(deadline_s or math.inf):
            while (running := self._transactions.running(job)) is not None:
                await running.ended.wait()
            return self._transactions.start(job, "", work)
        raise ConflictError(f"job {job}: another transaction went on for {deadline_s:g} s")

    async def forget(self, request: members_pb2.ForgetRequest) -> members_pb2.ForgetReply:
        """Drops a node that is gone from what this daemon and the living ones know."""
        node = check_node_name(request.node)
        self.check_gone(node)
        if node not in self._nodes.endpoints():
            raise NotFoundError(f"node {node}: no such node is known")
        others = [name for name in self._living.nodes() if name != self._config.node]

        async def tell(name: NodeName) -> None:
            with trio.move_on_after(_TELL_S):
                await self._nodes.tell_to_forget(name, node)

        await run_all([partial(tell, name) for name in others])
        self._nodes.forget(node)
        self._table.touch()
        return members_pb2.ForgetReply()

    def check_gone(self, node: NodeName) -> None:
        """Refuses a node that cannot be forgotten.

        Raises:
            PreconditionError: It lives, or something of it is needed.
        """
        if node == self._config.node:
            raise PreconditionError(f"node {node}: this is it; stop it, and forget it elsewhere")
        if node in self._living.nodes():
            raise PreconditionError(f"node {node}: it lives; drain it (node drain {node}) and stop it first")
        if jobs := self.busy().get(node):
            raise PreconditionError(
                f"node {node}: it has ranks of {', '.join(jobs)}; reconfigure them without it first"
            )
        if node == self._config.registry:
            raise PreconditionError(f"node {node}: it serves the registry")

    def busy(self) -> Mapping[NodeName, Sequence[JobName]]:
        """Returns the nodes on which jobs have ranks, and which jobs."""
        heads = self._table.heads().items()
        nodes = {node for _, head in heads for node in head.nodes}
        return {node: tuple(job for job, head in heads if node in head.nodes) for node in nodes}

    def _is_missed(self, node: NodeName) -> bool:
        return node in self.busy() or self._nodes.has_lived(node)


class Meeting:
    """Implements `rpc.handlers.MeetingHandler`."""

    def __init__(self, config: Config, nodes: Nodes, members: Members) -> None:
        self._config = config
        self._nodes = nodes
        self._members = members

    async def meet(self, request: members_pb2.MeetRequest) -> members_pb2.MeetReply:
        """Returns what a daemon that joins has to know."""
        check_node_name(request.node)
        return members_pb2.MeetReply(
            node=self._config.node, endpoints=_plain(self._nodes.endpoints()), registry=self._config.registry
        )

    async def forget(self, request: members_pb2.ForgetRequest) -> members_pb2.ForgetReply:
        """Drops a node from what this daemon knows."""
        node = check_node_name(request.node)
        self._members.check_gone(node)
        self._nodes.forget(node)
        return members_pb2.ForgetReply()


def _plain(endpoints: Mapping[NodeName, str]) -> dict[str, str]:
    return {str(node): endpoint for node, endpoint in endpoints.items()}
