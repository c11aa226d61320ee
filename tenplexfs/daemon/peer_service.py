"""What this daemon answers to other daemons."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress

import trio

from tenplexfs._pb import peer_pb2
from tenplexfs.core.snapshot import JobName, NodeName, TxId, check_job_name, check_node_name
from tenplexfs.daemon.kept_arrays import KeptArrays
from tenplexfs.daemon.view import VERSION, Metrics
from tenplexfs.errors import NotFoundError
from tenplexfs.formats.checkpoint import encode_files
from tenplexfs.formats.values import pack
from tenplexfs.rpc.messages import check_txid, head_of, mandate_of, snapshot_of, snapshot_to_pb
from tenplexfs.runtime.jobs import JobTable
from tenplexfs.runtime.leases import LeaseTable
from tenplexfs.runtime.member import Member
from tenplexfs.runtime.orders import StageOrder
from tenplexfs.runtime.persisting import Shares
from tenplexfs.runtime.protocols import ArraySource
from tenplexfs.runtime.save_parts import encode_sums
from tenplexfs.runtime.stopping import Stops

__all__ = ["PeerService"]


class PeerService:
    """Implements `rpc.handlers.PeerHandler` and `RangesHandler`.

    Args:
        nursery: Where stages run.
        learn: Takes note of where other nodes listen.
    """

    def __init__(
        self,
        *,
        member: Member,
        table: JobTable,
        leases: LeaseTable,
        metrics: Metrics,
        nursery: trio.Nursery,
        learn: Callable[[Mapping[NodeName, str]], None],
        stops: Stops,
        shares: Shares,
    ) -> None:
        self._member = member
        self._table = table
        self._leases = leases
        self._kept = KeptArrays(leases, nursery)
        self._metrics = metrics
        self._nursery = nursery
        self._learn = learn
        self._stops = stops
        self._shares = shares

    @contextmanager
    def open_arrays(self, job: JobName, txid: TxId) -> Iterator[ArraySource]:
        """Gives the local arrays of a snapshot. For worker threads."""
        with self._member.open_arrays(job, txid) as arrays:
            yield self._kept.of(txid, arrays)

    async def hello(self, request: peer_pb2.HelloRequest) -> peer_pb2.HelloReply:
        """Returns who this is."""
        member = self._member
        return peer_pb2.HelloReply(
            node=member.node, version=VERSION, incarnation=member.store.incarnation, jobs=member.jobs()
        )

    async def stage(self, request: peer_pb2.StageRequest) -> AsyncIterator[peer_pb2.StageProgress]:
        """Makes this node's part of a snapshot; given up when the coordinator goes away."""
        order = _order(request)
        self._learn(order.endpoints)
        counted = 0

        async def work(report: Callable[[int, int], None]) -> None:
            def count(done: int, total: int) -> None:
                nonlocal counted
                self._metrics.staged_bytes.inc(done - counted)
                counted = done
                report(done, total)

            await self._member.stage(order, count)

        async with aclosing(self._followed(work)) as steps:
            self._table.touch()
            try:
                async for done, total in steps:
                    yield peer_pb2.StageProgress(bytes_done=done, bytes_total=total)
            finally:
                self._table.touch()

    async def _followed(
        self, work: Callable[[Callable[[int, int], None]], Awaitable[None]]
    ) -> AsyncGenerator[tuple[int, int]]:
        """Yields what ``work`` reports, bytes done and in all; ends with it, and it with this."""
        send, receive = trio.open_memory_channel[tuple[int, int]](1)
        failures: list[Exception] = []
        scope = trio.CancelScope()

        def report(done: int, total: int) -> None:
            with suppress(trio.WouldBlock, trio.BrokenResourceError):  # the next one tells more
                send.send_nowait((done, total))

        async def run() -> None:
            with send, scope:
                try:
                    await work(report)
                except Exception as error:  # raised below, where the boundary of the call sees it
                    failures.append(error)

        # Not in a nursery of its own: this is a generator, which may be closed at its yield.
        self._nursery.start_soon(run)
        try:
            async for step in receive:
                yield step
        finally:
            receive.close()
            scope.cancel()
        if failures:
            raise failures[0]

    async def switch(self, request: peer_pb2.SwitchRequest) -> peer_pb2.SwitchReply:
        """Returns once fresh opens see the head."""
        head = head_of(request.head) if request.HasField("head") else None
        await self._table.switch(check_job_name(request.job), head)
        return peer_pb2.SwitchReply()

    async def drop(self, request: peer_pb2.DropRequest) -> peer_pb2.DropReply:
        """Drops a snapshot."""
        by = mandate_of(request.by) if request.HasField("by") else None
        await self._member.drop(check_job_name(request.job), check_txid(request.txid), by, request.reason)
        return peer_pb2.DropReply()

    async def describe(self, request: peer_pb2.DescribeRequest) -> peer_pb2.DescribeReply:
        """Returns what is here of a snapshot."""
        txid = check_txid(request.txid) if request.txid else None
        found = self._member.describe(check_job_name(request.job), txid)
        return peer_pb2.DescribeReply(
            snapshot=snapshot_to_pb(found.snapshot),
            layout_json=found.layout_json.decode(),
            settings_json=found.settings_json.decode(),
            created_ns=found.created_ns,
            committed=found.committed,
            values=found.values,
        )

    async def inventory(self, request: peer_pb2.InventoryRequest) -> peer_pb2.InventoryReply:
        """Returns what is stored here of a job."""
        parts = self._member.inventory(check_job_name(request.job))
        return peer_pb2.InventoryReply(
            parts=[
                peer_pb2.StoredPart(
                    snapshot=snapshot_to_pb(part.snapshot), committed=part.committed, copies_of=part.copies_of
                )
                for part in parts
            ]
        )

    async def sums(self, request: peer_pb2.SumsRequest) -> peer_pb2.SumsReply:
        """Returns the sums of the arrays that are here of a snapshot."""
        job, txid = check_job_name(request.job), check_txid(request.txid)
        return peer_pb2.SumsReply(sums=await trio.to_thread.run_sync(self._member.sums, job, txid))

    async def persist(self, request: peer_pb2.PersistRequest) -> AsyncIterator[peer_pb2.PersistReply]:
        """Writes this node's share of a step; given up when the leader goes away."""
        job = check_job_name(request.job)
        if not request.url:
            self._shares.newest[job] = request.persisted_step
            return
        txid = check_txid(request.txid)
        files: list[bytes] = []

        async def write(report: Callable[[int, int], None]) -> None:
            files.append(encode_files(await self._shares.persist(job, txid, request.url, report)))

        async with aclosing(self._followed(write)) as steps:
            async for done, total in steps:
                yield peer_pb2.PersistReply(bytes_done=done, bytes_total=total)
        yield peer_pb2.PersistReply(files=files[0])

    async def collect(self, request: peer_pb2.CollectRequest) -> peer_pb2.CollectReply:
        """Returns what this node's ranks have saved of a step."""
        saves = self._member.saves
        if saves is None:
            raise NotFoundError(f"node {self._member.node}: no training process can save here")
        job, snapshot = check_job_name(request.job), snapshot_of(request.snapshot)
        part = await saves.collect(job, snapshot, request.leader, min(request.patience_s, 8.0))
        if part is None:
            return peer_pb2.CollectReply()
        return peer_pb2.CollectReply(is_complete=True, values=pack(part.values), sums=encode_sums(part.sums))

    async def stop_at(self, request: peer_pb2.StopAtRequest) -> peer_pb2.StopAtReply:
        """Acts at this node's desk."""
        job = check_job_name(request.job)
        told = self._stops.act(job, request.generation, request.token, request.action, request.step)
        self._table.touch()
        return peer_pb2.StopAtReply(told=told.steps, for_all=told.for_all, ended=told.ended)

    async def lease(self, request: peer_pb2.LeaseRequest) -> peer_pb2.LeaseReply:
        """Keeps the bytes of a snapshot for a while."""
        job, txid = check_job_name(request.job), check_txid(request.txid)
        if not self._member.holds(job, txid):
            raise NotFoundError(f"node {self._member.node}: stores no snapshot {txid} of job {job}")
        lease_id = self._leases.lease(job, txid, request.lease_id, request.ttl_s)
        self._kept.keep(txid)
        return peer_pb2.LeaseReply(lease_id=lease_id)

    async def release(self, request: peer_pb2.ReleaseRequest) -> peer_pb2.ReleaseReply:
        """Ends a lease."""
        self._leases.release(request.lease_id)
        return peer_pb2.ReleaseReply()


def _order(request: peer_pb2.StageRequest) -> StageOrder:
    return StageOrder(
        job=check_job_name(request.job),
        by=mandate_of(request.by),
        snapshot=snapshot_of(request.snapshot),
        base_txid=check_txid(request.base_txid) if request.base_txid else None,
        old_layout_json=request.old_layout_json.encode(),
        new_layout_json=request.new_layout_json.encode(),
        settings_json=request.settings_json.encode(),
        coordinator=check_node_name(request.coordinator),
        drop=tuple(request.drop),
        endpoints={check_node_name(node): address for node, address in request.endpoints.items()},
        created_ns=request.created_ns,
        values=request.values,
        leader=request.leader,
        source=request.source,
        lost=tuple(map(check_node_name, request.lost)),
    )
