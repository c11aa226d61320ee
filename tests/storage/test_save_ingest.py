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
from tenplexfs.errors import InvalidError, NoRoomError, PreconditionError
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.storage.arrangement import arrange
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


def arrangement_of(rank: int):
    return arrange([(((rank, path),), PTC.shard(rank, path), PTC.tensors[path].dtype) for path in "wpb"])


def fill_files(ingest, part, fill: int, *, headers: bool = True) -> None:
    """Does what a client does."""
    numbers = range(len(part.names))
    for number, fd in zip(numbers, ingest.hand_out(part, numbers), strict=True):
        for i in part.arrangement.in_file[number]:
            slot = part.arrangement.slots[i]
            if headers:
                os.pwrite(fd, slot.header, slot.offset)
            os.pwrite(fd, bytes([fill]) * slot.nbytes, slot.offset + len(slot.header))
        assert ingest.settle(part, [number]) == [number]
        os.close(fd)
    assert ingest.settle(part, numbers) == []


def inodes(store: Store, names) -> set[int]:
    return {(store.path / name).stat().st_ino for name in names}


def save(store: Store, step: int, fill: int):
    """Saves all of both ranks; returns the stored snapshot, and the inodes of its files."""
    txid = f"{next(NUMBERS):016x}"
    ingest = store.save_ingest("j", SnapshotId(1, step, txid), LAYOUT, 1, settings_json=b"")
    parts = [ingest.reserve(arrangement_of(rank)) for rank in (0, 1)]
    for part in parts:
        fill_files(ingest, part, fill)
    assert parts[0].sums[0] == parts[1].sums[0]
    ingest.join([[(parts[0], 0), (parts[1], 0)], [(parts[0], 2), (parts[1], 2)]])
    stored = ingest.seal()
    store.commit("j", txid)
    return stored, inodes(store, {ref.file for ref in stored.arrays.values()})


def test_replicas_are_stored_once_padding_is_zero_and_sums_hold(store):
    stored, _ = save(store, 1, 7)
    assert stored.arrays[0, "w"] is stored.arrays[1, "w"]
    with store.arrays(stored) as arrays:
        padded = arrays.array(1, "p")
        assert padded is not None
        assert not padded[-2:].any() and set(padded[:-2].view(np.uint8)) == {7}
        assert set(arrays.array(1, "b").view(np.uint8)) == {7}
    assert list(store.verify()) == []
    kept = sum((store.path / name).stat().st_size for name in {ref.file for ref in stored.arrays.values()})
    assert store.used_bytes < kept + 8 * mmap.PAGESIZE


def test_dropped_files_are_used_again_and_hold_the_new_bytes(store):
    first, before = save(store, 1, 7)
    store.drop("j", first.id.txid)
    assert store.used_bytes == 0
    second, after = save(store, 2, 9)
    assert len(before & after) >= 3
    with store.arrays(second) as arrays:
        assert set(arrays.array(0, "w").view(np.uint8)) == {9}
        assert not arrays.array(1, "p")[-2:].any()
    assert list(store.verify()) == []


def test_a_file_that_somebody_has_mapped_is_never_used_again_and_counts_until_it_is_gone(store):
    first, _ = save(store, 1, 7)
    file = store.path / first.arrays[0, "w"].file
    inode = file.stat().st_ino
    fd = os.open(file, os.O_RDONLY)
    mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    os.close(fd)
    used = store.used_bytes
    store.drop("j", first.id.txid)
    assert 2 * MIB < store.used_bytes < used
    second, after = save(store, 2, 9)
    assert inode not in after
    assert set(mapped[-100:]) == {7}
    mapped.close()
    store.drop("j", second.id.txid)
    assert store.used_bytes == 0


@pytest.mark.parametrize("which", range(3))
def test_what_was_not_written_is_never_sealed(store, which):
    ingest = store.save_ingest("j", SnapshotId(1, 1, "f" * 16), LAYOUT, 1, settings_json=b"")
    part = ingest.reserve(arrangement_of(0))
    fill_files(ingest, part, 5)
    slot = part.arrangement.slots[which]
    path = store.path / part.names[slot.file]
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(slot.offset + 8)
        file.write(b"\x77")
    with pytest.raises(InvalidError, match=f"rank 0, {slot.keys[0][1]}: never came"):
        ingest.settle(part, range(len(part.names)))
    ingest.drop()
    assert store.used_bytes == 0


@pytest.mark.parametrize("lost", range(3))
def test_what_an_earlier_save_left_in_a_file_is_never_taken_for_what_a_client_wrote(store, lost):
    first, before = save(store, 1, 7)
    store.drop("j", first.id.txid)
    ingest = store.save_ingest("j", SnapshotId(1, 2, "f" * 16), LAYOUT, 1, settings_json=b"")
    part = ingest.reserve(arrangement_of(0))
    assert inodes(store, part.names) <= before
    numbers = range(len(part.names))
    file = part.arrangement.slots[lost].file
    for number, fd in zip(numbers, ingest.hand_out(part, numbers), strict=True):
        for i in part.arrangement.in_file[number] if number != file else ():
            slot = part.arrangement.slots[i]
            os.pwrite(fd, slot.header + bytes(slot.nbytes), slot.offset)
        os.close(fd)
    with pytest.raises(InvalidError, match=f"rank 0, {'wpb'[lost]}: never came"):
        ingest.settle(part, numbers)
    ingest.drop()
    assert store.used_bytes == 0


def test_of_many_in_one_file_each_must_be_written_again(store):
    layout = LAYOUT.replace(b'"w": {', b'"v": {"shape": [3], "dtype": "int8"}, "w": {')
    ptc = build_ptc(parse_layout(layout))
    arrangement = arrange([(((0, path),), ptc.shard(0, path), ptc.tensors[path].dtype) for path in "bv"])
    for step, written in ((1, (0, 1)), (2, (1,))):
        ingest = store.save_ingest("j", SnapshotId(1, step, f"{step:016x}"), layout, 1, settings_json=b"")
        part = ingest.reserve(arrangement)
        (fd,) = ingest.hand_out(part, [0])
        for slot in (arrangement.slots[i] for i in written):
            os.pwrite(fd, slot.header + bytes(slot.nbytes), slot.offset)
        os.close(fd)
        if step == 2:
            with pytest.raises(InvalidError, match="rank 0, b: never came"):
                ingest.settle(part, [0])
        else:
            assert ingest.settle(part, [0]) == []
        ingest.drop()


@pytest.mark.parametrize("copied", [False, True])
def test_the_clients_sums_are_taken_for_what_only_it_could_write(store, copied):
    ingest = store.save_ingest("j", SnapshotId(1, 1, "f" * 16), LAYOUT, 1, settings_json=b"")
    part = ingest.reserve(arrangement_of(0))
    fill_files(ingest, part, 5)
    true = dict(part.sums)
    part.given = {0: 1, 1: 2, 2: 3}
    if copied:
        for number in range(len(part.names)):
            ingest.copy_out(part, number)
    assert ingest.settle(part, range(len(part.names))) == []
    assert part.sums == (true if copied else {0: (1,), 1: (2,), 2: (3,)})


def test_what_is_settled_is_handed_out_no_more(store):
    ingest = store.save_ingest("j", SnapshotId(1, 1, "f" * 16), LAYOUT, 1, settings_json=b"")
    part = ingest.reserve(arrangement_of(0))
    fill_files(ingest, part, 7)
    for number in range(len(part.names)):
        with pytest.raises(PreconditionError, match=f"file {number} of a rank is sealed already"):
            ingest.hand_out(part, [number])


def test_what_somebody_can_still_write_is_copied_away(store):
    ingest = store.save_ingest("j", SnapshotId(1, 1, "f" * 16), LAYOUT, 1, settings_json=b"")
    part = ingest.reserve(arrangement_of(0))
    numbers = range(len(part.names))
    fill_files(ingest, part, 5)
    paths = [store.path / name for name in part.names]
    for path in paths:
        path.chmod(0o600)
    fds = [os.open(path, os.O_RDWR) for path in paths]
    assert ingest.settle(part, numbers) == list(numbers)
    for number in numbers:
        ingest.copy_out(part, number)
    assert ingest.settle(part, numbers) == []
    stored = ingest.seal()
    for fd in fds:
        os.pwrite(fd, b"\xff" * 4096, 0)
        os.close(fd)
    assert list(store.verify()) == []
    with store.arrays(stored) as arrays:
        assert set(arrays.array(0, "b").view(np.uint8)) == {5}


def test_arrays_that_are_equal_by_several_names_are_kept_once(store):
    ingest = store.save_ingest("j", SnapshotId(1, 1, "f" * 16), LAYOUT, 1, settings_json=b"")
    parts = [ingest.reserve(arrangement_of(rank)) for rank in (0, 1)]
    for part in parts:
        fill_files(ingest, part, 5)
    a, b = parts
    ingest.join([[(a, 0), (b, 0)], [(b, 0), (a, 0)], [(a, 0), (a, 0)]])
    stored = ingest.seal()
    assert stored.arrays[0, "w"] is stored.arrays[1, "w"]
    assert stored.arrays[0, "p"].file != stored.arrays[1, "p"].file


def test_spare_files_make_room_for_others(store):
    first, _ = save(store, 1, 7)
    store.drop("j", first.id.txid)
    ingest = store.ingest("j", SnapshotId(2, 1, "f" * 16), LAYOUT, 1)
    ingest.reserve([Wanted(((0, "x"),), (31 * MIB,), "int8")])
    held = sum(file.stat().st_blocks * 512 for file in (store.path / "objects").iterdir())
    assert held <= 32 * MIB
    with pytest.raises(NoRoomError):
        ingest.reserve([Wanted(((0, "y"),), (2 * MIB,), "int8")])
    ingest.drop()


def test_the_kernel_knows_who_has_a_file():
    path = Path(f"/dev/shm/tenplexfs-holders-{os.getpid()}")
    path.write_bytes(b"x" * mmap.PAGESIZE)
    try:
        reader = os.open(path, os.O_RDONLY)
        assert not has_writer(reader)
        fd = os.open(path, os.O_RDWR)
        assert has_writer(reader)
        mapped = mmap.mmap(fd, 0)
        os.close(fd)
        assert has_writer(reader)
        assert not is_alone(reader)
        mapped.close()
        assert not has_writer(reader) and is_alone(reader)
        path.unlink()
        assert is_alone(reader)
        os.close(reader)
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("late", ["settle", "hand_out"])
def test_a_save_that_is_given_up_touches_no_file_that_is_used_again(store, late):
    given_up = store.save_ingest("j", SnapshotId(1, 1, "e" * 16), LAYOUT, 1, settings_json=b"")
    padded = given_up.reserve(arrangement_of(1))
    numbers = range(len(padded.names))
    before = inodes(store, padded.names)
    if late == "settle":
        fill_files(given_up, padded, 5)
    next_one = store.save_ingest("j", SnapshotId(1, 1, "f" * 16), LAYOUT, 1, settings_json=b"")
    parts = []

    class DroppedInTheMiddle(list):
        def __iter__(self):
            yield self[0]
            given_up.drop()
            parts.append(next_one.reserve(arrangement_of(0)))
            fill_files(next_one, parts[0], 7)
            yield from self[1:]

    with pytest.raises(PreconditionError, match="dropped"):
        getattr(given_up, late)(padded, DroppedInTheMiddle(numbers))
    assert inodes(store, parts[0].names) & before
    assert next_one.settle(parts[0], range(len(parts[0].names))) == []
    stored = next_one.seal()
    with store.arrays(stored) as arrays:
        for path in "wpb":
            assert set(arrays.array(0, path).view(np.uint8)) == {7}
