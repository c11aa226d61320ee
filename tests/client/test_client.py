"""The client by itself: what it imports, forks, threads, and what it says when nobody is there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash

import tenplexfs
from tenplexfs.client import connection, copying
from tenplexfs.client.arrays import Source
from tenplexfs.client.connection import parse_place, patiently
from tenplexfs.client.copying import Copier, Placed
from tenplexfs.client.mapping import map_private
from tenplexfs.core.dtypes import EXTENDED
from tenplexfs.errors import InvalidError, UnavailableError

HEAVY = ("grpc", "trio", "pyfuse3", "torch", "msgspec", "xxhash", "google.protobuf", "httpx")


def test_the_client_imports_nothing_of_the_daemon():
    code = (
        "import sys, tenplexfs; "
        "tenplexfs.save, tenplexfs.load, tenplexfs.read; "
        "tenplexfs.should_stop, tenplexfs.env, tenplexfs.wait; "
        "import tenplexfs.client.copying; "
        f"print(sorted(set({HEAVY!r}) & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
    assert tenplexfs.EXIT_RECONFIGURE == 75
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tenplexfs.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/mnt/t/gpt/model/3", ("/mnt/t", "gpt", None, 3)),
        ("/mnt/t/gpt@120/model/3/", ("/mnt/t", "gpt", 120, 3)),
        ("/mnt/t/gpt", ("/mnt/t", "gpt", None, None)),
        ("/mnt/model/gpt", ("/mnt/model", "gpt", None, None)),
        ("/mnt/t/../u/gpt/model/0", ("/mnt/u", "gpt", None, 0)),
    ],
)
def test_places(path, wanted):
    place = parse_place(path)
    assert (str(place.mount), place.job, place.step, place.rank) == wanted


@pytest.mark.parametrize("path", ["/mnt/t/gpt/model", "/", "/mnt/t/gpt@x/model/0"])
def test_paths_that_name_nothing(path):
    with pytest.raises(InvalidError, match="need <mount>/<job>"):
        parse_place(path)


def test_without_a_daemon_it_waits_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "_RETRY_S", 0.01)
    monkeypatch.delenv("TENPLEXFS_SOCKET", raising=False)
    tries = []

    def work():
        tries.append(time.monotonic())
        return connection.socket_of(tmp_path)

    with pytest.raises(UnavailableError, match=r"no daemon shows its tree there.*waited 0.05 s"):
        patiently(work, patience_s=0.05)
    assert len(tries) > 2
    monkeypatch.setenv("TENPLEXFS_SOCKET", str(tmp_path / "no"))
    with pytest.raises(UnavailableError, match=r"daemon .*/no: not reached: No such file"):
        patiently(lambda: connection.Connection(connection.socket_of(tmp_path)), patience_s=0.02)


def test_a_state_that_cannot_be_saved_is_refused_before_anybody_is_asked(tmp_path):
    path = tmp_path / "gpt" / "model" / "0"
    with pytest.raises(InvalidError, match=r"state 'x': .*needs pickle"):
        tenplexfs.save({"x": object()}, path, step=1)
    with pytest.raises(InvalidError, match="step -1"):
        tenplexfs.save({}, path, step=-1)
    with pytest.raises(InvalidError, match="model/<rank>"):
        tenplexfs.save({}, tmp_path / "gpt", step=1)
    with pytest.raises(InvalidError, match="framework 'x'"):
        tenplexfs.load(path, framework="x")


BASE = np.arange(6 << 20, dtype=np.float32).reshape(1 << 10, 6 << 10)
VIEWS = {
    "whole": BASE,
    "transposed": BASE.T,
    "strided": BASE[::3, ::2],
    "offset": BASE[5:900, 7:],
    "expanded": np.broadcast_to(BASE[0], (40, 6 << 10)),
    "row": BASE[7:8],
    "backwards": BASE[::-1],
    "empty": BASE[:0],
    "scalar": BASE[3, 4],
    "column": BASE[:, 3],
    "bfloat16": BASE.view(EXTENDED["bfloat16"])[:, ::2],
}


@pytest.fixture(params=[True, False], ids=["summed", "not summed"])
def is_summed(request, monkeypatch):
    """Whether the library that sums is there."""
    if not request.param:
        monkeypatch.setattr(copying, "_xxhash", lambda: None)
    return request.param


def written(path: Path, tensors: list[Placed], *, is_summed: bool) -> bytes:
    fd = os.open(path, os.O_RDWR)
    copier = Copier()
    try:
        for _, task in reversed(list(copier.tasks(fd, tensors))):
            task()
    finally:
        os.close(fd)
    wanted = {t.number: xxhash.xxh3_64_intdigest(t.source.array().tobytes()) for t in tensors if is_summed}
    assert copier.sums == wanted
    return path.read_bytes()


@pytest.mark.parametrize("name", VIEWS)
def test_any_view_is_written_in_row_major_order(tmp_path, name, is_summed):
    view = np.asarray(VIEWS[name])
    file = tmp_path / "file"
    file.write_bytes(b"\xaa" * (192 + view.nbytes))
    placed = Placed(64, b"h" * 128, Source(view.shape, view.dtype.name, view), 5)
    found = written(file, [placed], is_summed=is_summed)
    assert found[: 192 + view.nbytes] == b"\xaa" * 64 + b"h" * 128 + view.tobytes()
    assert not any(found[192 + view.nbytes :]) and len(found) < 192 + view.nbytes + 64


def test_many_small_tensors_go_where_they_belong(tmp_path, is_summed):
    views = [np.asarray(view) for view in VIEWS.values() if view.nbytes < 1 << 20]
    arrays = [np.full(n % 97, n, np.uint16) for n in range(3000)] + views
    tensors, wanted, offset = [], bytearray(), 0
    for n, array in enumerate(arrays):
        if n == 1500:  # a hole that is somebody else's
            wanted += b"\xaa" * 640
            offset += 640
        tensors.append(Placed(offset, b"h" * 64, Source(array.shape, array.dtype.name, array), n))
        own = b"h" * 64 + array.tobytes()
        wanted += own + bytes(-len(own) % 64)
        offset = len(wanted)
    file = tmp_path / "file"
    file.write_bytes(b"\xaa" * offset)
    assert written(file, tensors, is_summed=is_summed) == bytes(wanted)


@pytest.mark.parametrize("name", ["whole", "transposed", "parts"])
def test_the_header_comes_last_and_says_that_all_is_written(tmp_path, monkeypatch, name):
    if name == "parts":
        monkeypatch.setattr(copying, "_PART_BYTES", 5 << 20)
    array = VIEWS.get(name, BASE)
    file = tmp_path / "file"
    file.touch()
    calls = []

    def pwritev(fd, buffers, offset):
        calls.append((offset, sum(map(len, buffers))))
        return os.writev(fd, buffers)

    monkeypatch.setattr(copying.os, "pwritev", pwritev)
    fd = os.open(file, os.O_RDWR)
    copier = Copier()
    tasks = list(copier.tasks(fd, [Placed(0, b"h" * 128, Source(array.shape, array.dtype.name, array), 0)]))
    for _, task in tasks[1:] + tasks[:1]:
        assert (0, 128) not in calls
        task()
    os.close(fd)
    assert calls[-1] == (0, 128) and len(tasks) == (5 if name == "parts" else 1)
    assert sum(size for _, size in calls) == 128 + array.nbytes
    assert len(copier.sums) == (name != "parts")


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda base: base, id="whole"),
        pytest.param(lambda base: base[:, : 3 << 17], id="rows of less than a block"),
        pytest.param(lambda base: base[:, : 5 << 17], id="rows of more than a block"),
    ],
)
def test_a_sum_is_that_of_what_was_written_though_the_tensor_changes_meanwhile(tmp_path, monkeypatch, view):
    array = view(np.zeros((4, 3 << 18), np.uint8))
    file = tmp_path / "file"
    file.touch()
    pwritev = os.pwritev

    def change(fd, buffers, offset):
        array[:] += 1
        return pwritev(fd, buffers, offset)

    monkeypatch.setattr(copying.os, "pwritev", change)
    fd = os.open(file, os.O_RDWR)
    copier = Copier()
    ((_, task),) = copier.tasks(fd, [Placed(0, b"h" * 128, Source(array.shape, "uint8", array), 0)])
    task()
    os.close(fd)
    data = file.read_bytes()[128:]
    assert len(set(data)) > 3 and copier.sums == {0: xxhash.xxh3_64_intdigest(data)}


def fds_count() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_map_is_private_writable_and_needs_no_descriptor(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(range(200)))
    before = fds_count()
    maps = []
    for _ in range(50):
        fd = os.open(file, os.O_RDONLY)
        maps.append(map_private(fd, 200)[8:])
        os.close(fd)
    assert fds_count() == before
    maps[0][:4] = 99
    assert bytes(maps[0][:5]) == b"cccc\x0c" and bytes(maps[1][:5]) == bytes(range(8, 13))
    assert file.read_bytes() == bytes(range(200))

    def count() -> int:
        return Path("/proc/self/maps").read_text().count(str(file))

    assert count() >= 2
    maps.clear()
    assert count() == 0
    assert map_private(-1, 0).nbytes == 0
    with pytest.raises(OSError, match="mmap"):
        map_private(-1, 5)


def test_read_gives_the_real_dtype(tmp_path):
    file = tmp_path / "w.npy"
    kind = EXTENDED["bfloat16"]
    np.save(file, np.arange(4, dtype=np.uint16).view("V2"))
    os.setxattr(file, "user.tenplexfs.dtype", b"bfloat16")
    found = tenplexfs.read(file)
    assert found.dtype == kind and found.tobytes() == np.arange(4, dtype=np.uint16).tobytes()
    os.removexattr(file, "user.tenplexfs.dtype")
    assert tenplexfs.read(file).dtype == np.dtype("V2")
