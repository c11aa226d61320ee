"""Groups of gloo ranks for tests: a process that has imported torch forks them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cluster.daemons import Daemon


class Ranks:
    """Groups of ranks, one after the other, that run the checks of a module."""

    def __init__(self, module: str = "tests.torch.dcp_checks") -> None:
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "GLOO_SOCKET_IFNAME": "lo"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.torch.ranks", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        )

    def run(self, check: str, where: Path, nodes: list[Daemon], **arguments: Any) -> list[Any]:
        """Runs ``check`` with one rank for each of ``nodes``, which is its node."""
        return self._run(check, where, nodes, len(nodes), arguments)

    def run_alone(self, check: str, where: Path, node: Daemon, **arguments: Any) -> Any:
        """Runs ``check`` without a process group."""
        return self._run(check, where, [node], 0, arguments)[0]

    def _run(self, check: str, where: Path, nodes: list[Daemon], world: int, arguments: Any) -> list[Any]:
        mounts = [str(node.mount) for node in nodes]
        order = {
            "check": check,
            "world": world,
            "mounts": mounts,
            "where": str(where),
            "arguments": arguments,
        }
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        results = json.loads(self.process.stdout.readline())
        failures = [
            f"rank {rank}: {each['failure']}" for rank, each in enumerate(results) if "failure" in each
        ]
        logs = "\n".join(node.log.read_text()[-2000:] for node in dict.fromkeys(nodes))
        assert not failures, "\n".join([*failures, logs])
        return [each["ok"] for each in results]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
