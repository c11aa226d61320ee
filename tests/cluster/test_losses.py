"""A node lost for good while others take from it, and a registry lost with all that it knew."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading

import pytest

from tenplexfs.core.build import build_ptc
from tenplexfs.formats.layout_json import parse_layout
from tests.cluster.daemons import Daemons, check, until
from tests.cluster.test_daemons import WHOLE, load
from tests.runtime.cluster import layout_json, tensors_of, write_safetensors

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.mount,
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse is not there"),
]

TWICE = layout_json(
    mesh={"dp": 2},
    nodes={"node0": [0], "node1": [1]},
    tensors={"w/{i}": {"shape": [256, 512], "dtype": "float32", "count": {"i": 8}}},
)


def job_status(node) -> dict[str, object]:
    return json.loads((node.mount / ".tenplexfs" / "jobs" / "gpt" / "status.json").read_text())


def test_a_source_that_is_killed_while_it_sends_is_replaced_by_its_replica(tmp_path):
    whole = tensors_of(build_ptc(parse_layout(TWICE)))
    (tmp_path / "layout.json").write_bytes(TWICE)
    write_safetensors(tmp_path / "m.safetensors", {p.replace("/", "."): a for p, a in whole.items()})
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # takes calls, and answers none
        three = Daemons(tmp_path, 3)
        third = three.nodes[2]
        way = f"node1=127.0.0.1:{three.ports['node1']}"
        third.arguments[third.arguments.index(way)] = f"node1=127.0.0.1:{deaf.getsockname()[1]}"
        with three:
            first, second = three.nodes[:2]
            first.ok("job", "create", "gpt", "--layout", str(tmp_path / "layout.json"))
            first.ok("import", "gpt", str(tmp_path / "m.safetensors"), "--step", "3")
            answers = []

            def move():
                answers.append(first.ok("reconfigure", "gpt", "--mesh", "dp=2", "--nodes", "node0:1,node2:1"))

            moving = threading.Thread(target=move)
            moving.start()
            until(lambda: job_status(third)["state"] == "reconfiguring")
            assert first.job()["generation"] == 1
            second.kill()
            shutil.rmtree(second.store)
            moving.join()
            (answer,) = answers
            assert "node1" not in answer["plan"]["matrix"], answer
            for node in (first, third):
                assert node.job()["generation"] == 2
                assert sorted(node.job()["nodes"]) == ["node0", "node2"]
                assert check(node.mount, "gpt", whole) >= 16
            second.start()  # with a store that begins anew
            second.wait()
            until(lambda: (second.mount / "gpt").exists())
            assert check(second.mount, "gpt", whole) >= 16


def test_a_registry_that_was_lost_is_rebuilt_on_the_operators_word(tmp_path):
    with Daemons(tmp_path, 2) as two:
        load(two)
        first, second = two.nodes
        before = first.job()
        status, content, _ = first.run("registry", "rebuild", "--yes")
        assert (status, content["error"]["code"]) == (1, "FAILED_PRECONDITION")
        for node in two.nodes:
            node.stop()
        shutil.rmtree(first.store / "registry")
        first.start()
        first.wait()
        until(lambda: "registry rebuild" in str(job_status(first)["message"]))
        content = first.ok("registry", "rebuild")
        assert content["silent"] == ["node1"]
        assert content["written"] is False
        status, content, _ = first.run("registry", "rebuild", "--yes")
        assert status == 1
        assert "node1 may have parts" in content["error"]["message"]
        second.start()
        second.wait()
        content = second.ok("registry", "rebuild", "--yes")
        assert content["written"] is True
        (job,) = content["jobs"]
        assert (job["generation"], job["step"], job["txid"]) == (1, 7, before["txid"])
        for node in two.nodes:
            until(lambda node=node: job_status(node)["state"] == "ready")
            assert node.job() == before
            assert check(node.mount, "gpt", WHOLE) > 20
        second.ok("reconfigure", "gpt", "--mesh", "pp=1,tp=4")
        for node in two.nodes:
            assert node.job()["generation"] == 2
            assert check(node.mount, "gpt", WHOLE) > 20
