"""The gRPC servers of a daemon: one on TCP for peers and schedulers, one on a Unix socket for this machine.

`grpc.aio` does not run under trio, so these are the synchronous servers: each call has a thread, which waits
for its handler on the trio thread. The bytes of ranges never pass the trio thread.
"""

from __future__ import annotations

import errno
import keyword
import re
import socket as sockets
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import trio
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tenplexfs.errors import ExistsError, InvalidError, UnavailableError
from tenplexfs.rpc.admission import Admission, NodeCheck, TokenCheck
from tenplexfs.rpc.bulk import ENDPOINT
from tenplexfs.rpc.bulk_server import BulkServer
from tenplexfs.rpc.connection import OPTIONS, SERVICES
from tenplexfs.rpc.errors import answer
from tenplexfs.rpc.handlers import (
    ControlHandler,
    DatasetsHandler,
    LocalHandler,
    MeetingHandler,
    MembersHandler,
    PeerHandler,
    RangesHandler,
    SamplesHandler,
)
from tenplexfs.rpc.memory import keep_freed_memory
from tenplexfs.rpc.registry_service import RegistryService, ServedRegistry
from tenplexfs.rpc.sending import messages_of
from tenplexfs.rpc.wire import FETCH, FetchRequest, with_sums

__all__ = ["serve"]

_THREAD_COUNT = 1024
_CONTROL_COUNT = 512
"""Calls of Control that run at a time: watchers of jobs leave threads to the registry and to peers."""
_AHEAD_COUNT = 16


@asynccontextmanager
async def serve(
    nursery: trio.Nursery,
    *,
    control: ControlHandler,
    peer: PeerHandler,
    ranges: RangesHandler,
    local: LocalHandler,
    datasets: DatasetsHandler | None = None,
    samples: SamplesHandler | None = None,
    members: MembersHandler | None = None,
    meeting: MeetingHandler | None = None,
    registry: ServedRegistry | None = None,
    listen: str | None,
    socket: Path | None,
    credentials: grpc.ServerCredentials | None = None,
    context: ssl.SSLContext | None = None,
    data_port: int = 0,
    token: str | None = None,
    node: str | None = None,
    grace_s: float = 0.5,
) -> AsyncIterator[str]:
    """Serves until the context ends; gives the address that was bound, "" without ``listen``.

    Args:
        nursery: Where streams run.
        control: Served on both.
        peer: Served on TCP, with ``ranges``.
        ranges: The bytes that peers ask for.
        local: Served on the Unix socket.
        datasets: Served on the Unix socket.
        samples: Served on TCP.
        members: Served on the Unix socket.
        meeting: Served on TCP.
        registry: Served on TCP, when this daemon owns it.
        listen: ``host:port``; port 0 takes a free one.
        socket: Where the Unix socket is made, for the owner alone.
        credentials: For TLS on TCP; none: in the clear.
        context: The same for what is not gRPC.
        data_port: On the host of ``listen``, for the bytes of ranges; 0 takes a free one.
        token: What calls over TCP must carry, as ``authorization: Bearer <token>``.
        node: Whose daemon this is; calls over TCP that are meant for another are refused.
        grace_s: How long running calls may take to end.

    Raises:
        ExistsError: The address or the socket is in use.
        InvalidError: There is no such address, or it is not allowed.
    """
    keep_freed_memory()
    edge = _Edge(nursery, trio.lowlevel.current_trio_token())
    remote: dict[str, object] = {"Control": control, "Peer": peer}
    if registry is not None:
        remote["Registry"] = RegistryService(registry)
    if samples is not None:
        remote["Samples"] = samples
    if meeting is not None:
        remote["Meeting"] = meeting
    own: dict[str, object] = {"Control": control, "Local": local}
    if datasets is not None:
        own["Datasets"] = datasets
    if members is not None:
        own["Members"] = members
    running: list[_Server | BulkServer] = []
    try:
        address = ""
        if listen is not None:
            _check_free(listen)
            host = listen.rpartition(":")[0]
            data = BulkServer(ranges, host, data_port, context=context, token=token, node=node)
            running.append(data)
            over_tcp = _Server(edge, remote, (ranges, data.port), token, node)
            running.append(over_tcp)
            address = over_tcp.bind(listen, credentials)
        if socket is not None:
            over_unix = _Server(edge, own)
            running.append(over_unix)
            over_unix.bind_unix(socket)
        for each in running:
            each.start()
        yield address
    finally:
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as stopping:
                for each in running:
                    stopping.start_soon(trio.to_thread.run_sync, each.stop, grace_s)


_Admit = Callable[[grpc.ServicerContext], None]


class _Server:
    """One gRPC server with its services, health and reflection."""

    def __init__(
        self,
        edge: _Edge,
        handlers: Mapping[str, object],
        ranges: tuple[RangesHandler, int] | None = None,
        token: str | None = None,
        node: str | None = None,
    ) -> None:
        """``ranges`` has their handler, and the port of the `BulkServer` that serves them as well."""
        self._pool = ThreadPoolExecutor(_THREAD_COUNT, thread_name_prefix="grpc")
        interceptors: list[grpc.ServerInterceptor] = [] if token is None else [TokenCheck(token)]
        if node is not None:
            interceptors.append(NodeCheck(node))
        self._server = grpc.server(
            self._pool, interceptors=interceptors, options=OPTIONS, maximum_concurrent_rpcs=_THREAD_COUNT
        )
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [SERVICES[name].full_name for name in handlers]
        for name, handler in handlers.items():
            self._server.add_generic_rpc_handlers((edge.service(SERVICES[name], handler),))
        if ranges is not None:
            self._server.add_generic_rpc_handlers((_ranges_service(*ranges),))
        reflection.enable_server_reflection(
            (*names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        for name in ("", *names):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def bind(self, listen: str, credentials: grpc.ServerCredentials | None) -> str:
        """Returns the address that was bound, with its port."""
        try:
            port = (
                self._server.add_insecure_port(listen)
                if credentials is None
                else self._server.add_secure_port(listen, credentials)
            )
        except RuntimeError as error:
            raise ExistsError(f"listen {listen}: cannot be bound: {error}") from error
        return f"{listen.rpartition(':')[0]}:{port}"

    def bind_unix(self, path: Path) -> None:
        """Makes the socket, in the place of one that nobody serves."""
        _clear_socket(path)
        try:
            self._server.add_insecure_port(f"unix:{path.absolute()}")
        except RuntimeError as error:
            raise InvalidError(f"socket {path}: cannot be made: {error}") from error
        path.chmod(0o600)

    def start(self) -> None:
        self._server.start()

    def stop(self, grace_s: float) -> None:
        """Ends the calls and the threads; blocks."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_s).wait()
        self._pool.shutdown()


class _Edge:
    """Runs handlers on the trio thread for calls that wait on gRPC's threads."""

    def __init__(self, nursery: trio.Nursery, token: trio.lowlevel.TrioToken) -> None:
        self._nursery = nursery
        self._token = token

    def service(self, descriptor: ServiceDescriptor, handler: object) -> grpc.GenericRpcHandler:
        """Returns the service of ``descriptor``, answered by the methods of ``handler`` of the same names."""
        methods = {}
        admit = Admission(_CONTROL_COUNT).admit if descriptor is SERVICES["Control"] else _everybody
        for method in descriptor.methods:
            make, kind = (
                (self._stream, grpc.unary_stream_rpc_method_handler)
                if method.server_streaming
                else (self._unary, grpc.unary_unary_rpc_method_handler)
            )
            # The request is decoded behind the boundary: gRPC would answer INTERNAL to one that is malformed.
            methods[method.name] = kind(
                make(getattr(handler, _python_name(method.name)), _decoder(method.input_type), admit),
                response_serializer=method.output_type._concrete_class.SerializeToString,
            )
        return grpc.method_handlers_generic_handler(descriptor.full_name, methods)

    def _scope(self, context: grpc.ServicerContext) -> trio.CancelScope:
        """Returns a scope that is cancelled when the call is over."""
        scope = trio.CancelScope()

        def cancel() -> None:
            # called by the one thread that serves all calls: it must not wait
            try:
                self._token.run_sync_soon(scope.cancel)
            except trio.RunFinishedError:
                return

        if not context.add_callback(cancel):
            scope.cancel()
        return scope

    def _unary(
        self, method: Callable[[Any], Awaitable[Message]], decode: Callable[[bytes], Message], admit: _Admit
    ) -> Callable[[bytes, Any], Message]:
        def serve_one(data: bytes, context: grpc.ServicerContext) -> Message:
            answer(context, lambda: admit(context))
            request = answer(context, lambda: decode(data))
            scope = self._scope(context)

            async def call() -> Message:
                with scope:
                    return await method(request)
                raise UnavailableError("the caller went away")

            return answer(context, lambda: trio.from_thread.run(call, trio_token=self._token))

        return serve_one

    def _stream(
        self,
        method: Callable[[Any], AsyncIterator[Message]],
        decode: Callable[[bytes], Message],
        admit: _Admit,
    ) -> Callable[[bytes, Any], Iterator[Message]]:
        def serve_many(data: bytes, context: grpc.ServicerContext) -> Iterator[Message]:
            answer(context, lambda: admit(context))
            request = answer(context, lambda: decode(data))
            replies = self._replies(method, request, self._scope(context))
            while (reply := answer(context, lambda: next(replies, None))) is not None:
                yield reply

        return serve_many

    def _replies(
        self, method: Callable[[Any], AsyncIterator[Message]], request: Message, scope: trio.CancelScope
    ) -> Iterator[Message]:
        send, receive = trio.open_memory_channel[Any](_AHEAD_COUNT)
        # what ended the stream; none of ours unless the handler said so
        end: list[Exception | None] = []

        async def pump() -> None:
            with send, scope:
                try:
                    async with aclosing(method(request)) as replies:  # type: ignore[type-var]
                        async for reply in replies:
                            await send.send(reply)
                    end.append(None)
                except Exception as error:
                    end.append(error)

        trio.from_thread.run_sync(self._nursery.start_soon, pump, trio_token=self._token)
        while True:
            try:
                reply = trio.from_thread.run(receive.receive, trio_token=self._token)
            except trio.EndOfChannel:
                break
            yield reply
        if not end:
            raise UnavailableError("the stream was cut off: this daemon is going away, or the caller has")
        if end[0] is not None:
            raise end[0]


def _everybody(_: grpc.ServicerContext) -> None:
    """Lets a call in."""


def _decoder(kind: Descriptor) -> Callable[[bytes], Message]:
    def decode(data: bytes) -> Message:
        try:
            message: Message = kind._concrete_class.FromString(data)
        except DecodeError as error:
            raise InvalidError(f"request: {len(data)} bytes that are no {kind.name}") from error
        return message

    return decode


def _python_name(method: str) -> str:
    """Returns the name of a handler's method: CreateJob is ``create_job``, Import is ``import_``."""
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", method).lower()
    return f"{name}_" if keyword.iskeyword(name) else name


def _ranges_service(handler: RangesHandler, data_port: int) -> grpc.GenericRpcHandler:
    def messages(data: bytes) -> Iterator[bytes]:
        request = FetchRequest.decode(data)
        with handler.open_arrays(request.job, request.txid) as arrays:
            # gRPC takes bytes only
            yield from with_sums(bytes(each) for each in messages_of(arrays, request) if each)

    def fetch(data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        stream = messages(data)
        while (message := answer(context, lambda: next(stream, None))) is not None:
            yield message

    def endpoint(_: bytes, __: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"%d" % data_port

    methods = {path.split("/")[2]: make for path, make in ((FETCH, fetch), (ENDPOINT, endpoint))}
    return grpc.method_handlers_generic_handler(
        FETCH.split("/")[1],
        {name: grpc.unary_stream_rpc_method_handler(make) for name, make in methods.items()},
    )


def _check_free(listen: str) -> None:
    """Raises in plain words what gRPC would only call a failure."""
    host, colon, port = listen.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
        raise InvalidError(f"listen {listen}: need host:port")
    try:
        found = sockets.getaddrinfo(host.strip("[]"), int(port), type=sockets.SOCK_STREAM)
        for family, _, _, _, address in found:
            sockets.create_server(address, family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ExistsError(
                f"listen {listen}: the address is in use; choose another by --listen"
            ) from error
        raise InvalidError(f"listen {listen}: {error.strerror or error}") from error


def _clear_socket(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_socket():
        raise ExistsError(f"socket {path}: is there and is no socket; choose another by --socket")
    with sockets.socket(sockets.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise ExistsError(f"socket {path}: a daemon serves it already; choose another by --socket")
