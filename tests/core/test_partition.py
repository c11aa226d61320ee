import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenplexfs.core.cursor import Cursor, Extent, Tail
from tenplexfs.core.order import Order
from tenplexfs.core.partition import DegreeError, Partition
from tenplexfs.errors import InvalidError


def partition(count, batch, degree, *, consumed=0, tail=Tail.DROP, uneven=False, epoch=0, shuffle=True):
    extent = Extent(count, tail)
    return Partition.of(
        Cursor(epoch, consumed, batch, 3), extent, degree=degree, uneven=uneven, shuffle=shuffle
    )


@settings(deadline=None)
@given(
    st.integers(1, 80),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(0, 80),
    st.sampled_from(Tail),
    st.booleans(),
)
def test_the_parts_of_a_batch_are_the_batch(count, batch, degree, consumed, tail, uneven):
    degree = min(degree, batch)
    if not uneven and batch % degree:
        degree = 1
    whole = partition(count, batch, degree, consumed=min(consumed, count), tail=tail, uneven=uneven)
    ranks = [whole.rank(rank) for rank in range(degree)]
    assert sum(rank.count for rank in ranks) == whole.samples
    stream = []
    for number in range(whole.batches):
        parts = [rank.span(rank.end_of(number), rank.end_of(number + 1)).tolist() for rank in ranks]
        assert parts == [part.tolist() for part in np.array_split(whole.batch(number), degree)]
        stream += whole.batch(number).tolist()
    assert stream + whole.dropped.tolist() == Order(count, 3, 0).span(min(consumed, count), count).tolist()
    for number, rank in enumerate(ranks):
        ids = rank.span(0, rank.count)
        backwards = np.arange(rank.count)[::-1]
        assert np.array_equal(rank.ids(backwards), ids[::-1])
        where, rows = whole.locate(ids)
        assert (where == number).all()
        assert np.array_equal(rows, np.arange(rank.count))
    gone = np.setdiff1d(np.arange(count), stream)
    assert (np.stack(whole.locate(gone)) == -1).all()


def test_forty_samples_over_two_then_four_ranks_then_one():
    seen = []
    for consumed, degree, steps in ((0, 2, 2), (8, 4, 3), (20, 1, 5)):
        part = partition(40, 4, degree, consumed=consumed, shuffle=False)
        for step in range(steps):
            for rank in map(part.rank, range(degree)):
                seen += rank.span(rank.end_of(step), rank.end_of(step + 1)).tolist()
    assert seen == list(range(40))


def test_five_samples_by_two():
    dropped = partition(5, 2, 1)
    assert dropped.batches == 2
    assert dropped.dropped.tolist() == Order(5, 3, 0).ids([4]).tolist()
    kept = partition(5, 2, 2, tail=Tail.KEEP)
    assert kept.batches == 3
    assert kept.dropped.size == 0
    assert [kept.rank(rank).count for rank in (0, 1)] == [3, 2]


def test_an_uneven_batch_gives_the_first_ranks_more():
    uneven = partition(20, 5, 4, uneven=True)
    assert [uneven.rank(rank).local_batch for rank in range(4)] == [2, 1, 1, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition(40, 4, 3), "global batch 4: 3 ranks do not divide it; .* 4 are 1, 2, 4$"),
        (lambda: partition(40, 36, 5), "are 1, 2, 3, 4, 6, 9, 12, 18, 36$"),
        (lambda: partition(40, 4, 8), "8 ranks do not divide it"),
        (lambda: partition(40, 4, 5, uneven=True), "global batch 4: has no sample for some of 5 ranks"),
        (lambda: partition(40, 4, 0), "data-parallel degree: need >= 1, got 0"),
        (lambda: partition(40, 4, 2).rank(-1), "rank -1: need 0 <= rank < 2"),
        (lambda: partition(40, 4, 2).rank(5), "rank 5: need 0 <= rank < 2"),
    ],
)
def test_degrees_and_ranks_that_do_not_fit_are_value_errors(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert isinstance(caught.value, DegreeError)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition(40, 4, 2).batch(10), "batch 10: need 0 <= batch < 10"),
        (lambda: partition(40, 4, 2).rank(0).ids([20]), "row 20: rank 0 has 20 rows"),
        (lambda: partition(40, 4, 2).rank(0).positions([-1]), "row -1"),
        (lambda: partition(40, 4, 2).rank(0).positions([0.5]), "rows: need integers"),
        (lambda: partition(40, 4, 2).rank(1).span(3, 21), r"rows \[3, 21\): rank 1 has 20 rows"),
        (lambda: partition(40, 4, 2).rank(1).end_of(11), "need 0 <= batches <= 10, got 11"),
        (lambda: partition(40, 4, 2, consumed=41), "consumed 41: epoch 0 has 40 samples"),
        (
            lambda: Partition(Order(9, 3, 1), Cursor(0, 0, 1, 3), Extent(9, Tail.DROP), 1),
            "is not the order of",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(InvalidError, match=message):
        call()


@pytest.mark.parametrize(("count", "limit_s"), [(6_800_000, 0.2), (10**9, 1.0), (10**10, 1.0)])
def test_repartition_takes_no_time_and_no_memory(count, limit_s):
    tracemalloc.start()
    began = time.perf_counter()
    for degree in (64, 128):
        part = partition(count, 1024, degree, consumed=1024 * 1000, epoch=1)
        first = np.concatenate(
            [part.rank(rank).span(0, part.rank(rank).local_batch) for rank in range(degree)]
        )
        assert np.array_equal(first, part.batch(0))
        last = part.rank(degree - 1)
        last.ids(np.arange(last.count - 8, last.count))
    took_s = time.perf_counter() - began
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert took_s < limit_s
    assert peak_bytes < 4 << 20
