"""A daemon killed at random instants of whatever it does comes back by itself, at a committed state."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import tenplexfs
from tenplexfs.core.build import build_ptc
from tenplexfs.formats.layout_json import parse_layout
from tests.cluster.daemons import COMMAND, Daemons, check, until
from tests.runtime.cluster import layout_json, write_safetensors

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.mount,
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse is not there"),
]

# A few here; `make soak` asks for 200.
KILLS = int(os.environ.get("TENPLEXFS_KILLS", "5"))
SEED = int(os.environ.get("TENPLEXFS_SEED", "1"))
TENSORS = {
    "w/{i}": {
        "shape": [512, 1024],
        "dtype": "float32",
        "count": {"i": 6},
        "shard": [{"axis": "tp", "dim": 0}],
    },
    "small/{i}": {"shape": [9], "dtype": "float32", "count": {"i": 20}},
}
LAYOUT = layout_json(mesh={"tp": 2}, nodes={"node0": [0, 1]}, tensors=TENSORS)
PTC = build_ptc(parse_layout(LAYOUT))
SIZE = sum(tensor.nbytes for tensor in PTC.tensors.values())

SAVE = """
import sys, numpy as np, tenplexfs
target, step, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
state = {f"w/{i}".replace("/", "."): np.full((256, 1024), step, np.float32) for i in range(6)}
state |= {f"small.{i}": np.full(9, step, np.float32) for i in range(20)}
tenplexfs.save(state, f"{target}/model/{rank}", step=step, snapshot=sys.argv[4])
"""


def state_of(step: int) -> dict[str, np.ndarray]:
    return {path: np.full(tensor.shape, step, np.float32) for path, tensor in PTC.tensors.items()}


@pytest.fixture
def one(tmp_path):
    with Daemons(tmp_path, 1, memory="256MiB") as daemons:
        (node,) = daemons.nodes
        (tmp_path / "layout.json").write_bytes(LAYOUT)
        node.ok("job", "create", "gpt", "--layout", str(tmp_path / "layout.json"))
        yield node


def command_of(node, kind: str, step: int, tmp_path: Path, chosen: random.Random) -> list[list[str]]:
    """The processes that do it."""
    if kind == "import":
        write_safetensors(
            tmp_path / "m.safetensors", {p.replace("/", "."): a for p, a in state_of(step).items()}
        )
        asked = ["import", "gpt", str(tmp_path / "m.safetensors"), "--step", str(step)]
        return [[*COMMAND, "--socket", str(node.socket), *asked]]
    if kind == "reconfigure":
        mesh = "tp=1" if len(node.job()["nodes"]["node0"]) == 2 else "tp=2"
        return [[*COMMAND, "--socket", str(node.socket), "reconfigure", "gpt", "--mesh", mesh]]
    if kind == "save":
        job = node.job()
        loaded = f"{job['generation']}:{job['step']}:{job['txid']}"
        ranks = range(len(job["nodes"]["node0"]))
        target = str(node.mount / "gpt")
        return [[sys.executable, "-c", SAVE, target, str(step), str(rank), loaded] for rank in ranks]
    files = sorted(map(str, (node.mount / "gpt/full").rglob("*.npy")))
    return [["cat", *chosen.sample(files, 8)]]


def test_a_daemon_killed_at_any_instant_comes_back_at_a_committed_state(one, tmp_path):
    chosen = random.Random(SEED)
    step = 1
    for command in command_of(one, "import", step, tmp_path, chosen):
        subprocess.run(command, check=True, capture_output=True)
    for number in range(KILLS):
        before = one.job()
        kinds = ["import", "reconfigure", "read"] + (["save"] if len(before["nodes"]["node0"]) == 2 else [])
        kind = kinds[number % len(kinds)]
        wanted = before["step"] + 1
        what = f"kill {number} (seed {SEED}) in {kind}, after {before}"
        commands = command_of(one, kind, wanted, tmp_path, chosen)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        running = [subprocess.Popen(command, **quiet) for command in commands]
        timer = threading.Timer(chosen.uniform(0, 0.2 if kind == "read" else 1.5), one.kill)
        timer.start()
        timer.join()
        for process in running:
            if kind != "save":
                process.wait(60)
        one.start()
        one.wait()
        for process in running:  # a save waits for the daemon, and goes on or fails
            process.wait(120)
        after = one.job()
        assert after["step"] in (before["step"], wanted), what
        assert after["generation"] - before["generation"] in (0, 1), what
        assert check(one.mount, "gpt", state_of(after["step"])) > 20, what
        assert one.ok("verify")["mismatches"] == [], what
    until(lambda: not one.ok("status")["store"]["past"])
    status = one.ok("status")["store"]
    copies = 1 + len(status["kept"])
    assert SIZE <= status["used_bytes"] <= copies * (SIZE * 1.5 + (1 << 20)), status
    assert tenplexfs.load(one.mount / "gpt/model/0")
