"""Daemons killed in the middle of things: what was committed stays, what was not leaves nothing."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from tenplexfs.core.build import build_ptc
from tenplexfs.formats.layout_json import parse_layout
from tests.cluster.daemons import COMMAND, Daemons, check, until
from tests.runtime.cluster import layout_json, tensors_of, write_safetensors

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.mount,
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse is not there"),
]

BIG = layout_json(
    tensors={
        "w/{i}": {
            "shape": [512, 1024],
            "dtype": "float32",
            "count": {"i": 8},
            "shard": [{"axis": "tp", "dim": 1}],
            "on": {"pp": {"by": "i", "owner": [0, 0, 0, 0, 1, 1, 1, 1]}},
        },
        "small": {"shape": [3], "dtype": "int8"},
    }
)
WHOLE = tensors_of(build_ptc(parse_layout(BIG)))
MESHES = ["pp=1,tp=4", "pp=4,tp=1", "pp=2,tp=2"]


@pytest.mark.parametrize("seed", range(3))
def test_any_daemon_killed_at_any_time_leaves_one_history(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    (tmp_path / "layout.json").write_bytes(BIG)
    write_safetensors(tmp_path / "m.safetensors", {p.replace("/", "."): a for p, a in WHOLE.items()})
    with Daemons(tmp_path, 2) as two:
        first = two.nodes[0]
        first.ok("job", "create", "gpt", "--layout", str(tmp_path / "layout.json"))
        first.ok("import", "gpt", str(tmp_path / "m.safetensors"), "--step", "0")
        for number in range(2):
            before = first.job()["generation"]
            asked, victim = random_.choice(two.nodes), random_.choice(two.nodes)
            mesh = MESHES[(seed + number) % 3]
            command = [*COMMAND, "--socket", str(asked.socket), "reconfigure", "gpt", "--mesh", mesh]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as request:
                timer = threading.Timer(random_.uniform(0.3, 1.6), victim.kill)
                timer.start()
                timer.join()
                request.wait()
            victim.start()
            victim.wait()
            until(lambda: two.nodes[0].job() == two.nodes[1].job())
            assert first.job()["generation"] in (before, before + 1)
            for node in two.nodes:
                check(node.mount, "gpt", WHOLE)
        # And it goes on: once the lock of a coordinator that died is over, the next transaction runs.
        until(lambda: two.nodes[1].run("reconfigure", "gpt", "--mesh", "pp=1,tp=4")[0] == 0)
        for node in two.nodes:
            check(node.mount, "gpt", WHOLE)
            until(lambda node=node: len(node.ok("status")["store"]["past"]) == 0)
        used = sum(node.ok("status")["store"]["used_bytes"] for node in two.nodes)
        size = sum(array.nbytes for array in WHOLE.values())
        assert size <= used <= size + (1 << 20), "stages that were given up take no room"
        assert np.load(first.mount / "gpt" / "full" / "small.npy").shape == (3,)
