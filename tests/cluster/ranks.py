"""Training processes of the save tests, one for each rank, told what to do."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.cluster.daemons import Daemon


class Rank:
    """A training process."""

    def __init__(self, node: Daemon, rank: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.rank", str(node.mount / "gpt"), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RANK": str(rank)},
        )

    def ask(self, *what: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 60)[0], "no answer"
        return json.loads(self.process.stdout.readline())

    def do(self, *what: object) -> Any:
        self.ask(*what)
        return self.hear()

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait()


@contextmanager
def ranks(*nodes: Daemon) -> Iterator[list[Rank]]:
    """One process for each rank, on its node."""
    made = [Rank(node, rank) for rank, node in enumerate(nodes)]
    try:
        yield made
    finally:
        for each in made:
            each.end()
            assert each.process.stdin is not None and each.process.stdout is not None
            each.process.stdin.close()
            each.process.stdout.close()


def all_do(group: list[Rank], *what: object) -> list[Any]:
    for each in group:
        each.ask(*what)
    return [each.hear() for each in group]
