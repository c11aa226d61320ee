import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplexfs.core.region import (
    Region,
    box_volumes,
    disjoint_atoms,
    find_overlap,
    flat_boxes,
    join,
    split_runs,
    union_volume,
)
from tenplexfs.errors import InvalidError

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def shapes_and_boxes(draw, groups=1):
    shape = draw(SHAPES)
    out = []
    for _ in range(groups):
        boxes = []
        for _ in range(draw(st.integers(0, 5))):
            start = [draw(st.integers(0, n)) for n in shape]
            boxes.append([start, [draw(st.integers(a, n)) for a, n in zip(start, shape, strict=True)]])
        out.append(np.array(boxes, np.int64).reshape(len(boxes), 2, len(shape)))
    return shape, *out


def slices(box):
    return tuple(slice(a, b) for a, b in zip(*box, strict=True))


def mask(shape, box):
    out = np.zeros(shape, bool)
    out[slices(box)] = True
    return out


@given(SHAPES, st.data())
def test_the_boxes_of_a_run_are_its_elements_in_order(shape, data):
    size = math.prod(shape)
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    array = np.arange(size).reshape(shape)
    boxes = flat_boxes(shape, begin, end)
    got = np.concatenate([np.empty(0, int), *(array[slices(box)].ravel() for box in boxes)])
    assert got.tolist() == list(range(begin, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(shapes_and_boxes(groups=2))
def test_join_finds_exactly_the_pairs_that_share_an_element(given_boxes):
    shape, a, b = given_boxes
    want = [
        (i, j) for i in range(len(a)) for j in range(len(b)) if (mask(shape, a[i]) & mask(shape, b[j])).any()
    ]
    assert list(zip(*(column.tolist() for column in join(a, b)), strict=True)) == want


@given(shapes_and_boxes())
def test_atoms_are_disjoint_and_make_up_every_box(given_boxes):
    shape, boxes = given_boxes
    atoms, box, atom = disjoint_atoms(boxes)
    assert find_overlap(atoms) is None
    assert (box_volumes(atoms) > 0).all()
    for k in range(len(boxes)):
        made = np.zeros(shape, bool)
        for number in atom[box == k]:
            made |= mask(shape, atoms[number])
        assert (made == mask(shape, boxes[k])).all()
    held = np.any([mask(shape, b) for b in boxes], axis=0) if len(boxes) else np.zeros(1, bool)
    assert union_volume(boxes) == held.sum()


@given(shapes_and_boxes())
def test_split_runs_gives_contiguous_parts(given_boxes):
    shape, boxes = given_boxes
    boxes = boxes[box_volumes(boxes) > 0]
    extents = np.array([shape] * len(boxes), np.int64).reshape(len(boxes), len(shape))
    array = np.arange(math.prod(shape)).reshape(shape)
    owner, parts, offsets = split_runs(extents, boxes)
    for k in range(len(boxes)):
        got = [array[slices(part)].ravel() for part in parts[owner == k]]
        for run, offset in zip(got, offsets[owner == k], strict=True):
            assert run.tolist() == list(range(offset, offset + len(run)))
        assert np.concatenate(got).tolist() == array[slices(boxes[k])].ravel().tolist()


@pytest.mark.parametrize(("start", "stop"), [((7,), (3,)), ((-1,), (3,)), ((0, 0), (3,))])
def test_a_region_refuses_reversed_negative_and_uneven_bounds(start, stop):
    with pytest.raises(InvalidError, match=r"region: "):
        Region(start, stop)


def test_a_region_past_the_end_is_refused_with_the_values():
    with pytest.raises(InvalidError, match=r"w: dim 1: need stop <= 4, got \[2, 5\)"):
        Region((0, 2), (3, 5)).check_inside((3, 4), "w")
