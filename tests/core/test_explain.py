"""What a plan says to a person adds up to its totals."""

import json
import math

import pytest

from tenplexfs.core.build import build_ptc
from tenplexfs.core.explain import node_bytes, ranks_alike, reasons, stored_bytes
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
    made = plan(ptc(**OLD), ptc(**{**OLD, "tp": 4, "pp": 1, "nodes": ("a", "c")}))
    why = {key: reason.why for reason in reasons(made) for key in reason.keys}
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
    assert (reason.keys, reason.moved, reason.old) == (("w",), 32, "explicit pieces; replicas 1")
    assert reason.why == "cut alike, but ranks are on other nodes"


def test_what_nodes_store_is_counted_array_by_array():
    whole, cut = (ptc(**{**OLD, "zero": zero}, nodes=("a", "b", "c", "d")) for zero in (False, True))
    for made in (whole, cut):
        stored = stored_bytes(made)
        for node, ranks in made.nodes.items():
            distinct = {}
            for rank in ranks:
                for path in made.rank_paths(rank):
                    distinct[made.tensors[path].path, made.shard(rank, path)] = made.tensors[path].itemsize
            sizes = [math.prod(s.local_shape) * size for (_, s), size in distinct.items()]
            pads = [sum(b.volume for b in s.padding) * size for (_, s), size in distinct.items()]
            assert stored[node] == (sum(sizes), sum(pads))


def test_ranks_alike_have_the_same_local_shapes():
    made = ptc(**{**OLD, "ep": 1, "pp": 3})
    groups = ranks_alike(made)
    assert sorted(rank for group in groups for rank in group.ranks) == list(range(made.world_size))
    assert [len(group.ranks) for group in groups] == [4, 4, 4]
    for group in groups:
        assert {made.local_bytes(rank) for rank in group.ranks} == {group.nbytes}
    fc2 = "decoder/layers/{i}/mlp/experts/{e}/linear_fc2/weight"
    assert [dict(group.shapes[fc2]) for group in groups] == [
        {(4096, 7168): 8 * layers} for layers in (11, 11, 10)
    ]
