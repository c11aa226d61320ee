"""Replicas grow over several daemons, which pass pieces on to each other, also when one of them is killed."""

from __future__ import annotations

import json
import os
import subprocess
import threading

import numpy as np
import pytest

from tests.cluster.daemons import COMMAND, Daemons, check, until
from tests.runtime.cluster import write_safetensors

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.mount,
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse is not there"),
]

RNG = np.random.default_rng(0)
WHOLE = {f"w/{i}": RNG.random((1024, 1024), np.float32) for i in range(4)} | {"b": np.arange(5.0)}


def layout(count: int) -> str:
    return json.dumps(
        {
            "format": "tenplexfs-layout",
            "version": 1,
            "mesh": {"dp": count},
            "nodes": {f"node{n}": [n] for n in range(count)},
            "tensors": {
                "w/{i}": {"shape": [1024, 1024], "dtype": "float32", "count": {"i": 4}},
                "b": {"shape": [5], "dtype": "float64"},
            },
        }
    )


def test_four_replicas_of_one_and_a_relay_that_is_killed(tmp_path):
    for count in (1, 4):
        (tmp_path / f"{count}.json").write_text(layout(count))
    write_safetensors(tmp_path / "m.safetensors", {p.replace("/", "."): a for p, a in WHOLE.items()})
    with Daemons(tmp_path, 4) as four:
        first, relay = four.nodes[0], four.nodes[2]
        first.ok("job", "create", "gpt", "--layout", str(tmp_path / "1.json"))
        first.ok("import", "gpt", str(tmp_path / "m.safetensors"), "--step", "0")
        plan = first.ok("plan", "--job", "gpt", str(tmp_path / "4.json"))
        size = sum(array.nbytes for array in WHOLE.values())
        assert plan["bytes"]["moved"] == plan["bytes"]["moved_lower_bound"] == 3 * size
        assert plan["nodes"]["node0"]["sends"] < 1.01 * size
        assert plan["matrix"]["node2"].keys() == {"node1", "node3"}

        command = [*COMMAND, "--socket", str(first.socket), "reconfigure", "gpt", str(tmp_path / "4.json")]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as request:
            until(lambda: first.ok("status")["jobs"][0]["state"] != "ready" or request.poll() is not None)
            timer = threading.Timer(0.05, relay.kill)
            timer.start()
            timer.join()
            request.wait()
        relay.start()
        relay.wait()
        for node in (first, four.nodes[1], relay):
            until(lambda node=node: node.job() == four.nodes[3].job())
            check(node.mount, "gpt", WHOLE)

        until(lambda: first.run("reconfigure", "gpt", str(tmp_path / "4.json"))[0] == 0)
        for node in four.nodes:
            until(lambda node=node: node.job() == first.job())
            assert node.job()["mesh"] == [{"name": "dp", "size": 4}]
            check(node.mount, "gpt", WHOLE)
            assert node.ok("verify", "gpt")["mismatches"] == []
        logs = [node.log.read_text() for node in four.nodes]
        assert not any("gRPC carries them" in log for log in logs)
