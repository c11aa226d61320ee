"""Asking nodes: this one directly, others over gRPC."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import aclosing

import trio

from tenplexfs._pb import members_pb2, peer_pb2
from tenplexfs.core.membership import Mandate
from tenplexfs.core.snapshot import Head, JobName, NodeInfo, NodeName, SnapshotId, TxId, check_job_name
from tenplexfs.core.stopping import Told
from tenplexfs.errors import InvalidError, TenplexError
from tenplexfs.formats.checkpoint import CheckpointFile, decode_files
from tenplexfs.formats.values import unpack
from tenplexfs.rpc.messages import head_to_pb, mandate_to_pb, snapshot_of, snapshot_to_pb
from tenplexfs.rpc.peer_client import PeerClient
from tenplexfs.runtime.attempts import SavePart
from tenplexfs.runtime.jobs import JobTable
from tenplexfs.runtime.member import Member
from tenplexfs.runtime.orders import Description, StageOrder, StoredPart
from tenplexfs.runtime.persisting import Shares
from tenplexfs.runtime.save_parts import decode_sums
from tenplexfs.runtime.stopping import Stops

__all__ = ["Desks", "Leasing", "Nodes"]

log = logging.getLogger(__name__)

_COLLECT_S = 4.0


class Nodes:
    """Implements `runtime.orders.NodeCalls`.

    Attributes:
        member, table, shares: Of this node; set once they are made, for they need these calls themselves.
    """

    member: Member
    table: JobTable
    shares: Shares

    def __init__(
        self,
        here: NodeName,
        client: PeerClient,
        endpoints: Mapping[NodeName, str],
        given: Collection[NodeName] = (),
    ) -> None:
        """``given`` are those whose endpoints somebody has set: what they announce does not count."""
        self._here = here
        self._client = client
        self._endpoints = dict(endpoints)
        self._given = {here, *given}
        self._lived: set[NodeName] = set()

    def endpoints(self) -> Mapping[NodeName, str]:
        """Returns the nodes that are known, this one too, and where they listen."""
        return dict(self._endpoints)

    def check_known(self, nodes: Iterable[NodeName]) -> None:
        """Refuses names of nodes that nobody has told this one of.

        Raises:
            InvalidError: Names them, and those that are known.
        """
        unknown = [node for node in nodes if node not in self._endpoints]
        if unknown:
            raise InvalidError(
                f"nodes: {', '.join(unknown)}: no such node is known; "
                f"known: {', '.join(sorted(self._endpoints))}"
            )

    def learn(self, endpoints: Mapping[NodeName, str]) -> None:
        """Takes note of where nodes listen that this one was not told of."""
        for node, address in endpoints.items():
            if node not in self._endpoints:
                self._connect(node, address)

    def hear(self, living: Mapping[NodeName, NodeInfo]) -> None:
        """Takes note of where living nodes say that they listen."""
        for node, info in living.items():
            self._lived.add(node)
            if node not in self._given and self._endpoints.get(node) != info.endpoint:
                self._connect(node, info.endpoint)

    def has_lived(self, node: NodeName) -> bool:
        """Says whether a node was ever heard of as living."""
        return node in self._lived

    def forget(self, node: NodeName) -> None:
        """Forgets a node that is gone, and where somebody has said that it listens."""
        self._endpoints.pop(node, None)
        self._given.discard(node)
        self._lived.discard(node)
        self._client.forget_address(node)

    async def tell_to_forget(self, node: NodeName, gone: NodeName) -> None:
        """Makes another node forget one that is gone; where it refuses, it knows better."""
        try:
            await self._client.forget(node, members_pb2.ForgetRequest(node=gone))
        except TenplexError as error:
            log.warning("node %s: does not forget %s: %s", node, gone, error)

    def _connect(self, node: NodeName, address: str) -> None:
        self._endpoints[node] = address
        self._client.connect_to(node, address)

    async def stage(self, node: NodeName, order: StageOrder, report: Callable[[int, int], None]) -> None:
        """Returns once the node's part is staged."""
        if node == self._here:
            await self.member.stage(order, report)
            return
        stage = self._client.stage(node, _stage_request(order))
        async with aclosing(stage) as replies:  # type: ignore[type-var]
            async for reply in replies:
                report(reply.bytes_done, reply.bytes_total)

    async def switch(self, node: NodeName, job: JobName, head: Head | None) -> None:
        """Returns once fresh opens on the node see ``head``."""
        if node == self._here:
            await self.table.switch(job, head)
            return
        message = None if head is None else head_to_pb(head)
        await self._client.switch(node, peer_pb2.SwitchRequest(job=job, head=message))

    async def drop(
        self, node: NodeName, job: JobName, txid: TxId, by: Mandate | None, reason: str = ""
    ) -> None:
        """Drops a snapshot."""
        if node == self._here:
            await self.member.drop(job, txid, by, reason)
            return
        mandate = None if by is None else mandate_to_pb(by)
        await self._client.drop(node, peer_pb2.DropRequest(job=job, txid=txid, by=mandate, reason=reason))

    async def collect(
        self, node: NodeName, job: JobName, snapshot: SnapshotId, leader: str
    ) -> SavePart | None:
        """Returns what the node's ranks have saved, or None when it is not complete yet."""
        if node == self._here:
            assert self.member.saves is not None  # it asks for a save of its own
            return await self.member.saves.collect(job, snapshot, leader, _COLLECT_S)
        request = peer_pb2.CollectRequest(
            job=job, snapshot=snapshot_to_pb(snapshot), leader=leader, patience_s=_COLLECT_S
        )
        reply = await self._client.collect(node, request)
        return SavePart(unpack(reply.values), decode_sums(reply.sums)) if reply.is_complete else None

    async def describe(
        self, node: NodeName, job: JobName, txid: TxId, *, patience_s: float | None = None
    ) -> Description:
        """Returns what the node stores of a snapshot."""
        if node == self._here:
            await trio.lowlevel.checkpoint()
            return self.member.describe(job, txid)
        request = peer_pb2.DescribeRequest(job=job, txid=txid)
        reply = await self._client.describe(node, request, patience_s=patience_s)
        return Description(
            snapshot_of(reply.snapshot),
            reply.layout_json.encode(),
            reply.settings_json.encode(),
            reply.created_ns,
            reply.committed,
            reply.values,
        )

    async def jobs(self, node: NodeName) -> tuple[JobName, ...]:
        """Returns the jobs of which the node stores something."""
        if node == self._here:
            await trio.lowlevel.checkpoint()
            return self.member.jobs()
        reply = await self._client.hello(node, peer_pb2.HelloRequest(node=self._here))
        return tuple(map(check_job_name, reply.jobs))

    async def inventory(
        self, node: NodeName, job: JobName, *, patience_s: float | None = None
    ) -> tuple[StoredPart, ...]:
        """Returns what the node stores of a job."""
        if node == self._here:
            await trio.lowlevel.checkpoint()
            return self.member.inventory(job)
        request = peer_pb2.InventoryRequest(job=job)
        reply = await self._client.inventory(node, request, patience_s=patience_s)
        return tuple(
            StoredPart(snapshot_of(part.snapshot), part.committed, tuple(map(NodeName, part.copies_of)))
            for part in reply.parts
        )

    async def persist(
        self, node: NodeName, job: JobName, txid: TxId, url: str, report: Callable[[int, int], None]
    ) -> tuple[CheckpointFile, ...]:
        """Returns the files that the node has written of a snapshot."""
        if node == self._here:
            return await self.shares.persist(job, txid, url, report)
        request = peer_pb2.PersistRequest(job=job, txid=txid, url=url)
        files = b""
        async with aclosing(self._client.persist(node, request)) as replies:  # type: ignore[type-var]
            async for reply in replies:
                files = reply.files
                if not files:
                    report(reply.bytes_done, reply.bytes_total)
        return decode_files(files)

    async def persisted(self, node: NodeName, job: JobName, step: int) -> None:
        """Tells the node which step is the newest that is persisted."""
        if node == self._here:
            await trio.lowlevel.checkpoint()
            self.shares.newest[job] = step
            return
        request = peer_pb2.PersistRequest(job=job, persisted_step=step)
        async with aclosing(self._client.persist(node, request)) as replies:  # type: ignore[type-var]
            async for _ in replies:
                continue

    async def sums(self, node: NodeName, job: JobName, txid: TxId) -> bytes:
        """Returns the sums of the arrays that the node stores of a snapshot."""
        if node == self._here:
            return await trio.to_thread.run_sync(self.member.sums, job, txid)
        return (await self._client.sums(node, peer_pb2.SumsRequest(job=job, txid=txid))).sums


class Desks:
    """Implements `runtime.stopping.StopCalls`."""

    def __init__(self, here: NodeName, client: PeerClient, stops: Stops) -> None:
        self._here = here
        self._client = client
        self._stops = stops

    async def stop_at(
        self, node: NodeName, job: JobName, generation: int, token: str, action: str, step: int
    ) -> Told:
        """Acts at the desk of a node; returns what was told."""
        if node == self._here:
            await trio.lowlevel.checkpoint()
            return self._stops.act(job, generation, token, action, step)
        request = peer_pb2.StopAtRequest(
            job=job, generation=generation, token=token, action=action, step=max(step, 0)
        )
        reply = await self._client.stop_at(node, request)
        return Told(dict(reply.told), reply.for_all, reply.ended)


class Leasing:
    """Implements `runtime.leases.LeaseCalls`."""

    def __init__(self, client: PeerClient) -> None:
        self._client = client

    async def lease(self, node: NodeName, job: JobName, txid: TxId, lease_id: str, ttl_s: float) -> str:
        """Takes a lease or renews it."""
        request = peer_pb2.LeaseRequest(job=job, txid=txid, lease_id=lease_id, ttl_s=ttl_s)
        return str((await self._client.lease(node, request)).lease_id)

    async def release(self, node: NodeName, lease_id: str) -> None:
        """Ends a lease."""
        await self._client.release(node, peer_pb2.ReleaseRequest(lease_id=lease_id))


def _stage_request(order: StageOrder) -> peer_pb2.StageRequest:
    return peer_pb2.StageRequest(
        job=order.job,
        by=mandate_to_pb(order.by),
        snapshot=snapshot_to_pb(order.snapshot),
        base_txid=order.base_txid or "",
        old_layout_json=order.old_layout_json.decode(),
        new_layout_json=order.new_layout_json.decode(),
        settings_json=order.settings_json.decode(),
        coordinator=order.coordinator,
        drop=order.drop,
        endpoints={str(node): address for node, address in order.endpoints.items()},
        created_ns=order.created_ns,
        values=order.values,
        leader=order.leader,
        source=order.source,
        lost=order.lost,
    )
