"""Files that are used again through a real daemon, under who still reads what they held."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import tenplexfs
from tenplexfs._pb import control_pb2
from tenplexfs.cli.client import Daemon as Control
from tenplexfs.client.connection import Connection
from tenplexfs.errors import NoRoomError, TenplexError
from tests.cluster.daemons import Daemon, Daemons, until
from tests.runtime.cluster import layout_json

pytestmark = [pytest.mark.cluster, pytest.mark.mount]

SHAPE = (1024, 2048)
SIZE = 8 << 20
LIMIT = 5 * SIZE
ROWS = np.arange(SHAPE[0], dtype=np.float32)[:, None]
LAYOUT = layout_json(
    mesh={"tp": 2},
    nodes={"node0": [0, 1]},
    tensors={
        "w": {"shape": list(SHAPE), "dtype": "float32", "shard": [{"axis": "tp", "dim": 0}]},
        "s": {"shape": [64], "dtype": "float32"},
    },
)


@pytest.fixture
def node(tmp_path):
    memory = Path(subprocess.check_output(["mktemp", "-d", "-p", "/dev/shm"], text=True).strip())
    store = memory / "store"
    try:
        with Daemons(tmp_path, 1, memory=str(LIMIT), store=str(store)) as daemons:
            (tmp_path / "layout.json").write_bytes(LAYOUT)
            (only,) = daemons.nodes
            only.store = store
            only.ok("job", "create", "gpt", "--layout", str(tmp_path / "layout.json"))
            yield only
    finally:
        subprocess.run(["rm", "-rf", str(memory)], check=True)


def part(world: int, rank: int, step: int) -> dict[str, np.ndarray]:
    rows = SHAPE[0] // world
    own = np.broadcast_to(ROWS[rank * rows : (rank + 1) * rows] + 10_000 * step, (rows, SHAPE[1]))
    return {"w": np.ascontiguousarray(own), "s": np.full(64, step, np.float32)}


def save(node: Daemon, world: int, step: int) -> None:
    """Saves all ranks, or nothing."""
    made = []
    try:
        for rank in range(world):
            path = node.mount / "gpt" / "model" / str(rank)
            made.append(tenplexfs.save(part(world, rank, step), path, step=step, wait=False))
    finally:
        for each in made:
            if len(made) < world:
                each.abandon()
                each.ended_within(30)
            else:
                each.wait(30)


def handed_out(client: Connection, snapshot: str, world: int, rank: int, step: int) -> tuple[int, list[int]]:
    """Begins a save; returns its number, and the files it is given."""
    begun = client.ask(
        "save.begin",
        job="gpt",
        rank=rank,
        step=step,
        snapshot=snapshot,
        process="1-a",
        run="",
        paths=["w", "s"],
        kinds=[["float32", [SHAPE[0] // world, SHAPE[1]]], ["float32", [64]]],
        of=np.arange(2, dtype=np.uint32).tobytes(),
        ties={},
        document=b"{}",
        consumed=None,
        world=world,
    )
    return begun["save"], client.ask_fds("save.files", save=begun["save"], first=0, count=2)[1]


class Readers:
    """Arrays that are mapped, and what they must hold."""

    def __init__(self) -> None:
        self.held: list[tuple[np.ndarray, np.ndarray]] = []
        self.given_up = 0

    def add(self, array: np.ndarray, wanted: np.ndarray) -> None:
        self.held.append((array, wanted))
        if len(self.held) > 4:
            del self.held[0]

    def check(self) -> None:
        assert all(np.array_equal(array, wanted) for array, wanted in self.held)

    def making_room(self, work: Callable[[], None]) -> None:
        """Does ``work``, without some readers if there is no room with them."""

        def works() -> bool:
            try:
                work()
            except NoRoomError:  # what was let go a moment ago may still count
                self.given_up += len(self.held[:1])
                del self.held[:1]
                return False
            return True

        until(works)


def files(node: Daemon) -> dict[str, int]:
    """Names and inodes of the files of arrays, some of which change their names meanwhile."""
    return {file.name: file.inode() for file in os.scandir(node.store / "objects")}


def used(node: Daemon) -> int:
    """What the store takes, by the kernel's count of blocks."""
    size = 0
    for file in (file for kind in ("objects", "segments") for file in (node.store / kind).iterdir()):
        with suppress(FileNotFoundError):
            size += file.stat().st_blocks * 512
    return size


def test_what_is_mapped_keeps_its_bytes_through_saves_reconfigurations_and_a_kill(node):
    rng = random.Random(11)
    readers = Readers()
    names: dict[int, set[str]] = {}
    step = 0

    def reconfigure(world: int) -> None:
        mesh, nodes = [control_pb2.Axis(name="tp", size=world)], {"node0": 4}
        request = control_pb2.ReconfigureRequest(job="gpt", mesh=mesh, nodes=nodes)
        with Control(str(node.socket)) as control:
            assert [*control.reconfigure(request, 60)][-1].phase == "done"

    world = 2
    for generation in range(6):
        if generation:
            world = 6 - world
            readers.making_room(lambda world=world: reconfigure(world))
        for _ in range(4):
            if step:
                rank = rng.randrange(world)
                loaded = tenplexfs.load(node.mount / "gpt" / "model" / str(rank))
                assert np.array_equal(loaded["w"], part(world, rank, step)["w"])
                readers.add(loaded["w"], part(world, rank, step)["w"])
                shown = np.load(node.mount / "gpt" / "model" / str(rank) / "w.npy", mmap_mode="r")
                assert np.array_equal(shown, part(world, rank, step)["w"])
                del shown
            step += 1
            readers.making_room(lambda step=step, world=world: save(node, world, step))
            readers.check()
            for name, inode in files(node).items():
                names.setdefault(inode, set()).add(name)
            assert used(node) <= LIMIT + (1 << 20)
    assert node.ok("verify")["mismatches"] == []
    assert sum(len(each) for each in names.values()) > len(names) + 20 and readers.given_up

    # Killed while a client fills files that were used before.
    before = tenplexfs.env(node.mount / "gpt")["snapshot"]
    with Connection(str(node.socket)) as client:
        _, fds = handed_out(client, before, world, 0, step + 1)
        node.kill()
        for fd in fds:
            os.pwrite(fd, b"\xff" * (1 << 20), 0)
    readers.check()
    node.start()
    node.wait()
    given = {os.fstat(fd).st_ino for fd in fds}
    there = {file.inode() for kind in ("objects", "segments") for file in os.scandir(node.store / kind)}
    assert len(given) == len(fds) and not given & there
    for fd in fds:  # who does not know yet
        os.pwrite(fd, b"\xff" * (1 << 20), 1 << 20)
        os.close(fd)
    assert tenplexfs.env(node.mount / "gpt")["snapshot"] == before
    # What was past when it was killed may be spare by now; what is unlinked and read still counts as used.
    status = json.loads((node.mount / ".tenplexfs/status.json").read_text())["store"]
    assert used(node) <= status["used_bytes"] + status["spare_bytes"]
    assert node.ok("verify")["mismatches"] == []
    readers.making_room(lambda: save(node, world, step + 1))
    readers.check()
    for rank in range(world):
        found = tenplexfs.load(node.mount / "gpt" / "model" / str(rank))
        assert np.array_equal(found["w"], part(world, rank, step + 1)["w"])


def test_a_client_that_says_it_has_written_and_has_not_is_refused(node):
    for step in range(1, 6):
        save(node, 2, step)
    before = tenplexfs.env(node.mount / "gpt")["snapshot"]
    with Connection(str(node.socket)) as client:
        name, fds = handed_out(client, before, 2, 1, 6)
        for fd in fds:
            os.close(fd)
        sums = {"sums": np.array([1, 2], np.uint64).tobytes(), "summed": b"\1\1"}
        with pytest.raises(TenplexError, match=r"rank 1, [ws]: never came: no header"):
            client.ask("save.seal", save=name, **sums)
    assert tenplexfs.env(node.mount / "gpt")["snapshot"] == before
    save(node, 2, 6)
