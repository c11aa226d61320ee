import os
import resource
import subprocess
import sys

import pytest

from tenplexfs.errors import (
    CorruptError,
    ExistsError,
    InvalidError,
    NoRoomError,
    PreconditionError,
    UnavailableError,
)
from tenplexfs.storage.directory import Directory


def test_makes_it_private(tmp_path):
    path = tmp_path / "a" / "store"
    directory = Directory(path)
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / "lock").read_text() == f"{os.getpid()}\n"
    assert directory.read_manifest() is None
    directory.close()
    path.chmod(0o755)
    Directory(path).close()
    assert path.stat().st_mode & 0o777 == 0o700


def test_a_second_owner_is_told_the_first(tmp_path):
    first = Directory(tmp_path)
    with pytest.raises(ExistsError, match=f"in use by process {os.getpid()}"):
        Directory(tmp_path)
    first.close()
    first.close()
    Directory(tmp_path).close()


def test_the_lock_goes_with_its_process(tmp_path):
    code = f"""import os, sys; from pathlib import Path; from tenplexfs.storage.directory import Directory
directory = Directory(Path({str(tmp_path)!r})); print(os.getpid(), flush=True); sys.stdin.read()"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        pid = child.stdout.readline().strip()
        with pytest.raises(ExistsError, match=f"process {pid}"):
            Directory(tmp_path)
        child.kill()
    Directory(tmp_path).close()


def test_another_directory_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(InvalidError, match=r"not a store, it holds 'thesis\.tex'"):
        Directory(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(PreconditionError, match=r"Not a directory|File exists"):
        Directory(tmp_path / "thesis.tex")


def test_files_without_a_manifest_are_refused(tmp_path):
    directory = Directory(tmp_path)
    (tmp_path / "objects" / "x.npy").write_bytes(b"x")
    with pytest.raises(CorruptError, match="is missing but objects/ is not empty"):
        directory.read_manifest()
    directory.close()


def test_manifest_is_replaced_whole(tmp_path):
    directory = Directory(tmp_path)
    for data in (b"one", b"a much longer one" * 1000, b"", b"two"):
        if data:
            directory.write_manifest(data)
            assert directory.read_manifest() == data
    directory.close()
    with pytest.raises(PreconditionError, match="closed"):
        directory.write_manifest(b"three")
    again = Directory(tmp_path)
    assert again.read_manifest() == b"two"
    again.close()


def test_full_file_system(small_tmpfs):
    directory = Directory(small_tmpfs / "store")
    assert directory.in_memory
    directory.write_manifest(b"1" * 40_000)
    with pytest.raises(NoRoomError, match="no room for a manifest of 9000000 bytes"):
        directory.write_manifest(b"2" * 9_000_000)
    assert directory.read_manifest() == b"1" * 40_000
    directory.write_manifest(b"2" * 40_000)
    filler = os.open(small_tmpfs / "filler", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="No space left"):
        while True:
            os.write(filler, bytes(4096))
    os.close(filler)
    for _ in range(3):
        directory.write_manifest(b"3" * 39_000)
    assert directory.read_manifest() == b"3" * 39_000
    directory.close()


def test_without_a_free_descriptor_the_manifest_is_the_old_one(tmp_path):
    directory = Directory(tmp_path)
    directory.write_manifest(b"one")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(UnavailableError, match="the manifest cannot be written: Too many open files"):
            directory.write_manifest(b"two")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert directory.read_manifest() == b"one"
    directory.write_manifest(b"two")
    assert directory.read_manifest() == b"two"
    directory.close()
