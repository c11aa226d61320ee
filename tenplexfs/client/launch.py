"""``tenplexfs run``: this node's ranks of a job, on top of torchrun, started again for each new layout.

The committed layout says which ranks are here, and that overrides the order in which torchrun counts. All
ranks of a start load one snapshot, which `tenplexfs.load`, `Reader` and `save` take from the environment.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tenplexfs import EXIT_RECONFIGURE
from tenplexfs.client.commands import find_mount
from tenplexfs.client.jobs import env
from tenplexfs.errors import NotFoundError, TenplexError, UsageError

__all__ = ["main"]

_POLL_S = 0.5


@dataclass(frozen=True)
class _Start:
    """One start of this node's ranks.

    Attributes:
        ranks: Which are here.
        world_size: How many there are on all nodes.
        nodes_count: On how many nodes.
        generation, step, snapshot: Of what they load; None for a job that is not there yet.
    """

    ranks: tuple[int, ...]
    world_size: int
    nodes_count: int
    generation: int | None = None
    step: int | None = None
    snapshot: str | None = None


def main(arguments: Sequence[str]) -> int:
    """Runs a job until it ends; returns its exit status."""
    given = _parse(arguments)
    try:
        return _Launcher(given).run()
    except TenplexError as error:
        sys.stderr.write(f"tenplexfs run: {error.message}\n")
        return error.exit_status


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tenplexfs run", description="Run this node's ranks of a job, again for each new layout."
    )
    parser.add_argument("--job", required=True, help="name of the job; its first save may make it")
    parser.add_argument(
        "--mount",
        type=Path,
        help="mount of the daemon; else TENPLEXFS_MOUNT, or around the working directory",
    )
    parser.add_argument("--nproc", type=int, default=1, help="ranks of a job that is not there yet (1)")
    parser.add_argument(
        "--rendezvous", metavar="HOST:PORT", help="where nodes meet, the same on all; needed with several"
    )
    parser.add_argument(
        "--max-failures", type=int, default=3, help="failures without a new step after which to give up (3)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- train.py ...")
    given = parser.parse_args(arguments)
    given.command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not given.command:
        parser.error("need the training script, as in: tenplexfs run --job gpt -- train.py")
    return given


class _Launcher:
    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._path = (given.mount.absolute() if given.mount else find_mount()) / given.job
        self._process: subprocess.Popen[bytes] | None = None
        self._ended_by: int | None = None

    def run(self) -> int:
        """Starts the ranks until they end for good."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._forward)
        failures = 0
        start = self._first()
        while True:
            status = self._run_once(start)
            if self._ended_by is not None:
                return 128 + self._ended_by
            if status == 0:
                return 0
            before = start
            start = self._next(before, stopped=status == EXIT_RECONFIGURE)
            if status != EXIT_RECONFIGURE:
                moved = (start.generation, start.step) != (before.generation, before.step)
                failures = 1 if moved else failures + 1
                if failures > self._given.max_failures:
                    self._say(f"failed {failures} times without a new step: giving up")
                    return status
                self._say(f"failed with status {status}: starting again from step {start.step}")

    def _first(self) -> _Start:
        try:
            now = env(self._path)
        except NotFoundError:
            count = self._given.nproc
            return _Start(tuple(range(count)), count, 1)
        return self._settled(now, None)

    def _next(self, before: _Start, *, stopped: bool) -> _Start:
        if before.generation is None or not stopped:
            return self._first()
        return self._settled(env(self._path), before.generation)

    def _settled(self, now: dict[str, Any], old: int | None) -> _Start:
        """Returns how to start, once nothing is being changed and there are ranks here."""
        said = False
        while True:
            quiet = now["state"] in ("ready", "empty") and now["stop"] is None
            if quiet and now["ranks"]:
                break
            if not said and old is not None:
                self._say(f"stopped at step {now['step']}; waiting for the next layout")
                said = True
            time.sleep(_POLL_S)
            now = env(self._path)
        nodes = sum(1 for ranks in now["nodes"].values() if ranks)
        loads = now["snapshot"] if now["step"] is not None else None
        return _Start(tuple(now["ranks"]), now["world_size"], nodes, now["generation"], now["step"], loads)

    def _run_once(self, start: _Start) -> int:
        """Returns 0, `EXIT_RECONFIGURE` when all ranks ended so, or how they failed."""
        where = f"generation {start.generation}, step {start.step}" if start.generation else "a new job"
        self._say(f"ranks {', '.join(map(str, start.ranks))} of {start.world_size}: {where}")
        with tempfile.TemporaryDirectory(prefix="tenplexfs-run-") as notes:
            command = [*self._torchrun(start), "-m", "tenplexfs.client.worker", *self._given.command]
            self._process = subprocess.Popen(command, env=self._environment(start, notes))
            status = self._process.wait()
            self._process = None
            said = {int(note.read_text()) for note in Path(notes).iterdir()}
        if status == 0 and EXIT_RECONFIGURE in said:
            return EXIT_RECONFIGURE
        return status if status == 0 else max(said - {0, EXIT_RECONFIGURE}, default=abs(status))

    def _torchrun(self, start: _Start) -> list[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "0"]
        command += ["--nnodes", str(start.nodes_count), "--nproc-per-node", str(len(start.ranks))]
        if start.nodes_count == 1:
            return [*command, "--standalone"]
        if not self._given.rendezvous:
            raise UsageError(
                f"job {self._given.job}: is on {start.nodes_count} nodes; where do they meet? "
                "give --rendezvous HOST:PORT, the same on all"
            )
        place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", self._given.rendezvous]
        return [*command, *place, "--rdzv-id", f"{self._given.job}-{start.generation}-{start.step}"]

    def _environment(self, start: _Start, notes: str) -> Mapping[str, str]:
        made = {**os.environ, "TENPLEXFS_JOB": self._given.job, "TENPLEXFS_MOUNT": str(self._path.parent)}
        made["TENPLEXFS_RANKS"] = ",".join(map(str, start.ranks))
        made["TENPLEXFS_NOTES"] = notes
        values = {"GENERATION": start.generation, "STEP": start.step, "SNAPSHOT": start.snapshot}
        for name, value in values.items():
            made.pop(f"TENPLEXFS_{name}", None)
            if value is not None:
                made[f"TENPLEXFS_{name}"] = str(value)
        return made

    def _forward(self, number: int, _: FrameType | None) -> None:
        self._ended_by = number
        if self._process is None:
            raise SystemExit(128 + number)
        self._process.send_signal(number)

    def _say(self, text: str) -> None:
        sys.stderr.write(f"tenplexfs run: job {self._given.job}: {text}\n")
        sys.stderr.flush()
