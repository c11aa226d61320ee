"""Long computations in a process of their own, so that the mount stays responsive.

A Python thread that computes holds up a 4 KiB read by 5 to 75 ms; planning and expanding layouts take longer.
The worker is spawned (never forked: gRPC threads live here), kept, and ends when this process does, however
that ends: its standard input closes. Both processes are ours, so pickle is safe between them.
"""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, ParamSpec, TypeVar, cast

import trio

from tenplexfs.errors import UnavailableError

__all__ = ["Compute"]

P = ParamSpec("P")
R = TypeVar("R")

_LENGTH = struct.Struct("<Q")


class Compute:
    """One worker process, started at the first call. Calls run one after another."""

    def __init__(self) -> None:
        self._worker: subprocess.Popen[bytes] | None = None
        self._busy = threading.Lock()
        self._closed = False

    async def __call__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns ``function(*args)``, computed in the worker; all of it must be picklable.

        A cancelled call is not waited for; its answer is thrown away.

        Raises:
            TenplexError: As ``function`` raised it.
            UnavailableError: The worker died twice in a row.
        """
        return await trio.to_thread.run_sync(self._call, function, args, kwargs, abandon_on_cancel=True)

    def _call(self, function: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        request = pickle.dumps((function, args, kwargs), pickle.HIGHEST_PROTOCOL)
        with self._busy:
            try:
                failed, answer = self._exchange(request)
            except (
                EOFError,
                BrokenPipeError,
            ):  # it was killed: once more, with a new one
                self._end()
                try:
                    failed, answer = self._exchange(request)
                except (EOFError, BrokenPipeError) as error:
                    self._end()
                    raise UnavailableError("the worker process that plans died twice; see the log") from error
        if failed:
            raise answer
        return cast(R, answer)

    def _exchange(self, request: bytes) -> tuple[bool, Any]:
        worker = self._worker
        if worker is None:
            if self._closed:
                raise UnavailableError("the daemon is stopping")
            worker = self._worker = subprocess.Popen(
                [sys.executable, "-m", "tenplexfs.runtime.compute"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert worker.stdin is not None
        assert worker.stdout is not None
        _send(worker.stdin, request)
        return pickle.loads(_receive(worker.stdout))  # type: ignore[no-any-return]

    def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            worker.wait()
            for stream in (worker.stdin, worker.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):  # of what was never sent
                        stream.close()

    def close(self) -> None:
        """Ends the worker, also in the middle of a call."""
        self._closed = True
        if self._worker is not None:
            self._worker.kill()
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
