"""Layouts of sizes and names that no machine holds are refused by one line, before anything is computed."""

import json

import pytest

from tenplexfs.core.build import build_ptc
from tenplexfs.errors import InvalidError
from tenplexfs.formats.layout_json import parse_layout

W = {"shape": [8, 4], "dtype": "float32"}


def cut(**how):
    return {"w": {**W, "shard": [{"axis": "tp", "dim": 0, **how}]}}


def flat(**how):
    return {"w": {**W, "shard": [{"axis": "tp", "flat": True, **how}]}}


def parse(tensors, **more):
    document = {"format": "tenplexfs-layout", "version": 1, "mesh": {"tp": 2}, "nodes": {"a": [0, 1]}}
    return build_ptc(parse_layout(json.dumps({**document, "tensors": tensors, **more})))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": {**W, "shape": [2**62, 2**62]}}, r"tensor 'w': shape \[.*\] of float32: more than"),
        ({"w": {**W, "shape": [2**100]}}, "tensor 'w': shape .* more than"),
        ({"w": {**W, "shape": [0, 2**64]}}, "tensor 'w': shape .* more than"),
        ({"w": {**W, "shape": [1] * 33}}, "tensor 'w': 33 dims, at most 32"),
        (cut(pad_to=2**62), "pad_to: need at most"),
        (cut(pad_multiple=2**63), "pad_multiple: need 1 to"),
        (flat(pad_to_multiple=2**62), "pad_to_multiple: need 1 to"),
        (
            {"w": {**W, "shape": [8, 2**40], "shard": [{"axis": "tp", "dim": 0, "pad_to": 2**40}]}},
            "tensor 'w': padded to more than",
        ),
        ({"l/{i}": {**W, "count": 10**9}}, "tensors: their counts give 1000000000, at most"),
        ({"l/{i}/{e}": {**W, "count": {"i": 2**11, "e": 2**11}}}, "tensors: their counts give 4194304"),
        ({"a\ud800": W}, "no UTF-8 text"),
        ({"a.b": W, "a/b": W}, "tensors: 'a.b' and 'a/b' are one path"),
    ],
)
def test_what_no_machine_holds_is_refused_at_once(tensors, message):
    with pytest.raises(InvalidError, match=message) as caught:
        parse(tensors)
    assert "\n" not in caught.value.message


def test_explicit_shapes_have_the_same_bounds():
    shard = {"tensor": [4], "dtype": "float32", "pieces": [{"start": [0], "stop": [4], "at": [0]}]}
    with pytest.raises(InvalidError, match=r"tensor 'w': shape .* more than"):
        parse({}, ranks=[{"w": shard}, {"w": shard}], **{"global": {"w": [2**63]}})


def test_a_mesh_of_more_axes_than_arrays_have_dims_is_refused():
    with pytest.raises(InvalidError, match="mesh: 33 axes, at most 31"):
        parse({"w": W}, mesh={"tp": 2} | {f"a{number}": 1 for number in range(32)})
    assert parse({"w": W}, mesh={"tp": 2} | {f"a{number}": 1 for number in range(30)}).world_size == 2
