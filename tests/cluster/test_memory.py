"""Memory on a real daemon: the limit as the kernel counts it, who is refused, and who holds what."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tenplexfs.core.build import build_ptc
from tenplexfs.formats import npy
from tenplexfs.formats.layout_json import parse_layout
from tests.cluster.daemons import Daemon, Daemons, until
from tests.runtime.cluster import layout_json, write_safetensors

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.mount,
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse is not there"),
]

SHAPE = (1024, 1024)
SIZE = 4 << 20
LIMIT = 3 * SIZE + (2 << 20)  # three copies, not four
LAYOUT = layout_json(
    mesh={"tp": 1}, nodes={"node0": [0]}, tensors={"w": {"shape": list(SHAPE), "dtype": "float32"}}
)
HOLD = """
import sys, hashlib
file = open(sys.argv[1], "rb", buffering=0)
print("ready", flush=True)
sys.stdin.readline()
print(hashlib.sha256(file.read()).hexdigest(), flush=True)
"""


def state(step: int) -> dict[str, np.ndarray]:
    return {"w": np.full(SHAPE, step, np.float32)}


def load(node: Daemon, base: Path, step: int) -> tuple[int, dict, str]:
    write_safetensors(base / "m.safetensors", state(step))
    return node.run("import", "gpt", str(base / "m.safetensors"), "--step", str(step))


def kernel_bytes(node: Daemon) -> int:
    """What the store takes, by the kernel's count of blocks."""
    files = [file for kind in ("objects", "segments") for file in (node.store / kind).iterdir()]
    return sum(file.stat().st_blocks * 512 for file in files)


@pytest.fixture
def memory():
    """A store belongs in memory: a directory there."""
    directory = Path(subprocess.check_output(["mktemp", "-d", "-p", "/dev/shm"], text=True).strip())
    yield directory
    subprocess.run(["rm", "-rf", directory], check=True)


@pytest.fixture
def start(tmp_path, memory):
    started: list[Daemons] = []

    def start(**flags: str) -> Daemon:
        flags = {"memory": str(LIMIT), "store": str(memory / "store"), **flags}
        started.append(Daemons(tmp_path, 1, **flags).__enter__())
        (node,) = started[-1].nodes
        node.store = Path(flags["store"])
        (tmp_path / "layout.json").write_bytes(LAYOUT)
        return node

    yield start
    for daemons in started:
        daemons.__exit__()


def test_the_limit_holds_by_the_kernels_count_and_who_stands_in_the_way_is_named(start, tmp_path):
    node = start()
    node.ok("job", "create", "gpt", "--layout", str(tmp_path / "layout.json"))
    for step in range(1, 6):  # each drops the step before the last early: there is no room for four
        status, content, _ = load(node, tmp_path, step)
        assert status == 0, content
        assert kernel_bytes(node) <= LIMIT
        until(lambda: not node.ok("status")["store"]["past"])
    assert sorted(path.name for path in node.mount.iterdir()) == [".tenplexfs", "gpt", "gpt@4"]
    held = node.mount / "gpt@4/full/w.npy"
    command = [sys.executable, "-c", HOLD, held]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout.readline() == "ready\n"
        descriptor = os.open(node.mount / "gpt/full/w.npy", os.O_RDONLY)
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        os.close(descriptor)
        assert load(node, tmp_path, 6)[0] == 0  # steps 4, 5 and 6: three copies, two of them in use
        status, content, _ = load(node, tmp_path, 7)
        assert status == 5, content
        message = content["error"]["message"]
        assert f"{reader.pid} (python" in message and f"limit {LIMIT}" in message, message
        assert node.job()["step"] == 6, "what is committed stays"
        assert kernel_bytes(node) <= LIMIT
        assert any(f"{reader.pid} (" in holder for holder in node.ok("status")["holders"])
        wanted = np.load(node.mount / "gpt@5/full/w.npy").tobytes()
        assert mapped[128:] == wanted == state(5)["w"].tobytes(), "mapped bytes are never taken"
        reader.stdin.write("\n")
        reader.stdin.flush()
        digest = reader.stdout.readline().strip()
        reader.wait(30)
    file = npy.header(SHAPE, "float32") + state(4)["w"].tobytes()
    assert digest == hashlib.sha256(file).hexdigest(), "bytes of an open file are never taken"
    mapped.close()
    until(lambda: load(node, tmp_path, 7)[0] == 0)  # once the holder is gone there is room
    assert node.job()["step"] == 7


def test_with_a_disk_open_files_of_the_past_make_room(start, tmp_path):
    (tmp_path / "spill").mkdir()
    node = start(spill=str(tmp_path / "spill"))
    node.ok("job", "create", "gpt", "--layout", str(tmp_path / "layout.json"))
    files = []
    for step in range(1, 9):
        status, content, _ = load(node, tmp_path, step)
        assert status == 0, content
        files.append((node.mount / "gpt/full/w.npy").open("rb", buffering=0))
        assert kernel_bytes(node) <= LIMIT
    for step, file in enumerate(files, 1):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert file.read()[128:] == state(step)["w"].tobytes(), step
        file.close()
    assert list((tmp_path / "spill").iterdir()) == [], "what is spilled has no name"


def test_a_job_has_its_own_memory(start, tmp_path):
    node = start()
    node.ok("job", "create", "gpt", "--layout", str(tmp_path / "layout.json"), "--memory", "1MiB")
    status, content, _ = load(node, tmp_path, 1)
    assert status == 5
    assert "its memory is 1048576" in content["error"]["message"]
    assert kernel_bytes(node) == 0
    ptc = build_ptc(parse_layout((node.mount / "gpt/layout.json").read_bytes()))
    assert ptc.tensors["w"].shape == SHAPE
    assert json.loads((node.mount / ".tenplexfs/jobs/gpt/status.json").read_text())["state"] == "empty"


def test_without_remote_reads_the_ranks_of_others_are_listed_and_not_read(tmp_path):
    layout = layout_json(
        mesh={"tp": 2},
        nodes={"node0": [0], "node1": [1]},
        tensors={"w": {"shape": [8, 4], "dtype": "float32", "shard": [{"axis": "tp", "dim": 0}]}},
    )
    (tmp_path / "layout.json").write_bytes(layout)
    write_safetensors(tmp_path / "m.safetensors", {"w": np.ones((8, 4), np.float32)})
    with Daemons(tmp_path, 2, remote_reads="off") as two:
        node = two.nodes[0]
        node.ok("job", "create", "gpt", "--layout", str(tmp_path / "layout.json"))
        node.ok("import", "gpt", str(tmp_path / "m.safetensors"), "--step", "0")
        assert np.load(node.mount / "gpt/model/0/w.npy").shape == (4, 4)
        remote = node.mount / "gpt/model/1/w.npy"
        assert remote.stat().st_size == 128 + 64
        for file in (remote, node.mount / "gpt/full/w.npy", node.mount / "gpt/model/1.safetensors"):
            with pytest.raises(OSError):
                file.read_bytes()


SAVE_MUCH = """
import sys, numpy as np, tenplexfs
row = np.arange(1024, dtype=np.float32)
state = {f"b.{i}": np.broadcast_to(row + i, (16384, 1024)) for i in range(4)}
tenplexfs.save(state, sys.argv[1], step=1)
"""


@pytest.fixture
def small_group():
    """A control group of 64 MiB: a function that moves the calling process into it."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"tenplexfs-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(64 << 20))
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        yield lambda group=group: (group / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()
        return
    pytest.skip("no control group for memory can be made here")


def test_pages_are_the_daemons_not_the_clients(start, tmp_path, small_group):
    node = start(memory="400MiB")
    tensors = {"b/{i}": {"shape": [16384, 1024], "dtype": "float32", "count": {"i": 4}}}
    (tmp_path / "layout.json").write_bytes(layout_json(mesh={"tp": 1}, nodes={"node0": [0]}, tensors=tensors))
    node.ok("job", "create", "gpt", "--layout", str(tmp_path / "layout.json"))
    command = [sys.executable, "-c", SAVE_MUCH, str(node.mount / "gpt/model/0")]
    done = subprocess.run(command, preexec_fn=small_group, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert node.job()["step"] == 1
    assert kernel_bytes(node) >= 256 << 20
    row = np.load(node.mount / "gpt/full/b/3.npy", mmap_mode="r")[-1]
    np.testing.assert_array_equal(row, np.arange(1024, dtype=np.float32) + 3)
