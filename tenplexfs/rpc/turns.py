"""Streams that leave one host for several others go on about evenly.

Where the link is the limit, TCP alone gives one stream three times what it gives another, for seconds. Nodes
that pass on what they get to each other wait for the one that gets it last, so a stream that is ahead of the
others waits for a moment. One that is far behind is slow for reasons of its own, and nobody waits for it.
"""

from __future__ import annotations

import fcntl
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tenplexfs.core.snapshot import JobName, TxId
from tenplexfs.rpc.wire import FetchRequest

__all__ = ["Turns"]

_LONG_BYTES = 4 << 20
_AHEAD_BYTES = 1 << 20
_AHEAD_PARTS = 16
_FAR = 4
_MOST_WAIT_S, _LOOK_S = 0.2, 0.01


@dataclass(eq=False)
class _Stream:
    fd: int
    ahead_bytes: int
    sent_bytes: int

    def delivered_bytes(self) -> int:
        """Returns what the other host has, as far as this one knows."""
        queued = struct.unpack("i", fcntl.ioctl(self.fd, termios.TIOCOUTQ, bytes(4)))[0]
        return self.sent_bytes - int(queued)


class Turns:
    """Groups of streams. Thread-safe.

    Args:
        clock: Seconds that never go back.
        sleep: Waits for so many.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._groups: dict[tuple[JobName, TxId], list[_Stream]] = {}

    @contextmanager
    def stream(self, fd: int, request: FetchRequest, *, are_whole: bool) -> Iterator[Callable[[int], None]]:
        """Gives what is called after each message with its bytes, and waits when the stream is ahead.

        Args:
            fd: The stream's socket.
            request: What it carries. A short one waits for nobody.
            are_whole: Its arrays are there; what is only passed on goes as it comes.
        """
        nbytes, group = request.nbytes - request.start, (request.job, request.txid)
        if nbytes < _LONG_BYTES or not are_whole:
            yield lambda _: None
            return
        mine = _Stream(fd, max(_AHEAD_BYTES, nbytes // _AHEAD_PARTS), 0)
        with self._lock:
            others = self._groups.setdefault(group, [])
            mine.sent_bytes = min((other.delivered_bytes() for other in others), default=0)
            others.append(mine)

        def sent(nbytes: int) -> None:
            mine.sent_bytes += nbytes
            if len(others) > 1:
                self._wait(mine, others)

        try:
            yield sent
        finally:
            with self._lock:
                others.remove(mine)
                if not others:
                    self._groups.pop(group, None)

    def _wait(self, mine: _Stream, all_of_them: list[_Stream]) -> None:
        until_s = self._clock() + _MOST_WAIT_S
        while self._clock() < until_s:
            with self._lock:
                behind = [
                    mine.sent_bytes - other.delivered_bytes() for other in all_of_them if other is not mine
                ]
            near = [lag for lag in behind if lag < _FAR * mine.ahead_bytes]
            if max(near, default=0) <= mine.ahead_bytes:
                return
            self._sleep(_LOOK_S)
