"""Two daemons whose registry is etcd."""

from __future__ import annotations

import json
import os

import pytest

from tests.cluster.daemons import Daemons, check, until
from tests.cluster.test_daemons import WHOLE, load
from tests.etcd import EtcdServer

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.mount,
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse is not there"),
]


def away(node):
    return json.loads((node.mount / ".tenplexfs" / "status.json").read_text())["registry"]["away"]


def test_while_etcd_is_away_all_is_served_and_nothing_switches(tmp_path):
    (tmp_path / "etcd").mkdir()
    with EtcdServer(tmp_path / "etcd") as etcd:
        registry = etcd.url.replace("http://", "etcd://") + "/test"
        with Daemons(tmp_path, 2, registry=registry) as two:
            load(two)
            first, second = two.nodes
            second.ok("reconfigure", "gpt", "--mesh", "pp=1,tp=4")
            for node in two.nodes:
                assert node.job()["generation"] == 2
                assert check(node.mount, "gpt", WHOLE) > 20

            etcd.kill()
            until(lambda: away(first) and away(second))
            assert "127.0.0.1" in away(first)
            status, content, _ = first.run("reconfigure", "gpt", "--mesh", "pp=2,tp=2")
            assert status == 3, content
            assert "the registry is away, nothing switches" in content["error"]["message"]
            for node in two.nodes:
                assert node.job()["generation"] == 2
                assert check(node.mount, "gpt", WHOLE) > 20
            second.kill()
            second.start()  # from its store alone
            second.wait()
            assert check(second.mount, "gpt", WHOLE) > 20
            until(lambda: "127.0.0.1" in second.ok("status")["registry"]["away"])
            job = json.loads((second.mount / ".tenplexfs" / "jobs" / "gpt" / "status.json").read_text())
            assert "nothing switches, the registry is away" in json.dumps(job)

            etcd.start()
            until(lambda: not away(first) and not away(second))
            first.ok("reconfigure", "gpt", "--mesh", "pp=2,tp=2")
            for node in two.nodes:
                until(lambda node=node: node.job()["generation"] == 3)
                assert check(node.mount, "gpt", WHOLE) > 20
            second.ok("job", "remove", "gpt")
            until(lambda: [entry.name for entry in first.mount.iterdir()] == [".tenplexfs"])


def test_daemons_move_to_etcd_with_what_they_hold(tmp_path):
    (tmp_path / "etcd").mkdir()
    with EtcdServer(tmp_path / "etcd") as etcd, Daemons(tmp_path, 2) as two:
        load(two)
        before = two.nodes[0].job()
        for node in two.nodes:
            node.stop()
            node.arguments[node.arguments.index("--registry") + 1] = etcd.url.replace("http://", "etcd://")
            node.start()
        for node in two.nodes:
            node.wait()
        assert two.nodes[1].ok("registry", "rebuild", "--yes")["written"] is True
        for node in two.nodes:
            until(lambda node=node: (node.mount / "gpt" / "job.json").exists() and node.job() == before)
            assert check(node.mount, "gpt", WHOLE) > 20
        two.nodes[0].ok("reconfigure", "gpt", "--mesh", "pp=1,tp=4")
        for node in two.nodes:
            until(lambda node=node: node.job()["generation"] == 2)
            assert check(node.mount, "gpt", WHOLE) > 20
