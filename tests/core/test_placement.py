import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from tenplexfs.core.build import build_ptc
from tenplexfs.core.layout import place_in_order
from tenplexfs.core.placement import place
from tenplexfs.core.planner import plan
from tenplexfs.errors import InvalidError
from tenplexfs.formats.layout_json import parse_layout

from .carrying import carry_out, lower_bound
from .layouts import held, text, transitions


def gpt(tp, pp, dp, nodes, layers=8, **more):
    stage = [int(k) for k, part in enumerate(np.array_split(range(layers), pp)) for _ in part]
    on = {"pp": {"by": "i", "owner": stage}}
    return parse_layout(
        json.dumps(
            {
                "format": "tenplexfs-layout",
                "version": 1,
                "mesh": {"pp": pp, "dp": dp, "tp": tp},
                "nodes": nodes,
                "tensors": {
                    "layers/{i}/qkv": {
                        "shape": [48, 16],
                        "dtype": "float32",
                        "count": layers,
                        "shard": [{"axis": "tp", "dim": 0}],
                        "on": on,
                    },
                    "layers/{i}/norm": {"shape": [16], "dtype": "float32", "count": layers, "on": on},
                    "embedding": {
                        "shape": [64, 16],
                        "dtype": "float32",
                        "shard": [{"axis": "tp", "dim": 0}],
                        "on": {"pp": 0},
                    },
                },
                **more,
            }
        )
    )


def moved(old, layout):
    return plan(old, build_ptc(layout)).totals["moved"]


def test_losing_a_node_of_sixteen_moves_nothing():
    names = [f"node{k:02d}" for k in range(16)]
    old = build_ptc(gpt(8, 4, 4, {name: list(range(8 * k, 8 * k + 8)) for k, name in enumerate(names)}))
    left = {name: 8 for name in names if name != "node03"}
    fresh = gpt(8, 4, 3, left)
    assert moved(old, place(old, fresh)) == 0
    assert moved(old, place(old, replace(fresh, keep_together=("tp",)))) == 0
    assert moved(old, place_in_order(fresh)) > 0


@settings(max_examples=15, deadline=None)
@given(transitions())
def test_placement_is_never_worse_than_in_order_and_near_the_optimum(documents):
    old = build_ptc(parse_layout(text(documents[0])))
    given_layout = parse_layout(text(documents[1]))
    size = given_layout.mesh.size
    if size > 6:
        given_layout = parse_layout(text(documents[0]))
        size = given_layout.mesh.size
    if size > 6:
        return
    counts = {"a": size // 2, "b": size - size // 2, "c": 1}
    open_layout = replace(given_layout, nodes=(), devices=tuple(counts.items()))
    got = moved(old, place(old, open_layout))
    assert got <= moved(old, place_in_order(open_layout))
    best = None
    for nodes in itertools.product("abc", repeat=size):
        if all(nodes.count(name) <= count for name, count in counts.items()):
            ranks = tuple((n, tuple(r for r in range(size) if nodes[r] == n)) for n in "abc" if n in nodes)
            value = moved(old, replace(given_layout, nodes=ranks))
            best = value if best is None else min(best, value)
    assert got <= best * 1.05


def test_ranks_to_keep_together_share_a_node():
    old = build_ptc(gpt(2, 2, 1, {"a": [0, 2], "b": [1, 3]}))
    together = gpt(2, 2, 1, {"a": 2, "b": 2}, keep_together=["tp"])
    assert {frozenset(ranks) for _, ranks in place(old, together).nodes} == {
        frozenset({0, 1}),
        frozenset({2, 3}),
    }
    apart = place(old, gpt(2, 2, 1, {"a": 2, "b": 2}))
    assert moved(old, apart) == 0


def test_no_room_to_keep_together_is_refused_with_the_numbers():
    old = build_ptc(gpt(2, 2, 1, {"a": [0, 1, 2, 3]}))
    with pytest.raises(
        InvalidError, match=r"2 groups of 2 ranks to keep together \(tp\), the nodes have room for 1"
    ):
        place(old, gpt(2, 2, 1, {"a": 3, "b": 1}, keep_together=["tp"]))


@settings(max_examples=40)
@given(transitions())
def test_where_ranks_are_placed_a_plan_moves_what_the_nodes_lack(documents):
    old = build_ptc(parse_layout(text(documents[0])))
    fresh = parse_layout(text(documents[1]))
    half = -(-fresh.mesh.size // 2)
    placed = place(old, replace(fresh, nodes=(), devices=(("b", half), ("d", 1), ("a", half))))
    assert sorted(rank for _, ranks in placed.nodes for rank in ranks) == list(range(fresh.mesh.size))
    assert all(len(ranks) <= {"b": half, "d": 1, "a": half}[node] for node, ranks in placed.nodes)
    made = plan(old, build_ptc(placed))
    held_before, wanted = (
        [held(d, r) for r in p.ranks()] for d, p in zip(documents, (old, made.new), strict=True)
    )
    found, wire_bytes = carry_out(made, held_before)
    assert wire_bytes == lower_bound(made, held_before, wanted)
    assert made.totals["moved"] == sum(wire_bytes.values())
    for rank, paths in enumerate(wanted):
        for path, array in paths.items():
            assert np.array_equal(found[rank][path], array)


def test_explicit_ranks_are_placed_where_their_pieces_are():
    def rows(*firsts):
        return [
            {"w": {"tensor": [2], "dtype": "float32", "pieces": [{"start": [k], "stop": [k + 2], "at": [0]}]}}
            for k in firsts
        ]

    common = {"format": "tenplexfs-layout", "version": 1, "global": {"w": [8]}}
    old = {**common, "ranks": rows(0, 2, 4, 6), "nodes": {"a": [0, 2], "b": [1, 3]}}
    new = {**common, "ranks": rows(6, 4, 2, 0), "nodes": {"a": 2, "b": 2}}
    before = build_ptc(parse_layout(json.dumps(old)))
    placed = place(before, parse_layout(json.dumps(new)))
    assert dict(placed.nodes) == {"a": (1, 3), "b": (0, 2)}
    assert moved(before, placed) == 0
