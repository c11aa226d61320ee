"""Layouts as nobody should write them: refused in one line, soon."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenplexfs.core.build import build_ptc
from tenplexfs.core.derive import derive_layout
from tenplexfs.core.planner import plan
from tenplexfs.errors import TenplexError
from tenplexfs.formats.layout_json import layout_digest, layout_text, parse_layout
from tests.fuzz.mutations import json_values, mutated, within

PATIENCE_S = 10.0

MESHED = {
    "format": "tenplexfs-layout",
    "version": 1,
    "mesh": {"pp": 2, "dp": 2, "tp": 2},
    "meshes": {"expert": {"pp": 2, "ep": 4}},
    "nodes": {"node0": [0, 1, 2, 3], "node1": [4, 5, 6, 7]},
    "tensors": {
        "embedding/weight": {
            "shape": [13, 4],
            "dtype": "bfloat16",
            "shard": [{"axis": "tp", "dim": 0, "pad_to": 16}],
            "on": {"pp": 0},
        },
        "layers/{i}/qkv": {
            "shape": [24, 4],
            "dtype": "float32",
            "count": {"i": 4},
            "shard": [{"axis": "tp", "dim": 0, "sections": [16, {"width": 4, "ways": 1}, 4]}],
            "on": {"pp": {"by": "i", "owner": [0, 0, 1, 1]}},
        },
        "adam/{i}/qkv": {"like": "layers/{i}/qkv", "then": [{"axis": "dp", "dim": 0, "rule": "ceil"}]},
        "experts/{e}/w": {"shape": [8], "dtype": "float16", "count": {"e": 4}, "mesh": "expert",
                          "on": {"ep": {"by": "e", "owner": [0, 1, 2, 3]}}},
        "flat": {"shape": [5, 7], "dtype": "float32",
                 "shard": [{"axis": ["dp", "tp"], "flat": True, "pad_to_multiple": 16}]},
        "bias": {"shape": [6], "dtype": "float32", "flat": "b0"},
        "scale": {"shape": [], "dtype": "float64", "flat": "b0"},
        "head/weight": {"alias": "embedding/weight", "on": {"pp": 1}},
    },
    "flat_groups": {"b0": {"members": ["bias", "scale"], "align": 4, "pad_to_multiple": 8, "axis": "dp"}},
    "dataset": {"axis": "dp", "global_batch": 8},
}  # fmt: skip
W = {"dtype": "float32", "pieces": [{"start": [0, 0], "stop": [2, 2], "at": [0, 0]}]}
EXPLICIT = {
    "format": "tenplexfs-layout",
    "version": 1,
    "global": {"w": [4, 2]},
    "nodes": {"node0": 1, "node1": 1},
    "ranks": [
        {"w": {"tensor": [2, 2], **W}},
        {"w": {"tensor": [3, 2], "dtype": "float32",
               "pieces": [{"start": [2, 0], "stop": [4, 2], "at": [1, 0]}],
               "padding": [{"start": [0, 0], "stop": [1, 2]}]}},
    ],
}  # fmt: skip


def take_in(text):
    """Does with a layout what a daemon does; anything but a TenplexError is a bug."""
    with within(PATIENCE_S):
        try:
            layout = parse_layout(text)
            ptc = build_ptc(layout)
            layout_digest(layout)
            assert layout_text(parse_layout(layout_text(layout))) == layout_text(layout)
            plan(build_ptc(parse_layout(json.dumps(MESHED))), ptc, drop=("*",)).summary()
        except TenplexError as error:
            assert "\n" not in error.message
            return error
    return None


@settings(max_examples=300, deadline=None)
@given(mutated([MESHED, EXPLICIT]))
def test_layouts_with_something_wrong(document):
    take_in(json.dumps(document))


@given(json_values)
def test_other_json(document):
    take_in(json.dumps(document))


@given(st.binary() | st.text())
def test_no_json(text):
    take_in(text)


@given(
    st.dictionaries(st.text(max_size=3) | st.sampled_from(["pp", "dp", "tp"]), st.integers(), max_size=4),
    st.none() | st.dictionaries(st.text(max_size=8), st.integers(), max_size=3),
)
def test_meshes_that_are_asked_for(mesh, nodes):
    layout = parse_layout(json.dumps(MESHED))
    with within(PATIENCE_S):
        try:
            build_ptc(derive_layout(layout, mesh, nodes))
        except TenplexError as error:
            assert "\n" not in error.message


@pytest.mark.parametrize(
    "change",
    [
        {"mesh": {"tp": 2**40}},
        {"tensors": {"w/{i}": {"shape": [1], "dtype": "int8", "count": 2**40}}},
        {"tensors": {"w/{i}/{j}": {"shape": [1], "dtype": "int8", "count": {"i": 2**20, "j": 2**20}}}},
        {"tensors": {"w": {"shape": [2**62, 2**62], "dtype": "int8"}}},
        {"tensors": {"w": {"shape": [1] * 100, "dtype": "int8"}}},
        {"tensors": {f"w{i}": {"like": f"w{i + 1}"} for i in range(5000)}
         | {"w5000": {"shape": [1], "dtype": "int8"}}},
        {"dataset": {"axis": "tp", "global_batch": 10**40}},
        {"tensors": {"\ud800": {"shape": [1], "dtype": "int8"}}},
        {"nodes": {"\ud800": 1}},
    ],
    ids=["ranks", "count", "counts", "bytes", "dims", "chain", "batch", "surrogate", "node"],
)  # fmt: skip
def test_sizes_that_nobody_has_are_refused(change):
    base = {"format": "tenplexfs-layout", "version": 1, "mesh": {"tp": 1}, "tensors": {}}
    assert take_in(json.dumps(base | change)) is not None


def test_depth_is_refused():
    assert take_in("[" * 100_000) is not None
    assert take_in('{"a":' * 100_000) is not None
    assert take_in('{"format":"tenplexfs-layout","version":' + "1" * 10_000 + "}") is not None
