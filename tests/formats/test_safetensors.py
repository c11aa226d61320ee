import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from tenplexfs.core.dtypes import itemsize_of
from tenplexfs.errors import CorruptError, InvalidError
from tenplexfs.formats.safetensors import _ITEMSIZE, DTYPES, parse

T = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def encode(header, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_all_types_have_the_size_of_ours():
    assert {name: itemsize_of(ours) for name, ours in DTYPES.items()} == _ITEMSIZE


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
KINDS = st.sampled_from(["f4", "f2", "i8", "u1", "?", "u2", "f8"])


@given(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), st.tuples(SHAPES, KINDS))
)
def test_reads_what_the_library_writes(wanted):
    wanted.pop("__metadata__", None)
    rng = np.random.default_rng(1)
    arrays = {n: rng.integers(0, 2, shape).astype(kind) for n, (shape, kind) in wanted.items()}
    file = save(arrays, metadata={"format": "np"})
    entries = parse(file)
    assert entries.keys() == arrays.keys()
    for name, entry in entries.items():
        assert entry.shape == arrays[name].shape and entry.dtype == arrays[name].dtype.name
        assert file[entry.begin : entry.end] == arrays[name].tobytes()


BAD = {
    "short": (b"1234567", CorruptError, "need at least 8"),
    "header too long": (struct.pack("<Q", 10**9) + b"{}", InvalidError, "at most"),
    "header cut": (struct.pack("<Q", 100) + b"{}", CorruptError, "cut short"),
    "data cut": (encode({"a": T}, bytes(23)), CorruptError, "cut short: .* end at byte"),
    "data too long": (encode({"a": T}, bytes(25)), CorruptError, "bytes too many"),
    "no data at all": (encode({}, bytes(1)), CorruptError, "bytes too many"),
    "no JSON": (encode(b"{]", b""), InvalidError, "no valid JSON"),
    "no UTF-8": (encode(b'{"\xff": 1}', b""), InvalidError, "no valid JSON"),
    "no object": (encode(b"[]", b""), InvalidError, "JSON object"),
    "deep": (encode(b'{"a":' + b"[" * 100_000, b""), InvalidError, "no valid JSON"),
    "twice": (
        encode(b'{"a": %b, "a": %b}' % ((json.dumps(T).encode(),) * 2), bytes(24)),
        InvalidError,
        "twice",
    ),
    "fields": (encode({"a": {**T, "x": 1}}, bytes(24)), InvalidError, "no more"),
    "dtype": (encode({"a": {**T, "dtype": "F33"}}, bytes(24)), InvalidError, "'F33': unknown"),
    "dtype of no text": (encode({"a": {**T, "dtype": [1]}}, bytes(24)), InvalidError, "unknown"),
    "4 bits": (encode({"a": {**T, "dtype": "F4"}}, bytes(24)), InvalidError, "4-bit"),
    "negative": (encode({"a": {**T, "shape": [-2, -3]}}, bytes(24)), InvalidError, "list of sizes"),
    "bool": (encode({"a": {**T, "shape": [True, 6]}}, bytes(24)), InvalidError, "list of sizes"),
    "float": (encode({"a": {**T, "shape": [2.0, 3]}}, bytes(24)), InvalidError, "list of sizes"),
    "huge": (
        encode({"a": {**T, "shape": [2**62, 0, 4], "data_offsets": [0, 0]}}, b""),
        InvalidError,
        "needs 0",
    ),
    "size": (encode({"a": {**T, "shape": [2, 4]}}, bytes(24)), InvalidError, "needs 32"),
    "backwards": (encode({"a": {**T, "data_offsets": [24, 0]}}, bytes(24)), InvalidError, "begin, end"),
    "overlap": (
        encode({"a": T, "b": {**T, "data_offsets": [20, 44]}}, bytes(44)),
        InvalidError,
        "'a' and 'b' overlap",
    ),
    "same": (encode({"a": T, "b": T}, bytes(24)), InvalidError, "overlap"),
    "gap": (encode({"a": T, "b": {**T, "data_offsets": [28, 52]}}, bytes(52)), InvalidError, "gap"),
    "gap at the front": (encode({"a": {**T, "data_offsets": [4, 28]}}, bytes(28)), InvalidError, "gap"),
    "metadata": (encode({"__metadata__": {"a": 1}}, b""), InvalidError, "object of strings"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused(case, tmp_path):
    file, error, message = BAD[case]
    with pytest.raises(error, match=message):
        parse(file)
    if case not in ("4 bits", "fields", "twice", "huge"):  # the library is more lenient there
        (tmp_path / "file").write_bytes(file)
        with pytest.raises((SafetensorError, OSError)), safe_open(tmp_path / "file", "np"):
            pass


@given(st.data())
def test_no_damage_makes_it_show_other_bytes(data):
    file = bytearray(save({"a": np.arange(6, dtype="f4"), "b": np.arange(4, dtype="u2")}))
    at = data.draw(st.integers(0, len(file) - 21))
    file[at] = data.draw(st.integers(0, 255))
    try:
        entries = parse(bytes(file))
    except (InvalidError, CorruptError):
        return
    assert sum(entry.end - entry.begin for entry in entries.values()) == 32
