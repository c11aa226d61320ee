"""Commands that need no daemon, and how everything is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file


@pytest.fixture
def bert(tmp_path):
    """A tiny BERT as a safetensors file, with one tensor that no family knows."""
    tensors = {"embeddings.word_embeddings.weight": np.zeros((101, 8), np.float32)}
    for i in range(3):
        layer = f"encoder.layer.{i}"
        tensors |= {
            f"{layer}.attention.self.query.weight": np.ones((8, 8), np.float32),
            f"{layer}.attention.output.dense.weight": np.ones((8, 8), np.float32),
            f"{layer}.output.LayerNorm.bias": np.ones(8, np.float32),
        }
    path = tmp_path / "model.safetensors"
    save_file(tensors | {"odd": np.ones(3, np.float32)}, path)
    return path


def test_a_layout_is_made_checked_and_shown(cli, bert, tmp_path):
    out = tmp_path / "layout.json"
    arguments = ("--tp", 2, "--pp", 2, "--nodes", "node0,node1")
    done = cli("layout", "make", "--from", bert, *arguments, "-o", out)
    assert done.status == 0, done.err
    assert "not recognised, replicated: odd" in done.err
    assert "embeddings/word_embeddings/weight (dim 0 of 101 over tp 2)" in done.err
    assert cli("layout", "make", "--from", bert, *arguments).json == json.loads(out.read_text())

    checked = cli("layout", "check", out, "--json").json
    assert (checked["format"], checked["version"]) == ("tenplexfs-layout-check", 1)
    assert (checked["ranks"], checked["tensors"]) == (4, 11)
    assert checked["nodes"] == {"node0": [0, 1], "node1": [2, 3]}
    assert "every element covered" in cli("layout", "check", out).out
    shown = cli("layout", "show", out)
    assert "encoder/layer/{i}/output/LayerNorm/bias" in shown.out
    missing = cli("layout", "show", out, "--tensor", "zz")
    assert (missing.status, missing.err[:25]) == (1, "tenplexfs: no tensor 'zz'")
    assert missing.err.endswith("and 6 more\n")
    assert cli("--json", "layout", "show", out).json["format"] == "tenplexfs-layout"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ((), 2, ()),
        (("nonsense",), 2, ("nonsense' (see tenplexfs --help)",)),
        (("tls", "init"), 2, ("Missing argument 'DIR' (see tenplexfs tls init --help)",)),
        (("layout", "check", "--nonsense"), 2, ("--nonsense",)),
        (("layout", "check", "absent.json"), 1, ("absent.json", "no such file")),
        (("layout", "make", "--from", "absent.safetensors", "--nodes", "a"), 1, ("absent.safetensors",)),
        (("layout", "make", "--from", "x", "--nodes", "a:1,b"), 2, ("--nodes", "every node or for none")),
        (("layout", "make", "--from", "x", "--nodes", "a", "--qkv", "odd"), 2, ("--qkv odd",)),
        (("layout", "make", "--from", "x", "--nodes", "a", "--tp", "0"), 2, ("--tp",)),
        (("plan", "one.json"), 2, ("OLD and NEW", "got 1")),
        (("reconfigure", "gpt"), 2, ("layout file, --mesh or --resources",)),
        (("reconfigure", "gpt", "--mesh", "tp=0", "--socket", "none"), 2, ("--mesh 'tp=0'",)),
        (("status",), 3, ("no daemon",)),
        (("status", "--socket", "/nowhere/at.sock"), 3, ("/nowhere/at.sock", "tenplexfs serve")),
        (("unmount", "/"), 1, ("/: no tenplexfs is mounted there",)),
    ],
)
def test_what_is_wrong_is_one_line_and_a_status(cli, arguments, status, words):
    done = cli(*arguments)
    assert done.status == status
    if not arguments:
        return
    assert done.out == ""
    assert len(done.err.splitlines()) == 1, done.err
    assert all(word in done.err for word in words), done.err
    machine = cli(*arguments, "--json")
    assert machine.status == status
    assert machine.err == ""
    assert set(machine.json["error"]) == {"code", "message", "details"}


def test_the_code_of_an_error_is_that_of_grpc(cli):
    assert cli("--json", "status").json["error"]["code"] == "UNAVAILABLE"
    assert cli("--json", "layout", "check", "absent").json["error"]["code"] == "NOT_FOUND"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ("bad.json",)),
        ("[1, 2]", ("bad.json",)),
        ('{"format": "else"}', ("bad.json",)),
        ("\udcff", ("bad.json", "UTF-8")),
    ],
)
def test_a_bad_layout_file_is_named(cli, tmp_path, text, words):
    (tmp_path / "bad.json").write_bytes(text.encode(errors="surrogateescape"))
    done = cli("layout", "check", "bad.json")
    assert done.status == 1
    assert len(done.err.splitlines()) == 1
    assert all(word in done.err for word in words), done.err


def test_a_layout_that_does_not_divide_names_tensor_dim_and_ways(cli, layout):
    done = cli("layout", "check", layout("odd.json", 3, "node0"))
    assert done.status == 1
    assert all(word in done.err for word in ("odd.json", "w", "8", "3")), done.err


def test_a_plan_is_made_offline(cli, layout):
    old, new = layout("old.json", 2, "node0", "node1"), layout("new.json", 4, "node0", "node1")
    plan = cli("plan", old, new, "--json").json
    assert (plan["format"], plan["version"]) == ("tenplexfs-plan", 1)
    size = plan["bytes"]
    assert size["needed"] == size["kept"] + size["local"] + size["moved"] == 8 * 6 * 4
    assert size["moved"] == size["moved_lower_bound"] == 2 * 2 * 6 * 4
    assert set(plan["operations"]) == {"split", "move", "merge"}
    assert plan["matrix"]["node0"]["node1"] == plan["nodes"]["node1"]["receives"]
    assert "transfers" not in plan
    listed = cli("plan", old, new, "--json", "--operations").json["transfers"]
    assert {"tensor", "source_rank", "target_rank", "source_start", "target_stop", "wire"} <= set(listed[0])
    person = cli("plan", old, new)
    assert person.status == 0
    assert all(word in person.out for word in ("needed", "moved lower bound", "node0", "splits"))


def test_a_tensor_that_the_new_layout_lacks_is_refused(cli, layout, tmp_path):
    old, new = layout("old.json", 2, "node0"), layout("new.json", 2, "node0")
    document = json.loads(new.read_text())
    document["tensors"] = {"v": document["tensors"]["w"]}
    new.write_text(json.dumps(document))
    done = cli("plan", old, new)
    assert done.status == 1
    assert "w" in done.err
