"""Plans are carried out on index arrays and held against the oracle, which knows nothing of plans."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenplexfs.core.build import build_ptc
from tenplexfs.core.planner import plan
from tenplexfs.errors import InvalidError, UnavailableError
from tenplexfs.formats.layout_json import parse_layout

from .carrying import carry_out, lower_bound
from .layouts import held, text, transitions


@settings(max_examples=150)
@given(transitions())
def test_a_plan_gives_every_rank_its_bytes_and_moves_the_least(documents):
    old, new = (build_ptc(parse_layout(text(d))) for d in documents)
    old_held, new_held = (
        [held(d, rank) for rank in ptc.ranks()] for d, ptc in zip(documents, (old, new), strict=True)
    )
    for ptc, expected in ((old, old_held), (new, new_held)):
        for rank in ptc.ranks():
            assert list(ptc.rank_paths(rank)) == sorted(expected[rank])
    made = plan(old, new)
    arrays, wire_bytes = carry_out(made, old_held)
    for rank in new.ranks():
        assert sorted(arrays.get(rank, {})) == sorted(new_held[rank])
        for path, expected in new_held[rank].items():
            assert np.array_equal(arrays[rank][path], expected), (rank, path)
    bound = lower_bound(made, old_held, new_held)
    summary = made.summary()
    assert wire_bytes == bound
    assert {node: n["receives"] for node, n in summary["nodes"].items()} == bound
    numbers = summary["bytes"]
    assert numbers["moved"] == numbers["moved_lower_bound"] == sum(bound.values())
    assert numbers["needed"] == numbers["kept"] + numbers["local"] + numbers["moved"]
    assert sum(n["sends"] for n in summary["nodes"].values()) == numbers["moved"]


@settings(max_examples=150)
@given(transitions(), st.data())
def test_lost_nodes_are_no_sources_and_what_only_they_held_is_named(documents, data):
    old, new = (build_ptc(parse_layout(text(d))) for d in documents)
    lost = data.draw(st.sets(st.sampled_from(sorted(old.nodes))))
    old_held, new_held = (
        [held(d, rank) for rank in ptc.ranks()] for d, ptc in zip(documents, (old, new), strict=True)
    )
    left = [{} if old.node_of(rank) in lost else old_held[rank] for rank in old.ranks()]
    there, wanted = ({}, {})
    for into, arrays in ((there, left), (wanted, new_held)):
        for rank in arrays:
            for path, array in rank.items():
                into.setdefault("v" if path == "tied" else path, set()).update(array[array >= 0].tolist())
    gone = {path for path, elements in wanted.items() if elements - there.get(path, set())}
    if gone:
        with pytest.raises(UnavailableError, match="no node that is left holds") as caught:
            plan(old, new, lost=lost)
        found = {old.tensors[path].path for path in caught.value.details["tensors"]}
        assert found == gone
        for path, region in caught.value.details["tensors"].items():
            box = eval(f"np.s_{region}") if region != "[]" else ()
            shape = new.tensors[path].shape
            indices = np.arange(math.prod(shape)).reshape(shape)[box]
            key = "v" if path == "tied" else path
            assert indices.size
            assert not set(np.ravel(indices).tolist()) & there.get(key, set())
        return
    made = plan(old, new, lost=lost)
    arrays, wire_bytes = carry_out(made, left)
    for rank in new.ranks():
        for path, expected in new_held[rank].items():
            assert np.array_equal(arrays[rank][path], expected), (rank, path)
    bound = lower_bound(made, left, new_held)
    assert wire_bytes == bound
    numbers = made.summary()["bytes"]
    assert numbers["moved"] == numbers["moved_lower_bound"] == sum(bound.values())


@given(transitions(count=1))
def test_a_plan_to_itself_keeps_everything(documents):
    ptc = build_ptc(parse_layout(text(documents[0])))
    numbers = plan(ptc, ptc).totals
    assert numbers["moved"] == numbers["local"] == 0
    assert numbers["kept"] == numbers["needed"]


@given(transitions())
def test_the_order_of_the_json_does_not_change_the_plan(documents):
    shuffled = [
        {**d, "tensors": dict(reversed(d["tensors"].items())), "nodes": dict(reversed(d["nodes"].items()))}
        for d in documents
    ]
    first, second = (
        plan(*(build_ptc(parse_layout(text(d))) for d in pair)) for pair in (documents, shuffled)
    )
    assert first.summary() == second.summary()


def layout(tensors, mesh=None, nodes=None):
    document = {"format": "tenplexfs-layout", "version": 1, "mesh": mesh or {"tp": 2}, "tensors": tensors}
    return build_ptc(parse_layout(json.dumps({**document, "nodes": nodes} if nodes else document)))


W = {"shape": [4], "dtype": "float32", "shard": [{"axis": "tp", "dim": 0}]}


def test_everything_that_does_not_fit_is_named_at_once():
    old = layout({"w": W, "v": W, "gone": W, "half": W})
    new = layout({"w": {**W, "dtype": "float16"}, "v": {**W, "shape": [8]}, "fresh": W, "half": W})
    with pytest.raises(InvalidError) as caught:
        plan(old, new)
    for words in ("w: is float32 [4]", "v: is", "fresh: not in the old", "gone: the new layout lacks it"):
        assert words in caught.value.message
    assert "half" not in caught.value.message
    kept = layout({"half": W})
    assert plan(old, kept, drop=["w", "v", "go*"]).totals["moved"] == 0


def test_tied_tensors_are_counted_once_and_found_under_either_name():
    tied = {
        "embedding": {**W, "on": {"pp": 0}},
        "head": {"alias": "embedding", "on": {"pp": -1}},
    }
    old = layout(tied, {"pp": 2, "tp": 2}, {"a": [0, 1], "b": [2, 3]})
    apart = layout({"head": W}, {"tp": 2}, {"b": [0, 1]})
    assert plan(old, apart, drop=["embedding"]).totals == {
        "needed": 16, "kept": 16, "local": 0, "moved": 0, "moved_lower_bound": 0, "padding": 0,
    }  # fmt: skip


def test_tying_what_was_held_apart_is_refused():
    apart = layout({"embedding": W, "head": W})
    tied = layout({"embedding": W, "head": {"alias": "embedding"}})
    with pytest.raises(InvalidError, match="which the old layout holds apart"):
        plan(apart, tied)


def test_what_is_lost_is_named_in_one_line():
    old = layout({f"w{n}": W for n in range(7)}, nodes={"a": [0], "b": [1]})
    with pytest.raises(UnavailableError) as caught:
        plan(old, layout({f"w{n}": W for n in range(7)}, {"tp": 1}, {"a": [0]}), lost=["b"])
    assert caught.value.message == (
        "no node that is left holds w0 [2:4], w1 [2:4], w2 [2:4], w3 [2:4], w4 [2:4] and 2 tensors more; "
        "lost: b"
    )
    assert len(caught.value.details["tensors"]) == 7


def test_a_node_that_came_back_empty_gets_its_bytes_from_a_replica():
    replicated = {"w": {"shape": [4], "dtype": "float32"}}
    both = layout(replicated, {"dp": 2}, {"a": [0], "b": [1]})
    made = plan(both, both, lost=["b"])
    assert made.summary()["matrix"] == {"a": {"b": 16}}
