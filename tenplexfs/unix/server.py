"""The socket: who may speak, frames in and out, errors as answers. What is asked is `unix.session`'s."""

from __future__ import annotations

import array
import logging
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import trio

from tenplexfs.errors import ExistsError, InvalidError, PreconditionError, TenplexError
from tenplexfs.formats import frames

__all__ = ["Answer", "Session", "UnixServer"]

log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 1024
_PIECE_BYTES = 1 << 20

Answer = tuple[Mapping[str, object], Sequence[int]]
"""What answers a request, and descriptors that go with it; they are closed once they are sent."""


class Session(Protocol):
    """One connection. Its requests come one after another."""

    async def handle(self, op: str, message: Mapping[str, Any]) -> Answer:
        """Returns the answer to a request.

        Raises:
            TenplexError: It is refused.
        """
        ...

    async def close(self) -> None:
        """The connection ended, however."""
        ...


class UnixServer:
    """Listens on ``path`` until cancelled.

    Args:
        path: Of the socket; a dead one there is replaced.
        session: Makes a session for each connection, given the process on the other side (0: not to be seen).
    """

    def __init__(self, path: Path, session: Callable[[int], Session]) -> None:
        self._path = path
        self._session = session

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves; started once it listens.

        Raises:
            ExistsError: Somebody listens there.
        """
        with self._listen() as listener:
            try:
                async with trio.open_nursery() as nursery:
                    task_status.started()
                    while True:
                        connection, _ = await listener.accept()
                        nursery.start_soon(self._serve, connection)
            finally:
                self._path.unlink(missing_ok=True)

    def _listen(self) -> trio.socket.SocketType:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(self._path))
            except FileNotFoundError:
                pass
            except ConnectionRefusedError:
                self._path.unlink(missing_ok=True)
            except OSError as error:
                raise PreconditionError(f"socket {self._path}: {error.strerror}") from error
            else:
                raise ExistsError(f"socket {self._path}: another daemon listens there")
        listener = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw = socket.socket(fileno=os.dup(listener.fileno()))
        with raw:
            before = os.umask(0o177)
            try:
                raw.bind(str(self._path))
            except OSError as error:
                raise PreconditionError(f"socket {self._path}: {error.strerror or error}") from error
            finally:
                os.umask(before)
            raw.listen(_BACKLOG)
        return listener

    async def _serve(self, connection: trio.socket.SocketType) -> None:
        pid, uid = _peer(connection)
        session = self._session(pid)
        with connection:
            try:
                if uid not in (os.geteuid(), 0):
                    raise PreconditionError(f"uid {uid}: the daemon answers uid {os.geteuid()} and root")
                while (message := await _receive(connection)) is not None:
                    await self._answer(connection, session, message)
            except TenplexError as error:  # no frame, or nobody of ours: whatever follows is noise
                with suppress(OSError):
                    await _send(connection, frames.encode(frames.failure(0, error)), ())
            except OSError:
                pass  # it went away
            finally:
                with trio.CancelScope(shield=True):
                    await session.close()

    async def _answer(
        self, connection: trio.socket.SocketType, session: Session, message: Mapping[str, Any]
    ) -> None:
        """The one boundary: whatever a request leads to becomes an answer."""
        fds: Sequence[int] = ()
        try:
            op = message.get("op")
            if not isinstance(op, str):
                raise InvalidError(f"frame: op {op!r}: need a name")
            try:
                content, fds = await session.handle(op, message)
                reply = frames.encode(frames.answer(message["id"], content))
            except TenplexError as error:
                reply = frames.encode(frames.failure(message["id"], error))
            except Exception as error:
                log.exception("socket: %s failed", op)
                wrapped = TenplexError(f"{op}: failed in the daemon, see its log: {error!r}")
                reply = frames.encode(frames.failure(message["id"], wrapped))
            await _send(connection, reply, fds)
        finally:
            for fd in fds:
                os.close(fd)


def _peer(connection: trio.socket.SocketType) -> tuple[int, int]:
    """Returns the pid and the uid of the other side."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


async def _receive(connection: trio.socket.SocketType) -> dict[str, Any] | None:
    """Returns the next message, or None when the other side has ended, in the middle of one too."""
    prefix = await _read(connection, frames.PREFIX_BYTES)
    if prefix is None:
        return None
    body = await _read(connection, frames.body_bytes(bytes(prefix)))
    return None if body is None else frames.decode(body)


async def _read(connection: trio.socket.SocketType, count: int) -> bytearray | None:
    data = bytearray(min(count, _PIECE_BYTES))  # what is announced and never comes takes no room
    done = 0
    while done < count:
        if done == len(data):
            data.extend(bytes(min(count - done, len(data))))
        with memoryview(data) as view:
            got = await connection.recv_into(view[done:])
        if not got:
            return None
        done += got
    return data


async def _send(connection: trio.socket.SocketType, frame: bytes, fds: Sequence[int]) -> None:
    view = memoryview(frame)
    if fds:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        view = view[await connection.sendmsg([view[:_PIECE_BYTES]], [rights]) :]
    while view:
        view = view[await connection.send(view) :]
