import itertools

import pytest

from tenplexfs.errors import CorruptError, NoRoomError, StaleError
from tenplexfs.storage.files import FileTable


def table(root, limit=1 << 20):
    for kind in ("objects", "segments"):
        (root / kind).mkdir(exist_ok=True)
    ids = itertools.count()
    return FileTable(root, limit_bytes=limit, new_id=lambda: f"{next(ids)}")


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
