import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplexfs.core.cursor import Cursor, Extent, Tail
from tenplexfs.errors import InvalidError


def drop(count):
    return Extent(count, Tail.DROP)


def keep(count):
    return Extent(count, Tail.KEEP)


def at(epoch, consumed, batch=4):
    return Cursor(epoch, consumed, batch, seed=1)


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 60), st.sampled_from(Tail), st.integers(0, 40))
def test_steps_one_by_one_or_at_once(count, batch, consumed, tail, steps):
    extent = Extent(count, tail)
    if tail is Tail.DROP and batch > count:
        batch = count
    cursor = start = at(2, min(consumed, count), batch).settle(extent)
    for _ in range(steps):
        left = count - cursor.consumed
        takes = min(batch, left)
        assert takes == batch or tail is Tail.KEEP
        cursor = at(cursor.epoch, cursor.consumed + takes, batch)
        remains = count - cursor.consumed
        if remains == 0 or (remains < batch and tail is Tail.DROP):
            cursor = at(cursor.epoch + 1, 0, batch)
    assert start.advance(steps, extent) == cursor


def test_five_samples_by_two():
    start = at(0, 0, 2)
    assert start.batches_left(drop(5)) == 2
    assert start.dropped(drop(5)) == (4, 5)
    assert start.advance(2, drop(5)) == at(1, 0, 2)
    assert start.batches_left(keep(5)) == 3
    assert start.dropped(keep(5)) == (5, 5)
    assert start.advance(2, keep(5)) == at(0, 4, 2)
    assert start.advance(3, keep(5)) == at(1, 0, 2)


def test_batch_of_four_for_three_steps_then_of_eight():
    cursor = at(0, 0).advance(3, drop(40)).with_batch(8, drop(40))
    assert cursor == at(0, 12, 8)
    assert cursor.batches_left(drop(40)) == 3
    assert cursor.dropped(drop(40)) == (36, 40)
    assert cursor.advance(4, drop(40)) == at(1, 8, 8)


def test_a_batch_that_no_longer_fits_ends_the_epoch():
    assert at(0, 36).with_batch(8, drop(40)) == at(1, 0, 8)
    assert at(0, 36).with_batch(8, keep(40)) == at(0, 36, 8)
    assert at(0, 36, 8).dropped(drop(40)) == (36, 40)


def test_skipped_and_given():
    assert at(0, 8).skip(10, drop(40)) == at(0, 18)
    assert at(0, 8).skip(30, drop(40)) == at(1, 0)  # two are left: no batch
    assert at(0, 8).skip(72 + 3, drop(40)) == at(2, 3)
    assert at(0, 8).given(21, drop(40)) == at(0, 21)
    assert at(1, 8).given(0, drop(40)) == at(1, 0)
    assert at(0, 8).given(40, drop(40)) == at(1, 0)
    assert at(1, 0).given(30, drop(40), epoch=0) == at(0, 30)
    with pytest.raises(InvalidError, match="consumed 41: epoch 0 has 40 samples"):
        at(0, 8).given(41, drop(40))


def test_epochs_to_come():
    assert at(3, 8).start_of(3) == at(3, 8)
    assert at(3, 8).start_of(7) == at(7, 0)
    with pytest.raises(InvalidError, match="epoch 2: is over, the cursor is in epoch 3"):
        at(3, 8).start_of(2)


def test_far_ahead_is_arithmetic():
    assert at(0, 0, 1000).advance(10**15 + 7, drop(10**10 + 3)) == at(10**8, 7000, 1000)


def test_json_there_and_back():
    cursor = Cursor(3, 10**12, 512, 2**64 - 1)
    assert Cursor.from_json(cursor.to_json()) == cursor
    for bad in ({}, {**cursor.to_json(), "epoch": "3"}, {**cursor.to_json(), "epoch": True}, {"x": 1}):
        with pytest.raises(InvalidError, match="need the integers epoch, consumed, global_batch, seed"):
            Cursor.from_json(bad)
    with pytest.raises(InvalidError, match="need the integers"):
        Cursor.from_json({**cursor.to_json(), "more": 1})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: at(-1, 0), "need epoch, consumed >= 0"),
        (lambda: at(0, 0, 0), "global batch: need >= 1, got 0"),
        (lambda: Cursor(0, 0, 1, -1), "seed"),
        (lambda: at(0, 0).advance(-1, drop(40)), "steps: need >= 0, got -1"),
        (lambda: at(0, 0).skip(-1, drop(40)), "samples to skip"),
        (lambda: at(0, 0).advance(0, drop(3)), "global batch 4: no epoch of 3 samples has a batch"),
        (lambda: at(0, 0).advance(1, keep(0)), "no epoch of 0 samples"),
        (lambda: drop(-1), "samples: need >= 0"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(InvalidError, match=message):
        call()
