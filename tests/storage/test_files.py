import itertools
import mmap
import random

import numpy as np
import pytest

from tenplexfs.errors import CorruptError, NoRoomError, StaleError
from tenplexfs.storage.files import FileTable

PAGE = 4096


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def table(root, limit=1 << 20, clock=None):
    for kind in ("objects", "segments"):
        (root / kind).mkdir(exist_ok=True)
    ids = itertools.count()
    return FileTable(root, limit_bytes=limit, new_id=lambda: f"{next(ids)}", clock=clock or Clock())


def test_room_is_taken_whole_or_not_at_all(tmp_path):
    files = table(tmp_path, limit=3 * 4096)
    (name,) = files.allocate([("objects", 4097)])
    assert (tmp_path / name).read_bytes() == bytes(4097)
    assert (tmp_path / name).stat().st_blocks * 512 >= 4097
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert files.used_bytes == 8192
    with pytest.raises(NoRoomError, match="8192 bytes needed, 8192 used, limit 12288") as caught:
        files.allocate([("segments", 1), ("segments", 1)])
    assert caught.value.details == {"needed_bytes": 8192, "used_bytes": 8192, "limit_bytes": 12288}
    assert files.used_bytes == 8192 and not list((tmp_path / "segments").iterdir())


def test_full_file_system(small_tmpfs):
    files = table(small_tmpfs, limit=1 << 30)
    with pytest.raises(NoRoomError, match="its file system"):
        files.allocate([("objects", 300_000)] * 5)
    assert files.used_bytes == 0 and not list((small_tmpfs / "objects").iterdir())


def test_unlinked_when_nothing_names_it_and_counted_while_mapped(tmp_path):
    files = table(tmp_path)
    (name,) = files.allocate([("objects", 10)])
    files.hold([name])
    files.map_writable(name)[:3] = b"abc"
    files.let_go([name])
    mapped = files.map(name)
    assert mapped is files.map(name)
    with pytest.raises(TypeError):
        mapped[0] = 1
    view = memoryview(mapped)[:3]
    files.let_go([name])
    assert not (tmp_path / name).exists()
    with pytest.raises(StaleError, match="dropped"):
        files.hold([name])
    del mapped
    assert bytes(view) == b"abc" and files.used_bytes == 4096
    del view
    assert files.used_bytes == 0


def test_writable_maps_count_too(tmp_path):
    files = table(tmp_path)
    (name,) = files.allocate([("objects", 10)])
    mapped = files.map_writable(name)
    files.let_go([name])
    assert files.used_bytes == 4096
    del mapped
    assert files.used_bytes == 0


def test_what_is_left_of_a_crash(tmp_path):
    for number in range(3):
        table(tmp_path)
        (tmp_path / "segments" / f"{number}.seg").write_bytes(bytes(5000))
    files = table(tmp_path)
    for wanted, message in (
        ({"segments/7.seg": 1}, "is missing"),
        ({"segments/1.seg": 5001}, "has 5000 bytes"),
    ):
        with pytest.raises(CorruptError, match=message):
            files.adopt(wanted)
    files.adopt({"segments/1.seg": 4999})
    assert [file.name for file in (tmp_path / "segments").iterdir()] == ["1.seg"]
    assert files.used_bytes == 8192


def spare(files, root, kind, size, byte=b"x"):
    """Returns the inode of a file that was used, full of ``byte``, and is spare."""
    (name,) = files.allocate([(kind, size)])
    (root / name).write_bytes(byte * size)
    inode = (root / name).stat().st_ino
    (root / name).chmod(0o400)
    files.let_go([name], recycle=True)
    assert not (root / name).exists()
    return inode


def on_disk(root):
    return sum(
        file.stat().st_blocks * 512 for kind in ("objects", "segments") for file in (root / kind).iterdir()
    )


@pytest.mark.parametrize(
    ("had", "wanted", "again"),
    [
        (4 * PAGE, 4 * PAGE, True),
        (4 * PAGE, 8 * PAGE, True),  # grown
        (4 * PAGE, 2 * PAGE, True),  # cut
        (4 * PAGE, 8 * PAGE + 1, False),
        (4 * PAGE + 2, 2 * PAGE, False),
    ],
)
def test_what_is_spare_is_used_for_about_its_size(small_tmpfs, had, wanted, again):
    files = table(small_tmpfs)
    inode = spare(files, small_tmpfs, "objects", had)
    assert files.used_bytes == 0 and files.spare_bytes == -(-had // PAGE) * PAGE
    (other,) = files.allocate([("segments", wanted)], recycle=True)
    assert (small_tmpfs / other).read_bytes() == bytes(wanted)  # of another kind
    (name,) = files.allocate([("objects", wanted)], recycle=True)
    found = (small_tmpfs / name).stat()
    assert (found.st_ino == inode) == again and found.st_size == wanted
    assert (found.st_mode & 0o777, files.spare_bytes == 0) == (0o600, again)
    kept = min(had, wanted) if again else 0
    assert (small_tmpfs / name).read_bytes() == b"x" * kept + bytes(wanted - kept)
    assert on_disk(small_tmpfs) == files.used_bytes + files.spare_bytes
    files.let_go([name, other])
    assert files.used_bytes == 0


def test_a_spare_file_that_somebody_has_found_is_not_cut(small_tmpfs):
    files = table(small_tmpfs)
    inode = spare(files, small_tmpfs, "objects", 4 * PAGE)
    (found,) = (small_tmpfs / "objects").iterdir()
    with found.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        (name,) = files.allocate([("objects", 3 * PAGE)], recycle=True)
        assert (small_tmpfs / name).stat().st_ino != inode
        assert mapped[:] == b"x" * (4 * PAGE)
    assert (small_tmpfs / name).read_bytes() == bytes(3 * PAGE)


def test_the_nearest_size_comes_first_and_exact_ones_are_not_taken_for_others(small_tmpfs):
    files = table(small_tmpfs)
    inodes = {size: spare(files, small_tmpfs, "objects", size) for size in (3 * PAGE, 4 * PAGE, 6 * PAGE)}
    wanted = [("objects", 5 * PAGE), ("objects", 6 * PAGE), ("objects", 2 * PAGE)]
    names = files.allocate(wanted, recycle=True)
    found = [(small_tmpfs / name).stat().st_ino for name in names]
    assert found == [inodes[4 * PAGE], inodes[6 * PAGE], inodes[3 * PAGE]]


def test_spare_files_never_stand_in_the_way(small_tmpfs):
    clock = Clock()
    files = table(small_tmpfs, limit=64 * PAGE, clock=clock)
    for size in (10, 20, 30):
        clock.now_s += 1
        spare(files, small_tmpfs, "objects", size * PAGE)
    assert files.spare_bytes == 60 * PAGE
    files.allocate([("objects", 10 * PAGE + 1)])  # the oldest goes
    assert files.spare_bytes == 50 * PAGE and files.used_bytes == 11 * PAGE
    files.allocate([("objects", 53 * PAGE)])
    assert files.spare_bytes == 0 and on_disk(small_tmpfs) == 64 * PAGE
    with pytest.raises(NoRoomError):
        files.allocate([("objects", 1)], recycle=True)


@pytest.mark.parametrize(("recycle", "size"), [(False, 200), (True, 190)])
def test_a_full_file_system_gets_them_back_first(small_tmpfs, recycle, size):
    files = table(small_tmpfs, limit=1 << 30)
    sizes = [("objects", 100 * PAGE), ("objects", 80 * PAGE)]
    names = files.allocate(sizes)
    files.let_go(names, recycle=True)
    (name,) = files.allocate([("objects", size * PAGE)], recycle=recycle)  # of 256 pages in all
    assert files.spare_bytes == 0 and on_disk(small_tmpfs) == size * PAGE
    assert (small_tmpfs / name).read_bytes() == bytes(size * PAGE)


def test_what_nobody_wants_goes_after_a_while(tmp_path):
    clock = Clock()
    files = table(tmp_path, clock=clock)
    spare(files, tmp_path, "objects", PAGE)
    clock.now_s = 5
    spare(files, tmp_path, "objects", 3 * PAGE)
    assert not files.free_spares(idle_s=6)
    clock.now_s = 7
    assert files.free_spares(idle_s=6) and files.spare_bytes == 3 * PAGE == on_disk(tmp_path)
    assert files.free_spares() and not files.free_spares() and on_disk(tmp_path) == 0


def test_what_readers_have_mapped_stays_through_saves_and_changes_of_size(small_tmpfs):
    """Also files that are used again and again, cut and grown, when there is hardly any room."""
    rng = random.Random(7)
    files = table(small_tmpfs, limit=64 * PAGE)
    readers, live, again, seen = [], [], 0, set()
    for turn in range(300):
        generation = turn // 60
        sizes = [("objects", (3 + generation % 3) * PAGE + number) for number in range(3)]
        try:
            names = files.allocate(sizes, recycle=True)
        except NoRoomError:
            if readers:
                readers.pop(rng.randrange(len(readers)))[1].close()
            continue
        byte = turn % 255 + 1
        for name, (_, size) in zip(names, sizes, strict=True):
            inode = (small_tmpfs / name).stat().st_ino
            again += inode in seen
            seen.add(inode)
            (small_tmpfs / name).write_bytes(bytes([byte]) * size)
            (small_tmpfs / name).chmod(0o400)
            if rng.random() < 0.1:
                with (small_tmpfs / name).open("rb") as file:
                    readers.append((byte, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        live.append((byte, names))
        if len(live) > 2:
            files.let_go(live.pop(0)[1], recycle=True)
        for wanted, mapped in readers:
            assert (np.frombuffer(mapped, np.uint8) == wanted).all(), turn
        for wanted, held in live:
            assert all(set((small_tmpfs / name).read_bytes()) == {wanted} for name in held)
        assert on_disk(small_tmpfs) <= 64 * PAGE
    assert again > 300 and len(readers) > 3
    for _, mapped in readers:
        mapped.close()
    for _, names in live:
        files.let_go(names, recycle=True)
    assert files.used_bytes == 0 and files.spare_bytes == on_disk(small_tmpfs)
