"""Calls of other daemons: bytes of their snapshots, and the steps of a transaction."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import grpc
import trio
from google.protobuf.message import Message

from tenplexfs._pb import members_pb2, peer_pb2
from tenplexfs.core.snapshot import JobName, NodeName, TxId
from tenplexfs.errors import CorruptError, NotFoundError, TimedOutError, UnavailableError
from tenplexfs.rpc.bulk import Greeting
from tenplexfs.rpc.bulk_client import BulkClient
from tenplexfs.rpc.connection import Cancel, Connection
from tenplexfs.rpc.errors import UnreachedError
from tenplexfs.rpc.retries import Retries
from tenplexfs.rpc.threads import in_thread
from tenplexfs.rpc.wire import FETCH, FetchRequest, checked, split
from tenplexfs.runtime.protocols import Ranges

__all__ = ["PeerClient"]

_REACH_S = 1.0  # for a node that has just come back; connections are tried again after a quarter of a second
_MESSAGE_BYTES = 1 << 18  # what is passed on waits for whole messages


class PeerClient:
    """Asks other daemons; a `tenplexfs.runtime.protocols.PeerReader`. For one trio thread.

    Args:
        endpoints: Node to ``host:port``; `connect_to` adds more.
        credentials: For TLS; none: in the clear.
        context: The same for what is not gRPC.
        token: What the others want to hear, if they do.
        call_deadline_s: For the short calls.
        stage_deadline_s: For a whole stage.
        max_calls: At most so many calls at the same time; each takes a thread.
    """

    def __init__(
        self,
        endpoints: Mapping[NodeName, str],
        *,
        credentials: grpc.ChannelCredentials | None = None,
        context: ssl.SSLContext | None = None,
        token: str | None = None,
        call_deadline_s: float = 10.0,
        stage_deadline_s: float = 24 * 3600.0,
        max_calls: int = 128,
    ) -> None:
        self._endpoints = dict(endpoints)
        self._credentials = credentials
        self._context = context
        self._token = token
        self._call_deadline_s = call_deadline_s
        self._stage_deadline_s = stage_deadline_s
        self._limiter = trio.CapacityLimiter(max_calls)
        self._peers: dict[tuple[NodeName, str], _Peer] = {}

    def connect_to(self, node: NodeName, endpoint: str) -> None:
        """Makes ``endpoint`` the address of ``node``."""
        self._endpoints[node] = endpoint

    def forget_address(self, node: NodeName) -> None:
        """Knows no address of ``node`` any more."""
        self._endpoints.pop(node, None)

    def close(self) -> None:
        """Ends all calls."""
        for peer in self._peers.values():
            peer.bulk.close()
            peer.connection.close()
        self._peers.clear()

    def _connection(self, node: NodeName) -> Connection:
        return self._peer(node).connection

    def _peer(self, node: NodeName) -> _Peer:
        endpoint = self._endpoints.get(node)
        if endpoint is None:
            raise NotFoundError(
                f"node {node}: no address; this daemon knows {', '.join(sorted(self._endpoints)) or 'none'}"
            )
        key = (node, endpoint)
        if key not in self._peers:
            made = Connection(endpoint, credentials=self._credentials, token=self._token, node=node)
            greeting = Greeting(self._token or "", node)
            self._peers[key] = _Peer(made, BulkClient(made, context=self._context, greeting=greeting))
        return self._peers[key]

    async def fetch(
        self,
        node: NodeName,
        job: JobName,
        txid: TxId,
        ranges: Sequence[Ranges],
        write: Callable[[int, bytes | memoryview], None],
        *,
        deadline_s: float,
        patience_s: float | None = None,
    ) -> None:
        """Streams ``ranges`` in order; the contract is that of `PeerReader.fetch`."""
        peer = self._peer(node)

        def run(cancel: Cancel) -> None:
            retries, offset = Retries(deadline_s, patience_s=patience_s), 0
            for batch in split(ranges):
                request = FetchRequest(job, txid, 0, batch, _MESSAGE_BYTES)
                offset = _fetch_batch(peer, request, offset, write, retries, cancel)

        await in_thread(run, limiter=self._limiter)

    async def _call(
        self, node: NodeName, method: str, request: Message, *, patience_s: float | None = None
    ) -> Message:
        """Returns the answer to a call that may be made twice, retried until the deadline for short calls.

        With ``patience_s``: for so long after a first failure.
        """
        connection = self._connection(node)

        def run(cancel: Cancel) -> Message:
            def once(left_s: float) -> Message:
                return connection.call(method, request, deadline_s=left_s, cancel=cancel)

            return Retries(self._call_deadline_s, patience_s=patience_s).run(once, cancel)

        return await in_thread(run, limiter=self._limiter)

    async def stream_into(
        self, node: NodeName, method: str, request: Message, take: Callable[[Any], None], *, deadline_s: float
    ) -> None:
        """Calls ``take`` in a worker thread with each message of a stream; not tried again."""
        connection = self._connection(node)

        def run(cancel: Cancel) -> None:
            for reply in connection.stream(method, request, deadline_s=deadline_s, cancel=cancel):
                take(reply)

        await in_thread(run, limiter=self._limiter)

    async def hello(self, node: NodeName, request: peer_pb2.HelloRequest) -> peer_pb2.HelloReply:
        """Returns who ``node`` is."""
        reply: peer_pb2.HelloReply = await self._call(node, "Peer/Hello", request)
        return reply

    async def stage(
        self, node: NodeName, request: peer_pb2.StageRequest
    ) -> AsyncIterator[peer_pb2.StageProgress]:
        """Yields the progress of ``node``; ends once it has staged.

        Close it (`aclosing`) to stop the node's work. A stage that reaches nobody is tried again for a
        second. One that is cut off is not: the coordinator knows better whether it still wants it.
        """
        async with aclosing(self._stream(node, "Peer/Stage", request)) as replies:
            async for reply in replies:
                yield reply

    async def persist(
        self, node: NodeName, request: peer_pb2.PersistRequest
    ) -> AsyncIterator[peer_pb2.PersistReply]:
        """Yields the progress of ``node``; the last reply names the files that it wrote. Else as `stage`."""
        async with aclosing(self._stream(node, "Peer/Persist", request)) as replies:
            async for reply in replies:
                yield reply

    async def _stream(self, node: NodeName, method: str, request: Message) -> AsyncGenerator[Any]:
        connection = self._connection(node)
        cancel, retries = Cancel(), Retries(self._stage_deadline_s, patience_s=_REACH_S)

        def opened() -> Iterator[Message]:
            return connection.stream(method, request, deadline_s=retries.left_s(), cancel=cancel)

        replies = opened()

        def following(waiting: Cancel) -> Message | None:
            nonlocal replies
            waiting.watch(cancel)
            while True:
                try:
                    return next(replies, None)
                except UnreachedError as error:
                    retries.wait(error, cancel)
                    replies = opened()

        try:
            while (reply := await in_thread(following, limiter=self._limiter)) is not None:
                yield reply
        finally:
            cancel.cancel()

    async def forget(self, node: NodeName, request: members_pb2.ForgetRequest) -> None:
        """Makes ``node`` forget one that is gone."""
        await self._call(node, "Meeting/Forget", request)

    async def switch(self, node: NodeName, request: peer_pb2.SwitchRequest) -> None:
        """Tells ``node`` that the head moved; returns once it shows it."""
        await self._call(node, "Peer/Switch", request)

    async def drop(self, node: NodeName, request: peer_pb2.DropRequest) -> None:
        """Makes ``node`` drop a snapshot."""
        await self._call(node, "Peer/Drop", request)

    async def describe(
        self, node: NodeName, request: peer_pb2.DescribeRequest, *, patience_s: float | None = None
    ) -> peer_pb2.DescribeReply:
        """Returns what ``node`` has of a snapshot."""
        reply: peer_pb2.DescribeReply = await self._call(
            node, "Peer/Describe", request, patience_s=patience_s
        )
        return reply

    async def inventory(
        self, node: NodeName, request: peer_pb2.InventoryRequest, *, patience_s: float | None = None
    ) -> peer_pb2.InventoryReply:
        """Returns what ``node`` stores of a job."""
        reply: peer_pb2.InventoryReply = await self._call(
            node, "Peer/Inventory", request, patience_s=patience_s
        )
        return reply

    async def sums(self, node: NodeName, request: peer_pb2.SumsRequest) -> peer_pb2.SumsReply:
        """Returns the sums of what ``node`` stores of a snapshot."""
        reply: peer_pb2.SumsReply = await self._call(node, "Peer/Sums", request)
        return reply

    async def collect(self, node: NodeName, request: peer_pb2.CollectRequest) -> peer_pb2.CollectReply:
        """Returns what the ranks of ``node`` have saved of a step, as far as it is complete."""
        reply: peer_pb2.CollectReply = await self._call(node, "Peer/Collect", request)
        return reply

    async def stop_at(self, node: NodeName, request: peer_pb2.StopAtRequest) -> peer_pb2.StopAtReply:
        """Agrees with ``node`` on where ranks stop."""
        reply: peer_pb2.StopAtReply = await self._call(node, "Peer/StopAt", request)
        return reply

    async def lease(self, node: NodeName, request: peer_pb2.LeaseRequest) -> peer_pb2.LeaseReply:
        """Keeps bytes on ``node``."""
        reply: peer_pb2.LeaseReply = await self._call(node, "Peer/Lease", request)
        return reply

    async def release(self, node: NodeName, request: peer_pb2.ReleaseRequest) -> None:
        """Ends a lease on ``node``."""
        await self._call(node, "Peer/Release", request)


@dataclass(frozen=True)
class _Peer:
    """The ways to one daemon."""

    connection: Connection
    bulk: BulkClient

    def messages(
        self, request: FetchRequest, *, deadline_s: float, cancel: Cancel
    ) -> Iterator[bytes | memoryview]:
        """Yields the bytes that ``request`` asks for, checked; each message is valid until the next one."""
        encoded, nbytes = request.encode(), request.nbytes - request.start
        stream = self.bulk.open(deadline_s, cancel)
        if stream is None:
            answers = self.connection.raw_stream(FETCH, encoded, deadline_s=deadline_s, cancel=cancel)
            yield from checked(answers, nbytes)
            return
        is_whole = False
        cancel.watch(stream)
        try:
            yield from stream.messages(encoded, nbytes, deadline_s=deadline_s)
            is_whole = True
        finally:
            cancel.watch(None)
            if is_whole:
                self.bulk.give_back(stream)
            else:
                stream.cancel()
                self.bulk.close()  # the others may have ended with it


def _fetch_batch(
    peer: _Peer,
    request: FetchRequest,
    offset: int,
    write: Callable[[int, bytes | memoryview], None],
    retries: Retries,
    cancel: Cancel,
) -> int:
    """Writes what ``request`` asks for from ``offset`` on; returns where it ends. Resumes after failures."""
    done, total = 0, request.nbytes
    while done < total:
        try:
            rest = replace(request, start=done)
            for message in peer.messages(rest, deadline_s=retries.left_s(), cancel=cancel):
                write(offset + done, message)
                done += len(message)
                retries.progressed()
        except (UnavailableError, CorruptError, TimedOutError) as error:
            retries.wait(error, cancel)
    return offset + total
