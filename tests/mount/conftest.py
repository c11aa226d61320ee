"""A mount in a process of its own: a page fault of the tests' own process would hold the GIL it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tenplexfs.fuse.mountpoint import find_mount

ROOT = Path(__file__).parents[2]
WAIT_S = 60


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.mount)
            if not Path("/dev/fuse").exists():
                item.add_marker(pytest.mark.skip(reason="/dev/fuse is missing"))


class Daemon:
    """A process that serves memory snapshots at `path`; see `server`."""

    def __init__(
        self,
        path: Path,
        log: Path,
        *,
        grace_s: float = 0.2,
        uid: int | None = None,
        allow_other: bool = False,
    ) -> None:
        self.path = path
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.mount.server", str(path), str(grace_s)),
                    *([] if uid is None else [str(uid)]),
                    *(["allow_other"] if allow_other else []),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
            )
        self.greeting = self._answer()

    def __call__(self, op: str, **arguments: object) -> object:
        """Has one command done."""
        self.start(op, **arguments)
        return self._answer()

    def start(self, op: str, **arguments: object) -> None:
        """Sends a command; its answer is read by `finish`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()

    def finish(self) -> object:
        return self._answer()

    def stop(self) -> int:
        """Lets it leave in order."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        return self.process.wait(WAIT_S)

    def clean_up(self) -> None:
        """Ends it whatever its state, and takes every mount at its path away."""
        try:
            self.stop()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(WAIT_S)
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()
            while find_mount(str(self.path)) is not None:
                subprocess.run(["fusermount3", "-u", "-z", "--", self.path], check=True)

    def _answer(self) -> object:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        return json.loads(line)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts daemons; the first directory is ``tmp_path/mnt``."""
    daemons: list[Daemon] = []

    def start(path: Path = tmp_path / "mnt", **options: float) -> Daemon:
        daemons.append(Daemon(path, tmp_path / "log", **options))
        return daemons[-1]

    try:
        yield start
    finally:
        for daemon in daemons:
            daemon.clean_up()


@pytest.fixture
def daemon(start: Callable[..., Daemon]) -> Daemon:
    return start()
