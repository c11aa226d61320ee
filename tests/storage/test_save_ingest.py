"""Files that are handed out: sealed only when nobody writes, used again only when nobody has them."""

from __future__ import annotations

import mmap
import os
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from tenplexfs.core.build import build_ptc
from tenplexfs.core.snapshot import SnapshotId
from tenplexfs.errors import NoRoomError
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.storage.holders import has_writer, is_alone
from tenplexfs.storage.store import Store, Wanted

MIB = 1 << 20
LAYOUT = (
    b'{"format": "tenplexfs-layout", "version": 1, "mesh": {"tp": 2}, "nodes": {"n": [0, 1]}, "tensors": {'
    b'"w": {"shape": [524288], "dtype": "float32"}, "b": {"shape": [3], "dtype": "int8"},'
    b'"p": {"shape": [700000], "dtype": "float32", "shard": [{"axis": "tp", "dim": 0, "pad_to": 700002}]}}}'
)
PTC = build_ptc(parse_layout(LAYOUT))


@pytest.fixture
def store():
    root = Path(f"/dev/shm/tenplexfs-test-{os.getpid()}")
    with_limit = Store.open(root, node="n", limit_bytes=32 * MIB)
    yield with_limit
    with_limit.close()
    for file in sorted(root.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    root.rmdir()


NUMBERS = count(1)


def save(store: Store, step: int, fill: int):
    """Saves all of both ranks; returns the stored snapshot and which files were recycled."""
    txid = f"{next(NUMBERS):016x}"
    ingest = store.save_ingest("j", SnapshotId(1, step, txid), LAYOUT, 1, settings_json=b"")
    sums, recycled = {}, set()
    for rank in (0, 1):
        keys = [(rank, path) for path in PTC.rank_paths(rank)]
        rooms = [Wanted((key,), PTC.shard(*key).local_shape, PTC.tensors[key[1]].dtype) for key in keys]
        ingest.reserve(rooms, recycle=True)
        files = [key for key in keys if ingest.in_file(key)]
        assert {path for _, path in files} == {"w", "p"}
        for key in files:
            handed = ingest.hand_out(key)
            size = np.prod(PTC.shard(*key).local_shape) * 4
            os.pwrite(handed.fd, bytes([fill]) * int(size), handed.offset)
            assert ingest.settle([key]) == [key]
            os.close(handed.fd)
            if handed.recycled:
                recycled.add(key)
        assert ingest.settle(files) == []
        ingest.pwrite((rank, "b"), 0, bytes([fill]) * 3)
        sums.update({key: ingest.finish(key, PTC.shard(*key)) for key in keys})
    assert sums[0, "w"] == sums[1, "w"]
    ingest.join([[(0, "w"), (1, "w")], [(0, "b"), (1, "b")]])
    stored = ingest.seal({key: PTC.shard(*key) for key in sums}, sums=sums)
    store.commit("j", txid)
    return stored, recycled


def test_replicas_are_stored_once_padding_is_zero_and_sums_hold(store):
    stored, recycled = save(store, 1, 7)
    assert stored.arrays[0, "w"] is stored.arrays[1, "w"]
    assert not recycled
    with store.arrays(stored) as arrays:
        padded = arrays.array(1, "p")
        assert padded is not None
        assert not padded[-2:].any() and set(padded[:-2].view(np.uint8)) == {7}
    assert list(store.verify()) == []
    kept = sum((store.path / name).stat().st_size for name in {ref.file for ref in stored.arrays.values()})
    assert store.used_bytes < kept + 8 * mmap.PAGESIZE


def test_dropped_files_are_used_again_and_hold_the_new_bytes(store):
    first, _ = save(store, 1, 7)
    inode = (store.path / first.arrays[0, "w"].file).stat().st_ino
    store.drop("j", first.id.txid, recycle=True)
    assert store.used_bytes == 0
    second, recycled = save(store, 2, 9)
    assert recycled == {(0, "w"), (1, "w"), (0, "p"), (1, "p")}
    inodes = {(store.path / ref.file).stat().st_ino for ref in second.arrays.values()}
    assert inode in inodes
    with store.arrays(second) as arrays:
        assert set(arrays.array(0, "w").view(np.uint8)) == {9}
        assert not arrays.array(1, "p")[-2:].any()
    assert list(store.verify()) == []


def test_a_file_that_somebody_has_mapped_is_never_used_again_and_counts_until_it_is_gone(store):
    first, _ = save(store, 1, 7)
    fd = os.open(store.path / first.arrays[0, "w"].file, os.O_RDONLY)
    mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    os.close(fd)
    used = store.used_bytes
    store.drop("j", first.id.txid, recycle=True)
    assert 2 * MIB < store.used_bytes < used
    second, recycled = save(store, 2, 9)
    assert (0, "w") not in recycled or (1, "w") not in recycled
    assert set(mapped[-100:]) == {7}
    mapped.close()
    store.drop("j", second.id.txid)
    assert store.used_bytes == 0


def test_spare_files_make_room_for_others(store):
    first, _ = save(store, 1, 7)
    store.drop("j", first.id.txid, recycle=True)
    ingest = store.ingest("j", SnapshotId(2, 1, "f" * 16), LAYOUT, 1)
    ingest.reserve([Wanted(((0, "x"),), (31 * MIB,), "int8")])
    held = sum(file.stat().st_blocks * 512 for file in (store.path / "objects").iterdir())
    assert held <= 32 * MIB
    with pytest.raises(NoRoomError):
        ingest.reserve([Wanted(((0, "y"),), (2 * MIB,), "int8")])
    ingest.drop()


def test_the_kernel_knows_who_has_a_file(tmp_path):
    path = Path(f"/dev/shm/tenplexfs-holders-{os.getpid()}")
    path.write_bytes(b"x" * mmap.PAGESIZE)
    try:
        assert not has_writer(path)
        fd = os.open(path, os.O_RDWR)
        assert has_writer(path)
        mapped = mmap.mmap(fd, 0)
        os.close(fd)
        assert has_writer(path)
        reader = os.open(path, os.O_RDONLY)
        assert not is_alone(reader)
        mapped.close()
        assert not has_writer(path) and is_alone(reader)
        path.unlink()
        assert is_alone(reader)
        os.close(reader)
    finally:
        path.unlink(missing_ok=True)
