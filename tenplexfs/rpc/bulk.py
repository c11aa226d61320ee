"""Bytes between daemons over plain sockets, beside gRPC: what both sides say.

gRPC's Python layer copies every message on both sides and wakes several threads for it, which costs more than
the transfer itself (docs/decisions/0005). So ranges travel over a connection of their own: the asker says
`MAGIC` and a `Greeting`, then one `wire.FetchRequest` at a time, each after its length; the answer is frames,
a `HEADER` and a body. With certificates all of it is TLS, mutual, as for gRPC.

Where the port is, `ENDPOINT` tells over gRPC; where it cannot be reached, gRPC carries the bytes too.
"""

from __future__ import annotations

import errno
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress

import msgspec

from tenplexfs.errors import TenplexError, UnavailableError, error_from_code

__all__ = [
    "DATA",
    "ENDPOINT",
    "ERROR",
    "HEADER",
    "LENGTH",
    "MAGIC",
    "MAX_GREETING_BYTES",
    "PULSE",
    "TICK_S",
    "Greeting",
    "close",
    "decode_error",
    "encode_error",
    "prepare",
    "receive",
    "receive_into",
    "send",
]

ENDPOINT = "/tenplexfs.v1.Ranges/Endpoint"
"""Answers an empty message with the port, in decimal; 0 is none."""
MAGIC = b"tpxbulk1"
MAX_GREETING_BYTES = 16 << 10
LENGTH = struct.Struct("<I")
HEADER = struct.Struct("<BxxxIQ")
"""Kind, bytes of the body, xxh3_64 of it."""
DATA, ERROR, PULSE = 1, 2, 3
"""Bytes of the stream; why there are no more; still there (or: come in)."""
TICK_S = 1.0
"""How long a socket waits before it looks whether to go on waiting."""
_STEP_BYTES = 1 << 16


class Greeting(msgspec.Struct, frozen=True):
    """Who calls whom.

    Attributes:
        token: What the server wants to hear, if it does.
        node: Whose daemon it has to be.
    """

    token: str = ""
    node: str = ""


class _Refusal(msgspec.Struct, frozen=True):
    code: str
    message: str


def encode_error(error: TenplexError) -> bytes:
    """Returns the body of an `ERROR` frame."""
    return msgspec.msgpack.encode(_Refusal(error.code, error.message))


def decode_error(body: bytes | memoryview) -> TenplexError:
    """Returns the error that the body of a frame is."""
    try:
        found = msgspec.msgpack.decode(body, type=_Refusal)
    except (ValueError, msgspec.MsgspecError):
        return UnavailableError("an answer that is none")
    return error_from_code(found.code, found.message)


def prepare(sock: socket.socket) -> None:
    """Makes calls on ``sock`` block, for at most a tick."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(TICK_S)
        return
    # Python's own timeout would cost another system call for each one, and `MSG_WAITALL`.
    sock.settimeout(None)
    seconds = struct.pack("ll", int(TICK_S), int(TICK_S % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)


def receive_into(sock: socket.socket, view: memoryview, tick: Callable[[], None]) -> None:
    """Fills ``view``; calls ``tick``, which may raise, whenever it has to wait for the rest.

    Raises:
        UnavailableError: The connection ended.
    """
    flags = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
    while len(view):
        try:
            count = sock.recv_into(view, 0, flags)
        except (BlockingIOError, TimeoutError):
            tick()
            continue
        except OSError as error:
            raise _ended(error) from error
        if not count:
            raise UnavailableError("the connection ended")
        view = view[count:]
        if len(view):  # also where a little comes all the time
            tick()


def receive(sock: socket.socket, nbytes: int, tick: Callable[[], None]) -> bytearray:
    """Returns the next ``nbytes``, in memory that is taken as they come; as `receive_into`."""
    data = bytearray()
    while len(data) < nbytes:
        part = bytearray(min(nbytes - len(data), _STEP_BYTES))
        receive_into(sock, memoryview(part), tick)
        data += part
    return data


def send(sock: socket.socket, head: bytes, body: bytes | memoryview, tick: Callable[[], None]) -> None:
    """Sends both; calls ``tick``, which may raise, whenever it has to wait for the other side.

    Raises:
        UnavailableError: The connection ended.
    """
    parts = [memoryview(head), memoryview(body)]
    secure = isinstance(sock, ssl.SSLSocket)
    while parts:
        try:
            # An SSL socket has no sendmsg.
            count = sock.send(parts[0]) if secure else sock.sendmsg(parts)
        except (BlockingIOError, TimeoutError):
            tick()
            continue
        except OSError as error:
            raise _ended(error) from error
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][count:]
            tick()


def close(sock: socket.socket) -> None:
    """Ends the connection, also for a thread that waits on it."""
    with suppress(OSError):
        # of the socket itself: a farewell in TLS could block
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    sock.close()


def _ended(error: OSError) -> UnavailableError:
    reason = (
        errno.errorcode.get(error.errno or 0, "") if not isinstance(error, ssl.SSLError) else error.reason
    )
    return UnavailableError(f"the connection ended: {error.strerror or reason or error}")
