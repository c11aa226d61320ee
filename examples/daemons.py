"""Daemons of tenplexfs as child processes on this machine, for the demo and the benchmarks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

TENPLEXFS = [sys.executable, "-m", "tenplexfs"]
START_S = 30.0
STOP_S = 15.0


def run(*arguments: object) -> Any:  # noqa: ANN401 - JSON
    """Runs one command of tenplexfs and returns its JSON."""
    command = [*TENPLEXFS, *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr or json.loads(done.stdout)["error"]["message"]
        raise SystemExit(f"tenplexfs {' '.join(command[3:-1])}: exit {done.returncode}: {said}")
    return json.loads(done.stdout)


class Node:
    """One daemon, started at once, and again by `start` when it has ended; `wait` says when it is up."""

    def __init__(
        self,
        name: str,
        base: Path,
        store: Path,
        ports: dict[str, int],
        *,
        mount: bool,
        prefix: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.address = f"127.0.0.1:{ports[name]}"
        self.socket = base / f"{name}.sock"
        self.mount = base / "mnt" / name if mount else None
        self.store = store / name
        self._log = base / f"{name}.log"
        command = [
            *prefix,
            *TENPLEXFS,
            "serve",
            "--node",
            name,
            "--listen",
            self.address,
            "--registry",
            next(iter(ports)),
        ]
        command += ["--store", str(self.store), "--socket", str(self.socket), "--memory", "50%"]
        for peer, port in ports.items():
            command += [] if peer == name else ["--peer", f"{peer}=127.0.0.1:{port}"]
        if self.mount is None:
            command += ["--no-mount"]
        else:
            self.mount.mkdir(parents=True)
            command += ["--mount", str(self.mount)]
        self._command = command
        self.start()

    def start(self) -> None:
        """Starts the daemon."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> None:
        """Returns once the daemon answers."""
        deadline = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < deadline:
            status = [*TENPLEXFS, "status", "--socket", str(self.socket)]
            if subprocess.run(status, capture_output=True, check=False).returncode == 0:
                return
        raise SystemExit(f"{self.name} did not start:\n{self._log.read_text()}")

    def stop(self) -> None:
        """Ends the daemon, which takes its mount away."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.mount is not None and os.path.ismount(self.mount):
            subprocess.run(["fusermount3", "-uqz", str(self.mount)], check=False)


@contextmanager
def cluster(names: Sequence[str], *, mount: bool = True, prefix: Sequence[str] = ()) -> Iterator[list[Node]]:
    """Daemons that know each other, in directories of their own; all of it is gone afterwards.

    By SIGTERM too. ``prefix`` is what each command begins with, to start it elsewhere.
    """
    with ExitStack() as stack:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        stack.callback(signal.signal, signal.SIGTERM, before)
        base = Path(tempfile.mkdtemp(prefix="tenplexfs-"))
        store = Path(tempfile.mkdtemp(prefix="tenplexfs-", dir="/dev/shm"))
        for directory in (base, store):
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
        # As the daemon does for its default store, where it may.
        huge = ["mount", "-t", "tmpfs", "-o", "mode=0700,size=100%,huge=within_size", "tenplexfs-store"]
        if (
            os.geteuid() == 0
            and not subprocess.run([*huge, store], capture_output=True, check=False).returncode
        ):
            stack.callback(subprocess.run, ["umount", "-l", store], check=False)
        with ExitStack() as probes:
            sockets = [probes.enter_context(socket.socket()) for _ in names]
            for probe in sockets:
                probe.bind(("127.0.0.1", 0))
            ports = {name: probe.getsockname()[1] for name, probe in zip(names, sockets, strict=True)}
        nodes = []
        for name in names:
            nodes.append(Node(name, base, store, ports, mount=mount, prefix=prefix))
            stack.callback(nodes[-1].stop)
        for node in nodes:
            node.wait()
        yield nodes
