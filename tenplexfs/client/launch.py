"""``tenplexfs run``: this node's ranks of a job, on top of torchrun, started again for each new layout.

The committed layout says which ranks are here, and that overrides the order in which torchrun counts. All
ranks of a start load one snapshot, which `tenplexfs.load`, `Reader` and `save` take from the environment.

Several nodes agree on each start at a `Meeting`: on its name, under which torchrun's c10d rendezvous runs at
an address of the first node, and on the snapshot. Where the ranks of a node fail, its launcher puts another
start in the place of this one; the others see that, end what they have left, and join.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from tenplexfs import EXIT_RECONFIGURE
from tenplexfs.client.commands import Parser, fail, find_mount
from tenplexfs.client.connection import Connection, socket_of
from tenplexfs.client.jobs import env
from tenplexfs.client.meeting import Meeting
from tenplexfs.client.worker import BEGUN
from tenplexfs.errors import NotFoundError, TenplexError, UnavailableError, UsageError

__all__ = ["main"]

_POLL_S = 0.5
_LAGGARD_S = 60.0  # how long ranks may go on when the job has another generation already
_JOIN_S = 30 * 24 * 3600  # torchrun waits for the other nodes until `_watch` ends it
_ENDED = "ended:"


@dataclass(frozen=True)
class _Start:
    """One start of the ranks, as this node sees it.

    Attributes:
        node: This one.
        nodes: The nodes that have ranks, in the order of these; the first one leads.
        ranks: Which are here.
        world_size: How many there are on all nodes.
        is_settled: There are ranks here, and nothing is being changed.
        generation, step, snapshot: Of what they load; None for a job that is not there yet.
        name, endpoint: Of its rendezvous, where there are several nodes.
    """

    node: str
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    world_size: int
    is_settled: bool
    generation: int | None = None
    step: int | None = None
    snapshot: str | None = None
    name: str = ""
    endpoint: str = ""

    @property
    def key(self) -> str:
        """Under what the nodes agree on the name of a start."""
        return f"generation {self.generation or 'none'}"


class _OverError(Exception):
    """The run has ended on other nodes, with a status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def main(arguments: Sequence[str]) -> int:
    """Runs a job until it ends; returns its exit status."""
    try:
        given = _parse(arguments)
        launcher = _Launcher(given)
        try:
            return launcher.run()
        finally:
            launcher.close()
    except SystemExit as end:  # the help was shown
        return int(end.code or 0)
    except TenplexError as error:
        # Before the script's name: its own --json is none of ours.
        own = itertools.takewhile(lambda part: part != "--" and not part.endswith(".py"), arguments)
        return fail(error, as_json="--json" in own, command="tenplexfs run")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="tenplexfs run", description="Run this node's ranks of a job, again for each new layout."
    )
    parser.add_argument("--job", required=True, help="name of the job; its first save may make it")
    parser.add_argument(
        "--mount",
        type=Path,
        help="mount of the daemon; else TENPLEXFS_MOUNT, or around the working directory",
    )
    parser.add_argument(
        "--nproc", type=int, default=1, help="ranks of a job that is not there yet, on each node (1)"
    )
    parser.add_argument(
        "--nodes", metavar="NAME,...", help="nodes of a job that is not there yet, in the order of the ranks"
    )
    parser.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="where the launchers of several nodes meet, the same on all; HOST is one of theirs",
    )
    parser.add_argument(
        "--max-failures", type=int, default=3, help="failures without a new step after which to give up (3)"
    )
    parser.add_argument("--json", action="store_true", help="print errors as JSON")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- train.py ...")
    given = parser.parse_args(arguments)
    given.command = given.command[1:] if given.command[:1] == ["--"] else given.command
    given.nodes = given.nodes.split(",") if given.nodes else []
    if not given.command:
        parser.error("need the training script, as in: tenplexfs run --job gpt -- train.py")
    if given.nproc < 1:
        parser.error(f"--nproc {given.nproc}: need 1 or more")
    if len(given.nodes) > 1 and not given.rendezvous:
        parser.error("several nodes: where do they meet? give --rendezvous HOST:PORT, the same on all")
    return given


class _Launcher:
    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._path = (given.mount.absolute() if given.mount else find_mount("--mount")) / given.job
        self._meeting = Meeting(given.rendezvous) if given.rendezvous else None
        self._process: subprocess.Popen[bytes] | None = None
        self._ended_by: int | None = None
        self._last_said = ""
        self._token = secrets.token_hex(8)

    def close(self) -> None:
        """Leaves the other nodes."""
        if self._meeting is not None and self._ended_by is None:
            self._meeting.close()

    def run(self) -> int:
        """Starts the ranks until they end for good."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._forward)
        failures, status = 0, 0
        before: _Start | None = None
        while True:
            try:
                start = self._next(before)
            except _OverError as over:
                return status if status not in (0, EXIT_RECONFIGURE) else over.status
            if before is not None and status not in (0, EXIT_RECONFIGURE):
                moved = (start.generation, start.step) != (before.generation, before.step)
                failures = 1 if moved else failures + 1
                if failures > self._given.max_failures:
                    self._say(f"failed {failures} times without a new step: giving up")
                    self._end(start, status)
                    return status
                where = "the beginning" if start.step is None else f"step {start.step}"
                self._say(f"failed with status {status}: starting again from {where}")
            status = self._run_once(start)
            if self._ended_by is not None:
                return 128 + self._ended_by
            if status == 0 and (for_all := self._end(start, 0)) is not None:
                return for_all
            before = start

    def _end(self, start: _Start, status: int) -> int | None:
        """Tells the other nodes that the run ends; returns its status, or None where they start again."""
        if self._meeting is None:
            return status
        try:
            found = self._meeting.swap(start.key, start.name, f"{_ENDED}{status}")
        except UnavailableError:
            return status  # they have all left
        return int(found.removeprefix(_ENDED)) if found.startswith(_ENDED) else None

    def _next(self, before: _Start | None) -> _Start:
        """Returns how to start, once nothing is being changed, there are ranks here, and all nodes agree.

        Raises:
            _OverError: The run has ended on other nodes.
        """
        while True:
            start = self._wanted()
            try:
                if self._meeting is not None:
                    self._check(self._meeting.get(start.key))
                if start.is_settled and (agreed := self._agree(start, before)) is not None:
                    return agreed
                self._say(f"waiting for {self._waits_for(start)}")
            except UnavailableError as error:
                self._say(error.message)
            time.sleep(_POLL_S)

    def _waits_for(self, start: _Start) -> str:
        if start.is_settled:
            return "the other nodes"
        return "the next layout" if start.ranks else "a layout with ranks here"

    def _wanted(self) -> _Start:
        try:
            now = env(self._path)
        except NotFoundError:
            return self._new()
        nodes = sorted((ranks[0], node) for node, ranks in now["nodes"].items() if ranks)
        return _Start(
            node=now["node"],
            nodes=tuple(node for _, node in nodes),
            ranks=tuple(now["ranks"]),
            world_size=now["world_size"],
            is_settled=now["state"] in ("ready", "empty") and now["stop"] is None and bool(now["ranks"]),
            generation=now["generation"],
            step=now["step"],
            snapshot=now["snapshot"] if now["step"] is not None else None,
        )

    def _new(self) -> _Start:
        """Returns the first start of a job that its first save makes."""
        with Connection(socket_of(self._path.parent)) as connection:
            node = connection.ask("hello")["node"]
        nodes, count = self._given.nodes or [node], self._given.nproc
        first = nodes.index(node) * count if node in nodes else None
        ranks = () if first is None else tuple(range(first, first + count))
        return _Start(node, tuple(nodes), ranks, count * len(nodes), is_settled=bool(ranks))

    def _check(self, text: str | None) -> None:
        if text is not None and text.startswith(_ENDED):
            raise _OverError(int(text.removeprefix(_ENDED)))

    def _agree(self, start: _Start, before: _Start | None) -> _Start | None:
        """Returns ``start`` with what the nodes agreed on, or None: ask again."""
        if self._meeting is None:
            if len(start.nodes) > 1:
                raise UsageError(
                    f"job {self._given.job}: is on {len(start.nodes)} nodes; where do they meet? "
                    "give --rendezvous HOST:PORT, the same on all"
                )
            return start
        last = before.name if before is not None and before.key == start.key else None
        name = self._meeting.swap(start.key, last, secrets.token_hex(8))
        self._check(name)
        if self._meeting.swap(f"{name}/{start.node}", None, self._token) != self._token:
            self._meeting.swap(start.key, name, secrets.token_hex(8))  # a launcher before this one was in it
            return None
        text = self._meeting.get(f"{name}/start")
        if text is None and start.node == start.nodes[0]:
            endpoint = f"{self._meeting.own_host()}:{_free_port()}"
            mine = {"endpoint": endpoint, "step": start.step, "snapshot": start.snapshot}
            text = self._meeting.swap(f"{name}/start", None, json.dumps(mine))
        if text is None:
            return None
        agreed = replace(start, name=name, **json.loads(text))
        is_here = agreed.step is None or (start.step is not None and start.step >= agreed.step)
        return agreed if is_here else None

    def _run_once(self, start: _Start) -> int:
        """Returns 0, or `EXIT_RECONFIGURE` if they ended so or are to be others, or how they failed."""
        where = f"generation {start.generation}, step {start.step}" if start.generation else "a new job"
        self._say(f"ranks {', '.join(map(str, start.ranks))} of {start.world_size}: {where}")
        with tempfile.TemporaryDirectory(prefix="tenplexfs-run-") as directory:
            notes = Path(directory)
            command = [*self._torchrun(start), "-m", "--", "tenplexfs.client.worker", *self._given.command]
            with subprocess.Popen(command, env=self._environment(start, directory)) as process:
                self._process = process
                overtaken = self._watch(process, start, notes)
                self._process = None
            _kill_left(notes)
            found = [note.read_text() for note in notes.iterdir()]
        said = {int(text) for text in found if text.isdecimal()}
        if overtaken == "layout" or (overtaken and not found):
            return EXIT_RECONFIGURE
        if process.returncode == 0 and not overtaken:
            return EXIT_RECONFIGURE if EXIT_RECONFIGURE in said else 0
        return max(said - {0, EXIT_RECONFIGURE}, default=abs(process.returncode) or 1)

    def _watch(self, process: subprocess.Popen[bytes], start: _Start, notes: Path) -> str:
        """Waits for the end; ends it itself where the job went on without it, and says why."""
        late_since_s: float | None = None
        overtaken = ""
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
                return overtaken
            if overtaken or self._ended_by is not None:
                continue
            has_begun = any(notes.iterdir())
            if self._others_left(start):
                overtaken = "start"
            elif self._is_old(start):
                late_since_s = late_since_s or time.monotonic()
                if not has_begun or time.monotonic() - late_since_s > _LAGGARD_S:
                    overtaken = "layout"
            if overtaken:
                self._say(f"the job has another {overtaken}: ending what runs here")
                # While torchrun waits for others it hears of no signal.
                process.send_signal(signal.SIGTERM if has_begun else signal.SIGKILL)

    def _others_left(self, start: _Start) -> bool:
        with suppress(UnavailableError):
            # Where they are all done, the ranks here are about to be.
            still = (start.name, f"{_ENDED}0")
            return self._meeting is not None and self._meeting.get(start.key) not in still
        return False

    def _is_old(self, start: _Start) -> bool:
        with suppress(TenplexError):
            return bool(env(self._path, patience_s=0)["generation"] > (start.generation or 1))
        return False

    def _torchrun(self, start: _Start) -> list[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "0"]
        command += ["--nnodes", str(len(start.nodes)), "--nproc-per-node", str(len(start.ranks))]
        if len(start.nodes) == 1:
            return [*command, "--standalone"]
        assert self._meeting is not None
        leads = str(start.node == start.nodes[0]).lower()
        place = ["--rdzv-backend", "c10d", "--rdzv-id", start.name, "--rdzv-endpoint", start.endpoint]
        place += ["--rdzv-conf", f"is_host={leads},join_timeout={_JOIN_S}"]
        return [*command, *place, "--local-addr", self._meeting.own_host()]

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
        if text == self._last_said:
            return
        self._last_said = text
        sys.stderr.write(f"tenplexfs run: job {self._given.job}: {text}\n")
        sys.stderr.flush()


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def _kill_left(notes: Path) -> None:
    """Kills ranks that outlived torchrun, which was killed itself."""
    for note in notes.iterdir():
        text = note.read_text()
        if not text.startswith(BEGUN):
            continue
        pid = int(text.removeprefix(BEGUN))
        with suppress(OSError):
            if b"tenplexfs.client.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
