import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tenplexfs.core.ptc import Piece, Shard
from tenplexfs.core.region import Region
from tenplexfs.errors import InvalidError
from tenplexfs.storage.sums import as_bytes, box_sums, piece_boxes, piece_sums


@given(st.data())
def test_the_sum_is_that_of_the_bytes_in_c_order(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=4)))
    bounds = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    box = Region(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))
    array = np.arange(np.prod(shape)).astype(ml_dtypes.bfloat16).reshape(shape)
    wanted = array[tuple(slice(a, b) for a, b in bounds)].tobytes()
    assert box_sums(array, [box]) == (xxhash.xxh3_64_intdigest(wanted),)


@pytest.mark.parametrize(
    ("shape", "start", "stop"),
    [
        ((3000, 1000), (1, 7), (2999, 993)),
        ((3, 2, 600_000), (0, 1, 5), (3, 2, 599_999)),
        ((2, 9), (0, 0), (2, 9)),
    ],
)
def test_boxes_of_many_blocks(shape, start, stop):
    array = np.random.default_rng(0).random(shape, "f4")
    wanted = array[tuple(map(slice, start, stop))].tobytes()
    assert box_sums(array, [Region(start, stop)]) == (xxhash.xxh3_64_intdigest(wanted),)


def test_equal_pieces_have_equal_sums_wherever_they_lie():
    tensor = np.arange(24, dtype="i2").reshape(4, 6)
    region = Region((1, 2), (3, 5))
    boxed = np.zeros((3, 8), "i2")
    boxed[1:3, 4:7] = tensor[1:3, 2:5]
    flat = np.concatenate([np.zeros(5, "i2"), tensor[1:3, 2:5].ravel()])
    a = piece_sums(boxed, Shard((3, 8), (Piece(region, (1, 4)),)))
    b = piece_sums(flat, Shard((11,), (Piece(region, (5,)),), flat=True))
    assert a == b == (xxhash.xxh3_64_intdigest(tensor[1:3, 2:5].tobytes()),)


def test_other_dims_than_the_tensor():
    scalar = Shard((1,), (Piece(Region((), ()), (0,)),), flat=True)
    assert piece_boxes(scalar) == (Region((0,), (1,)),)
    folded = Shard((2, 3), (Piece(Region((0,), (4,)), (1,)),))
    array = np.arange(6, dtype="u1").reshape(2, 3)
    assert piece_boxes(folded) == (Region((1,), (5,)),)
    assert piece_sums(array, folded) == (xxhash.xxh3_64_intdigest(bytes([1, 2, 3, 4])),)


def test_box_outside_is_refused():
    with pytest.raises(InvalidError, match="not within an array of shape"):
        box_sums(np.zeros((2, 3)), [Region((0, 0), (2, 4))])
    with pytest.raises(InvalidError, match="not within"):
        box_sums(np.zeros((2, 3)), [Region((0, 0, 0), (1, 1, 1))])


def test_bytes_of_types_without_a_buffer():
    for array in (np.ones((), ml_dtypes.bfloat16), np.ones((2, 2), "M8[s]"), np.ones((0, 3), "f4")):
        assert bytes(as_bytes(array)) == array.tobytes()
