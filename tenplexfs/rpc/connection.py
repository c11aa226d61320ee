"""Blocking calls of a daemon, by the names in the protos; `threads.in_thread` is how trio makes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from tenplexfs._pb import control_pb2, dataset_pb2, local_pb2, members_pb2, peer_pb2, registry_pb2
from tenplexfs.errors import UnavailableError
from tenplexfs.rpc.errors import CLIENT_METADATA, error_of

__all__ = ["NODE_KEY", "OPTIONS", "SERVICES", "Cancel", "Connection"]

NODE_KEY = "tenplexfs-node"
"""Metadata of a call that is meant for one node: whoever else hears it refuses."""

OPTIONS: tuple[tuple[str, int], ...] = (
    # Layouts written out are tens of MiB.
    ("grpc.max_receive_message_length", 1 << 28),
    ("grpc.max_send_message_length", 1 << 28),
    ("grpc.max_metadata_size", 1 << 20),
    ("grpc.absolute_max_metadata_size", 1 << 20),
    # Frames as large as they come and a window that is open from the start: 0.9 instead of 0.67 of plain TCP.
    ("grpc.http2.max_frame_size", (1 << 24) - 1),
    ("grpc.http2.lookahead_bytes", 1 << 24),
    ("grpc.http2.bdp_probe", 0),
    # A peer that is cut off is noticed in half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # So long a connection may take to be made, and so long after one that was refused comes the next try.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 250),
    # Two daemons must not share a port.
    ("grpc.so_reuseport", 0),
)
"""For both sides."""

SERVICES: dict[str, ServiceDescriptor] = {
    name: module.DESCRIPTOR.services_by_name[name]
    for name, module in (
        ("Control", control_pb2),
        ("Peer", peer_pb2),
        ("Registry", registry_pb2),
        ("Local", local_pb2),
        ("Datasets", dataset_pb2),
        ("Samples", dataset_pb2),
        ("Members", members_pb2),
        ("Meeting", members_pb2),
    )
}
"""Descriptors of the services, by name."""


class _Cancellable(Protocol):
    def cancel(self) -> object:
        """Ends it."""
        ...


class Cancel:
    """Ends a blocking call from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._call: _Cancellable | None = None

    @property
    def cancelled(self) -> bool:
        """Whether the call is to end."""
        return self._event.is_set()

    def watch(self, call: _Cancellable | None) -> None:
        """Makes ``call`` the one that `cancel` ends."""
        with self._lock:
            self._call = call
            if self._event.is_set() and call is not None:
                call.cancel()

    def cancel(self) -> None:
        """Ends the call, and any wait."""
        with self._lock:
            self._event.set()
            if self._call is not None:
                self._call.cancel()

    def wait(self, seconds: float) -> bool:
        """Waits; returns at once, True, when cancelled."""
        return self._event.wait(seconds)


class Connection:
    """Calls to one daemon. Thread-safe; connects when first used, and again when needed.

    Args:
        target: ``host:port`` or ``unix:/path``.
        credentials: For TLS; none: in the clear.
        token: What the server wants to hear, if it does.
        node: Whose daemon it has to be, if that matters.
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        node: str | None = None,
    ) -> None:
        self.target = target
        self._metadata = (
            CLIENT_METADATA,
            *((("authorization", f"Bearer {token}"),) if token else ()),
            *(((NODE_KEY, node),) if node else ()),
        )
        self._channel = (
            grpc.insecure_channel(target, options=OPTIONS)
            if credentials is None
            else grpc.secure_channel(target, credentials, options=OPTIONS)
        )

    def call(
        self, method: str, request: Message, *, deadline_s: float, cancel: Cancel | None = None
    ) -> Message:
        """Returns the answer of ``method``, as "Control/GetJob".

        Raises:
            TenplexError: What the daemon answered, or UnavailableError or TimedOutError.
        """
        path, decode = _method(method)
        start = self._channel.unary_unary(path, request_serializer=_encode, response_deserializer=decode)
        with self._translated(method):
            future = start.future(request, timeout=deadline_s, metadata=self._metadata)
            if cancel is not None:
                cancel.watch(future)
            return future.result()

    def stream(
        self, method: str, request: Message, *, deadline_s: float, cancel: Cancel | None = None
    ) -> Iterator[Message]:
        """Yields the answers of ``method``, as "Control/WatchJob"; raises as `call`."""
        path, decode = _method(method)
        start = self._channel.unary_stream(path, request_serializer=_encode, response_deserializer=decode)
        return self._messages(method, start, request, deadline_s, cancel)

    def raw_stream(
        self, path: str, request: bytes, *, deadline_s: float, cancel: Cancel | None = None
    ) -> Iterator[bytes]:
        """Yields the messages of a call that is not protobuf; raises as `call`."""
        return self._messages(path, self._channel.unary_stream(path), request, deadline_s, cancel)

    def _messages(
        self,
        method: str,
        start: grpc.UnaryStreamMultiCallable,
        request: object,
        deadline_s: float,
        cancel: Cancel | None,
    ) -> Iterator[Any]:
        with self._translated(method):
            messages = start(request, timeout=deadline_s, metadata=self._metadata)
            if cancel is not None:
                cancel.watch(messages)
            try:
                yield from messages
            finally:
                messages.cancel()

    @contextmanager
    def _translated(self, method: str) -> Iterator[None]:
        what = f"{self.target}: {method.rpartition('/')[2]}"
        try:
            yield
        except grpc.RpcError as error:
            raise error_of(error, what) from error
        except grpc.FutureCancelledError as error:
            raise UnavailableError(f"{what}: cancelled") from error
        except ValueError as error:
            # what gRPC raises on a closed channel
            raise UnavailableError(f"{what}: {error}") from error

    def close(self) -> None:
        """Ends all calls."""
        self._channel.close()


def _method(name: str) -> tuple[str, Callable[[bytes], Message]]:
    service, _, method = name.partition("/")
    descriptor = SERVICES[service].methods_by_name[method]
    return f"/{SERVICES[service].full_name}/{method}", descriptor.output_type._concrete_class.FromString


def _encode(message: Message) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded
