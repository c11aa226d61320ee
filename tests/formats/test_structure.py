"""What goes into a state comes out: the table "State" of the cases, and whatever hypothesis draws."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenplexfs.client.arrays import source_of
from tenplexfs.core.dtypes import EXTENDED
from tenplexfs.errors import CorruptError, InvalidError
from tenplexfs.formats.structure import flatten, leaf_files, read_document, unflatten, write_document

Point = namedtuple("Point", "x y")
LONG = "k" * 300


def there_and_back(state, *, allow_pickle=False):
    flat = flatten(state, source_of, allow_pickle=allow_pickle)
    files = list(flat.tensors) + [f"{path}.json" for path in leaf_files(flat.document)]
    assert len(files) == len(set(files))
    return unflatten(
        flat.document, lambda path: flat.tensors[path].array().copy(), allow_pickle=allow_pickle
    ), flat


def same(a, b):
    """Equal in type, value and bits, all the way down, the order of keys included."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, np.ndarray | np.generic):
        assert (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())
    elif isinstance(a, dict):
        assert len(a) == len(b)
        for (key, item), (other, found) in zip(a.items(), b.items(), strict=True):
            same(key, other)
            same(item, found)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for item, found in zip(a, b, strict=True):
            same(item, found)
    elif isinstance(a, argparse.Namespace):
        same(vars(a), vars(b))
    elif isinstance(a, float) and math.isnan(a):
        assert math.isnan(b)
    else:
        assert repr(a) == repr(b) if isinstance(a, float | complex) else a == b


CASES = [
    {"a.b": 1, "a": {"b": 2}},
    {"a.b": {"c": 1, "d": 5}, "a": {"b": {"c": 2}}},
    {"x.0": 1, "x": [np.zeros(2), 2]},
    {1: "x", "1": "y", 2: "z", -3: "w"},
    {"": 1, ".": 2, "..": 3, "a/b": 4, "a//b": 5, "a#b": 6, "a?b": 7, "é": 8, LONG: 9, LONG + "x": 10},
    {(1, "a"): 1, (1, "b"): 2, None: 3, True: 4, "True": 5, "None": 6, 1.5: 7, "1.5": 8, b"x": 9},
    (0, (), [], {}, None, True, 1.5, 1 + 2j, b"x", "False"),
    [Counter({25: 1}), Counter(), Point(1, np.ones(2)), Point(1, 2), OrderedDict(b=1, a=2), OrderedDict()],
    [{3, 1, 2}, frozenset({"a"}), set(), bytearray(b"ab"), defaultdict(list, a=[1]), defaultdict(None)],
    {"many": list(range(12)), "none": [], "tensors": [np.full(1, i) for i in range(12)]},
    argparse.Namespace(lr=0.1, betas=(0.9, 0.999), w=np.ones(3), empty=argparse.Namespace()),
    {"state": {}, "groups": [{"lr": 1e-3, "step": np.zeros(()), "params": [0, 1], "foreach": None}]},
    [math.inf, -math.inf, math.nan, -0.0, 1e-320, 2**80, -(2**80), complex(math.nan, -0.0), "\ud800", "\0"],
    [np.float32(1.5), np.int8(-3), np.bool_(1), np.complex64(1j), EXTENDED["bfloat16"].type(2), np.str_("é")],
    np.arange(6).reshape(2, 3),
    7,
    {},
    [],
]


@pytest.mark.parametrize("state", CASES, ids=range(len(CASES)))
def test_comes_back_as_it_went_in(state):
    same(there_and_back(state)[0], state)


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 5), (2, 3, 4)])
@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int64", "float16", "float64", "complex64", "S3", "M8[s]", *EXTENDED]
)
def test_every_dtype_and_shape_keeps_its_bits(shape, dtype):
    kind = EXTENDED.get(dtype) or np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    array = np.random.default_rng(0).integers(0, 2, size, np.uint8).view(kind).reshape(shape)
    same(there_and_back({"w": array})[0], {"w": array})


def test_the_dots_of_the_dotted_one_are_escaped_where_leaves_meet():
    flat = flatten({"a.b": 1, "a": {"b": 2}, "c.d": 3, 1: 4, "1": 5}, source_of)
    files = {path: json.loads(data) for path, data in leaf_files(flat.document).items()}
    assert files == {"a%2Eb": 1, "a/b": 2, "c/d": 3, "%i1": 4, "1": 5}


def test_lists_of_plain_values_are_one_leaf_and_other_words_are_tagged():
    flat = flatten({"a": [1, [2, "x"]], "b": (1, 2j), "c": [{"d": 1}], "e": {}}, source_of)
    files = {path: json.loads(data) for path, data in leaf_files(flat.document).items()}
    assert files["a"] == [1, [2, "x"]]
    assert files["b"] == {"$": "tuple", "items": [1, {"$": "complex", "real": 0.0, "imag": 2.0}]}
    assert files["c/0/d"] == 1
    assert files["e"] == {}


def test_tied_are_those_with_one_storage_seen_in_one_way():
    w = np.arange(12.0).reshape(3, 4)
    other = w.copy()
    other.flat[0] = np.nextafter(0.0, 1.0)
    state = {"a": w, "b": w, "c": w[:], "view": w[:, 1:], "t": w.T, "like": other, "bits": w.view(np.int64)}
    back, flat = there_and_back(state)
    assert dict(flat.ties) == {"b": "a", "c": "a"}
    assert back["a"] is back["b"] is back["c"]
    assert len({id(item) for item in back.values()}) == 5
    same(back, state)


def test_views_are_their_own_elements_in_row_major_order():
    base = np.arange(24).reshape(4, 6)
    state = [base.T, base[::2, 1::3], base[1:2], np.broadcast_to(base[0], (3, 6)), base[::-1]]
    back, _ = there_and_back(state)
    for view, found in zip(state, back, strict=True):
        assert found.tobytes() == view.tobytes()


class Odd:
    def __init__(self, value=1):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value

    __hash__ = None


@pytest.mark.parametrize("odd", [Odd(), {"x": Odd()}, [Odd(), np.ones(1)], {frozenset({Odd}): 1}, object()])
def test_other_objects_are_refused_with_their_path(odd):
    with pytest.raises(InvalidError, match=r"state 'opt.*needs pickle"):
        flatten({"opt": {"groups": odd}} if not isinstance(odd, dict) else {"opt": odd}, source_of)


def test_pickled_objects_need_both_sides():
    state = {"a": {"b": Odd(5)}, "c": [Odd(6), np.ones(2)], "d": {1: Odd(7)}}
    flat = flatten(state, source_of, allow_pickle=True)
    with pytest.raises(InvalidError, match=r"state a/b: .*Odd: was pickled; give allow_pickle=True"):
        unflatten(flat.document, lambda path: None)
    back, _ = there_and_back(state, allow_pickle=True)
    assert (back["a"]["b"].value, back["c"][0].value, back["d"][1].value) == (5, 6, 7)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (np.array([None, 1]), "object"),
        (np.zeros(2, [("a", "i4")]), "dtype"),
        (np.zeros(2, ">f4"), "native byte order"),
        (np.ma.masked_array([1]), "plain array"),
    ],
)
def test_arrays_without_plain_bytes_are_refused_with_their_path(tensor, why):
    with pytest.raises(InvalidError, match=rf"state 'a/w': .*{why}"):
        flatten({"a": {"w": tensor}}, source_of)


def test_a_state_within_itself_is_refused():
    state = {}
    state["again"] = state
    with pytest.raises(InvalidError, match="within itself"):
        flatten(state, source_of)


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"[]",
        b'{"version": 2, "root": []}',
        b'{"version":1,"root":["x"]}',
        b'{"version":1,"root":["d;","dict",[["a",[",l","a"],[]]]]}',
        b'{"version":1,"root":' + b"[" * 100_000,
    ],
)
def test_a_broken_document_is_an_error(bad):
    with pytest.raises(CorruptError):
        unflatten(bad, lambda path: None)


def test_equal_structures_are_equal_bytes():
    first, second = ({"a": {f"{i}": i for i in order}} for order in (range(3), range(3)))
    assert flatten(first, source_of).document == flatten(second, source_of).document
    sets = [flatten({"s": set(order)}, source_of).document for order in (("a", "b", "c"), ("c", "b", "a"))]
    assert sets[0] == sets[1]
    assert write_document(read_document(sets[0])) == sets[0]


def test_a_named_tuple_whose_module_is_gone_comes_back_alike():
    flat = flatten({"p": Point(1, np.ones(1))}, source_of)
    document = flat.document.replace(__name__.encode(), b"no.such.module")
    found = unflatten(document, lambda path: 2)["p"]
    assert found == (1, 2) and found._fields == ("x", "y") and type(found).__name__ == "Point"
    assert "no.such.module" not in sys.modules


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.frozensets(st.integers(0, 9) | st.text(max_size=2), max_size=3),
)
arrays = st.builds(
    lambda shape, dtype, seed: (
        np.random.default_rng(seed)
        .integers(0, 2, math.prod(shape) * np.dtype(dtype).itemsize, np.uint8)
        .view(dtype)
        .reshape(shape)
    ),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from(["f4", "i1", "c8", EXTENDED["bfloat16"]]),
    st.integers(0, 9),
)
tricky = st.sampled_from(
    ["", ".", "..", "a", "a.b", "a.b.c", "b", "b.c", "c", "1", "%i1", "%2E", "a/b", LONG]
)
keys = st.one_of(
    tricky,
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    st.integers(-2, 3),
    st.none(),
    st.tuples(st.integers(0, 2), st.text(max_size=1)),
)
states = st.recursive(
    scalars | arrays,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Point, inner, inner),
        st.dictionaries(keys, inner, max_size=5),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(tricky, inner, max_size=3).map(lambda d: argparse.Namespace(**d)),
    ),
    max_leaves=20,
)


@settings(max_examples=400, deadline=None)
@given(states)
def test_any_state_comes_back(state):
    try:
        back, _ = there_and_back(state)
    except InvalidError as error:
        assert "not valid Unicode" in error.message
        return
    same(back, state)
