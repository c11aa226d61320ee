"""The daemon's side of bytes over plain sockets: a thread for each connection."""

from __future__ import annotations

import hmac
import logging
import socket
import ssl
import threading
from collections.abc import Callable

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
from tenplexfs.runtime.protocols import ArraySource, GrowingArrays

__all__ = ["BulkServer"]

log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 1024
_GREETING_S = 10
_STALL_S = 60
"""Ticks that the other side may take nothing of what it asked for."""


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
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host.strip("[]"), port), family=family, backlog=64)
        except OSError as error:
            raise ExistsError(f"data port {host}:{port}: cannot be bound: {error.strerror}") from error
        self.port: int = self._listener.getsockname()[1]
        self._turns = Turns()
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._acceptor = threading.Thread(target=self._accept, name="bulk", daemon=True)

    def start(self) -> None:
        """Begins to answer."""
        self._acceptor.start()

    def stop(self, grace_s: float) -> None:
        """Ends all connections, and waits so long for each of their threads; blocks."""
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
            except OSError:
                if self._listener.fileno() < 0:
                    return
                continue
            with self._lock:
                if len(self._connections) >= _MOST_CONNECTIONS:
                    bulk.close(sock)
                    continue
                thread = threading.Thread(target=self._serve, args=(sock,), name="bulk", daemon=True)
                self._connections[sock] = thread
            thread.start()

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
        patience = _patience(_GREETING_S)
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
        data = bytes(bulk.receive(sock, length, _patience(_STALL_S)))
        try:
            request = FetchRequest.decode(data)
            with (
                self._handler.open_arrays(request.job, request.txid) as arrays,
                self._turns.stream(
                    sock.fileno(), request, are_whole=not isinstance(arrays, GrowingArrays)
                ) as sent,
            ):
                for message in messages_of(arrays, request):
                    kind = bulk.DATA if message else bulk.PULSE
                    head = bulk.HEADER.pack(kind, len(message), xxh3_64_intdigest(message))
                    bulk.send(sock, head, message, _patience(_STALL_S))
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

    def _refuse(self, sock: socket.socket, error: TenplexError) -> None:
        body = bulk.encode_error(error)
        bulk.send(sock, bulk.HEADER.pack(bulk.ERROR, len(body), xxh3_64_intdigest(body)), body, _patience(5))


class _GoneError(UnavailableError):
    """The caller is away, so that nobody hears why."""


def _are_whole(arrays: ArraySource) -> bool:
    return not isinstance(arrays, GrowingArrays)


def _wait() -> None:
    """For a connection that nobody uses now."""


def _patience(ticks: int) -> Callable[[], None]:
    left = iter(range(ticks))

    def tick() -> None:
        if next(left, None) is None:
            raise _GoneError(f"the other side does nothing for {ticks * bulk.TICK_S:g} s")

    return tick
