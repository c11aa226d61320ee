from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenplexfs.core.order import COUNT_MAX, Order
from tenplexfs.errors import InvalidError


def far_from_uniform(counts):
    """How many standard deviations the chi-squared of equally likely counts is from its mean."""
    counts = np.asarray(counts, float).ravel()
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return abs(((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


GOLDEN = {
    (10, 7, 0): [9, 1, 2, 6, 3, 7, 8, 0, 5, 4],
    (10, 7, 1): [7, 9, 4, 2, 5, 8],
    (16384, 0, 0): [4691, 11033, 3162, 15238, 13260, 11330],
    (16385, 0, 0): [1494, 16099, 1501, 10392, 2156, 10095],
    (6_800_000, 1234, 3): [5418795, 4719649, 5885996, 62067, 384473, 6054369],
    (1_000_000_000, 2**64 - 1, 0): [903196935, 179997584, 658380190, 874334745, 342908990, 799576162],
    (COUNT_MAX, 1, 2**40): [
        170513839271112,
        150298173479366,
        3391230604696,
        59869751717408,
        4305545793418,
        98485365468789,
    ],
}


@pytest.mark.parametrize(("key", "first"), GOLDEN.items(), ids=str)
def test_the_order_never_changes_between_versions(key, first):
    assert Order(*key).span(0, len(first)).tolist() == first


@pytest.mark.parametrize(
    "count", [0, 1, 2, 3, 5, 1000, 16384, 16385, 16386, 129 * 128, 65536, 100_003, 1 << 20]
)
def test_it_is_a_permutation_and_positions_undo_it(count):
    order = Order(count, seed=5, epoch=2)
    ids = order.span(0, count)
    assert ids.dtype == np.int64
    assert np.array_equal(np.sort(ids), np.arange(count))
    assert np.array_equal(order.positions(ids), np.arange(count))


@settings(deadline=None)
@given(st.integers(1, COUNT_MAX), st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.data())
def test_random_access_agrees_with_ranges_and_undoes(count, seed, epoch, data):
    order = Order(count, seed, epoch)
    begin = data.draw(st.integers(0, count))
    end = min(count, begin + data.draw(st.integers(0, 40)))
    ids = order.span(begin, end)
    assert ((ids >= 0) & (ids < count)).all()
    assert len(set(ids.tolist())) == end - begin
    backwards = np.arange(begin, end)[::-1].reshape(-1, 1)
    assert np.array_equal(order.ids(backwards), ids[::-1].reshape(-1, 1))
    assert np.array_equal(order.positions(ids), np.arange(begin, end))


def test_blocks_do_not_show():
    order = Order(1_000_000, 1, 1)
    whole = order.span(0, 60_000)
    assert np.array_equal(whole[12_345:54_321], order.span(12_345, 54_321))


def test_without_shuffling_each_epoch_is_the_samples_as_they_are():
    order = Order(100, 3, 4, shuffle=False)
    assert order.span(10, 20).tolist() == list(range(10, 20))
    assert order.positions([5]).tolist() == [5]


def test_epochs_seeds_and_counts_give_orders_of_their_own():
    keys = [(20_000, 0, 0), (20_000, 0, 1), (20_000, 0, 2), (20_000, 1, 0), (20_001, 0, 0)]
    orders = [Order(*key).span(0, 20_000) for key in keys]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).sum() < 10


def test_all_orders_of_four_samples_are_equally_likely():
    seen = dict.fromkeys(permutations(range(4)), 0)
    for seed in range(4800):
        seen[tuple(Order(4, seed, 0).span(0, 4).tolist())] += 1
    assert far_from_uniform(list(seen.values())) < 4


@pytest.mark.parametrize("count", [16_000, 16_400, 40_000, 1_000_000, 10**10])
def test_a_position_says_nothing_of_the_sample(count):
    taken = min(count, 1_000_000)
    ids = Order(count, 9, 0).span(0, taken)
    where = np.arange(taken)
    by_size = np.bincount(ids * 32 // count * 32 + where * 32 // taken, minlength=1024)
    assert far_from_uniform(by_size) < 5
    for modulus in (32, 37):
        by_rest = np.bincount(ids % 32 * modulus + where % modulus, minlength=32 * modulus)
        assert far_from_uniform(by_rest) < 5
    steps = np.diff(ids) % count
    assert far_from_uniform(np.histogram(steps, bins=64, range=(0, count))[0]) < 5
    ascending = (np.diff(ids) > 0).mean()
    assert abs(ascending - 0.5) < 5 / (12 * taken) ** 0.5


def test_where_the_first_sample_goes_and_what_stays_is_by_chance():
    count = 17_000
    first = [int(Order(count, seed, 0).ids(0)) for seed in range(4000)]
    assert far_from_uniform(np.histogram(first, bins=50, range=(0, count))[0]) < 4
    fixed = [int((Order(count, seed, 0).span(0, count) == np.arange(count)).sum()) for seed in range(400)]
    assert abs(np.mean(fixed) - 1) < 4 / 400**0.5  # Poisson with mean 1
    assert abs(np.var(fixed) - 1) < 0.4


def test_neighbours_in_one_epoch_are_strangers_in_the_next():
    count = 250_000
    one, two = Order(count, 1, 0).span(0, count), Order(count, 1, 1).positions(np.arange(count))
    distance = np.diff(two[one]) % count
    assert far_from_uniform(np.histogram(distance, bins=100, range=(0, count))[0]) < 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Order(-1, 0, 0), "samples: need 0 <= count <= 2\\^48, got -1"),
        (lambda: Order(COUNT_MAX + 1, 0, 0), "got 281474976710657"),
        (lambda: Order(1, -1, 0), "seed: .* got -1"),
        (lambda: Order(1, 2**64, 0), "seed"),
        (lambda: Order(1, 0, -1), "epoch"),
        (lambda: Order(5, 0, 0).span(2, 6), r"positions \[2, 6\): need 0 <= begin <= end <= 5"),
        (lambda: Order(5, 0, 0).ids([0, 5]), "position 5: need 0 <= position < 5"),
        (lambda: Order(5, 0, 0).positions([-2, 1]), "sample -2"),
        (lambda: Order(5, 0, 0).ids([0.5]), "need integers, got float64"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(InvalidError, match=message):
        call()
