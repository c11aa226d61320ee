"""The asker's side of bytes over plain sockets. Blocking; for the threads of `PeerClient`."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
from xxhash import xxh3_64_intdigest

from tenplexfs.errors import CorruptError, TenplexError, TimedOutError, UnavailableError
from tenplexfs.rpc import bulk
from tenplexfs.rpc.connection import Cancel, Connection
from tenplexfs.rpc.errors import UnservedError
from tenplexfs.rpc.ranges import MESSAGE_BYTES

__all__ = ["BulkClient", "BulkStream"]

log = logging.getLogger(__name__)

_CONNECT_S = 3.0
_STALL_S = 30
_AVOID_S = 60.0
_MOST_IDLE = 8
_LIMITS = {bulk.DATA: MESSAGE_BYTES, bulk.ERROR: MESSAGE_BYTES, bulk.PULSE: 0}


class BulkStream:
    """One connection, for one request at a time; it goes back to its client for the next one."""

    def __init__(self, sock: socket.socket, target: str) -> None:
        self._sock = sock
        self._target = target
        self._head = memoryview(bytearray(bulk.HEADER.size))
        self._scratch = memoryview(bytearray(MESSAGE_BYTES))
        self._end_s = 0.0
        self._frame_s = 0.0

    def cancel(self) -> None:
        """Ends it, also for a thread that waits for it."""
        bulk.close(self._sock)

    def greet(self, greeting: bulk.Greeting) -> None:
        """Says who calls whom.

        Raises:
            TenplexError: It was refused.
        """
        said = msgspec.msgpack.encode(greeting)
        self._frame_s = time.monotonic()
        self._end_s = self._frame_s + _CONNECT_S
        bulk.send(self._sock, bulk.MAGIC + bulk.LENGTH.pack(len(said)), said, self._tick)
        if len(self._frame(0)):
            raise CorruptError(f"{self._target}: an answer that is none")

    def messages(self, request: bytes, nbytes: int, *, deadline_s: float) -> Iterator[memoryview]:
        """Yields the ``nbytes`` bytes of an encoded `wire.FetchRequest` in messages, each checked.

        What was yielded is valid until the next one is asked for.

        Raises:
            TenplexError: What the other side said, or that it is away, late or not to be believed.
        """
        self._frame_s = time.monotonic()
        self._end_s = self._frame_s + deadline_s
        bulk.send(self._sock, bulk.LENGTH.pack(len(request)), request, self._tick)
        left = nbytes
        while left:
            message = self._frame(left)
            left -= len(message)
            if len(message):
                yield message

    def _frame(self, limit: int) -> memoryview:
        """Returns the body of the next frame of bytes; empty for one that only says that more will come."""
        self._frame_s = time.monotonic()
        if self._frame_s > self._end_s:
            raise self._late()
        try:
            bulk.receive_into(self._sock, self._head, self._tick)
            kind, length, wanted = bulk.HEADER.unpack(self._head)
            if kind not in _LIMITS or length > _LIMITS[kind] or (kind == bulk.DATA and length > limit):
                raise CorruptError(f"got a message of {length} bytes of kind {kind}, {limit} left")
            body = self._scratch[:length]
            bulk.receive_into(self._sock, body, self._tick)
        except UnavailableError as error:
            raise UnavailableError(f"{self._target}: {error.message}") from error
        if length and (got := xxh3_64_intdigest(body)) != wanted:
            raise CorruptError(f"{self._target}: checksum of a message is {got:016x}, sent as {wanted:016x}")
        if kind == bulk.ERROR:
            raise bulk.decode_error(body)
        return body

    def _tick(self) -> None:
        now_s = time.monotonic()
        if now_s > self._end_s:
            raise self._late()
        if now_s > self._frame_s + _STALL_S:
            raise UnavailableError(f"no message within {_STALL_S} s")

    def _late(self) -> TimedOutError:
        return TimedOutError(f"{self._target}: Fetch: not done before the deadline")


class BulkClient:
    """Connections to one daemon. Thread-safe.

    Args:
        connection: To the same daemon; says where the port is.
        context: For TLS; None: in the clear.
        greeting: What each connection begins with.
    """

    def __init__(
        self, connection: Connection, *, context: ssl.SSLContext | None, greeting: bulk.Greeting
    ) -> None:
        self._connection = connection
        self._host = connection.target.rpartition(":")[0].strip("[]")
        self._context = context
        self._greeting = greeting
        self._lock = threading.Lock()
        self._idle: list[BulkStream] = []
        self._port: int | None = None
        self._avoid_until_s = 0.0

    def open(self, deadline_s: float, cancel: Cancel) -> BulkStream | None:
        """Returns a connection, or None where gRPC has to do.

        Raises:
            TenplexError: The daemon does not answer at all, or refuses.
        """
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if time.monotonic() < self._avoid_until_s:
                return None
            port = self._port
        if port is not None:
            with suppress(TenplexError):  # another one's by now, after a restart
                if (made := self._connect(port)) is not None:
                    return made
        port = self._ask(deadline_s, cancel)
        made = self._connect(port) if port else None
        with self._lock:
            self._port = port or None
            if made is None:
                self._avoid_until_s = time.monotonic() + _AVOID_S
        if made is None and port:
            log.warning("%s: port %d for bytes cannot be reached; gRPC carries them", self._host, port)
        return made

    def give_back(self, stream: BulkStream) -> None:
        """Keeps a connection, whose last request was answered in full, for the next one."""
        with self._lock:
            if len(self._idle) < _MOST_IDLE:
                self._idle.append(stream)
                return
        stream.cancel()

    def close(self) -> None:
        """Ends the connections that are not in use."""
        with self._lock:
            idle, self._idle = self._idle, []
        for stream in idle:
            stream.cancel()

    def _ask(self, deadline_s: float, cancel: Cancel) -> int:
        try:
            answers = self._connection.raw_stream(bulk.ENDPOINT, b"", deadline_s=deadline_s, cancel=cancel)
            return int(next(answers, b"0"))
        except UnservedError:  # an older daemon
            return 0
        except (UnavailableError, TimedOutError):
            raise
        except (TenplexError, ValueError):
            return 0

    def _connect(self, port: int) -> BulkStream | None:
        try:
            sock = socket.create_connection((self._host, port), _CONNECT_S)
            try:
                if self._context is not None:
                    sock = self._context.wrap_socket(sock, server_hostname=self._host)
                bulk.prepare(sock)
                made = BulkStream(sock, f"{self._host}:{port}")
                made.greet(self._greeting)
            except BaseException:
                bulk.close(sock)
                raise
        except (OSError, UnavailableError, TimedOutError):
            return None
        return made
