"""The daemon's side of bytes over plain sockets: a thread for each connection."""

from __future__ import annotations

import hmac
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from xxhash import xxh3_64_intdigest

from tenplexfs.errors import (
    DeniedError,
    ExistsError,
    InvalidError,
    PreconditionError,
    TenplexError,
    UnavailableError,
)
from tenplexfs.rpc import bulk
from tenplexfs.rpc.handlers import RangesHandler
from tenplexfs.rpc.sending import messages_of
from tenplexfs.rpc.turns import Turns
from tenplexfs.rpc.wire import MAX_ENCODED_BYTES, FetchRequest
from tenplexfs.runtime.protocols import GrowingArrays

__all__ = ["BulkServer"]

log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 1024
_GREETING_S = 10
_STALL_S = 60
"""So long the other side may take to send a request, or to take a message of what it asked for."""
_PAUSE_S = 0.2
_LARGE_BYTES, _MOST_LARGE = 1 << 20, 8
"""Requests that are larger come in, and are read, so many at a time."""


class BulkServer:
    """Answers requests for ranges on a port of its own.

    Args:
        host: Where it listens.
        port: 0 takes a free one.
        context: For TLS, which asks callers for a certificate; None: in the clear.
        token: What callers must know.
        node: Whose daemon this is.

    Attributes:
        port: That was bound.

    Raises:
        ExistsError: The port is in use.
    """

    def __init__(
        self,
        handler: RangesHandler,
        host: str,
        port: int = 0,
        *,
        context: ssl.SSLContext | None = None,
        token: str | None = None,
        node: str | None = None,
    ) -> None:
        self._handler = handler
        self._context = context
        self._token = token
        self._node = node
        try:
            found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
            family, _, _, _, address = found[0]
            # as gRPC: whoever listens on every IPv6 address does so on every IPv4 one
            dual = address[0] == "::" and socket.has_dualstack_ipv6()
            self._listener = socket.create_server(address, family=family, backlog=64, dualstack_ipv6=dual)
        except OSError as error:
            raise ExistsError(f"data port {host}:{port}: cannot be bound: {error.strerror}") from error
        self.port: int = self._listener.getsockname()[1]
        self._turns = Turns()
        self._large = threading.BoundedSemaphore(_MOST_LARGE)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._acceptor = threading.Thread(target=self._accept, name="bulk", daemon=True)

    def start(self) -> None:
        """Begins to answer."""
        self._acceptor.start()

    def stop(self, grace_s: float) -> None:
        """Ends all connections, and waits so long for each of their threads; blocks."""
        self._stopping.set()
        bulk.close(self._listener)
        if self._acceptor.is_alive():
            self._acceptor.join()
        with self._lock:
            running = dict(self._connections)
        for sock in running:
            bulk.close(sock)
        for thread in running.values():
            thread.join(grace_s)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._stopping.is_set():
                    return
                log.warning("data port %d: takes no connection for now: %s", self.port, error.strerror)
                self._stopping.wait(_PAUSE_S)  # no descriptor is free: it would fail at once again
                continue
            with self._lock:
                if len(self._connections) >= _MOST_CONNECTIONS:
                    bulk.close(sock)
                    continue
                thread = threading.Thread(target=self._serve, args=(sock,), name="bulk", daemon=True)
                self._connections[sock] = thread
            try:
                thread.start()
            except RuntimeError as error:  # no more threads
                log.warning("data port %d: a connection is not served: %s", self.port, error)
                with self._lock:
                    del self._connections[sock]
                bulk.close(sock)

    def _serve(self, sock: socket.socket) -> None:
        plain = sock
        try:
            sock.settimeout(_GREETING_S)
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_side=True)
                with self._lock:
                    self._connections[sock] = self._connections.pop(plain)
            bulk.prepare(sock)
            if self._let_in(sock):
                while self._answer_one(sock):
                    pass
        except (OSError, TenplexError) as error:
            log.debug("bulk connection: %s", error)
        except Exception:
            log.exception("bulk connection failed")
        finally:
            bulk.close(sock)
            with self._lock:
                self._connections.pop(sock, None)
                self._connections.pop(plain, None)

    def _let_in(self, sock: socket.socket) -> bool:
        patience = _within(_GREETING_S)
        if bytes(bulk.receive(sock, len(bulk.MAGIC), patience)) != bulk.MAGIC:
            return False
        (length,) = bulk.LENGTH.unpack(bulk.receive(sock, bulk.LENGTH.size, patience))
        if length > bulk.MAX_GREETING_BYTES:
            return False
        try:
            said = msgspec.msgpack.decode(bulk.receive(sock, length, patience), type=bulk.Greeting)
        except (ValueError, msgspec.MsgspecError):
            return False
        refusal = self._refusal(said)
        if refusal is not None:
            self._refuse(sock, refusal)
            return False
        bulk.send(sock, bulk.HEADER.pack(bulk.PULSE, 0, 0), b"", patience)
        return True

    def _refusal(self, said: bulk.Greeting) -> TenplexError | None:
        if self._token is not None and not hmac.compare_digest(said.token.encode(), self._token.encode()):
            return DeniedError("the token is missing or wrong")
        if self._node is not None and said.node not in ("", self._node):
            return PreconditionError(
                f"this is {self._node}, not {said.node}: check the address of {said.node}"
            )
        return None

    def _answer_one(self, sock: socket.socket) -> bool:
        """Answers the next request; returns whether there may be another one."""
        (length,) = bulk.LENGTH.unpack(bulk.receive(sock, bulk.LENGTH.size, _wait))
        if length > MAX_ENCODED_BYTES:
            self._refuse(sock, InvalidError(f"request for ranges: {length} bytes: ask in parts"))
            return False
        with self._room(length):
            data = bytes(bulk.receive(sock, length, _within(_STALL_S)))
            try:
                request = FetchRequest.decode(data)
            except InvalidError as error:
                self._refuse(sock, error)
                return True
        try:
            with (
                self._handler.open_arrays(request.job, request.txid) as arrays,
                self._turns.stream(
                    sock.fileno(), request, are_whole=not isinstance(arrays, GrowingArrays)
                ) as sent,
            ):
                for message in messages_of(arrays, request):
                    kind = bulk.DATA if message else bulk.PULSE
                    head = bulk.HEADER.pack(kind, len(message), xxh3_64_intdigest(message))
                    bulk.send(sock, head, message, _within(_STALL_S))
                    sent(len(message))
        except _GoneError:
            raise
        except TenplexError as error:
            self._refuse(sock, error)
        except Exception as error:
            log.exception("a request for ranges failed")
            kind_of = type(error).__name__
            self._refuse(sock, TenplexError(f"internal error: {kind_of}; the daemon's log has more"))
        return True

    @contextmanager
    def _room(self, nbytes: int) -> Iterator[None]:
        """Lets few large requests come in at a time, so that they take a bounded part of the memory."""
        if nbytes <= _LARGE_BYTES:
            yield
        elif self._large.acquire(timeout=_STALL_S):
            try:
                yield
            finally:
                self._large.release()
        else:
            raise _GoneError(f"{_MOST_LARGE} large requests took {_STALL_S} s and more to come in")

    def _refuse(self, sock: socket.socket, error: TenplexError) -> None:
        body = bulk.encode_error(error)
        bulk.send(sock, bulk.HEADER.pack(bulk.ERROR, len(body), xxh3_64_intdigest(body)), body, _within(5))


class _GoneError(UnavailableError):
    """The caller is away, so that nobody hears why."""


def _wait() -> None:
    """For a connection that nobody uses now."""


def _within(seconds: float) -> Callable[[], None]:
    end_s = time.monotonic() + seconds

    def tick() -> None:
        if time.monotonic() > end_s:
            raise _GoneError(f"the other side is not done within {seconds:g} s")

    return tick
