"""The written-out list is carried out alone, and held against the oracle, which knows nothing of plans."""

import json

import numpy as np
from hypothesis import given, settings

from tenplexfs.cli.app import run
from tenplexfs.core.build import build_ptc
from tenplexfs.core.planner import plan
from tenplexfs.core.transfers import list_transfers
from tenplexfs.formats.layout_json import parse_layout

from .layouts import held, text, transitions


def box(start, stop):
    return tuple(slice(a, b) for a, b in zip(start, stop, strict=True))


def carry_out(listed, old, shapes, dtype):
    """Fills arrays of ``shapes`` by the list alone; returns them and how often each element was written."""
    arrays = [{path: np.full(shape, -1, dtype) for path, shape in paths.items()} for paths in shapes]
    times = [{path: np.zeros(shape, int) for path, shape in paths.items()} for paths in shapes]
    for one in listed:
        rank, path = one["target_rank"], one["tensor"]
        source = old[one["source_rank"]][one.get("source_tensor", path)]
        value = source[box(one["source_start"], one["source_stop"])]
        into = box(one["target_start"], one["target_stop"])
        arrays[rank][path][into] = value.reshape(arrays[rank][path][into].shape)
        times[rank][path][into] += 1
    return arrays, times


@settings(max_examples=60)
@given(transitions())
def test_the_list_alone_carries_the_plan_out(documents):
    old, new = (build_ptc(parse_layout(text(document))) for document in documents)
    old_held = [held(documents[0], rank) for rank in old.ranks()]
    new_held = [held(documents[1], rank) for rank in new.ranks()]
    made = plan(old, new)
    listed = list(list_transfers(made))
    shapes = [{path: array.shape for path, array in paths.items()} for paths in new_held]
    arrays, times = carry_out(listed, old_held, shapes, int)
    for rank in new.ranks():
        for path, expected in new_held[rank].items():
            assert np.array_equal(arrays[rank][path], expected), (rank, path)
            assert np.array_equal(times[rank][path], expected >= 0)
    crossings = set()
    for one in listed:
        if not one["wire"]:
            continue
        node, tensor = new.node_of(one["target_rank"]), new.tensors[one["tensor"]]
        assert old.node_of(one["source_rank"]) != node
        source = old_held[one["source_rank"]][one.get("source_tensor", one["tensor"])]
        for element in source[box(one["source_start"], one["source_stop"])].ravel().tolist():
            assert (node, tensor.path, element) not in crossings
            crossings.add((node, tensor.path, element))
    sizes = {tensor.path: tensor.itemsize for tensor in new.tensors.values()}
    assert sum(sizes[path] for _, path, _ in crossings) == made.totals["moved"]


def layout(tensors, mesh, nodes):
    return {"format": "tenplexfs-layout", "version": 1, "mesh": mesh, "nodes": nodes, "tensors": tensors}


def test_the_json_of_the_command_carries_values_from_one_layout_to_another(tmp_path, capsys):
    """Flat against boxed, tied names, replicas of a node, padding, a scalar, an empty tensor."""
    w = {"shape": [6, 4], "dtype": "float32"}
    flat = [{"axis": "tp", "dim": 1}, {"axis": "dp", "flat": True, "pad_to_multiple": 5}]
    old = layout(
        {
            "w": {**w, "shard": [{"axis": "tp", "dim": 0}]},
            "head": {"alias": "w", "on": {"dp": 1}},
            "m": {**w, "shard": flat},
            "step": {"shape": [], "dtype": "int64"},
            "empty": {"shape": [0, 3], "dtype": "float32"},
        },
        {"dp": 2, "tp": 2},
        {"a": [0, 1], "b": [2, 3]},
    )
    new = layout(
        {
            "w": {**w, "shard": [{"axis": "tp", "dim": 0, "pad_to": 8}]},
            "head": {"alias": "w", "shard": [{"axis": "tp", "dim": 1}]},
            "m": {**w, "shard": [{"axis": "tp", "dim": 1}]},
            "step": {"shape": [], "dtype": "int64"},
            "empty": {"shape": [0, 3], "dtype": "float32"},
        },
        {"tp": 4},
        {"b": [0], "c": [1, 2, 3]},
    )
    (tmp_path / "old.json").write_text(json.dumps(old))
    (tmp_path / "new.json").write_text(json.dumps(new))
    assert run(["plan", f"{tmp_path}/old.json", f"{tmp_path}/new.json", "--json", "--operations"]) == 0
    printed = json.loads(capsys.readouterr().out)
    values = {"w": np.random.default_rng(3).random(24), "m": np.arange(24) + 0.5, "step": np.array([7.0])}
    values |= {"head": values["w"], "empty": np.zeros(0)}

    def state(document, rank):
        indices = held(document, rank)
        return {path: np.append(values[path], -1)[index] for path, index in indices.items()}

    expected = [state(new, rank) for rank in range(4)]
    shapes = [{path: array.shape for path, array in paths.items()} for paths in expected]
    arrays, times = carry_out(printed["transfers"], [state(old, r) for r in range(4)], shapes, float)
    for rank, paths in enumerate(expected):
        for path, array in paths.items():
            assert np.array_equal(arrays[rank][path], array), (rank, path)
            assert np.array_equal(times[rank][path], array != -1)
    scalars = [t for t in printed["transfers"] if t["tensor"] == "step"]
    assert [(t["target_rank"], t["wire"], t["source_start"]) for t in scalars] == [
        (0, False, []),
        (1, True, []),
        (2, False, []),
        (3, False, []),
    ]
    assert not [t for t in printed["transfers"] if t["tensor"] == "empty"]
