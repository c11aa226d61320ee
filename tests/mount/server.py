"""Serves a mount of memory snapshots for the tests, told what to do by JSON lines on stdin.

It leaves when stdin closes, so that no mount outlives the tests, however they end.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path

import trio

from tenplexfs.core.layout import TensorEntry
from tenplexfs.core.snapshot import JobName
from tenplexfs.errors import TenplexError
from tenplexfs.fuse.mount import Mount
from tenplexfs.runtime.namespace import Control, Namespace, StoreNumbers
from tests.fuse.memory import HUGE, MemoryView, small_ptc


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Server:
    def __init__(self) -> None:
        self.status = b"{}"
        self.job_names: list[JobName] = []
        control = Control(
            files={"version": lambda: b"0.1.0\n", "status.json": lambda: self.status},
            jobs=lambda: self.job_names,
            job_files={
                "stop": lambda job: b"-\n",
                "status.json": lambda job: b'{"job": "%s"}' % job.encode(),
            },
        )
        self.namespace = Namespace(control, lambda: StoreNumbers(1 << 30, 1 << 28), clock_ns=time.time_ns)
        self.ptcs = {}
        self.gate = trio.Event()

    def ptc(self, tp: int, big: int, count: int, names: tuple[str, ...], huge: bool):
        extra = tuple(TensorEntry(name, (2,), "float32") for name in names) + ((HUGE,) if huge else ())
        if big:
            extra += (TensorEntry("big", (big,), "uint8"),)
        if count:
            extra += (TensorEntry("many/{i}", (2,), "float32", count=(("i", count),)),)
        key = (tp, big, count, names, huge)
        if key not in self.ptcs:
            self.ptcs[key] = small_ptc(tp, extra=extra)
        return self.ptcs[key]

    async def publish(
        self,
        *,
        job="gpt",
        version=0,
        tp=2,
        big=0,
        count=0,
        names=(),
        huge=False,
        remote=-1,
        fails=False,
        state=True,
    ) -> int:
        ptc = self.ptc(tp, big, count, tuple(names), huge)
        view = MemoryView(job, version, ptc, remote_rank=remote, gate=None if fails else self.gate)
        if job not in self.job_names:
            self.job_names.append(JobName(job))
        return await self.namespace.publish_and_invalidate(JobName(job), view, ptc if state else None)

    async def storm(self, *, first: int, last: int, grace_s: float, job: str = "gpt") -> None:
        """Publishes versions one after the other; each is freed when it was past for ``grace_s``."""
        past: deque[tuple[float, int]] = deque()
        for version in range(first, last):
            slot = await self.publish(job=job, version=version)
            self.status = str(version).encode()
            past.append((trio.current_time(), slot - 1))
            while past[0][0] + grace_s < trio.current_time():
                self.namespace.free(past.popleft()[1])
            await trio.sleep(0.003)

    async def retract(self, *, job: str) -> None:
        self.job_names.remove(JobName(job))
        await self.namespace.retract_and_invalidate(JobName(job))

    async def free(self, *, slot: int) -> None:
        self.namespace.free(slot)

    async def handles(self, *, slot: int) -> tuple[int, int]:
        return self.namespace.open_handles(slot)

    async def counts(self) -> dict[str, int]:
        """What a leak would show in."""
        files = sum(handles.files for handles in map(self.namespace.open_handles, self.namespace._trees))
        return {
            "trees": len(self.namespace._trees),
            "files": files + len(self.namespace._files) + len(self.namespace._orphans),
            "descriptors": descriptors(),
        }

    async def waiting(self) -> int:
        return self.gate.statistics().tasks_waiting

    async def open_gate(self) -> None:
        self.gate.set()


async def commands(server: Server, stop: trio.CancelScope) -> None:
    async def one(line: str) -> None:
        request = json.loads(line)
        result = await getattr(server, request.pop("op"))(**request)
        say(result)

    async with trio.open_nursery() as nursery:
        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            nursery.start_soon(one, line)
    stop.cancel()


async def main(path: Path, grace_s: float) -> None:
    server = Server()
    with trio.open_signal_receiver(signal.SIGTERM) as signals, trio.CancelScope() as stop:
        async with (
            Mount(server.namespace, path, grace_s=grace_s, allow_other="allow_other" in sys.argv) as mount,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(commands, server, stop)
            say(str(mount.path))

            async def on_signal() -> None:
                async for _ in signals:
                    stop.cancel()

            async def on_end() -> None:
                await mount.ended.wait()
                stop.cancel()

            nursery.start_soon(on_signal)
            nursery.start_soon(on_end)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    sys.setswitchinterval(0.0005)
    if sys.argv[3:4] not in ([], ["allow_other"]):  # to be somebody else, with what is imported already
        os.setgroups([])
        os.setgid(int(sys.argv[3]))
        os.setuid(int(sys.argv[3]))
    try:
        trio.run(main, Path(sys.argv[1]), float(sys.argv[2]))
    except TenplexError as error:
        say({"error": type(error).__name__, "message": error.message})
        os._exit(1)
    # A thread may still be reading stdin.
    os._exit(0)
