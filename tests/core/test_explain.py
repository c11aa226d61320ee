"""What a plan says to a person adds up to its totals."""

import json

import pytest

from tenplexfs.core.build import build_ptc
from tenplexfs.core.explain import node_bytes, reasons
from tenplexfs.core.planner import plan
from tenplexfs.core.presets import preset_layout
from tenplexfs.formats.layout_json import parse_layout


def ptc(name="mixtral-8x7b", nodes=("a", "b"), **sizes):
    return build_ptc(parse_layout(json.dumps(preset_layout(name, nodes=nodes, **sizes))))


OLD = {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "optimizer": "adam", "zero": True}


@pytest.mark.parametrize(
    "change", [{}, {"tp": 4}, {"pp": 1, "nodes": ("a", "c")}, {"ep": 1}, {"dp": 4, "ep": 4}]
)
def test_nodes_and_entries_add_up_to_the_totals(change):
    made = plan(ptc(**OLD), ptc(**{**OLD, **change}))
    of, found, size = node_bytes(made), reasons(made), made.totals
    for name, column in (
        ("needed", of.needed),
        ("kept", of.kept),
        ("local", of.local),
        ("moved", of.received),
    ):
        assert column.sum() == size[name]
    assert (of.local >= 0).all()
    for name in ("kept", "local", "moved"):
        assert sum(getattr(reason, name) for reason in found) == size[name]
    assert sum(reason.tensors for reason in found) == len(made.new.names)


def test_reasons_say_what_changed_in_the_words_of_the_layout():
    why = {
        r.key: r.why for r in reasons(plan(ptc(**OLD), ptc(**{**OLD, "tp": 4, "pp": 1, "nodes": ("a", "c")})))
    }
    fc2 = "decoder/layers/{i}/mlp/experts/{e}/linear_fc2/weight"
    assert why[fc2] == "dim 1 over tp 2 -> 4, i over pp 2 -> 1"
    assert why[f"optimizer/m/{fc2}"].startswith("dim 1 over tp 2 -> 4")
    assert {r.why for r in reasons(plan(ptc(**OLD), ptc(**OLD)))} == {
        "the same arrays on the same nodes: kept"
    }


def test_explicit_ranks_are_explained_too():
    leaf = {"tensor": [4], "dtype": "float32"}
    halves = [{"w": {**leaf, "pieces": [{"start": [a], "stop": [a + 4], "at": [0]}]}} for a in (0, 4)]
    document = {"format": "tenplexfs-layout", "version": 1, "ranks": halves, "global": {"w": [8]}}
    old = build_ptc(parse_layout(json.dumps({**document, "nodes": {"a": [0], "b": [1]}})))
    new = build_ptc(parse_layout(json.dumps({**document, "nodes": {"a": [1], "b": [0]}})))
    (reason,) = reasons(plan(old, new))
    assert (reason.key, reason.moved, reason.old) == ("w", 32, "explicit pieces; replicas 1")
    assert reason.why == "cut alike, but ranks are on other nodes"
