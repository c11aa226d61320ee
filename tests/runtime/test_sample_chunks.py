from __future__ import annotations

import numpy as np
import pytest

from tenplexfs.core.cursor import Cursor, Extent, Tail
from tenplexfs.core.partition import Partition, RankRows
from tenplexfs.errors import UnavailableError
from tenplexfs.runtime.sample_chunks import Chunk, Held, Pace

SIZE = 4


def rows_of(degree: int, rank: int, epoch: int = 0) -> RankRows:
    return Partition.of(Cursor(epoch, 0, 12, 5), Extent(200, Tail.KEEP), degree=degree).rank(rank)


def chunk(rows: RankRows, width: int, number: int) -> Chunk:
    begin, end = number * width, min((number + 1) * width, rows.count)
    ids = rows.span(begin, end)
    made = Chunk(rows, width, True, begin, end, ids, np.arange(len(ids) + 1) * SIZE)
    made.data = np.repeat(ids.astype(np.uint8), SIZE)
    return made


def test_what_is_held_is_found_by_arithmetic_as_by_looking():
    held, chunks = Held(), []
    for rows, width in (
        (rows_of(2, 0), 7),
        (rows_of(2, 1), 7),
        (rows_of(3, 1), 11),
        (rows_of(3, 1, epoch=1), 5),
    ):
        for number in range(0, -(-rows.count // width), 2):
            chunks.append(chunk(rows, width, number))
            chunks[-1].failed = {chunks[-1].begin + 1: UnavailableError("gone")}
    for each in chunks:
        held.add(each)
    rng = np.random.default_rng(0)
    while True:
        ids = rng.permutation(200)
        there = {int(sample) for each in chunks for sample in np.delete(each.ids, slice(1, 2))}
        which, data = held.find(ids)
        assert [int(ids[at]) for at in which] == [sample for sample in ids.tolist() if sample in there]
        assert bytes(data) == np.repeat(ids[which].astype(np.uint8), SIZE).tobytes()
        if not chunks:
            break
        held.remove(chunks.pop(int(rng.integers(len(chunks)))))


def test_a_chunk_that_was_replaced_does_not_take_the_new_one_with_it():
    held, old, new = Held(), chunk(rows_of(1, 0), 10, 3), chunk(rows_of(1, 0), 10, 3)
    held.add(old)
    held.add(new)
    held.remove(old)
    assert len(held.find(new.ids)[0]) == 10


@pytest.mark.parametrize(("latency_s", "transfer_s"), [(0.02, 0.017), (0.1, 0.004), (0.001, 0.5)])
def test_the_pace_fills_the_link_and_does_not_flood_it(latency_s, transfer_s):
    pace = Pace()
    seen = []
    for _ in range(1000):
        pace.took(max(latency_s + transfer_s, pace.at_once * transfer_s))
        seen.append(pace.at_once)
    fastest_s = max(latency_s + transfer_s, Pace.FEWEST * transfer_s)
    assert max(seen) <= min(3 * fastest_s / transfer_s + 1, Pace.MOST)
    assert min(seen[500:]) >= min(int(fastest_s / transfer_s), Pace.MOST)
