"""Gather and scatter against numpy: any boxes, any cuts of the stream."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenplexfs.errors import InvalidError
from tenplexfs.rpc.ranges import MESSAGE_BYTES, Scatter, gather

DTYPES = ["u1", "f2", "f4", "f8", "c16", "S3", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]


def filled(shape, dtype, seed=0):
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).view(dtype).reshape(shape)


def expected(parts):
    return b"".join(
        array[tuple(slice(a, b) for a, b in zip(*box, strict=True))].tobytes()
        for array, boxes in parts
        for box in boxes
    )


def chopped(data, sizes):
    at = 0
    while at < len(data):
        size = sizes[at % len(sizes)]
        yield at, data[at : at + size]
        at += size


@st.composite
def disjoint_parts(draw):
    """Arrays with disjoint boxes: a grid of cuts on each dim, some of its cells, in any order."""
    parts = []
    for seed in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=4)))
        cuts = [[0, *sorted(draw(st.lists(st.integers(0, n), max_size=n))), n] for n in shape]
        cells = np.array(np.meshgrid(*(range(len(c) - 1) for c in cuts), indexing="ij"), np.int64)
        cells = cells.reshape(len(shape), -1).T if shape else np.zeros((1, 0), np.int64)
        order = draw(st.permutations(range(len(cells)))) if len(cells) < 40 else range(len(cells))
        cells = cells[list(order)[: draw(st.integers(0, len(cells)))]]
        boxes = np.array(
            [
                [
                    [c[i] for c, i in zip(cuts, cell, strict=True)],
                    [c[i + 1] for c, i in zip(cuts, cell, strict=True)],
                ]
                for cell in cells
            ],
            np.int64,
        ).reshape(len(cells), 2, len(shape))
        parts.append((filled(shape, draw(st.sampled_from(DTYPES)), seed), boxes))
    return parts


@settings(max_examples=300, deadline=None)
@given(disjoint_parts(), st.integers(1, 200), st.lists(st.integers(1, 50), min_size=1, max_size=5), st.data())
def test_any_boxes_any_cuts(parts, message_bytes, sizes, data):
    want = expected(parts)
    messages = list(gather(parts, message_bytes=message_bytes))
    assert b"".join(messages) == want
    assert all(messages)
    assert all(len(m) <= max(message_bytes, 16) for m in messages)
    start = data.draw(st.integers(0, len(want)))
    assert b"".join(gather(parts, start=start, message_bytes=message_bytes)) == want[start:]

    targets = [(np.zeros_like(array), boxes) for array, boxes in parts]
    scatter = Scatter(targets)
    assert scatter.nbytes == len(want)
    for at, piece in chopped(want, sizes):
        scatter.write(at, piece)
    assert expected(targets) == want
    for (array, boxes), (target, _) in zip(parts, targets, strict=True):
        mask = np.zeros(array.shape, bool)
        for a, b in boxes:
            mask[tuple(map(slice, a, b))] = True
        assert target[~mask].tobytes() == bytes(target[~mask].nbytes), "wrote outside the boxes"


@pytest.mark.parametrize("shape", [(40, 3), (600, 300), (3, 500, 7), (70000, 16)])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_runs_of_equal_boxes(shape, width):
    """Long runs, which take the paths for many boxes at once, into targets of another shape."""
    array = filled(shape, "f4")
    starts = np.arange(0, shape[-1] - width + 1, width)
    boxes = np.zeros((len(starts), 2, len(shape)), np.int64)
    boxes[:, 1] = shape
    boxes[:, 0, -1], boxes[:, 1, -1] = starts, starts + width
    rows = np.zeros((shape[0], 2, len(shape)), np.int64)
    rows[:, 1] = shape
    rows[:, 0, 0], rows[:, 1, 0] = np.arange(shape[0]), np.arange(shape[0]) + 1
    parts = [(array, boxes), (array, rows[::-1])]
    want = expected(parts)
    assert b"".join(gather(parts)) == want
    flat = np.zeros(len(want) // 4, "f4")
    scatter = Scatter([(flat, np.array([[[0], [len(flat)]]]))])
    boxed = [(np.zeros_like(array), boxes), (np.zeros_like(array), rows[::-1])]
    back = Scatter(boxed)
    at = 0
    for message in gather(parts, message_bytes=100_003):
        scatter.write(at, message)
        back.write(at, memoryview(message))
        at += len(message)
    assert flat.tobytes() == want == expected(boxed)


def test_messages_are_about_one_mebibyte():
    array = filled((3000, 1000), "f4")
    columns = np.array([[[0, 100], [3000, 900]]])
    small = np.array([[[i, 8], [i + 1, 900]] for i in range(3000)])
    for parts in ([(array, columns)], [(array, small)], [(array, np.array([[[0, 0], [3000, 1000]]]))]):
        sizes = [len(m) for m in gather(parts)]
        assert max(sizes) <= MESSAGE_BYTES
        assert sum(sizes) / len(sizes) > MESSAGE_BYTES / 2


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([[[0, 0], [2, 4]]], r"box 0: need 0 <= start <= stop <= \(2, 3\)"),
        ([[[0, 0], [1, 1]], [[-1, 0], [1, 1]]], "box 1"),
        ([[[1, 0], [0, 1]]], "box 0"),
        ([[[0], [1]]], r"need shape \(n, 2, 2\)"),
    ],
)
def test_bad_boxes_are_refused(boxes, words):
    array = np.zeros((2, 3))
    with pytest.raises(InvalidError, match=words):
        list(gather([(array, np.array(boxes))]))
    with pytest.raises(InvalidError, match=words):
        Scatter([(array, np.array(boxes))])


def test_beyond_the_stream_is_refused():
    scatter = Scatter([(np.zeros(4, "u1"), np.array([[[0], [4]]]))])
    with pytest.raises(InvalidError, match=r"stream of 4 bytes: got \[2, 5\)"):
        scatter.write(2, b"abc")
