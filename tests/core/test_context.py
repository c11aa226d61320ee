import numpy as np
import pytest

from tenplexfs.core.context import ContextOrder, context_parts, context_runs
from tenplexfs.errors import InvalidError


@pytest.mark.parametrize("order", ContextOrder)
@pytest.mark.parametrize(
    ("shape", "dim"), [((16,), 0), ((16, 3), 0), ((2, 16), 1), ((2, 16, 5), -2), ((3, 5, 8), 2)]
)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_bytes_of_a_part_are_the_parts_of_the_array(order, shape, dim, degree):
    sample = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    length = shape[dim]
    seen = []
    for rank in range(degree):
        parts = context_parts(length, degree=degree, rank=rank, order=order)
        where = np.concatenate([np.arange(*part) for part in parts])
        seen += where.tolist()
        runs = context_runs(shape, 2, dim=dim, parts=parts)
        joined = b"".join(sample.tobytes()[begin:end] for begin, end in runs.tolist())
        assert joined == np.take(sample, where, axis=dim).tobytes()
    assert sorted(seen) == list(range(length))


def test_zigzag_pairs_the_first_with_the_last():
    parts = [context_parts(8, degree=2, rank=rank, order=ContextOrder.ZIGZAG) for rank in (0, 1)]
    assert parts == [((0, 2), (6, 8)), ((2, 4), (4, 6))]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: context_parts(10, degree=4, rank=0, order=ContextOrder.CONTIGUOUS),
            "10 does not divide into 4",
        ),
        (lambda: context_parts(12, degree=4, rank=0, order=ContextOrder.ZIGZAG), "12 does not divide into 8"),
        (lambda: context_parts(8, degree=4, rank=4, order=ContextOrder.ZIGZAG), "rank 4 of 4"),
        (lambda: context_parts(8, degree=0, rank=0, order=ContextOrder.ZIGZAG), "rank 0 of 0"),
        (lambda: context_runs((4,), 1, dim=1, parts=[(0, 2)]), r"dim 1: the samples have shape \(4,\)"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(InvalidError, match=message):
        call()
