"""Persisted steps: written, resumed, read by ranges; safetensors' reader and numpy know what is right."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenplexfs.core.region import Region
from tenplexfs.core.snapshot import JobName
from tenplexfs.errors import CorruptError, InvalidError, NotFoundError, UnavailableError
from tenplexfs.formats.checkpoint import (
    BLOCK_BYTES,
    MANIFEST,
    Checkpoint,
    Local,
    decode_files,
    directory_name,
    encode_files,
    snapshot_of_directory,
)
from tenplexfs.storage.checkpoint_reader import BlockReader, OpenCheckpoint, cuts_of, find_steps, index_of
from tenplexfs.storage.places import Place, check_url
from tests.storage import persist_driver

safe = pytest.importorskip("safetensors.numpy")

SNAPSHOT = persist_driver.SNAPSHOT


@pytest.fixture
def arrays() -> dict[tuple[int, str], np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        (0, "big/w"): rng.standard_normal((700, 901)),
        (0, "none"): np.zeros((0, 3), np.float32),
        (0, "scalar"): np.array(5, np.int16),
        (0, "z"): rng.standard_normal(5) + 1j * rng.standard_normal(5),
        (3, "big/w"): rng.integers(0, 255, (3, 1 << 20), np.uint8),
    }


def read(place: Path, files, wanted):
    with BlockReader(Place(str(place)), index_of(files, lambda rank, path: (rank, path))) as reader:
        return b"".join(reader.stream(wanted)), reader.read_bytes


def test_what_is_written_is_what_the_library_reads(tmp_path, arrays):
    files = persist_driver.write(tmp_path, arrays)
    assert [file.name for file in files] == ["model/00000-0.safetensors", "model/00003-0.safetensors"]
    found = safe.load_file(tmp_path / files[0].name)
    assert found["big.w"].tobytes() == arrays[0, "big/w"].tobytes()
    assert found["scalar"].tobytes() == arrays[0, "scalar"].tobytes()
    assert found["none"].shape == (0, 3)
    assert found["z"].shape == (5, 16)  # its bytes: the format has no complex128
    assert found["z"].tobytes() == arrays[0, "z"].tobytes()
    assert decode_files(encode_files(files)) == tuple(files)
    for file in files:
        assert (tmp_path / file.name).stat().st_size == file.nbytes


def test_what_is_there_is_not_written_again(tmp_path, arrays):
    files = persist_driver.write(tmp_path, arrays)
    times = [(tmp_path / file.name).stat().st_mtime_ns for file in files]
    (tmp_path / files[1].name).unlink()
    assert persist_driver.write(tmp_path, arrays) == files
    assert (tmp_path / files[0].name).stat().st_mtime_ns == times[0]
    arrays[0, "scalar"] = np.array(6, np.int16)  # same size, other sum
    assert persist_driver.write(tmp_path, arrays) != files
    assert (tmp_path / files[0].name).stat().st_mtime_ns > times[0]
    stop = threading.Event()
    stop.set()
    (tmp_path / files[0].name).unlink()
    with pytest.raises(UnavailableError, match="stopped"):
        persist_driver.write(tmp_path, arrays, stop=stop)
    assert not (tmp_path / files[0].name).exists()


def test_a_writer_that_is_killed_leaves_what_another_one_goes_on_from(tmp_path):
    driver = [sys.executable, "-m", "tests.storage.persist_driver", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    killed = subprocess.run([*driver, "30"], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    (first,) = (tmp_path / "model").glob("*.safetensors")  # the second one is not there by halves
    time_ns = first.stat().st_mtime_ns
    arrays = persist_driver.arrays()
    assert safe.load_file(first)["w"].tobytes() == arrays[0, "w"].tobytes()
    subprocess.run([*driver, "1000"], env=environment, check=True)
    assert first.stat().st_mtime_ns == time_ns
    assert list((tmp_path / "model").glob("*#*"))
    Place(str(tmp_path)).remove_halves()
    assert not list((tmp_path / "model").glob("*#*"))
    for (rank, name), array in arrays.items():
        assert safe.load_file(tmp_path / f"model/{rank:05d}-0.safetensors")[name].tobytes() == array.tobytes()


def test_ranges_cost_the_blocks_that_hold_them(tmp_path, arrays):
    files = persist_driver.write(tmp_path, arrays)
    rows = arrays[3, "big/w"]
    box = np.array([[[1, 100], [2, 200]]], np.int64)
    data, cost = read(tmp_path, files, [(3, "big/w", box)])
    assert data == rows[1:2, 100:200].tobytes()
    assert cost <= 2 * BLOCK_BYTES
    flat = np.array([[[(1 << 20) - 7], [(1 << 20) + 9]]], np.int64)
    assert (
        read(tmp_path, files, [(3, "big/w", flat)])[0]
        == rows.reshape(-1)[(1 << 20) - 7 : (1 << 20) + 9].tobytes()
    )
    scalar = np.zeros((1, 2, 0), np.int64)
    both = [(0, "scalar", scalar), (0, "big/w", np.array([[[0, 0], [700, 901]]], np.int64))]
    data, cost = read(tmp_path, files, both)
    assert data == arrays[0, "scalar"].tobytes() + arrays[0, "big/w"].tobytes()
    assert cost < files[0].nbytes + BLOCK_BYTES
    with pytest.raises(NotFoundError, match="other of rank 0 is not in the persisted step"):
        read(tmp_path, files, [(0, "other", scalar)])


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_block_is_refused_and_others_are_not(tmp_path, arrays, damage):
    files = persist_driver.write(tmp_path, arrays)
    path = tmp_path / files[1].name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[2 * BLOCK_BYTES + 17] ^= 1
    else:
        del data[2 * BLOCK_BYTES + 17 :]
    path.write_bytes(data)
    good, bad = (np.array([[[row, 0], [row + 1, 50]]], np.int64) for row in (0, 2))
    assert read(tmp_path, files, [(3, "big/w", good)])[0] == arrays[3, "big/w"][0, :50].tobytes()
    if damage == "gone":
        path.unlink()
    with pytest.raises(NotFoundError if damage == "gone" else CorruptError, match=r"00003-0\.safetensors"):
        read(tmp_path, files, [(3, "big/w", bad)])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_cuts_hold_exactly_the_boxes(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)))
    dtype = data.draw(st.sampled_from(["int8", "float32", "complex128"]))
    array = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    local = Local(0, "w", dtype, shape, 13)
    file = b"x" * 13 + array.tobytes()
    boxes, wanted = [], b""
    for _ in range(data.draw(st.integers(1, 4))):
        low = [data.draw(st.integers(0, n)) for n in shape]
        high = [data.draw(st.integers(a, n)) for a, n in zip(low, shape, strict=True)]
        boxes.append([low, high])
        wanted += array[Region(tuple(low), tuple(high)).as_slices()].tobytes()
    cuts = list(cuts_of(local, np.array(boxes, np.int64).reshape(len(boxes), 2, len(shape))))
    assert b"".join(cut.take(file[cut.begin : cut.end]) for cut in cuts) == wanted
    assert all(13 <= cut.begin < cut.end <= len(file) for cut in cuts)


def test_cuts_of_big_boxes_are_small():
    local = Local(0, "w", "float64", (3, 5, 1 << 18), 100)
    box = np.array([[[0, 1, 3], [3, 4, 1 << 17]]], np.int64)
    cuts = list(cuts_of(local, box))
    assert sum(math.prod(cut.shape) for cut in cuts) == 3 * 3 * ((1 << 17) - 3)
    assert max(cut.end - cut.begin for cut in cuts) <= 4 << 20


def test_a_torn_manifest_says_where_it_is(tmp_path):
    (tmp_path / MANIFEST).write_bytes(b"{")
    with pytest.raises(CorruptError, match=rf"{tmp_path}/{MANIFEST}: .*; take another step"):
        OpenCheckpoint.open(Place(str(tmp_path)))


def test_a_manifest_says_whether_it_is_whole(tmp_path, arrays):
    files = tuple(persist_driver.write(tmp_path / directory_name(SNAPSHOT), arrays))
    made = Checkpoint(JobName("gpt"), SNAPSHOT, 7, b'{"keep_steps": 2}', 1, 2, files)
    data = made.encode()
    assert Checkpoint.decode(data) == made
    place = Place(str(tmp_path))
    assert find_steps(place) == {}
    (place / directory_name(SNAPSHOT)).put(MANIFEST, data)
    (place / "000000000200.2.00000000000000cd").put("model/x", b"half")
    (place / "other").put(MANIFEST, b"{}")
    assert find_steps(place) == {SNAPSHOT: directory_name(SNAPSHOT)}
    content = json.loads(data)
    content["checkpoint"]["step"] = 151
    for wrong, error in (
        (json.dumps(content).encode(), CorruptError),
        (data[:-9], CorruptError),
        (b"[]", CorruptError),
        (data.replace(b'"version": 1', b'"version": 2'), InvalidError),
    ):
        with pytest.raises(error, match=r"manifest\.json"):
            Checkpoint.decode(wrong)


def test_names_of_directories_and_places():
    assert snapshot_of_directory(directory_name(SNAPSHOT)) == SNAPSHOT
    assert [snapshot_of_directory(name) for name in ("x", "1.2.3", "000000000150.0.00000000000000ab")] == [
        None
    ] * 3
    assert check_url("file:///a%20b/") == "/a b"
    for wrong in ("a/b", "s3://", "ftp://h/x", "file://host/x", "s3://b/\n"):
        with pytest.raises(InvalidError, match="need an absolute path"):
            check_url(wrong)
