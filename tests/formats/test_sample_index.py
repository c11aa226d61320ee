import numpy as np
import pytest

from tenplexfs.errors import CorruptError, InvalidError
from tenplexfs.formats.sample_index import RUN, Packing, SampleIndex, index_parts, names_of, parse_index

NAMES = ["/data/a b/x%.bin", "/data/a b/ü.bin", "/data/z\udcff"]


def make(
    table=None, runs=None, *, first=(0, 2, 2, 5), packing=Packing.NONE, ends=None, dtype=None, shape=None
):
    base, names_at, names = names_of(NAMES)
    table = None if table is None else np.asarray(table, np.int64)
    runs = None if runs is None else np.array(runs, RUN)
    ends = None if ends is None else np.asarray(ends, np.int64)
    first = np.asarray(first, np.int64)
    return SampleIndex("test", packing, dtype, shape, base, first, names_at, names, table, runs, ends)


BIG = 1 << 33
TABLE = [[5, 9], [9, 9], [BIG, BIG + 3], [0, 1], [1, 5]]


def files_of(index):
    return b"".join(bytes(part) for part in index_parts(index))


def there_and_back(index):
    return parse_index(memoryview(files_of(index)))


def test_a_table_of_ranges_over_files_also_empty_ones():
    index = there_and_back(make(TABLE))
    assert (index.count, index.file_count) == (5, 3)
    assert [index.name(file) for file in range(3)] == NAMES
    assert index.base == "/data/"
    spans = index.spans(np.array([4, 0, 2, 2]))
    assert spans.file.tolist() == [2, 0, 2, 2]
    assert spans.begin.tolist() == [[1], [5], [BIG], [BIG]]
    assert spans.end.tolist() == [[5], [9], [BIG + 3], [BIG + 3]]
    assert index.sizes(np.arange(5)).tolist() == [4, 0, 3, 1, 4]
    assert index.sizes(np.arange(0)).tolist() == []


def test_runs_of_one_size_take_no_room():
    runs = [(100, 8, 16, 1, 0, 0), (0, 8, 16, 1, 0, 0), (BIG, 8, 16, 1, 0, 0)]
    index = make(runs=runs, first=(0, 2, 2, 10**9), dtype=np.dtype("<i8"), shape=(2,))
    assert len(files_of(index)) < 1024
    spans = there_and_back(index).spans(np.array([1, 2, 10**9 - 1]))
    assert spans.file.tolist() == [0, 2, 2]
    assert spans.begin.tolist() == [[108], [BIG], [BIG + 8 * (10**9 - 3)]]
    assert (spans.end - spans.begin).tolist() == [[16]] * 3


def test_sixteen_bytes_a_sample():
    table = np.zeros((1000, 2), np.int64)
    assert len(files_of(make(table, first=(0, 400, 400, 1000)))) < 16 * 1000 + 1024


def test_members_end_where_the_next_begins():
    table = [[0, 100], [90, 50], [0, 10], [40, 20], [80, 30]]
    index = there_and_back(make(table, packing=Packing.MEMBER, ends=[200, 0, 120]))
    spans = index.spans(np.arange(5))
    assert spans.begin.reshape(-1).tolist() == [0, 90, 0, 40, 80]
    assert spans.end.reshape(-1).tolist() == [90, 200, 40, 80, 120]
    assert index.sizes(np.array([1, 4])).tolist() == [50, 30]


def test_the_mapped_arrays_are_views():
    data = bytearray(files_of(make(TABLE)))
    assert np.shares_memory(parse_index(memoryview(data)).table, np.frombuffer(data, np.uint8))


@pytest.mark.parametrize(
    "index",
    [
        lambda: make(TABLE, first=(0, 2, 1, 5)),
        lambda: make(TABLE, first=(0, 2, 2, 6)),
        lambda: make(TABLE, first=(0, 5)),
        lambda: make(),
        lambda: make(TABLE, [(0, 0, 0, 1, 0, 0)] * 3),
        lambda: make(runs=[(0, 8, 16, 1, 0, 0)] * 2),
        lambda: make(runs=[(0, 8, 8, 1, 0, 0), (0, 8, 8, 2, 8, 0), (0, 8, 8, 1, 0, 0)]),
        lambda: make(TABLE, packing=Packing.MEMBER),
        lambda: make(TABLE, shape=(2,)),
    ],
)
def test_parts_that_do_not_fit(index):
    with pytest.raises(CorruptError, match="its parts do not fit together"):
        index()


def test_damaged_files():
    data = files_of(make(TABLE))
    with pytest.raises(InvalidError, match="no index of samples"):
        parse_index(memoryview(b"something else entirely"))
    for size in range(len(data)):
        with pytest.raises((CorruptError, InvalidError)):
            parse_index(memoryview(data[:size]))
    for at in range(12, len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x55
        try:
            parse_index(memoryview(damaged))
        except (CorruptError, InvalidError):
            continue
