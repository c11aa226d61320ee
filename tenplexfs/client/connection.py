"""One conversation with the daemon: requests and answers over its Unix socket, with descriptors beside."""

from __future__ import annotations

import array
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tenplexfs.errors import InvalidError, TimedOutError, UnavailableError
from tenplexfs.formats import frames

__all__ = ["ANSWER_S", "PATIENCE_S", "Connection", "Place", "parse_place", "patiently", "socket_of"]

PATIENCE_S = 60.0
"""How long calls wait through a restart of the daemon."""

ANSWER_S = 60.0
"""How long a daemon may take for one answer; long waits are made of many."""

_RETRY_S = 0.1
_PIECE_BYTES = 1 << 20

T = TypeVar("T")


class Place:
    """What a path below a mount names; nothing is looked up, so that a dead mount does not matter.

    Attributes:
        mount: Where the daemon shows its tree.
        job: Name of the job.
        step: Of ``<job>@<step>``, else None.
        rank: Of ``model/<rank>``, else None.
    """

    __slots__ = ("job", "mount", "rank", "step")

    def __init__(self, mount: Path, job: str, step: int | None, rank: int | None) -> None:
        self.mount = mount
        self.job = job
        self.step = step
        self.rank = rank


def parse_place(path: str | os.PathLike[str]) -> Place:
    """Returns what ``<mount>/<job>`` or ``<mount>/<job>/model/<rank>`` names.

    Raises:
        InvalidError: It is neither.
    """
    absolute = Path(os.path.normpath(Path(path).absolute()))
    rank = None
    entry = absolute
    if absolute.parent.name == "model" and absolute.name.isdecimal():
        rank, entry = int(absolute.name), absolute.parent.parent
    job, at, step = entry.name.partition("@")
    if not job or (at and not step.isdecimal()) or (rank is None and job == "model"):
        raise InvalidError(f"{path}: need <mount>/<job>/model/<rank>, or <mount>/<job>")
    return Place(entry.parent, job, int(step) if at else None, rank)


def socket_of(mount: Path) -> str:
    """Returns the socket of the daemon that has ``mount``.

    Raises:
        UnavailableError: It is not there now.
    """
    try:
        return (mount / ".tenplexfs" / "endpoint").read_text().strip().removeprefix("unix:")
    except OSError as error:
        if given := os.environ.get("TENPLEXFS_SOCKET"):
            return given
        raise UnavailableError(f"{mount}: no daemon shows its tree there: {error.strerror}") from error


def patiently(work: Callable[[], T], *, patience_s: float = PATIENCE_S) -> T:
    """Returns what ``work`` does, again and again while the daemon is away.

    Raises:
        UnavailableError: It stayed away; the message says for how long it was waited.
    """
    end = time.monotonic() + patience_s
    while True:
        try:
            return work()
        except UnavailableError as error:
            if time.monotonic() + _RETRY_S > end:
                message = f"{error.message}; waited {patience_s:g} s"
                raise UnavailableError(message, **error.details) from error
        time.sleep(_RETRY_S)


class Connection:
    """For one thread of one process, for the time of a call.

    Raises:
        UnavailableError: Nobody listens on ``path``.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._ids = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(ANSWER_S)
        try:
            with self._reached():
                self._socket.connect(path)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends it; what was begun and not finished is dropped by the daemon."""
        self._socket.close()

    def shut_down(self) -> None:
        """Ends it from another thread: who waits for an answer is told that the daemon is gone."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def ask(self, op: str, **fields: object) -> dict[str, Any]:
        """Returns the answer to a request that brings no descriptors."""
        content, fds = self.ask_fds(op, **fields)
        _close_all(fds)
        return content

    def ask_fds(self, op: str, **fields: object) -> tuple[dict[str, Any], list[int]]:
        """Returns the answer to a request, and the descriptors beside it, which the caller closes.

        Raises:
            TenplexError: The daemon refuses.
            UnavailableError: The daemon went away.
        """
        self._ids += 1
        with self._reached():
            self._socket.sendall(frames.encode({"id": self._ids, "op": op, **fields}))
            message, fds = self._receive()
        try:
            return frames.outcome(message), fds
        except BaseException:
            _close_all(fds)
            raise

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        fds: list[int] = []
        try:
            prefix = self._read(frames.PREFIX_BYTES, fds)
            return frames.decode(self._read(frames.body_bytes(bytes(prefix)), fds)), fds
        except BaseException:
            _close_all(fds)
            raise

    def _read(self, count: int, fds: list[int]) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        done = 0
        room = socket.CMSG_SPACE(frames.MAX_FDS * 4)
        while done < count:
            if done:
                got = self._socket.recv_into(view[done:])
            else:  # descriptors come with the first byte
                chunk, ancillary, flags, _ = self._socket.recvmsg(
                    min(count, _PIECE_BYTES), room, socket.MSG_CMSG_CLOEXEC
                )
                for level, kind, payload in ancillary:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        fds.extend(array.array("i", payload[: len(payload) - len(payload) % 4]))
                if flags & socket.MSG_CTRUNC:
                    raise UnavailableError(f"daemon {self._path}: this process has no descriptors left")
                got = len(chunk)
                view[:got] = chunk
            if not got:
                raise UnavailableError(f"daemon {self._path}: ended in the middle of a call")
            done += got
        return data

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise TimedOutError(f"daemon {self._path}: no answer within {ANSWER_S:g} s") from error
        except OSError as error:
            raise UnavailableError(f"daemon {self._path}: not reached: {error.strerror or error}") from error


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
