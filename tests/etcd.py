"""A real etcd on free ports of this machine, which can be killed and started again."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from pathlib import Path

from tests.ports import free_port

PATIENCE_S = 20.0


class EtcdServer:
    def __init__(self, base: Path, *flags: str, scheme: str = "http") -> None:
        self.base = base
        self.port = free_port()
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        peer = f"http://127.0.0.1:{free_port()}"
        own = {
            "data-dir": str(base / "data"),
            "listen-client-urls": self.url,
            "advertise-client-urls": self.url,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "log-outputs": "stderr",
            "logger": "zap",
        }
        self.command = ["etcd", *(f"--{name}={value}" for name, value in own.items()), *flags]
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, *, wait: bool = True) -> None:
        with (self.base / "etcd.log").open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        deadline = time.monotonic() + PATIENCE_S
        while wait and not self.answers():
            assert self.process.poll() is None, (self.base / "etcd.log").read_text()
            assert time.monotonic() < deadline, (self.base / "etcd.log").read_text()
            time.sleep(0.05)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def answers(self) -> bool:
        try:
            self.ask("kv/range", {"key": "AA=="})
        except OSError:
            return False
        return True

    def ask(self, path: str, body: object) -> dict[str, object]:
        request = urllib.request.Request(f"{self.url}/v3/{path}", json.dumps(body).encode())
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=5) as reply:
            return json.load(reply)

    def compact(self) -> int:
        """Makes etcd forget all but the present."""
        revision = self.ask("kv/range", {"key": "AA=="})["header"]["revision"]
        self.ask("kv/compaction", {"revision": revision, "physical": True})
        return int(revision)
