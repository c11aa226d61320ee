import time

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplexfs.core.region import Region
from tenplexfs.core.snapshot import JobName, SnapshotId, TxId
from tenplexfs.errors import CorruptError, InvalidError
from tenplexfs.formats.manifest import (
    ArrayRef,
    Manifest,
    StoredSnapshot,
    decode,
    decode_snapshot,
    encode,
    encode_snapshot,
)

SIZES = st.integers(0, 2**63 - 1)


@st.composite
def regions(draw, ndim):
    pairs = [sorted((draw(SIZES), draw(SIZES))) for _ in range(ndim)]
    return Region(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


@st.composite
def refs(draw):
    shape = tuple(draw(st.lists(SIZES, max_size=3)))
    whole = Region((0,) * len(shape), shape)
    boxes = tuple(draw(st.lists(st.one_of(st.just(whole), regions(len(shape)), regions(1)), max_size=3)))
    sums = tuple(draw(st.integers(0, 2**64 - 1)) for _ in boxes)
    file, dtype = draw(st.sampled_from("abc")), draw(st.sampled_from(["bool", "bfloat16"]))
    return ArrayRef(file, draw(SIZES), draw(SIZES), draw(SIZES), shape, dtype, sums, boxes)


@st.composite
def snapshots(draw):
    pool = draw(st.lists(refs(), min_size=1, max_size=3))
    keys = st.tuples(st.integers(0, 2**17), st.text(st.characters(exclude_categories=["Cs"])))
    return StoredSnapshot(
        JobName("job"),
        SnapshotId(draw(st.integers(1, 9)), draw(st.none() | SIZES), TxId("0123456789abcdef")),
        draw(st.booleans()),
        draw(st.binary()),
        draw(SIZES),
        draw(st.dictionaries(keys, st.sampled_from(pool))),
    )


@given(st.lists(snapshots(), max_size=3))
def test_comes_back_as_it_was(stored):
    manifest = Manifest("node0", "ab", tuple((one.committed, encode_snapshot(one)) for one in stored))
    again = decode(encode(manifest))
    assert again == manifest
    assert [decode_snapshot(blob, committed=committed) for committed, blob in again.snapshots] == stored


def test_keys_that_share_an_array_still_do():
    ref = ArrayRef("a", 0, 128, 0, (0,), "bool", (), ())
    arrays = {(0, "x"): ref, (1, "x"): ref, (1, "y"): ref}
    stored = StoredSnapshot(JobName("j"), SnapshotId(1, None, TxId("t")), False, b"", 0, arrays)
    assert (
        len({id(ref) for ref in decode_snapshot(encode_snapshot(stored), committed=True).arrays.values()})
        == 1
    )


@given(st.data())
def test_damage_is_seen(data):
    good = encode(Manifest("node0", "ab", ((True, bytes(range(64))),)))
    at = data.draw(st.integers(0, len(good) - 1))
    bad = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    with pytest.raises((CorruptError, InvalidError), match="manifest"):
        decode(bad)
    with pytest.raises(CorruptError, match="manifest"):
        decode(good[:at])


def test_snapshot_with_wrong_numbers_is_refused():
    ref = ArrayRef("a", 0, 128, 0, (0,), "bool", (), ())
    stored = StoredSnapshot(JobName("j"), SnapshotId(1, None, TxId("t")), False, b"", 0, {(0, "x"): ref})
    fields = msgpack.unpackb(encode_snapshot(stored))
    for change in ({"files": []}, {"generation": 0}, {"arrays": [[0]]}, {"job": 3}):
        with pytest.raises(CorruptError, match="manifest"):
            decode_snapshot(msgpack.packb({**fields, **change}), committed=False)


def test_another_version_is_refused():
    fields = msgpack.unpackb(encode(Manifest("n", "i", ())))
    with pytest.raises(InvalidError, match="version 2"):
        decode(msgpack.packb({**fields, "version": 2}))


def test_many_arrays_are_quick():
    arrays = {
        (rank, f"layers/{i}/attention/weight"): ArrayRef(
            "segments/a.seg", i * 4096, 128, 4, (1, 1), "float32", (2**64 - 1,), (Region((0, 0), (1, 1)),)
        )
        for i in range(20_000)
        for rank in (0,)
    }
    stored = StoredSnapshot(JobName("j"), SnapshotId(1, 0, TxId("t")), False, b"{}", 0, arrays)
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        data = encode_snapshot(stored)
        seconds.append(time.process_time() - begin)
    assert len(data) < 2_500_000
    assert min(seconds) < 0.2
