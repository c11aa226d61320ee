"""The socket: requests in, answers out, slow and greedy clients kept short. What is asked is `http.edge`'s.

HTTP is h11's to read and write, but for the bodies whose length is announced: those go from the socket into
the buffer of whoever wants them. There is an `h11.Connection` for each request.
"""

from __future__ import annotations

import hmac
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from urllib.parse import parse_qsl, urlsplit

import h11
import trio

from tenplexfs.errors import DeniedError, ExistsError, InvalidError, TenplexError
from tenplexfs.http.message import Request, Response, Stream, text

__all__ = ["HttpServer"]

log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 256
_MAX_HEADER_BYTES = 64 << 10
_MAX_QUERY_FIELDS = 16
_HEADER_S = 30.0
_STALL_S = 30.0
"""So long the other side may let pass between two pieces of a body, or take for one piece of an answer."""
_LEAST_BYTES_S = 1 << 10
"""What a body must come with, after the first `_STALL_S`."""
_PIECE_BYTES = 1 << 18
_DRAIN_BYTES = 256 << 20
_FROM_WEB_PAGES = ("origin", "sec-fetch-site")

Handler = Callable[[Request], Awaitable[Response]]


class _GoneError(ConnectionError):
    """The other side is away, or might as well be."""


class HttpServer:
    """Listens until cancelled.

    Args:
        address: ``host:port``.
        context: For TLS, which asks callers for a certificate; None: in the clear.
        token: What callers must send as ``Authorization: Bearer``.
    """

    def __init__(
        self,
        address: str,
        handler: Handler,
        *,
        context: ssl.SSLContext | None = None,
        token: str | None = None,
    ) -> None:
        self._address = address
        self._handler = handler
        self._context = context
        self._token = token
        self._count = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves; started once it listens.

        Raises:
            ExistsError: The port is in use.
        """
        host, _, port = self._address.rpartition(":")
        try:
            listeners = await trio.open_tcp_listeners(int(port), host=host.strip("[]"), backlog=256)
        except OSError as error:
            raise ExistsError(f"http {self._address}: cannot be bound: {error.strerror or error}") from error
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, self._serve, listeners)
            task_status.started()

    async def _serve(self, socket: trio.SocketStream) -> None:
        self._count += 1
        wire = _Wire(socket, self._context)
        try:
            await wire.shake_hands()
            if self._count > _MOST_CONNECTIONS:
                line = f"{_MOST_CONNECTIONS} connections are open; come again"
                await _send(wire, h11.Connection(h11.SERVER), text(503, line))
                return
            while await self._exchange(wire):
                pass
        except (OSError, trio.BrokenResourceError):
            pass  # it went away
        except TenplexError as error:
            log.warning("http: an answer is broken off: %s", error)
        except Exception:
            log.exception("http: a connection failed")
        finally:
            self._count -= 1
            await wire.aclose()

    async def _exchange(self, wire: _Wire) -> bool:
        """Answers the next request; returns whether there may be another one."""
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEADER_BYTES)
        try:
            event = await _next_request(wire, connection)
        except h11.RemoteProtocolError as error:
            await _send(wire, connection, text(error.error_status_hint, f"no request of HTTP/1.1: {error}"))
            return False
        if event is None:
            return False
        body = _Body(wire, connection, event)
        response = await self._answer(event, body)
        try:
            await _send(wire, connection, response)
        finally:
            if isinstance(response.content, Stream):
                response.content.close()
        # Whoever still sends does not read the answer before it is done.
        return await body.drain() and connection.our_state is h11.DONE

    async def _answer(self, event: h11.Request, body: _Body) -> Response:
        """The one boundary: whatever a request leads to becomes an answer."""
        try:
            return await self._handler(self._request(event, body))
        except DeniedError as error:
            return text(error.http_status, error.message, **{"www-authenticate": "Bearer"})
        except TenplexError as error:
            return text(error.http_status, error.message)
        except OSError as error:
            if isinstance(error, _GoneError):
                raise
            log.exception("http: a request failed")
            return text(500, f"internal error: {error!r}; the daemon's log has more")
        except h11.RemoteProtocolError as error:
            return text(400, f"the body is not as announced: {error}")
        except Exception as error:
            log.exception("http: a request failed")
            return text(500, f"internal error: {type(error).__name__}; the daemon's log has more")

    def _request(self, event: h11.Request, body: _Body) -> Request:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        if any(name in headers for name in _FROM_WEB_PAGES):
            raise InvalidError("requests of web pages are refused")
        if self._token is not None:
            kind, _, word = headers.get("authorization", "").partition(" ")
            shown = word.strip().encode("latin-1") if kind.lower() == "bearer" else b""
            if not hmac.compare_digest(shown, self._token.encode()):
                raise DeniedError("the token is missing or wrong: need Authorization: Bearer TOKEN")
        try:
            parts = urlsplit(event.target.decode("ascii"))
            fields = parse_qsl(
                parts.query,
                keep_blank_values=True,
                errors="strict",
                max_num_fields=_MAX_QUERY_FIELDS,
            )
        except ValueError as error:
            raise InvalidError(f"the address is none: {error}") from None
        return Request(event.method.decode(), parts.path, dict(reversed(fields)), headers, body)


class _Wire:
    """A connection, and what came of it that nobody has taken yet."""

    def __init__(self, socket: trio.SocketStream, context: ssl.SSLContext | None) -> None:
        self._socket = socket
        self._tls = (
            None
            if context is None
            else trio.SSLStream(socket, context, server_side=True, https_compatible=True)
        )
        self.pending: bytes | bytearray = b""

    async def shake_hands(self) -> None:
        if self._tls is not None:
            with _patience(_HEADER_S):
                await self._tls.do_handshake()

    async def receive(self) -> bytes | bytearray:
        """Returns what comes next, nothing at the end."""
        if self.pending:
            data, self.pending = self.pending, b""
            return data
        return await self._some(_PIECE_BYTES)

    async def receive_into(self, view: memoryview) -> int:
        """Reads what comes next; returns how much."""
        if self.pending:
            count = min(len(self.pending), len(view))
            view[:count] = self.pending[:count]
            self.pending = self.pending[count:]
            return count
        if self._tls is None:
            return await self._socket.socket.recv_into(view)
        data = await self._some(len(view))
        view[: len(data)] = data
        return len(data)

    async def _some(self, limit_bytes: int) -> bytes | bytearray:
        try:
            return await (self._tls or self._socket).receive_some(limit_bytes)
        except trio.BrokenResourceError as error:
            raise _GoneError(str(error)) from error

    async def send(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for begin in range(0, len(view), _PIECE_BYTES):
            with _patience(_STALL_S):
                await (self._tls or self._socket).send_all(view[begin : begin + _PIECE_BYTES])

    async def aclose(self) -> None:
        with trio.move_on_after(1, shield=True):
            await trio.aclose_forcefully(self._tls or self._socket)


@contextmanager
def _patience(seconds: float) -> Iterator[None]:
    """Ends what takes too long as if the other side had gone."""
    with trio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise _GoneError("nothing came for too long")


class _Body:
    """Implements `http.message.Body`."""

    def __init__(self, wire: _Wire, connection: h11.Connection, event: h11.Request) -> None:
        self._wire = wire
        self._connection = connection
        headers = dict(event.headers)
        self._is_chunked = b"transfer-encoding" in headers
        self.size = None if self._is_chunked else int(headers.get(b"content-length", b"0"))
        self._left = self.size or 0
        self._chunk = memoryview(b"")
        self._is_done = self.size == 0
        self._waits = connection.they_are_waiting_for_100_continue
        self._begin_s = time.monotonic()
        self._count = 0
        if not self._is_chunked:
            wire.pending = connection.trailing_data[0]

    async def read_into(self, view: memoryview) -> int:
        if self._is_done or not view:
            return 0
        if self._waits:
            self._waits = False
            go_on = h11.InformationalResponse(status_code=100, headers=[])
            await self._wire.send(self._connection.send(go_on) or b"")
        with _patience(_STALL_S):
            count = await (self._read_chunk(view) if self._is_chunked else self._read(view))
        self._count += count
        spent_s = time.monotonic() - self._begin_s
        if spent_s > _STALL_S and self._count < _LEAST_BYTES_S * spent_s:
            raise _GoneError("it comes too slowly")
        return count

    async def _read(self, view: memoryview) -> int:
        count = await self._wire.receive_into(view[: self._left])
        if not count:
            raise _GoneError("it ended in the middle of a body")
        self._left -= count
        self._is_done = not self._left
        return count

    async def _read_chunk(self, view: memoryview) -> int:
        while not self._chunk:
            event = self._connection.next_event()
            if event is h11.NEED_DATA:
                data = await self._wire.receive()
                if not data:
                    raise _GoneError("it ended in the middle of a body")
                self._connection.receive_data(bytes(data))
            elif isinstance(event, h11.Data):
                self._chunk = memoryview(event.data)
            else:
                self._is_done = True
                self._wire.pending = self._connection.trailing_data[0]
                return 0
        count = min(len(view), len(self._chunk))
        view[:count], self._chunk = self._chunk[:count], self._chunk[count:]
        return count

    async def drain(self) -> bool:
        """Throws away what is left; returns whether it ended."""
        if self._is_done or self._waits:  # who waits for a word sends nothing
            return self._is_done
        block = memoryview(bytearray(_PIECE_BYTES))
        left = _DRAIN_BYTES
        try:
            while left > 0 and (count := await self.read_into(block)):
                left -= count
        except h11.RemoteProtocolError:
            return False
        return self._is_done


async def _next_request(wire: _Wire, connection: h11.Connection) -> h11.Request | None:
    """Returns what comes next; None when nothing does."""
    with trio.move_on_after(_HEADER_S):
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                return event
            if event is not h11.NEED_DATA:
                return None
            connection.receive_data(bytes(await wire.receive()))
    return None


async def _send(wire: _Wire, connection: h11.Connection, response: Response) -> None:
    content = response.content
    nbytes = content.nbytes if isinstance(content, Stream) else len(content)
    headers = [*response.headers.items(), ("content-length", str(nbytes))]
    head = h11.Response(status_code=response.status, headers=headers)
    await wire.send(connection.send(head) or b"")
    if isinstance(content, bytes):
        await wire.send(connection.send(h11.Data(data=content)) or b"")
    else:
        async with aclosing(content.blocks) as blocks:
            async for block in blocks:
                for part in connection.send_with_data_passthrough(h11.Data(data=block)) or ():  # type: ignore[arg-type]
                    await wire.send(part)
    await wire.send(connection.send(h11.EndOfMessage()) or b"")
