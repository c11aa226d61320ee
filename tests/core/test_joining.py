"""Neighbouring boxes are joined, and what is copied stays the same."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplexfs.core.build import build_ptc
from tenplexfs.core.joining import join_neighbours
from tenplexfs.core.node_part import node_part
from tenplexfs.core.planner import plan
from tenplexfs.formats.layout_json import parse_layout


def copied(shape, source, target, values):
    out = np.full(shape, -1)
    for s, t in zip(source.tolist(), target.tolist(), strict=True):
        into = tuple(slice(a, b) for a, b in zip(*t, strict=True))
        out[into] = values[tuple(slice(a, b) for a, b in zip(*s, strict=True))].reshape(out[into].shape)
    return out


@st.composite
def grids(draw):
    """Draws a shape, and boxes that cut it by a grid, in lexicographic order, some left out."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    points = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    spans = [list(itertools.pairwise(p)) for p in points]
    boxes = [[]]
    for span in spans:
        boxes = [[*box, one] for box in boxes for one in span]
    kept = [box for box in boxes if draw(st.integers(0, 4))] or boxes
    return shape, np.array([[[a for a, _ in box], [b for _, b in box]] for box in kept], np.int64)


@given(grids(), st.integers(0, 3))
def test_joined_boxes_copy_the_same_to_boxes(grid, shift):
    shape, boxes = grid
    values = np.arange(math.prod(shape)).reshape(shape)
    wide = [n + shift for n in shape]
    source, target = join_neighbours(boxes, boxes + shift)
    assert np.array_equal(copied(wide, source, target, values), copied(wide, boxes, boxes + shift, values))
    if (boxes[:, 1] - boxes[:, 0]).prod(axis=1).sum() == values.size:
        assert len(source) == 1


@given(grids())
def test_joined_boxes_copy_the_same_to_runs(grid):
    shape, boxes = grid
    values = np.arange(math.prod(shape)).reshape(shape)
    ends = np.cumsum((boxes[:, 1] - boxes[:, 0]).prod(axis=1))
    runs = np.stack([ends - (boxes[:, 1] - boxes[:, 0]).prod(axis=1), ends], axis=1)[:, :, None]
    whole = [int(ends[-1])]
    expected = copied(whole, boxes, runs, values)
    source, target = join_neighbours(boxes, runs)
    assert np.array_equal(copied(whole, source, target, values), expected)
    target, source = join_neighbours(runs, boxes)
    assert np.array_equal(copied(shape, target, source, expected), copied(shape, runs, boxes, expected))


def layout(tensors, mesh, nodes, **more):
    document = {"format": "tenplexfs-layout", "version": 1, "mesh": mesh, "nodes": nodes, **more}
    return build_ptc(parse_layout(json.dumps({**document, "tensors": tensors})))


def ranges(made):
    """The number of boxes that each array takes of each source."""
    targets = [target for node in made.nodes for target in node_part(made, node).targets]
    return [len(moves.source_boxes) for target in targets for moves in target.moves]


@pytest.mark.parametrize("ways", [4, 16, 64])
def test_the_ranges_are_linear_in_the_overlaps_of_shards(ways):
    w = {"shape": [64, 64], "dtype": "float32", "shard": [{"axis": "tp", "dim": 0}]}
    here, there = {"a": list(range(ways))}, {"b": list(range(ways))}
    # Tied, once by rows and once by columns: the atoms are a grid of ways x ways, the ranges stay linear.
    tied = {"w": w, "v": {"alias": "w", "shard": [{"axis": "tp", "dim": 1}]}}
    cross = plan(layout(tied, {"tp": ways}, here), layout(tied, {"tp": ways}, there))
    assert sum(ranges(cross)) <= 4 * ways
    # Rows to columns: every pair of shards meets once.
    columns = {"w": {**w, "shard": [{"axis": "tp", "dim": 1}]}}
    rows_to_columns = plan(layout({"w": w}, {"tp": ways}, here), layout(columns, {"tp": ways}, there))
    assert ranges(rows_to_columns) == [1] * ways**2
    # Runs of whole rows: one range where the runs meet, however many rows they have.
    flat = {"w": {**w, "shard": [{"axis": "tp", "flat": True}]}}
    assert ranges(plan(layout(flat, {"tp": ways}, here), layout({"w": w}, {"tp": ways}, there))) == [1] * ways
    # Half as many runs, and one more: neighbours of neighbours do not meet.
    fewer = layout(
        {"w": {**w, "shard": [{"axis": "tp", "flat": True}]}},
        {"tp": ways // 2 + 1},
        {"b": list(range(ways // 2 + 1))},
    )
    assert sum(ranges(plan(layout(flat, {"tp": ways}, here), fewer))) <= 2 * ways + 1


def test_explicit_pieces_row_by_row_are_one_range():
    def rows(first):
        return {"w": {"tensor": [4, 8], "dtype": "float32", "pieces": [
            {"start": [first + k, 0], "stop": [first + k + 1, 8], "at": [k, 0]} for k in range(4)
        ]}}  # fmt: skip

    document = {
        "format": "tenplexfs-layout",
        "version": 1,
        "ranks": [rows(0), rows(4)],
        "global": {"w": [8, 8]},
    }
    old, new = (build_ptc(parse_layout(json.dumps({**document, "nodes": {n: [0, 1]}}))) for n in "ab")
    assert ranges(plan(old, new)) == [1, 1]


@pytest.mark.parametrize("ways", [8, 64, 256])
def test_runs_of_a_matrix_that_is_held_whole_too_make_linear_work(ways):
    w = {
        "shape": [512, 512],
        "dtype": "float32",
        "shard": [{"axis": "dp", "flat": True, "pad_to_multiple": 7}],
    }
    tensors = {"w": w, "whole": {"alias": "w", "shard": []}}
    old = layout(tensors, {"dp": ways}, {f"a{k}": [k] for k in range(ways)})
    new = layout(tensors, {"dp": ways - 1}, {f"b{k}": [k] for k in range(ways - 1)})
    made = plan(old, new)
    assert len(made.matches[0].held.atoms) <= 3 * ways
    of_one = node_part(made, "b3").targets
    assert max(sum(len(moves.source_boxes) for moves in target.moves) for target in of_one) <= 6 * ways
