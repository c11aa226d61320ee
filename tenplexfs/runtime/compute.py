"""Long computations in a process of their own, so that the mount stays responsive.

A Python thread that computes holds up a 4 KiB read by 5 to 75 ms; planning and expanding layouts take longer.
A worker is spawned (never forked: gRPC threads live here), kept, and ends when this process does, however
that ends: its standard input closes. Both processes are ours, so pickle is safe between them.
"""

from __future__ import annotations

import pickle
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, ParamSpec, TypeVar, cast

import trio

from tenplexfs.errors import TimedOutError, UnavailableError

__all__ = ["Compute"]

P = ParamSpec("P")
R = TypeVar("R")

_LENGTH = struct.Struct("<Q")


class Compute:
    """Worker processes, each started at the first call that finds the others busy.

    Args:
        workers: How many; a call that takes long does not hold up what is short.
        deadline_s: For one call, and for the wait before it.
    """

    def __init__(self, *, workers: int = 2, deadline_s: float = 300.0) -> None:
        self._deadline_s = deadline_s
        self._workers = [_Worker() for _ in range(workers)]
        # The one that was used last first: it remembers what it built.
        self._free: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in reversed(self._workers):
            self._free.put(worker)

    async def __call__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns ``function(*args)``, computed in a worker; all of it must be picklable.

        A cancelled call is not waited for; its answer is thrown away.

        Raises:
            TenplexError: As ``function`` raised it.
            TimedOutError: It took longer than the deadline, and was ended.
            UnavailableError: The worker died twice in a row.
        """
        return await trio.to_thread.run_sync(self._call, function, args, kwargs, abandon_on_cancel=True)

    def _call(self, function: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        request = pickle.dumps((function, args, kwargs), pickle.HIGHEST_PROTOCOL)
        name = getattr(function, "__name__", "it")
        try:
            worker = self._free.get(timeout=self._deadline_s)
        except queue.Empty:
            raise TimedOutError(
                f"{name}: the {len(self._workers)} workers that plan are busy for {self._deadline_s:g} s"
            ) from None
        try:
            failed, answer = worker.call(request, name, self._deadline_s)
        finally:
            self._free.put(worker)
        if failed:
            raise answer
        return cast(R, answer)

    def close(self) -> None:
        """Ends the workers, also in the middle of a call."""
        for worker in self._workers:
            worker.close()


class _Worker:
    """One process, started again when it died. Calls run one after another."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._busy = threading.Lock()
        self._closed = False

    def call(self, request: bytes, name: str, deadline_s: float) -> tuple[bool, Any]:
        """Returns whether the call failed, and its answer."""
        late = threading.Event()

        def end() -> None:
            late.set()
            if self._process is not None:
                self._process.kill()

        with self._busy:
            timer = threading.Timer(deadline_s, end)
            timer.daemon = True
            timer.start()
            try:
                for _ in range(2):  # it was killed: once more, with a new one
                    try:
                        return self._exchange(request)
                    except (EOFError, BrokenPipeError):
                        self._end()
                        if late.is_set():
                            raise TimedOutError(f"{name}: took more than {deadline_s:g} s; ended") from None
            finally:
                timer.cancel()
        raise UnavailableError("the worker process that plans died twice; see the log")

    def _exchange(self, request: bytes) -> tuple[bool, Any]:
        process = self._process
        if process is None:
            if self._closed:
                raise UnavailableError("the daemon is stopping")
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "tenplexfs.runtime.compute"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        _send(process.stdin, request)
        return pickle.loads(_receive(process.stdout))  # type: ignore[no-any-return]

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):  # of what was never sent
                        stream.close()

    def close(self) -> None:
        """Ends it, also in the middle of a call."""
        self._closed = True
        if self._process is not None:
            self._process.kill()
        with self._busy:
            self._end()


def _send(stream: IO[bytes], message: bytes) -> None:
    stream.write(_LENGTH.pack(len(message)))
    stream.write(message)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    prefix = stream.read(_LENGTH.size)
    if len(prefix) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(prefix)
    message = stream.read(length)
    if len(message) < length:
        raise EOFError
    return message


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    while True:
        try:
            message = _receive(requests)
        except EOFError:
            return
        answer: tuple[bool, object]
        try:
            function, args, kwargs = pickle.loads(message)
            answer = (False, function(*args, **kwargs))
        except Exception as error:  # the boundary of this process: whatever it is travels to the caller
            answer = (True, error)
        _send(answers, pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))


if __name__ == "__main__":
    import signal

    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the terminal's Ctrl-C is for the daemon, which ends this one
    _serve(sys.stdin.buffer, sys.stdout.buffer)
