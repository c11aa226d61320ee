"""Transitions that broke other systems, each with its kind: carried out on index arrays, there and back."""

import itertools
import json
import math
import re

import numpy as np
import pytest

from tenplexfs.core.build import build_ptc
from tenplexfs.core.derive import derive_layout
from tenplexfs.core.layout import place_in_order
from tenplexfs.core.node_part import node_part
from tenplexfs.core.planner import plan
from tenplexfs.core.transfers import list_transfers
from tenplexfs.errors import InvalidError
from tenplexfs.formats.layout_json import layout_to_json, parse_layout

from .carrying import carry_out, lower_bound
from .layouts import held


def document(tensors, mesh, per_node=4, **more):
    size = math.prod(mesh.values())
    nodes = {f"n{k:02}": list(range(first, min(first + per_node, size)))
             for k, first in enumerate(range(0, size, per_node))}  # fmt: skip
    return {
        "format": "tenplexfs-layout",
        "version": 1,
        "mesh": mesh,
        "nodes": nodes,
        "tensors": tensors,
        **more,
    }


def ptc(given):
    return build_ptc(parse_layout(json.dumps(given)))


def derived(given, mesh, devices=4):
    """Returns the document of a layout with other sizes, on as many nodes as it needs."""
    layout = parse_layout(json.dumps(given))
    size = math.prod({**dict(layout.mesh.axes), **mesh}.values())
    nodes = {f"n{k:02}": devices for k in range(-(-size // devices))}
    return layout_to_json(place_in_order(derive_layout(layout, mesh, nodes)))


def go(*documents):
    """Carries the arrays of the first document through all others, and checks each stop by the oracle."""
    arrays = [held(documents[0], rank) for rank in ptc(documents[0]).ranks()]
    for before, after in itertools.pairwise(documents):
        made = plan(ptc(before), ptc(after))
        expected = [held(after, rank) for rank in made.new.ranks()]
        bound = lower_bound(made, arrays, expected)
        found, wire_bytes = carry_out(made, arrays)
        arrays = [found.get(rank, {}) for rank in made.new.ranks()]
        for rank, paths in enumerate(expected):
            assert sorted(arrays[rank]) == sorted(paths)
            for path, array in paths.items():
                assert np.array_equal(arrays[rank][path], array), (rank, path)
        assert wire_bytes == bound
        assert made.totals["moved"] == made.totals["moved_lower_bound"] == sum(bound.values())
    return arrays


def layers(count, stages=1, **mesh):
    owner = [int(k) for k, part in enumerate(np.array_split(range(count), stages)) for _ in part]
    on = {"pp": {"by": "i", "owner": owner}}
    entry = {"shape": [6, 4], "dtype": "float32", "count": count, "on": on}
    return document(
        {
            "layers/{i}/w": {**entry, "shard": [{"axis": "tp", "dim": 0, "rule": "ceil"}]},
            "layers/{i}/norm": {**entry, "shape": [4]},
            "embedding": {"shape": [10, 4], "dtype": "float16", "on": {"pp": 0}},
        },
        {"pp": stages, "dp": 1, "tp": 1, **mesh},
    )


@pytest.mark.parametrize(("count", "stages"), [(30, 4), (70, 12), (3, 5), (1, 4), (5, 5), (6, 4), (24, 1)])
def test_each_layer_is_on_one_stage_exactly(count, stages):
    start = layers(count)
    spread = derived(start, {"pp": stages})
    made = ptc(spread)
    for i in range(count):
        (holder,) = made.holders(f"layers/{i}/w")
        assert len(holder.keys) == 1
    held_by = [sum("/w" in path for path in made.rank_paths(rank)) for rank in made.ranks()]
    assert sum(held_by) == count
    assert max(held_by) - min(held_by) <= 1
    assert (0 in held_by) == (stages > count)
    go(start, spread, start)


@pytest.mark.parametrize("count", [4, 5])
@pytest.mark.parametrize("ways", [2, 4])
def test_experts_have_global_ids_and_all_survive(ways, count):
    def experts(ep):
        owner = [int(k) for k, part in enumerate(np.array_split(range(count), ep)) for _ in part]
        entry = {"shape": [2, 3], "dtype": "float32", "count": count}
        return document(
            {"experts/{i}/w": {**entry, "on": {"ep": {"by": "i", "owner": owner}}}}, {"ep": ep}, 1
        )

    assert len(go(experts(1), experts(ways), experts(3), experts(1))[0]) == count


def test_experts_by_two_indices_are_each_on_one_stage_and_one_rank():
    on = {"pp": {"by": "i", "owner": [0, 0, 1]}, "ep": {"by": "e", "owner": [0, 0, 1, 1]}}
    entry = {"shape": [2], "dtype": "float32", "count": {"i": 3, "e": 4}, "on": on}
    made = ptc(document({"layers/{i}/experts/{e}/w": entry}, {"pp": 2, "ep": 2}))
    assert made.rank_paths(3) == ("layers/2/experts/2/w", "layers/2/experts/3/w")
    assert sum(len(made.rank_paths(rank)) for rank in made.ranks()) == 12


W = {"shape": [8, 6], "dtype": "float32", "shard": [{"axis": "tp", "dim": 0}]}


@pytest.mark.parametrize(
    ("tensors", "hole"),
    [
        ({"w": {**W, "on": {"tp": 0}}}, "tensor 'w': no rank holds [4:8, 0:6] of its shape [8, 6]"),
        ({"w": {**W, "on": {"tp": 1}}}, "tensor 'w': no rank holds [0:4, 0:6] of its shape [8, 6]"),
        ({"v": W, "w": {**W, "on": {"tp": []}}}, "tensor 'w': no rank holds [0:8, 0:6]"),
        (
            {"w": {**W, "shard": [{"axis": "tp", "dim": 1, "cuts": [0, 2, 6]}], "on": {"tp": 0}}},
            "tensor 'w': no rank holds [0:8, 2:6]",
        ),
        (
            {"w": {**W, "shape": [8], "shard": [{"axis": "tp", "flat": True}], "on": {"tp": -1}}},
            "tensor 'w': no rank holds [0:4] of its shape [8]",
        ),
    ],
)
def test_what_is_half_covered_is_refused_with_the_region(tensors, hole):
    with pytest.raises(InvalidError, match=re.escape(hole)):
        ptc(document(tensors, {"tp": 2}))


def leaf(local, *pieces, **more):
    named = [dict(zip(("start", "stop", "at"), piece, strict=True)) for piece in pieces]
    return {"tensor": local, "dtype": "float32", "pieces": named, **more}


@pytest.mark.parametrize(
    ("leaves", "words"),
    [
        ([leaf([4], ([0], [4], [0]))], "no rank holds [4:8] of its shape [8]"),
        ([leaf([8], ([5], [3], [0]))], "dim 0: need 0 <= start <= stop, got [5, 3)"),
        ([leaf([8], ([-1], [7], [0]))], "dim 0: need 0 <= start <= stop, got [-1, 7)"),
        ([leaf([8], ([1], [9], [0]))], "dim 0: need stop <= 8, got [1, 9)"),
        ([leaf([8], ([0], [8], [1]))], "local start [1] stop [9] is outside the local array [8]"),
        ([leaf([8], ([0], [8], [-1]))], "local start [-1] stop [7] is outside the local array [8]"),
        ([leaf([10], ([0], [8], [0]), padding=[{"start": [8], "stop": [12]}])], "local start [8] stop [12]"),
        ([leaf([8], ([0, 0], [8, 1], [0]))], "need 1 dims"),
        ([leaf([8], ([0], [8], [0, 0]))], "1 in 'at'"),
        ([leaf([9], ([0], [8], [0]))], "a local array [9] hold 8 of its 9 elements"),
        ([leaf([8], ([0], [5], [0]), ([3], [6], [5]))], "overlap in the tensor: [0]:[5] and [3]:[6]"),
        ([leaf([8], ([0], [5], [0]), ([5], [8], [3]))], "overlap in the local array: [0]:[5] and [3]:[6]"),
        # Volume alone would accept these: 5 + 5 elements in ten places.
        ([leaf([10], ([0], [5], [0]), ([3], [8], [5]))], "overlap in the tensor: [0]:[5] and [3]:[8]"),
        ([leaf([10], ([0], [5], [0]), ([3], [8], [3]))], "two pieces of one shard overlap"),
    ],
)  # fmt: skip
def test_pieces_that_do_not_fit_are_refused_with_the_values(leaves, words):
    given = {"ranks": [{"w": one} for one in leaves], "global": {"w": [8]}}
    with pytest.raises(InvalidError, match=re.escape(words)) as caught:
        ptc({"format": "tenplexfs-layout", "version": 1, **given})
    assert "w" in caught.value.message


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ({"cuts": [0, 6, 4, 8]}, "cuts"),
        ({"cuts": [-1, 4, 6, 8]}, "cuts"),
        ({"cuts": [0, 4, 6, 9]}, "cuts"),
        ({"cuts": [0, 4, 8]}, "cuts"),
        ({"sections": [4, 3]}, "sections"),
        ({"sections": [-1, 9]}, "sections"),
        ({"pad_to": 7}, "7"),
        ({"pad_to": 10}, "10 does not divide by 3"),
        ({}, "8 does not divide by 3"),
    ],
)
def test_cuts_that_do_not_fit_name_tensor_dim_and_size(cut, words):
    with pytest.raises(InvalidError) as caught:
        ptc(document({"w": {**W, "shard": [{"axis": "tp", "dim": 0, **cut}]}}, {"tp": 3}))
    for word in ("tensor 'w'", "dim 0", words):
        assert word in caught.value.message


def vocabulary(tp, pad_to):
    entry = {"shape": [50257, 2], "dtype": "bfloat16", "shard": [{"axis": "tp", "dim": 0, "pad_to": pad_to}]}
    return document({"embedding": entry}, {"tp": tp}, 2)


def test_a_padded_vocabulary_there_and_back():
    one, eight = vocabulary(1, 50304), vocabulary(8, 51200)
    (back,) = go(one, eight, one)
    assert np.array_equal(back["embedding"][:50257].ravel(), np.arange(50257 * 2))
    assert (back["embedding"][50257:] == -1).all()
    made = plan(ptc(one), ptc(eight))
    assert made.totals["needed"] == 50257 * 2 * 2
    assert made.totals["padding"] == (51200 - 50257) * 2 * 2
    last = made.new.shard(7, "embedding")
    assert last.local_shape == (6400, 2)
    assert [(box.start, box.stop) for box in last.padding] == [((6400 - 943, 0), (6400, 2))]
    assert sum(math.prod(t["target_stop"][d] - t["target_start"][d] for d in (0, 1))
               for t in list_transfers(made)) == 50257 * 2  # fmt: skip


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("flat", [False, True])
def test_sources_merge_in_the_order_of_their_ranks(dim, flat):
    def cut(tp):
        shard = [{"axis": "tp", "flat": True}] if flat else [{"axis": "tp", "dim": dim}]
        return document({"w": {"shape": [24, 24], "dtype": "float32", "shard": shard}}, {"tp": tp}, 1)

    go(cut(12), cut(4), cut(12))
    listed = [t for t in list_transfers(plan(ptc(cut(12)), ptc(cut(4)))) if t["target_rank"] == 3]
    assert [t["source_rank"] for t in listed] == [9, 10, 11]
    starts = [t["target_start"] for t in listed]
    assert starts == sorted(starts)


@pytest.mark.parametrize("given", [layers(6, 3, dp=2, tp=2), vocabulary(8, 51200)])
def test_a_plan_to_itself_moves_and_copies_nothing(given):
    made = plan(ptc(given), ptc(given))
    assert made.operations == {"split": 0, "move": 0, "merge": 0}
    assert made.totals["kept"] == made.totals["needed"]
    for node in made.nodes:
        for target in node_part(made, node).targets:
            assert target.kept_from in target.keys
            assert {moves.way for moves in target.moves} <= {"kept"}
    assert not any(t["wire"] for t in list_transfers(made))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"dp": 2, "tp": 2}, {"dp": 2, "tp": 3}),
        ({"pp": 2, "tp": 2}, {"pp": 3, "tp": 2}),
        ({"pp": 2, "dp": 3, "tp": 4}, {"pp": 4, "dp": 2, "tp": 2}),
        ({}, {"tp": 7}),
        ({}, {"pp": 7}),
        ({}, {"dp": 7}),
    ],
    ids=["4 to 6 by tp", "4 to 6 by pp", "24 to 16", "1 to 7 by tp", "1 to 7 by pp", "1 to 7 by dp"],
)
@pytest.mark.parametrize("optimizer", [None, "flat", "flat_groups"])
def test_there_and_back_gives_the_same_bits(old, new, optimizer):
    start = layers(7, **{"pp": 1, **old}) if "pp" not in old else layers(7, old["pp"], **old)
    if optimizer == "flat":
        own = start["tensors"]["layers/{i}/w"]
        cut = {"axis": "dp", "flat": True, "pad_to_multiple": 4}
        start["tensors"]["adam/m/layers/{i}/w"] = {**own, "shard": [*own["shard"], cut]}
    elif optimizer == "flat_groups":
        own = start["tensors"]["layers/{i}/w"]
        start["tensors"]["adam/m/layers/{i}/w"] = {**own, "flat": "bucket"}
        members = [f"adam/m/layers/{i}/w" for i in range(7)]
        group = {"members": members, "axis": "dp", "align": 4, "pad_to_multiple": 3}
        start["flat_groups"] = {"bucket": group}
    there = derived(start, {"pp": 1, "dp": 1, "tp": 1, **new})
    go(start, there, derived(there, {"pp": 1, "dp": 1, "tp": 1, **old}))


def test_a_list_of_axes_is_not_one_axis_after_the_other():
    mesh = {"a": 2, "b": 3}
    entry = {"shape": [10], "dtype": "float32"}
    together = document({"w": {**entry, "shard": [{"axis": ["a", "b"], "dim": 0, "rule": "ceil"}]}}, mesh, 2)
    apart = document(
        {"w": {**entry, "shard": [{"axis": axis, "dim": 0, "rule": "ceil"} for axis in "ab"]}}, mesh, 2
    )
    assert [held(together, rank)["w"].size for rank in range(6)] == [2, 2, 2, 2, 2, 0]
    assert [held(apart, rank)["w"].size for rank in range(6)] == [2, 2, 1, 2, 2, 1]
    go(together, apart, together)


def test_experts_with_data_parallelism_of_their_own():
    def mixture(dp, tp, edp, ep):
        owner = [int(k) for k, part in enumerate(np.array_split(range(4), ep)) for _ in part]
        experts = {"shape": [4, 6], "dtype": "float32", "count": 4, "mesh": "expert"}
        return document(
            {
                "attention/w": {**W, "shape": [12, 2]},
                "experts/{i}/w": {**experts, "on": {"ep": {"by": "i", "owner": owner}}},
            },
            {"dp": dp, "tp": tp},
            meshes={"expert": {"edp": edp, "ep": ep}},
        )

    start = mixture(4, 3, 6, 2)
    made = ptc(start)
    assert len(made.holders("attention/w")) == 3
    (holder,) = made.holders("experts/3/w")
    assert [rank for rank, _ in holder.keys] == [1, 3, 5, 7, 9, 11]
    go(start, mixture(2, 6, 3, 4), mixture(1, 4, 1, 4), start)


def explicit(*ranks, nodes=None, **more):
    """A bare list, as Tenplex writes it, unless something must be said beside it."""
    if not (nodes or more):
        return list(ranks)
    named = {"nodes": nodes} if nodes else {}
    return {"format": "tenplexfs-layout", "version": 1, "ranks": list(ranks), **named, **more}


def shapes_alone(*locals_):
    return [{"model": {"0": {"weight": {"tensor": list(local)}}}} for local in locals_]


@pytest.mark.parametrize(
    ("locals_", "regions"),
    [
        ([(4, 6), (4, 6)], ["[0:4, 0:6]", "[4:8, 0:6]"]),
        ([(8, 2), (8, 3), (8, 1)], ["[0:8, 0:2]", "[0:8, 2:5]", "[0:8, 5:6]"]),
        ([(8, 6), (8, 6)], ["[0:8, 0:6]"] * 2),
    ],
)
def test_shapes_alone_say_which_dim_is_cut(locals_, regions):
    text = json.dumps(shapes_alone(*locals_))
    known = {"model/0/weight": (8, 6)}
    made = build_ptc(parse_layout(text, shapes=known, dtypes={"model/0/weight": "float16"}))
    found = [made.shard(rank, "model/0/weight").pieces[0].region for rank in made.ranks()]
    assert [str(region) for region in found] == regions


@pytest.mark.parametrize(
    ("locals_", "known", "words"),
    [
        ([(4, 3), (4, 3)], True, "dims [0, 1] are both cut; shapes alone do not say how: give pieces"),
        ([(4, 6)] * 4, True, "the ranks hold 16 of 8; shapes alone do not say which are replicas"),
        ([(4, 6), (3, 6)], True, "the ranks hold 7 of 8; shapes alone do not say what is missing"),
        ([(4, 6), (4, 6)], False, "its global shape is not given"),
        ([(9, 6)], True, "[9, 6]"),
        ([(48,)], True, "[48]"),
    ],
)
def test_shapes_that_leave_it_open_are_refused(locals_, known, words):
    shapes = {"model/0/weight": (8, 6)} if known else {}
    with pytest.raises(InvalidError, match=re.escape(words)) as caught:
        layout = parse_layout(
            json.dumps(shapes_alone(*locals_)), shapes=shapes, dtypes={"model/0/weight": "int8"}
        )
        build_ptc(layout)
    assert "model/0/weight" in caught.value.message


def test_explicit_layouts_move_no_more_than_they_must():
    """The bound from sets of elements, for pieces out of order, replicas and padding."""
    seed = np.random.default_rng(7)

    def scattered(ranks, nodes, keep):
        """Each rank: some of twelve rows of four, in random places of its local array, and padding."""
        out = []
        for rank in range(ranks):
            own = [row for row in range(12) if row % ranks == rank or seed.random() < keep]
            own = [int(row) for row in seed.permutation(own)]
            pad = int(seed.integers(0, 3))
            places = [int(k) for k in seed.permutation(len(own) + pad)]
            pieces = [
                ([row, 0], [row + 1, 4], [at, 0]) for row, at in zip(own, places[: len(own)], strict=True)
            ]
            pads = [{"start": [at, 0], "stop": [at + 1, 4]} for at in places[len(own) :]]
            out.append({"w": leaf([len(places), 4], *pieces, padding=pads)})
        return explicit(*out, nodes=nodes, **{"global": {"w": [12, 4]}})

    def arrays(given):
        whole, out = np.arange(48).reshape(12, 4), []
        for rank in given["ranks"]:
            local = np.full(rank["w"]["tensor"], -1)
            for piece in rank["w"]["pieces"]:
                local[piece["at"][0]] = whole[piece["start"][0]]
            out.append({"w": local})
        return out

    for _ in range(30):
        old = scattered(4, {"a": [0, 2], "b": [1, 3]}, 0.3)
        new = scattered(3, {"a": [1], "b": [0], "c": [2]}, 0.2)
        made = plan(ptc(old), ptc(new))
        found, wire_bytes = carry_out(made, arrays(old))
        assert wire_bytes == lower_bound(made, arrays(old), arrays(new))
        assert made.totals["moved"] == made.totals["moved_lower_bound"] == sum(wire_bytes.values())
        for rank, paths in enumerate(arrays(new)):
            assert np.array_equal(found[rank]["w"], paths["w"])


def test_a_tensor_whose_name_has_braces_needs_the_explicit_form():
    whole = leaf([4], ([0], [4], [0]))
    for name in ("a{i}", "a{i+1}/w", "{}", "x{", "}y"):
        given = explicit({name: whole}, nodes={"a": [0]}, **{"global": {name: [4]}})
        made = ptc(given)
        assert made.rank_paths(0) == (name,)
        again = parse_layout(json.dumps(layout_to_json(made.layout)))
        assert again == made.layout
        assert plan(made, build_ptc(again)).totals["moved"] == 0
        with pytest.raises(InvalidError, match="needs the explicit form, 'ranks'") as caught:
            ptc(document({name: {"shape": [4], "dtype": "float32"}}, {"tp": 1}))
        assert repr(name) in caught.value.message
