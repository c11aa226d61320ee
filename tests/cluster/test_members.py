"""Nodes that come, go, and are told to go, as real daemons."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenplexfs.cli.client import Daemon as Client
from tests.cluster.daemons import COMMAND, Daemon, Daemons, check, until
from tests.cluster.ranks import all_do, ranks
from tests.cluster.test_daemons import WHOLE, load, prepare
from tests.ports import free_port
from tests.runtime.cluster import layout_json, write_safetensors

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.mount,
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse is not there"),
]


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Daemons]:
    with Daemons(tmp_path, 3, memory="256MiB") as daemons:
        yield daemons


def states(node: Daemon) -> dict[str, str]:
    with Client(str(node.socket)) as client:
        return {each.name: each.state for each in client.nodes().nodes}


def row(node: Daemon, name: str) -> dict[str, Any]:
    return next(each for each in node.ok("node", "list")["nodes"] if each["name"] == name)


def joined(base: Path, name: str, *arguments: str, **flags: str) -> Daemon:
    """A daemon that is told of nobody but by ``arguments``."""
    made = Daemon(base, name, {name: free_port()}, memory="64MiB", **flags)
    at = made.arguments.index("--registry")
    del made.arguments[at : at + 2]
    made.arguments += arguments
    return made


def test_drained_lost_and_forgotten(three):
    a, b, c = three.nodes
    load(three)
    until(lambda: states(b) == {"node0": "living", "node1": "living", "node2": "living"})
    mine = row(a, "node1")
    assert mine["ranks"] == {"gpt": [2, 3]} and mine["sole_bytes"]["gpt"] > 0 and not mine["registry"]
    assert row(a, "node0")["registry"] and row(a, "node2")["ranks"] == {}

    # the idle node takes its place; the mesh stays
    drained = b.ok("node", "drain", "node1", "--deadline", "20s")
    assert drained["message"] == "node1 has nothing of any job any more"
    assert drained["jobs"]["gpt"]["job"]["nodes"] == {"node0": [0, 1], "node2": [2, 3]}
    assert a.ok("node", "drain", "node1")["jobs"] == {}  # asking for what is already so
    b.stop()
    check(a.mount, "gpt", WHOLE)
    until(lambda: states(a)["node1"] == "lost")

    status, content, _ = a.run("node", "forget", "node2")
    assert (status, content["error"]["message"][:18]) == (1, "node node2: it liv")
    a.ok("node", "forget", "node1")
    for node in (a, c):
        assert set(states(node)) == {"node0", "node2"}
    status, content, _ = a.run("node", "drain", "node1")
    assert status == 1 and "nodes: node1: no such node is known" in content["error"]["message"]

    # nobody is left that has devices for all: the state is moved, and the job waits
    drained = a.ok("node", "drain", "node2", "--deadline", "20s")["jobs"]["gpt"]["job"]
    assert drained["state"] == "paused" and list(drained["nodes"]) == ["node0"]
    assert drained["message"].startswith("node2 is drained: 2 devices for 4 ranks, ")
    c.stop()
    check(a.mount, "gpt", WHOLE)
    status, content, _ = a.run("node", "drain", "node0")
    assert status == 1 and "no other node lives that could take what it has" in content["error"]["message"]
    assert "still has ranks of gpt" in content["error"]["message"]

    # one that was forgotten comes back
    b.start()
    until(lambda: states(a).get("node1") == "living")
    assert a.ok("node", "drain", "node1")["jobs"] == {}


def test_the_ranks_stop_before_their_node_goes(three):
    a, b, _ = three.nodes
    load(three)
    until(lambda: len(states(a)) == 3 and set(states(a).values()) == {"living"})
    with ranks(a, a, b, b) as group:
        all_do(group, "load", 0)
        assert all_do(group, "should_stop", 8) == [False] * 4
        answers: list[Any] = []
        drain = ("node", "drain", "node1", "--deadline", "60s")
        thread = threading.Thread(target=lambda: answers.append(a.run(*drain)))
        thread.start()
        until(lambda: (a.mount / ".tenplexfs/jobs/gpt/stop").read_text() != "-\n")
        assert all_do(group, "should_stop", 9) == [True] * 4
        assert len(set(all_do(group, "save", 9, True))) == 1
        thread.join(60)
        ((status, content, _),) = answers
        assert status == 0, content
        job = content["jobs"]["gpt"]["job"]
        assert (job["step"], job["state"], job["nodes"]) == (9, "ready", {"node0": [0, 1], "node2": [2, 3]})


def test_late_ranks_are_not_waited_for_and_what_only_their_node_has_comes_first(three):
    a, b, c = three.nodes
    prepare(three.base)
    file = three.base / "layout.json"
    file.write_bytes(layout_json(nodes={"node0": [0, 1], "node1": [2], "node2": [3]}))
    rows = {"4": {"pp": 2, "tp": 2}, "2": {"pp": 2, "tp": 1}}
    table = f"parallelizer={json.dumps({'kind': 'table', 'rows': rows})}"
    a.ok("job", "create", "gpt", "--layout", str(file), "--set", table)
    a.ok("import", "gpt", str(three.base / "model.safetensors"), "--step", "7")
    until(lambda: len(states(a)) == 3 and set(states(a).values()) == {"living"})
    before = a.job()["generation"]
    same = {"w": {"shape": [4], "dtype": "float32"}}
    file.write_bytes(
        layout_json(nodes={"node0": [0], "node1": [1], "node2": [2]}, mesh={"dp": 3}, tensors=same)
    )
    write_safetensors(three.base / "same.safetensors", {"w": np.arange(4, dtype=np.float32)})
    a.ok("job", "create", "same", "--layout", str(file))
    a.ok("import", "same", str(three.base / "same.safetensors"))
    with ranks(a, a, b, c) as group:
        all_do(group, "load", 0)
        assert all_do(group, "should_stop", 8) == [False] * 4
        # they are asked to stop and do not ask again
        jobs = c.ok("node", "drain", "node2", "--deadline", "3s")["jobs"]
    job, paused = jobs["gpt"]["job"], jobs["same"]["job"]
    # nobody has to move, and every replica that is left stays one
    assert (paused["state"], set(paused["nodes"]), paused["survives_node_losses"]) == (
        "paused",
        {"node0", "node1"},
        1,
    )
    assert (job["step"], job["state"], job["mesh"]) == (7, "ready", {"pp": 2, "tp": 1})
    assert "node2" not in job["nodes"]
    assert job["generation"] == before + 2
    for node in three.nodes:
        check(node.mount, "gpt", WHOLE)


def test_daemons_that_join_by_one_of_them_or_by_a_name(tmp_path):
    seed_port = free_port()
    seed = Daemon(tmp_path, "node0", {"node0": seed_port}, memory="64MiB")
    others = [
        joined(tmp_path, "node1", "--join", f"127.0.0.1:{seed_port}"),
        joined(tmp_path, "node2", "--join", f"dns:localhost:{seed_port}"),
    ]
    try:
        for node in others:  # they wait for it
            node.start()
        seed.start()
        for node in (seed, *others):
            node.wait()
        for node in (seed, *others):
            until(lambda node=node: states(node) == dict.fromkeys(("node0", "node1", "node2"), "living"))
        prepare(tmp_path)
        seed.ok("job", "create", "gpt", "--layout", str(tmp_path / "layout.json"))
        seed.ok("import", "gpt", str(tmp_path / "model.safetensors"))
        others[0].ok("reconfigure", "gpt", "--mesh", "tp=2", "--nodes", "node1:2,node2:2")
        for node in (seed, *others):
            check(node.mount, "gpt", WHOLE)
        for node in others:
            command = [*COMMAND, "--json", "doctor", *node.arguments]
            found = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
            verdicts = {each["what"]: (each["verdict"], each["message"]) for each in found["findings"]}
            assert verdicts["join"][0] == verdicts["registry"][0] == verdicts["peer node0"][0] == "ok"
        assert others[1].stop() < 5
        others[1].start()
        others[1].wait()
        check(others[1].mount, "gpt", WHOLE)
    finally:
        for node in (seed, *others):
            node.clean()


def test_what_is_wrong_with_a_join_is_said(tmp_path, monkeypatch):
    def refused(*arguments: str, **flags: str) -> str:
        node = joined(tmp_path, "node1", *arguments, **flags)
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-")
        done = subprocess.run(
            [*COMMAND, "serve", *node.arguments], capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 2, done
        return done.stderr.strip()

    assert "join slurm: hosts 'n[1-'" in refused("--join", "slurm")
    assert "give it, or each --peer, not both" in refused("--join", "h:1", "--peer", "b=h:2")
