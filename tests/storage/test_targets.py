"""Exported files are there whole or not at all, in directories and in object stores alike."""

import os
import resource
import signal
import subprocess
import sys

import pytest

from tenplexfs.errors import CorruptError, ExistsError, InvalidError, NoRoomError, UnavailableError
from tenplexfs.storage.targets import Bucket, Directory, NewFile


def new(name: str, *parts: bytes) -> NewFile:
    return NewFile(name, sum(map(len, parts)), lambda: iter(parts))


def listed(root):
    return sorted(each.name for each in root.iterdir()) if root.exists() else []


@pytest.fixture(params=["directory", "bucket"])
def target(request, tmp_path):
    root = tmp_path / "deep" / "er"
    return (Directory(root) if request.param == "directory" else Bucket(str(root))), root


def test_files_are_written_and_replace_what_was_there(target):
    place, root = target
    assert (place.has("a"), place.read("a")) == (False, None)
    place.write([new("a", b"one", b"", b"two"), new("z", b"last")], [])
    assert (place.read("a"), place.read("z"), place.has("z")) == (b"onetwo", b"last", True)
    place.write([new("b", memoryview(b"three")), new("z", b"other")], ["z", "a", "absent"])
    assert listed(root) == ["b", "z"]
    assert place.read("z") == b"other"
    assert place.path("b") == str(root / "b")


def test_what_fails_leaves_what_was_there(target):
    place, root = target
    place.write([new("a", b"old"), new("z", b"old")], [])

    def broken():
        yield b"ne"
        raise UnavailableError("the daemon went away")

    with pytest.raises(UnavailableError, match="went away"):
        place.write([NewFile("z", 4, broken)], [])
    assert place.read("z") == b"old"
    assert [name for name in listed(root) if "#" not in name] == ["a", "z"]


def test_a_directory_refuses_what_does_not_fit_before_it_begins(tmp_path):
    place = Directory(tmp_path)
    with pytest.raises(NoRoomError, match=r"needed, .* free") as caught:
        place.write([NewFile("a", 1 << 60, lambda: iter(()))], [])
    assert (caught.value.exit_status, caught.value.details["needed"]) == (5, 1 << 60)
    with pytest.raises(CorruptError, match="2 bytes came of 3"):
        place.write([new("a", b"x"), NewFile("b", 3, lambda: iter([b"xy"]))], [])
    assert listed(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(InvalidError, match=r"Not a directory|File exists"):
        Directory(tmp_path / "file").write([new("a", b"")], [])
    with pytest.raises(InvalidError, match="Is a directory"):
        (tmp_path / "a").mkdir()
        place.write([new("a", b"x")], [])
    assert listed(tmp_path) == ["a", "file"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(NoRoomError, match="big: File too large"):
            place.write([new("big", bytes(2 << 20))], [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert listed(tmp_path) == ["a", "file"]


def test_two_writers_of_one_file_are_told_apart(tmp_path):
    place = Directory(tmp_path)

    def meanwhile():
        with pytest.raises(ExistsError, match="z: somebody else is writing it"):
            Directory(tmp_path).write([new("z", b"mine")], [])
        yield b"first"

    place.write([NewFile("z", 5, meanwhile)], [])
    assert place.read("z") == b"first"
    place.write([new("z", b"second")], [])
    assert listed(tmp_path) == ["z"]


def test_what_a_killed_writer_left_is_written_over(tmp_path):
    code = (
        "import os, sys, pathlib; from tenplexfs.storage.targets import *\n"
        "def parts():\n"
        "    yield b'x' * 100000\n"
        "    os.kill(os.getpid(), 9)\n"
        "f = NewFile('z', 100001, parts)\n"
        "Directory(pathlib.Path(sys.argv[1])).write([f], [])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert done.returncode == -signal.SIGKILL
    place = Directory(tmp_path)
    assert listed(tmp_path) == [".z.partial"]
    assert not place.has("z")
    place.write([new("z", b"whole")], [])
    assert listed(tmp_path) == ["z"]
    assert place.read("z") == b"whole"
