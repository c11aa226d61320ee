"""Real daemons as processes, cleaned up whatever a test does to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tenplexfs.core.build import build_ptc
from tenplexfs.core.dtypes import dtype_of
from tenplexfs.formats.layout_json import parse_layout
from tests.ports import free_port
from tests.runtime.cluster import shard_of

COMMAND = [sys.executable, "-m", "tenplexfs"]
PATIENCE_S = 30.0


def until(what: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Returns once ``what`` holds; polls, for processes have nothing to wait on."""
    deadline = time.monotonic() + patience_s
    while not what():
        assert time.monotonic() < deadline, f"not within {patience_s} s: {what}"
        time.sleep(0.02)


def is_mounted(path: Path) -> bool:
    return any(line.split()[4] == str(path) for line in Path("/proc/self/mountinfo").read_text().splitlines())


class Daemon:
    """One node. `start` may be called again after `kill` or `stop`."""

    def __init__(self, base: Path, name: str, ports: Mapping[str, int], **flags: str) -> None:
        self.name = name
        self.mount = base / f"{name}.mnt"
        self.store = base / f"{name}.store"
        self.socket = base / f"{name}.sock"
        self.log = base / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        own = {
            "node": name,
            "mount": str(self.mount),
            "listen": f"127.0.0.1:{ports[name]}",
            "registry": min(ports),
            "store": str(self.store),
            "socket": str(self.socket),
            "memory": "64MiB",
            **flags,
        }
        self.arguments = [
            part for flag, value in own.items() for part in (f"--{flag.replace('_', '-')}", value)
        ]
        for peer, port in ports.items():
            self.arguments += [] if peer == name else ["--peer", f"{peer}=127.0.0.1:{port}"]

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*COMMAND, "serve", *self.arguments], stdout=log, stderr=log)

    def wait(self) -> None:
        def ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()
            try:
                return is_mounted(self.mount) and bool((self.mount / ".tenplexfs" / "version").read_text())
            except OSError:  # the mount of the one before, dead
                return False

        until(ready)

    def refused(self) -> str:
        """Starts a daemon that must not start; returns what it says."""
        done = subprocess.run(
            [*COMMAND, "serve", *self.arguments], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 1, done
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("tenplexfs: ")]
        return line

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """Stops it where it is, without an end."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def stop(self) -> float:
        """Asks it to end; returns how long it took."""
        assert self.process is not None
        begin = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_S) == 0, self.log.read_text()
        return time.monotonic() - begin

    def clean(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        while is_mounted(self.mount):
            subprocess.run(["umount", "-l", str(self.mount)], check=True)

    def run(self, *arguments: str) -> tuple[int, Any, str]:
        """Runs a command against it; returns status, JSON, and the line on stderr."""
        command = [*COMMAND, "--socket", str(self.socket), "--json", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        text = done.stdout.strip() or done.stderr.strip()
        return done.returncode, json.loads(text) if text.startswith("{") else text, done.stderr

    def ok(self, *arguments: str) -> Any:
        status, content, error = self.run(*arguments)
        assert status == 0, (arguments, content, error, self.log.read_text())
        return content

    def job(self, job: str = "gpt") -> dict[str, Any]:
        return json.loads((self.mount / job / "job.json").read_text())


class Daemons:
    """Several nodes; the first one serves the registry."""

    def __init__(self, base: Path, count: int, **flags: str) -> None:
        self.base = base
        self.ports = {f"node{n}": free_port() for n in range(count)}
        self.nodes = [Daemon(base, name, self.ports, **flags) for name in self.ports]

    def __enter__(self) -> Daemons:
        try:
            for node in self.nodes:
                node.start()
            for node in self.nodes:
                node.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.clean()


def check(mount: Path, job: str, whole: Mapping[str, np.ndarray]) -> int:
    """Compares every file of every rank, and every whole tensor, with numpy's slices; returns how many."""
    root = mount / job
    ptc = build_ptc(parse_layout((root / "layout.json").read_bytes()))
    count = 0
    for rank in range(ptc.world_size):
        for path in ptc.rank_paths(rank):
            file = root / "model" / str(rank) / f"{path}.npy"
            equal(file, shard_of(ptc, rank, path, whole[ptc.tensors[path].path]))
            count += 1
        shown = sorted(
            p.relative_to(root / "model" / str(rank)) for p in (root / "model" / str(rank)).rglob("*.npy")
        )
        assert [str(p)[:-4] for p in shown] == sorted(ptc.rank_paths(rank), key=lambda p: Path(f"{p}.npy"))
    for path, tensor in ptc.tensors.items():
        equal(root / "full" / f"{path}.npy", whole[tensor.path])
        count += 1
    return count


def equal(file: Path, wanted: np.ndarray) -> None:
    found = np.load(file)
    assert found.shape == wanted.shape, file
    assert found.tobytes() == wanted.tobytes(), file
    assert os.getxattr(file, "user.tenplexfs.dtype").decode() in (wanted.dtype.name, wanted.dtype.str), file
    assert dtype_of(os.getxattr(file, "user.tenplexfs.dtype").decode()) == wanted.dtype
    assert file.stat().st_size == len(file.read_bytes())
