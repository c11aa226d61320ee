"""Layouts that only list what each rank holds, on the command line."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file


@pytest.fixture
def tenplex(tmp_path):
    """Writes a layout as Tenplex does: a bare list of local shapes. Returns its path."""

    def write(name, *locals_):
        ranks = [{"model": {"0": {"weight": {"tensor": list(local)}}}} for local in locals_]
        path = tmp_path / name
        path.write_text(json.dumps(ranks))
        return path

    return write


@pytest.mark.parametrize(
    "known",
    [
        {"model/0/weight": {"shape": [8, 6], "dtype": "float32"}},
        {"model.0.weight": {"shape": [8, 6], "dtype": "float32"}},
        {
            "format": "tenplexfs-layout",
            "version": 1,
            "mesh": {"tp": 1},
            "tensors": {"model/0/weight": {"shape": [8, 6], "dtype": "float32"}},
        },
    ],
)
def test_shapes_alone_are_completed_by_global(cli, tenplex, tmp_path, known):
    (tmp_path / "global.json").write_text(json.dumps(known))
    old, new = tenplex("old.json", (4, 6), (4, 6)), tenplex("new.json", (8, 2), (8, 2), (8, 2))
    checked = cli("layout", "check", old, "--global", "global.json", "--json").json
    assert (checked["ranks"], checked["bytes"]) == (2, 192)
    assert "4x6" in cli("layout", "show", old, "--global", "global.json").out
    plan = cli("plan", old, new, "--global", "global.json", "--json").json
    assert plan["bytes"]["needed"] == 192


def test_a_new_layout_takes_its_shapes_from_the_old_one(cli, tenplex, layout):
    old = layout("old.json", 2, "node0", "node1")
    document = json.loads(old.read_text())
    document["tensors"] = {"model/0/weight": document["tensors"]["w"]}
    old.write_text(json.dumps(document))
    plan = cli("plan", old, tenplex("new.json", (8, 3), (8, 3)), "--json").json
    assert plan["bytes"]["moved"] == plan["bytes"]["moved_lower_bound"] == 96


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (None, ("model/0/weight", "--global")),
        ({"model/0/weight": [8, 6]}, ("model/0/weight", "dtype")),
        ({"model/0/weight": "8"}, ("global.json", "model/0/weight", '"8"')),
        ({"model/0/weight": [-8, 6]}, ("global.json", "[-8, 6]")),
        ([], ("global.json", "tensor paths and global shapes")),
        ("{", ("global.json", "no valid JSON")),
    ],
)
def test_what_stays_open_is_refused(cli, tenplex, tmp_path, known, words):
    (tmp_path / "global.json").write_text(known if isinstance(known, str) else json.dumps(known))
    more = [] if known is None else ["--global", "global.json"]
    done = cli("layout", "check", tenplex("old.json", (4, 6), (4, 6)), *more)
    assert done.status == 1
    assert len(done.err.splitlines()) == 1
    assert all(word in done.err for word in words), done.err


@pytest.fixture
def mixture(tmp_path):
    """A tiny mixture of four experts as a safetensors file."""
    tensors = {}
    for i in range(2):
        layer = f"model.layers.{i}"
        tensors[f"{layer}.self_attn.q_proj.weight"] = np.ones((8, 8), np.float32)
        for e in range(4):
            tensors[f"{layer}.block_sparse_moe.experts.{e}.w1.weight"] = np.ones((16, 8), np.float32)
    path = tmp_path / "mixture.safetensors"
    save_file(tensors, path)
    return path


def test_experts_of_a_file_are_taken_out_of_the_replicas_as_those_of_a_preset(cli, mixture):
    arguments = ("layout", "make", "--from", mixture, "--nodes", "a,b", "--tp", 2)
    inside = cli(*arguments, "--dp", 4, "--ep", 2).json
    assert inside["mesh"] == {"pp": 1, "dp": 2, "ep": 2, "tp": 2}
    key = "model/layers/{i}/block_sparse_moe/experts/{e}/w1/weight"
    assert inside["tensors"][key]["shard"] == [{"axis": "tp", "dim": 0}]
    own = cli(*arguments, "--dp", 2, "--ep", 4).json
    assert own["mesh"] == {"pp": 1, "dp": 2, "tp": 2}
    assert own["meshes"] == {"expert": {"pp": 1, "edp": 1, "ep": 4}}
    assert own["tensors"][key]["mesh"] == "expert"
    assert "shard" not in own["tensors"][key]
    assert "mesh" not in own["tensors"]["model/layers/{i}/self_attn/q_proj/weight"]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (("--dp", 2, "--ep", 3), "ep 3 divides neither dp 2 nor dp x tp 2"),
        (("--dp", 8, "--ep", 8), "ep 8: the model has 4 experts"),
    ],
)
def test_experts_that_do_not_fit_are_refused(cli, mixture, sizes, words):
    done = cli("layout", "make", "--from", mixture, "--nodes", "a", *sizes)
    assert done.status == 1
    assert words in done.err


def test_tensors_whose_names_have_braces_are_refused_by_name(cli, tmp_path):
    save_file({"layers.{i}.w": np.ones(4, np.float32)}, tmp_path / "odd.safetensors")
    done = cli("layout", "make", "--from", "odd.safetensors", "--nodes", "a")
    assert done.status == 1
    assert "'layers/{i}/w'" in done.err
    assert "explicit form" in done.err
