"""Layouts of known models on the command line, and what a person sees of layouts and plans."""

from __future__ import annotations

import pytest

FOUR = "node0,node1,node2,node3"


@pytest.fixture
def make(cli, tmp_path):
    """A function that makes a layout of a known model and returns its path."""

    def invoke(name, *arguments, model="gpt3-1.3b"):
        path = tmp_path / name
        done = cli("layout", "make", "--model", model, *arguments, "-o", path)
        assert done.status == 0, done.err
        return path

    return invoke


def test_a_known_model_is_laid_out_and_planned(cli, make):
    old = make("old.json", "--tp", 4, "--pp", 2, "--dp", 2, "--nodes", FOUR, "--optimizer", "adam")
    new = make(
        "new.json", "--tp", 2, "--pp", 4, "--dp", 1, "--nodes", "node0,node1", "--optimizer", "adam", "--zero"
    )
    assert cli("layout", "check", old, "--json").json["ranks"] == 16
    size = cli("plan", old, new, "--json").json["bytes"]
    assert size["moved"] == size["moved_lower_bound"] > 0
    person = cli("plan", old, new).out
    assert "dim 0 over tp 4 -> 2, i over pp 2 -> 4, replicas 2 -> 1" in person
    assert "at least" in person
    assert "at 100Gbit/s: node" in person


def test_experts_are_taken_out_of_the_replicas(cli):
    arguments = ("--tp", 2, "--dp", 4, "--ep", 2, "--nodes", "a,b")
    layout = cli("layout", "make", "--model", "mixtral-8x7b", *arguments).json
    assert layout["mesh"] == {"pp": 1, "dp": 2, "ep": 2, "tp": 2}


def test_the_time_is_that_of_the_busiest_link(cli, layout):
    old, new = layout("old.json", 2, "node0"), layout("new.json", 2, "node1")
    plan = cli("plan", old, new, "--bandwidth", "1Gbit/s", "--bandwidth", "1MB/s", "--json").json
    assert plan["bytes"]["moved"] == 192
    assert [(e["bandwidth"], e["seconds"]) for e in plan["estimates"]] == [
        ("1Gbit/s", 192 * 8 / 1e9),
        ("1MB/s", 192 / 1e6),
    ]
    assert "estimates" not in cli("plan", old, new, "--json").json
    assert "at least" not in cli("plan", old, old).out


def test_a_plan_is_drawn_as_a_page(cli, layout, tmp_path):
    old, new = layout("old.json", 2, "node0"), layout("new.json", 4, "node0", "node1")
    done = cli("plan", old, new, "--html", "plan.html")
    assert done.status == 0, done.err
    assert "wrote plan.html" in done.out
    page = (tmp_path / "plan.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "old.json to new.json" in page
    assert cli("plan", old, "--mesh", "tp=1", "--html", "b.html", "--json").json["bytes"]["moved"] == 0
    assert "old.json to tp=1" in (tmp_path / "b.html").read_text()


def test_a_layout_is_shown_by_ranks_that_are_alike(cli, make):
    out = cli("layout", "show", make("l.json", "--tp", 2, "--pp", 2, "--dp", 2, "--nodes", "a,b")).out
    assert "ranks 0-3" in out
    assert "ranks 4-7" in out
    rows = [line.split() for line in out.splitlines()]
    qkv = next(row for row in rows if row and row[0].endswith("linear_qkv/weight"))
    assert qkv[-6:] == ["12", "of", "3072x2048"] * 2
    assert any("and 5 alike" in line for line in out.splitlines())


def test_one_tensor_is_drawn_with_who_holds_what(cli, make, layout):
    path = make("l.json", "--tp", 2, "--pp", 1, "--dp", 2, "--nodes", "a,b")
    shown = cli("layout", "show", path, "--tensor", "decoder.layers.0.self_attention.linear_qkv.weight").out
    assert shown.count("├") == 5
    assert "[0:1024, 0:2048] at [0, 0], [2048:3072, 0:2048] at [1024, 0]" in shown
    tied = cli("layout", "show", path, "--tensor", "output_layer/weight", "--json").json
    assert tied["canonical"] == "embedding/word_embeddings/weight"
    assert [shard["local_shape"] for shard in tied["shards"]] == [[25216, 2048]] * 2
    assert tied["shards"][1]["padding"] == [{"start": [25041, 0], "stop": [25216, 2048]}]


def test_check_tells_what_each_node_stores(cli, layout):
    path = layout("l.json", 4, "node0", "node1", shape=[6, 6], shard=[{"axis": "tp", "dim": 0, "pad_to": 8}])
    checked = cli("layout", "check", path, "--json").json
    assert checked["memory"] == {
        "node0": {"bytes": 4 * 6 * 4, "padding": 0},
        "node1": {"bytes": 4 * 6 * 4, "padding": 2 * 6 * 4},
    }
    assert "192 B, 1.33 times the tensors" in cli("layout", "check", path).out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("layout", "make", "--nodes", "a"), 2, "--from or --model"),
        (("layout", "make", "--nodes", "a", "--model", "x", "--from", "y"), 2, "--from or --model"),
        (("layout", "make", "--nodes", "a", "--model", "gpt5"), 1, "no model 'gpt5': known are bert-large"),
        (("layout", "make", "--nodes", "a", "--model", "bert-large", "--qkv", "fused"), 2, "go with --from"),
        (("layout", "make", "--nodes", "a", "--from", "y", "--zero"), 2, "go with --model"),
        (("layout", "make", "--nodes", "a", "--model", "resnet50", "--optimizer", "sgd"), 2, "need adam"),
        (("layout", "make", "--nodes", "a", "--model", "bert-large", "--tp", 3), 1, "tp 3 does not divide"),
        (("plan", "a", "b", "--bandwidth", "fast"), 2, "--bandwidth 'fast': need a rate"),
    ],
)
def test_what_does_not_go_together_is_refused(cli, arguments, status, words):
    done = cli(*arguments)
    assert done.status == status
    assert words in done.err
    assert len(done.err.splitlines()) == 1


def test_an_unknown_tensor_names_some_that_are_there(cli, layout):
    done = cli("layout", "show", layout("l.json", 2, "a"), "--tensor", "v")
    assert done.status == 1
    assert done.err == "tenplexfs: no tensor 'v'; there are: w\n"


def test_a_page_that_cannot_be_written_is_refused(cli, layout):
    path = layout("l.json", 2, "a")
    done = cli("plan", path, path, "--html", "absent/plan.html")
    assert done.status == 1
    assert "absent/plan.html" in done.err
