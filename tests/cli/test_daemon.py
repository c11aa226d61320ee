"""The command line against a real daemon."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from daemons import cluster
from safetensors.numpy import save_file

pytestmark = pytest.mark.cluster

needs_fuse = pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="no /dev/fuse")
W = np.arange(48, dtype=np.float32).reshape(8, 6)


@pytest.fixture
def node():
    with cluster(("node0",), mount=False) as (node,):
        yield node


@pytest.fixture
def weights(tmp_path):
    """A function that writes a safetensors file and returns its path."""

    def write(**tensors):
        path = tmp_path / f"{'-'.join(tensors)}.safetensors"
        save_file(tensors, path)
        return path

    return write


def test_the_life_of_a_job(cli, layout, weights, node, monkeypatch):
    monkeypatch.setenv("TENPLEXFS_SOCKET", str(node.socket))
    two, four = layout("two.json", 2, "node0"), layout("four.json", 4, "node0")

    assert cli("job", "list", "--json").json["jobs"] == []
    assert cli("job", "list").out == "no jobs\n"
    made = cli("job", "create", "gpt", "--layout", two, "--set", "keep_steps=2", "--json").json
    assert (made["format"], made["generation"]) == ("tenplexfs-job", 1)
    assert (made["step"], made["state"]) == (None, "empty")
    assert made["settings"] == {"keep_steps": 2}
    assert cli("job", "create", "gpt", "--layout", two, "--set", "keep_steps=2").status == 0
    assert cli("job", "create", "gpt", "--layout", four).status == 1
    for value in ("{broken}", '{"to"', "[1"):
        wrong = cli("job", "create", "new", "--layout", two, "--set", f"persist={value}")
        assert (wrong.status, f"--set 'persist={value}': no valid JSON" in wrong.err) == (2, True), wrong

    refused = cli("import", "gpt", weights(w=W, x=W), "--json")
    assert refused.status == 1
    assert "x" in refused.json["error"]["message"]
    done = cli("import", "gpt", weights(w=W, x=W), "--ignore", "x", "--step", 7, "--json").json
    assert (done["job"]["step"], done["job"]["state"]) == (7, "ready")

    assert cli("dataset", "show", "gpt").out == "no datasets\n"

    dry = cli("reconfigure", "gpt", four, "--dry-run", "--json").json
    assert dry["format"] == "tenplexfs-plan"
    assert cli("plan", "--job", "gpt", four, "--json").json["bytes"] == dry["bytes"]
    page = cli("plan", "--job", "gpt", four, "--html", "plan.html")
    assert page.status == 0, page.err
    assert "dim 0 over tp" in page.out
    assert cli("job", "show", "gpt", "--json").json["mesh"] == {"tp": 2}
    stale = cli("reconfigure", "gpt", four, "--generation", 9, "--json")
    assert (stale.status, stale.json["error"]["code"]) == (4, "ABORTED")
    moved = cli("reconfigure", "gpt", four, "--json").json
    assert (moved["phase"], moved["job"]["generation"], moved["job"]["mesh"]) == ("done", 2, {"tp": 4})
    assert moved["plan"]["bytes"] == dry["bytes"]
    assert cli("reconfigure", "gpt", four, "--json").json["job"]["generation"] == 2

    assert "every checksum right" in cli("verify").out
    status = cli("status", "--json").json
    assert (status["format"], status["node"], status["mount"]) == ("tenplexfs-status", "node0", None)
    assert status["store"]["used_bytes"] >= W.nbytes
    assert [job["name"] for job in status["jobs"]] == ["gpt"]
    assert all(word in cli("status").out for word in ("node0", "gpt", "ready", "tp=4"))

    assert cli("job", "remove", "gpt").status == 0
    gone = cli("job", "show", "gpt", "--json")
    assert (gone.status, gone.json["error"]["code"]) == (1, "NOT_FOUND")


def test_a_mesh_is_enough_for_a_reconfiguration(cli, layout, weights, node):
    asked = ("--socket", node.socket)
    cli("job", "create", "gpt", "--layout", layout("two.json", 2, "node0"), *asked)
    cli("import", "gpt", weights(w=W), *asked)
    done = cli("reconfigure", "gpt", "--mesh", "tp=4", "--nodes", "node0", *asked, "--json")
    assert done.status == 0, done.out
    assert done.json["job"]["mesh"] == {"tp": 4}
    refused = cli("reconfigure", "gpt", "--mesh", "tp=3", *asked)
    assert refused.status == 1
    assert len(refused.err.splitlines()) == 1


def test_a_layout_that_a_daemon_refuses_names_its_file(cli, layout, weights, node, monkeypatch, tmp_path):
    monkeypatch.setenv("TENPLEXFS_SOCKET", str(node.socket))
    odd = layout("odd.json", 5, "node0")
    (tmp_path / "text.json").write_text("{")
    cli("job", "create", "gpt", "--layout", layout("two.json", 2, "node0"))
    cli("import", "gpt", weights(w=W))
    for file, said in ((odd, "tensor 'w'"), (tmp_path / "text.json", "no valid JSON")):
        for command in (
            ("job", "create", "new", "--layout", file),
            ("reconfigure", "gpt", file),
            ("reconfigure", "gpt", file, "--dry-run"),
            ("plan", "--job", "gpt", file, "--json"),
        ):
            refused = cli(*command)
            text = refused.json["error"]["message"] if "--json" in command else refused.err
            assert (refused.status, text.count(str(file))) == (1, 1), text
            assert said in text and len(text.splitlines()) == 1
    known = cli("job", "create", "bad name", "--layout", odd)  # what is wrong is not in the file
    assert (known.status, str(odd) in known.err) == (1, True)
    other = cli("job", "create", "bad name", "--layout", tmp_path / "two.json")
    assert (other.status, "two.json" in other.err) == (1, False)


@needs_fuse
@pytest.mark.mount
def test_the_daemon_is_found_from_within_its_mount_and_ends_with_it(cli, layout, monkeypatch):
    with cluster(("node0",)) as (node,):
        made = layout("two.json", 2, "node0")
        monkeypatch.chdir(node.mount)
        assert cli("job", "create", "gpt", "--layout", made).status == 0
        monkeypatch.chdir(node.mount / "gpt")
        assert json.loads((node.mount / "gpt/job.json").read_text())["name"] == "gpt"
        assert cli("status", "--json").json["node"] == "node0"
        monkeypatch.chdir("/")
        ended = cli("unmount", node.mount, "--json")
        assert ended.status == 0, ended.out
        assert ended.json["node"] == "node0"
        assert list(node.mount.iterdir()) == []
        assert node.process.wait(10) == 0
