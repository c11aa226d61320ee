"""States as Tenplex's files and back, and what its requests say."""

from __future__ import annotations

import argparse
import math
import pickle
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplexfs.errors import InvalidError, NotFoundError, PreconditionError
from tenplexfs.formats.leaves import make_named_tuple
from tenplexfs.formats.structure import flatten, unflatten
from tenplexfs.formats.tenplex_files import (
    LIST_FILE,
    TENSOR,
    TensorFile,
    array_value,
    directories,
    files_of,
    is_below,
    list_length,
    state_of,
    tensor_path,
    value_of,
)
from tenplexfs.formats.tenplex_request import (
    Place,
    dtype_word,
    parse_array,
    parse_meta,
    parse_place,
    parse_range,
    parse_step,
)

KEYS = st.text(
    st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=5
).filter(lambda key: key not in (".", "..", LIST_FILE) and not key.lstrip("-").isdecimal())
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.builds(lambda: object),  # a tensor
)
STATES = st.dictionaries(
    st.one_of(KEYS, st.integers(-5, 5)),
    st.recursive(
        LEAVES,
        lambda below: st.one_of(
            st.lists(below, max_size=3),
            st.dictionaries(st.one_of(KEYS, st.integers(-5, 5)), below, min_size=1, max_size=3),
        ),
        max_leaves=8,
    ),
    min_size=1,
    max_size=4,
)


def flat(state):
    return flatten(state, lambda value: ("tensor", None) if value is object else None)


def uploaded(files):
    """The structure that the files give when they come in one by one."""
    values, lists = {}, {}
    for name, file in files.items():
        if name.rpartition("/")[2] == LIST_FILE:
            lists[name.removesuffix(LIST_FILE).removesuffix("/")] = list_length(file.data)
        elif file.tensor is not None:
            stem = name.removesuffix(TENSOR)
            assert file.tensor in tensor_path(stem)
            values[stem] = TensorFile(file.tensor)
        else:
            stem, value = value_of(name, file.data)
            assert stem not in values
            values[stem] = value
    return state_of(values, lists).document


def is_told_apart(state):
    """Whether no two of its names are one."""
    names = []

    def walk(node, at):
        if isinstance(node, dict):
            for key, child in node.items():
                walk(child, f"{at}/{key}")
        elif isinstance(node, list):
            for index, child in enumerate(node):
                walk(child, f"{at}/{index}")
        else:
            names.append(at)

    walk(state, "")
    return len(set(names)) == len(names) and not any(
        other != name and is_below(other, name) for name in names for other in names
    )


@given(STATES.filter(is_told_apart))
def test_a_state_comes_back_from_its_files(state):
    document = flat(state).document
    back = unflatten(uploaded(files_of(document)), lambda _: object)
    assert back == state
    assert list(map(type, leaves_of(back))) == list(map(type, leaves_of(state)))


def leaves_of(node):
    if isinstance(node, dict):
        return [leaf for key in sorted(node, key=str) for leaf in leaves_of(node[key])]
    return [leaf for child in node for leaf in leaves_of(child)] if isinstance(node, list) else [node]


def test_names_and_contents_are_those_of_tenplex():
    state = {
        "args": argparse.Namespace(lr=1, name="x"),
        "layers.0": {"w": object},
        "optimizer": [{"betas": (0.9, 0.95), "params": []}, None],
        3: float("inf"),
        "raw": b"\0\1",
        "ordered": OrderedDict(a=True),
        "scalar": np.float32(2.5),
        "complex": 1j,
        "empty": {},
        "point": namedtuple("Point", "x y")(1, 2),
        "a/b": "slash",
    }
    files = files_of(flat(state).document)
    assert vars(pickle.loads(files.pop("args.argparse.Namespace").data)) == {"lr": 1, "name": "x"}
    assert files.pop(f"layers.0/w{TENSOR}").tensor == "layers/0/w"
    assert {name: file.data for name, file in files.items()} == {
        "optimizer/dir.meta": b"list\n2",
        "optimizer/0/betas/dir.meta": b"list\n2",
        "optimizer/0/betas/0.float": b"0.9",
        "optimizer/0/betas/1.float": b"0.95",
        "optimizer/0/params/dir.meta": b"list\n0",
        "optimizer/1.none": b"None",
        "3.float": b"inf",
        "raw": b"\0\1",
        "ordered/a.bool": b"True",
        "scalar.float": b"2.5",
        "complex.json": b'{"$": "complex", "real": 0.0, "imag": 1.0}\n',
        "point/dir.meta": b"list\n2",
        "point/0.int": b"1",
        "point/1.int": b"2",
        "a%2Fb.str": b"slash",
    }


def test_what_would_be_one_file_is_refused():
    with pytest.raises(PreconditionError, match=r"0\.int: two keys"):
        files_of(flat({0: 1, "0": 2}).document)


def test_a_namespace_that_only_torch_could_make_is_a_directory():
    dtype = make_named_tuple("somewhere:Thing:a", [1])
    files = files_of(flat({"args": argparse.Namespace(lr=1, thing=dtype)}).document)
    assert set(files) == {"args/lr.int", "args/thing/dir.meta", "args/thing/0.int"}


def test_an_array_that_the_layout_does_not_know_is_an_array_again():
    array = np.arange(6, dtype=np.uint32)
    files = files_of(flat({"rng": [array_value("uint32", (6,), array.tobytes())]}).document)
    assert files[f"rng/0{TENSOR}"] == (None, array.tobytes(), "uint32", (6,))


def test_a_pickle_is_kept_and_never_opened():
    name, value = value_of("args.argparse.Namespace", b"cos\nsystem\n(S'false'\ntR.")
    assert (name, value.kind) == ("args", "argparse.Namespace")
    files = files_of(flat({"args": value}).document)
    assert files["args.argparse.Namespace"].data == value.data
    with pytest.raises(InvalidError, match="allow_pickle"):
        unflatten(flat({"args": value}).document, str)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.int", b"x"),
        ("a.int", b"1_0"),
        ("a.int", b"1" * 5000),
        ("a.int", b"\xff"),
        ("a.float", b"one"),
        ("a.bool", b"yes"),
        ("a.none", b"0"),
        ("a.str", b"\xff"),
    ],
)
def test_a_value_that_is_none_is_refused(name, data):
    with pytest.raises(InvalidError, match=name):
        value_of(name, data)


@pytest.mark.parametrize(
    ("values", "lists", "match"),
    [
        ({"a/0": 1}, {"a": 2}, "item 1 is missing"),
        ({"a/0": 1, "a/x": 1}, {"a": 1}, "has 2 items"),
        ({"a": 1, "a/b": 2}, {}, "as a file"),
        ({"a/b": 2, "a": 1}, {}, "as a directory"),
        ({"/".join("a" * 300): 1}, {}, "at most 200"),
        ({"a.b": TensorFile("a/b"), "a/b": TensorFile("a/b")}, {}, "another key"),
    ],
)
def test_files_that_are_no_state_are_refused(values, lists, match):
    with pytest.raises(InvalidError, match=match):
        state_of(values, lists)


@pytest.mark.parametrize("data", [b"", b"list", b"dict\n1", b"list\n-1", b"list\n1\n2", b"list\n99999999999"])
def test_a_list_says_its_length(data):
    with pytest.raises(InvalidError, match=LIST_FILE):
        list_length(data)


def test_directories_are_counted_with_the_top():
    assert directories(["b.txt", "c/d", "c/e"], "") == {"", "c"}
    assert directories(["c/d", "c/x/e"], "c") == {"c", "c/x"}
    assert directories(["c"], "c") == set()


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("job/gpt/iter", Place("gpt", "iter")),
        ("/job/gpt/save/3/a/b.int", Place("gpt", "save", 3, "a/b.int")),
        ("//job//gpt/load/0/", Place("gpt", "load", 0)),
        ("/job/gpt/load", Place("gpt", "load")),
        ("/job/gpt", Place("gpt")),
    ],
)
def test_paths(path, place):
    assert parse_place(path) == place
    assert parse_place(place.text) == place


@pytest.mark.parametrize("path", ["", "/", "/a", "/job", "/job/g/x", "/job/g/save/x/y", "/job/g/save/-1/y"])
def test_other_paths_are_not_there(path):
    with pytest.raises(NotFoundError, match="/job/<job>/iter"):
        parse_place(path)


@pytest.mark.parametrize(
    "path", ["/job/g/save/0/../x", "/job/../x/iter", "/job/g/save/0/./x", "job/g/save/0/\0"]
)
def test_no_path_leads_elsewhere(path):
    with pytest.raises(InvalidError):
        parse_place(path)


@pytest.mark.parametrize("words", ["1", "a:b", ":,", "-1:2", "1:2:3", "[1:2", "::", "1.0:2", "9" * 30 + ":"])
def test_ranges_that_are_none(words):
    with pytest.raises(InvalidError, match="range"):
        parse_range(words)


def test_ranges_shapes_and_words():
    assert parse_range("") == parse_range("[]") == []
    assert parse_range("[ 1 : 2 , : ]") == [(1, 2), (None, None)]
    assert parse_array("f16", "1,2") == ("float16", (1, 2))
    assert parse_array("bool", "") == ("bool", ())
    assert parse_meta(b"f32\n2\n4\n3\n") == ("float32", (4, 3))
    assert parse_meta(b"i64\n0\n") == ("int64", ())
    assert [dtype_word(name) for name in ("float64", "uint8", "bfloat16")] == ["f64", "u8", "bfloat16"]
    assert parse_step(b" 7\n") == 7
    for dtype, dims in (("f99", "1"), ("object", "1"), ("f32", "-1"), ("f32", "1,,2"), ("f32", "9" * 18)):
        with pytest.raises(InvalidError):
            parse_array(dtype, dims)
    for data in (b"", b"f32", b"f32\n2\n4", b"f32\n1\nx"):
        with pytest.raises(InvalidError):
            parse_meta(data)
    for data in (b"", b"-1", b"1.0", b"x", b"1" * 19):
        with pytest.raises(InvalidError):
            parse_step(data)


def test_numbers_come_back_bit_by_bit():
    for value in (0.1, 1e-5, -0.0, 5e-324, float("inf")):
        files = files_of(flat({"x": value}).document)
        back = value_of("x.float", files["x.float"].data)[1]
        assert back == value and math.copysign(1, back) == math.copysign(1, value)
