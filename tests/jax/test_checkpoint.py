"""Pytrees through real daemons: one process with eight devices, and two with four each, on two nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import pytest

from tests.cluster.daemons import Daemon, Daemons
from tests.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.mount]


def run(check: str, nodes: list[Daemon], *, devices: int = 8, **arguments: Any) -> list[Any]:
    """Runs ``check`` in one process for each of ``nodes``, which have ``devices`` together."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices // len(nodes)}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    order = {
        "check": check,
        "address": f"127.0.0.1:{free_port()}",
        "processes": len(nodes),
        "arguments": arguments,
    }
    with ExitStack() as stack:
        running = []
        for i, node in enumerate(nodes):
            own = json.dumps({**order, "process": i, "job": str(node.mount / "gpt")})
            files = [stack.enter_context(TemporaryFile("w+")) for _ in range(2)]
            command = [sys.executable, "-m", "tests.jax.checks", own]
            made = subprocess.Popen(command, stdout=files[0], stderr=files[1], env=environment)
            stack.enter_context(made)
            running.append((made, *files))
        for each, _, _ in running:  # what hangs ends itself
            each.wait()
        said = [[file.seek(0) or file.read() for file in files] for _, *files in running]
    logs = "\n".join(node.log.read_text()[-2000:] for node in dict.fromkeys(nodes))
    errors = "\n".join(error for _, error in said)
    assert all(each.returncode == 0 for each, _, _ in running), f"{errors}\n{logs}"
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with Daemons(tmp_path_factory.mktemp("jax"), 2, memory="128MiB") as daemons:
        yield daemons.nodes


@pytest.fixture(scope="module")
def saved(nodes):
    run("save_at", nodes, shape=[4, 2], names="data model", step=1, load=False)
    return nodes


def test_the_layout_comes_from_the_shardings(saved):
    layout = json.loads((saved[0].mount / "gpt" / "layout.json").read_text())
    assert layout["mesh"] == {"data": 4, "model": 2}
    assert layout["nodes"] == {"node0": [0, 1, 2, 3], "node1": [4, 5, 6, 7]}
    assert "ranks" not in layout
    assert layout["tensors"]["frame/params/layers/0/both"]["shard"] == [
        {"axis": "data", "dim": 0},
        {"axis": "model", "dim": 1},
    ]
    assert layout["tensors"]["optimizer/0/mu/rows"]["shard"] == [{"axis": "model", "dim": 0}]
    assert layout["tensors"]["frame/params/layers/0/columns"]["dtype"] == "bfloat16"
    both = np.load(saved[1].mount / "gpt" / "full" / "optimizer" / "0" / "nu" / "both.npy")
    np.testing.assert_array_equal(both.ravel(), (np.arange(128) * 7 + 1 + 5) % 251)
    leaf = saved[1].mount / "gpt" / "model" / "7" / "lr.json"
    assert json.loads(leaf.read_text()) == 1.5
    assert saved[0].ok("verify")["mismatches"] == []


def test_two_processes_load_at_other_meshes(saved):
    run("load_everywhere", saved, step=1)


def test_one_process_loads_at_other_meshes(saved):
    run("load_everywhere", [saved[1]], step=1)


def test_random_keys_and_states_of_one_device(saved):
    run("random_keys", saved)
    run("one_device", [saved[0]])


def test_what_is_refused(saved):
    """Each on both processes, and nothing has changed afterwards."""
    first, second = run("refusals", saved)
    wanted = {
        "unsaid": "say what this run was loaded from",
        "absent": "no such job",
        "missing": "host: is int64 [5], asked for int32 [5, 1]; nope: is not there",
        "value": "gone: no rank has saved such a value",
        "bare": "load: host: give it a sharding",
        "turned": "reconfigure it first",
        "world": "is laid out for 8 ranks, this run has 4",
        "extra": "extra on rank",
        "past": "step 1: is at step 1 already",
        "object": "needs pickle",
        "differ": "host",
    }
    for said in (first, second):
        assert {name: text for name, text in wanted.items() if text not in said[name]} == {}, said
    assert saved[0].job()["step"] == 1


def test_save_reconfigure_load_and_save_again(tmp_path):
    with Daemons(tmp_path, 2, memory="128MiB") as daemons:
        a, b = daemons.nodes
        run("save_at", [a, b], shape=[4, 2], names="data model", step=1, load=False)
        a.ok("reconfigure", "gpt", "--mesh", "data=2", "--nodes", "node1:4")
        run("save_at", [b], devices=4, shape=[2, 2], names="data model", step=2, load=True)
        a.ok("reconfigure", "gpt", "--mesh", "data=1,model=4", "--nodes", "node0:2,node1:2")
        placed = sorted(daemons.nodes, key=lambda node: a.job()["nodes"][node.name])
        run("save_at", placed, devices=4, shape=[1, 4], names="data model", step=3, load=True)
        assert a.job()["step"] == 3
        assert b.ok("verify")["mismatches"] == []
        run("load_everywhere", [a], step=3)
