import contextlib
import struct

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tenplexfs.errors import CorruptError, InvalidError, TenplexError
from tenplexfs.formats.megatron import parse_idx


def idx(lengths, bounds=None, *, code=4, itemsize=4, version=1, pointers=None):
    ends = np.cumsum([0, *lengths]) * itemsize
    pointers = ends[:-1] if pointers is None else pointers
    bounds = np.arange(len(lengths) + 1) if bounds is None else bounds
    return b"".join(
        [
            b"MMIDIDX\x00\x00",
            struct.pack("<QBQQ", version, code, len(lengths), len(bounds)),
            np.asarray(lengths, "<i4").tobytes(),
            np.asarray(pointers, "<i8").tobytes(),
            np.asarray(bounds, "<i8").tobytes(),
        ]
    )


def test_documents_of_several_sequences():
    index = parse_idx(idx([3, 2, 0, 5], [0, 2, 2, 4], code=8, itemsize=2))
    assert index.dtype == np.uint16
    assert index.documents.tolist() == [[0, 10], [10, 10], [10, 20]]
    assert (index.tokens, index.begin) == (10, 0)


def test_modes_behind_the_documents_are_passed_over():
    assert parse_idx(idx([3, 2]) + b"\0\0").tokens == 5


def test_nothing_in_it():
    index = parse_idx(idx([]))
    assert (index.documents.shape, index.tokens, index.sequences(8)) == ((0, 2), 0, 0)


def megatron_samples(lengths, length):
    """The rule as Megatron walks it: document by document, one token shared by neighbours."""
    total = sum(lengths)
    samples, document, offset = [], 0, 0
    starts = np.cumsum([0, *lengths])
    for _ in range((total - 1) // length if total else 0):
        begin, remaining = int(starts[document]) + offset, length + 1
        while remaining:
            left = lengths[document] - offset
            if left >= remaining:
                offset += remaining - 1
                remaining = 0
            else:
                remaining -= left
                document, offset = document + 1, 0
        samples.append((begin, begin + length + 1))
    return samples


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 7))
def test_sequences_are_megatrons(lengths, length):
    index = parse_idx(idx(lengths))
    ours = [(i * length, i * length + length + 1) for i in range(index.sequences(length))]
    assert ours == megatron_samples(lengths, length)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"", InvalidError, "no Megatron index"),
        (idx([1], version=2), InvalidError, "version 2"),
        (idx([1], code=9), InvalidError, "dtype code 9"),
        (idx([1, 2])[:-1], CorruptError, r"2 sequences, 3 bounds: need 82 bytes, got 81"),
        (idx([2, 2], pointers=[0, 12]), CorruptError, "sequence 1 begins at 12, the one before ends at 8"),
        (idx([-1]), CorruptError, "sequence 0 of -1 tokens"),
        (idx([1, 1], [0, 1]), CorruptError, "bounds of documents do not go from 0 up to 2"),
        (idx([1, 1], [0, 2, 1, 2]), CorruptError, "bounds"),
        (idx([1, 1], []), CorruptError, "bounds"),
    ],
)
def test_refusals(data, error, message):
    with pytest.raises(error, match=message):
        parse_idx(data)
    with pytest.raises(InvalidError, match="sequence length: need >= 1, got 0"):
        parse_idx(idx([1])).sequences(0)


@example(b"\x01\x00\x00\x00\x00\x00\x00\x00\x81", 85)
@given(st.binary(max_size=20), st.integers(0, 90))
def test_damage_ends_in_our_errors(noise, at):
    data = idx([3, 2, 4])
    with contextlib.suppress(TenplexError):
        parse_idx(data[:at] + noise + data[at + len(noise) :])
