"""Daemons killed in the middle of things: what was committed stays, what was not leaves nothing.

The coordinator, a member or the registry, at a random instant of a reconfiguration. Several jobs take turns,
for the lock of a coordinator that died is held for a while. ``TENPLEXFS_DAEMON_KILLS=100`` kills more often.
"""

from __future__ import annotations

import os
import random
import subprocess
import threading
from pathlib import Path

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

KILLS = int(os.environ.get("TENPLEXFS_DAEMON_KILLS", "8"))
SEED = int(os.environ.get("TENPLEXFS_SEED", "7"))
JOBS = [f"job{number}" for number in range(4)]
LAYOUT = layout_json(
    tensors={
        "w/{i}": {
            "shape": [512, 2048],  # each part in a file of its own
            "dtype": "float32",
            "count": {"i": 4},
            "shard": [{"axis": "tp", "dim": 1}],
            "on": {"pp": {"by": "i", "owner": [0, 0, 1, 1]}},
        },
        "small": {"shape": [3], "dtype": "int8"},
    }
)
WHOLE = tensors_of(build_ptc(parse_layout(LAYOUT)))
TARGETS = [
    ["--mesh", "pp=1,tp=4", "--nodes", "node0:2,node1:1,node2:1"],
    ["--mesh", "pp=4,tp=1", "--nodes", "node1:2,node2:2"],
    ["--mesh", "pp=2,tp=2", "--nodes", "node0:2,node2:2"],
    ["--mesh", "pp=1,tp=2", "--nodes", "node0:1,node1:1"],
]


def test_whoever_is_killed_whenever_leaves_one_history(tmp_path: Path) -> None:
    random_ = random.Random(SEED)
    (tmp_path / "layout.json").write_bytes(LAYOUT)
    write_safetensors(tmp_path / "m.safetensors", {p.replace("/", "."): a for p, a in WHOLE.items()})
    with Daemons(tmp_path, 3, memory="256MiB", retain="3") as three:
        registry = three.nodes[0]
        for job in JOBS:
            registry.ok("job", "create", job, "--layout", str(tmp_path / "layout.json"))
            registry.ok("import", job, str(tmp_path / "m.safetensors"), "--step", "0")
        moved = 0
        for number in range(KILLS):
            job, target = JOBS[number % len(JOBS)], TARGETS[random_.randrange(len(TARGETS))]
            before = registry.job(job)["generation"]
            coordinator = random_.choice(three.nodes)
            members = [node for node in three.nodes if node is not coordinator]
            victim = (coordinator, random_.choice(members), registry)[number % 3]
            command = [*COMMAND, "--socket", str(coordinator.socket), "reconfigure", job, *target]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as request:
                timer = threading.Timer(random_.uniform(0.4, 1.3), victim.kill)
                timer.start()
                timer.join()
                victim.start()  # at once: who waits for it goes on
                request.wait()
            victim.wait()
            until(lambda job=job: len({node.job(job)["txid"] for node in three.nodes}) == 1)
            after = registry.job(job)["generation"]
            assert after in (before, before + 1)
            moved += after - before
            for node in three.nodes:
                check(node.mount, job, WHOLE)
        # And it goes on: once the lock of a coordinator that died is over, the next transaction runs.
        for job in JOBS:
            until(lambda job=job: three.nodes[1].run("reconfigure", job, *TARGETS[0])[0] == 0)
        for node in three.nodes:
            check(node.mount, JOBS[-1], WHOLE)
            until(lambda node=node: len(node.ok("status")["store"]["past"]) == 0)
        size = len(JOBS) * sum(array.nbytes for array in WHOLE.values())

        def is_tidy() -> bool:
            used = sum(node.ok("status")["store"]["used_bytes"] for node in three.nodes)
            return bool(size <= used <= size + (1 << 20))

        until(is_tidy)  # stages that were given up take no room, soon
        assert moved >= KILLS // 5, "what is killed is in the middle of something"
