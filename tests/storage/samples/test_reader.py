from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenplexfs.errors import CorruptError, InvalidError, NotFoundError
from tenplexfs.storage.samples.gather import Gather
from tenplexfs.storage.samples.reader import FileRanges, LocalReader, read_ranges
from tenplexfs.storage.samples.routes import RoutedReader, is_url


def ranges(file, parts, at):
    begin, end = np.asarray(parts, np.int64).reshape(-1, 2).T
    return FileRanges(str(file), begin, end, np.asarray(at, np.int64))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)), max_size=20))
def test_any_ranges_in_any_order(tmp_path, local, parts):
    data = np.random.default_rng(0).bytes(300)
    path = tmp_path / "x"
    path.write_bytes(data)
    wanted = [(begin, begin + size) for begin, size in parts]
    assert [bytes(part) for part in read_ranges(local, str(path), wanted)] == [data[b:e] for b, e in wanted]


def test_above_four_gib_in_a_sparse_file(tmp_path, local):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        for offset in ((1 << 31) + 1, (1 << 32) + 1):
            file.seek(offset)
            file.write(b"here")
    for offset in ((1 << 31) + 1, (1 << 32) + 1):
        assert bytes(read_ranges(local, str(path), [(offset, offset + 4)])[0]) == b"here"
    assert local.sizes([str(path)]) == [(1 << 32) + 5]


def test_a_short_file_fails_its_ranges_only(tmp_path, local):
    short, whole = tmp_path / "short", tmp_path / "whole"
    short.write_bytes(b"0123456789")
    whole.write_bytes(b"abcdef")
    out = memoryview(bytearray(22))
    parts = ranges(short, [(0, 4), (4, 10), (10, 14), (2, 4)], [0, 4, 10, 14])
    failures = local.read([parts, ranges(whole, [(0, 6)], [16])], out)
    assert [(failure.batch, failure.number) for failure in failures] == [(0, 2)]
    assert isinstance(failures[0].error, CorruptError)
    message = "bytes [10, 14): the file has 10 bytes, fewer than its index says"
    assert failures[0].error.message == f"{short}: {message}"
    assert bytes(out[:10]) + bytes(out[14:]) == b"012345678923abcdef"


def test_files_that_cannot_be_opened(tmp_path, local):
    out = memoryview(bytearray(2))
    missing, folder = local.read(
        [ranges(tmp_path / "no", [(0, 1), (1, 2)], [0, 1]), ranges(tmp_path, [(0, 1)], [0])], out
    )[1:]
    assert isinstance(missing.error, NotFoundError)
    assert "no such file" in missing.error.message
    assert str(tmp_path) in folder.error.message
    with pytest.raises(NotFoundError):
        local.sizes([str(tmp_path / "no")])
    with pytest.raises(InvalidError, match="null"):
        local.sizes(["a\0b"])


def test_more_files_than_stay_open(tmp_path):
    reader = LocalReader(open_files_max=3)
    for number in range(10):
        (tmp_path / str(number)).write_bytes(bytes([number]))
    out = memoryview(bytearray(20))
    order = [*range(10), *range(10)]
    wanted = [ranges(tmp_path / str(number), [(0, 1)], [at]) for at, number in enumerate(order)]
    assert reader.read(wanted, out) == []
    assert list(out) == order
    reader.close()


def test_paths_directories_and_globs(tmp_path, local):
    names = ["a b/ü%.bin", "a b/z[1].bin", "c/d/e.bin", "c/x.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    whole = [str(tmp_path / name) for name in names]
    assert local.find(str(tmp_path)) == sorted(whole)
    assert local.find(str(tmp_path / "**" / "*.bin")) == sorted(whole[:3])
    assert local.find(str(tmp_path / "a b/z[1].bin")) == [whole[1]]
    assert local.find(str(tmp_path / "c/*")) == [whole[3]]
    with pytest.raises(NotFoundError, match="no such file"):
        local.find(str(tmp_path / "nothing*"))


def test_each_name_to_its_reader(tmp_path, server, objects):
    (tmp_path / "x").write_bytes(b"local")
    server.files["/y"] = b"remote"
    reader = RoutedReader(LocalReader(), objects())
    out = memoryview(bytearray(12))
    path, url = str(tmp_path / "x"), f"{server.url}/y"
    parts = [ranges(path, [(0, 5)], [0]), ranges(url, [(0, 6)], [5]), ranges(path, [(9, 10)], [11])]
    failures = reader.read(parts, out)
    assert bytes(out[:11]) == b"localremote"
    assert [(failure.batch, failure.number) for failure in failures] == [(2, 0)]
    assert reader.sizes([url, path]) == [6, 5]
    assert (reader.find(path), reader.find(url)) == ([path], [url])
    assert [is_url(name) for name in ("s3://a", "/s3://a", "C:x", "./a://b")] == [True, False, False, False]
    reader.close()


def many(count, width, total):
    """Begins and ends of ranges all over a file, and where they go, one after another."""
    begin = np.random.default_rng(count).integers(0, total - width, count)
    return np.stack([begin, begin + width], axis=1), np.arange(count) * width


@pytest.mark.parametrize(("count", "width"), [(8, 1), (100, 5000), (1024, 300), (2500, 64)])
def test_many_small_ranges_are_one_system_call(tmp_path, local, count, width, monkeypatch):
    data = np.random.default_rng(1).bytes(1 << 20)
    path = tmp_path / "x"
    path.write_bytes(data)
    parts, at = many(count, width, len(data))
    out = memoryview(bytearray(count * width))
    monkeypatch.setattr("tenplexfs.storage.samples.reader._File.read_into", None)
    assert local.read([ranges(path, parts, at)], out) == []
    assert bytes(out) == b"".join(data[begin:end] for begin, end in parts.tolist())


def test_ranges_before_a_file_are_no_memory_of_this_process(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(100_000))
    secret, out = np.full(1000, 7, np.uint8), bytearray(1000)
    with path.open("rb") as file:
        gather = Gather(file.fileno(), 100_000)
        begin = np.array([secret.ctypes.data - gather._bytes.ctypes.data])
        assert not gather.read(begin, np.array([1000]), np.array([0]), memoryview(out))
    assert bytes(out) == bytes(1000)


@pytest.mark.parametrize("left", [100_000, 98_304, 0])
def test_a_file_that_is_cut_while_it_is_mapped(tmp_path, local, left):
    data = np.random.default_rng(1).bytes(200_000)
    path = tmp_path / "x"
    path.write_bytes(data)
    parts, at = many(64, 1000, len(data))
    out = memoryview(bytearray(64_000))
    assert local.read([ranges(path, parts, at)], out) == []
    with path.open("r+b") as file:
        file.truncate(left)
    for _ in range(2):
        failures = local.read([ranges(path, parts, at)], out)
        assert [failure.number for failure in failures] == np.flatnonzero(parts[:, 1] > left).tolist()
        good = np.flatnonzero(parts[:, 1] <= left).tolist()
        assert all(out[n * 1000 : (n + 1) * 1000] == data[parts[n, 0] : parts[n, 1]] for n in good)
    path.write_bytes(data + data)  # longer than the map
    parts += len(data)
    assert local.read([ranges(path, parts, at)], out) == []
    assert bytes(out) == b"".join((data + data)[begin:end] for begin, end in parts.tolist())


def test_what_is_mapped_is_limited(tmp_path):
    reader = LocalReader(open_files_max=2, mapped_bytes_max=10_000)
    for number in range(6):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 6000)
        parts, at = many(20, 10, 6000)
        out = memoryview(bytearray(200))
        for file in (number, max(number - 1, 0)):
            assert reader.read([ranges(tmp_path / str(file), parts, at)], out) == []
            assert bytes(out) == bytes([file]) * 200
        maps = (Path("/proc/self/maps")).read_text()
        assert sum(str(tmp_path) in line for line in maps.splitlines()) == 1
    reader.close()
