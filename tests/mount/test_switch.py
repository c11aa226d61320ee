"""The switch from one snapshot to the next, seen from outside."""

import errno
import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.fuse.memory import small_ptc, whole

PTC = small_ptc()


def version_of(data: bytes) -> int:
    """The version that a document or the 0-d tensor shows."""
    return json.loads(data)["version"] if data[:1] == b"{" else int(np.frombuffer(data[128:], "f8")[0])


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def read_at(directory: int, path: str) -> int:
    fd = os.open(path, os.O_RDONLY, dir_fd=directory)
    try:
        return version_of(os.read(fd, 1 << 16))
    finally:
        os.close(fd)


def test_a_switch_is_seen_at_once_everywhere(daemon):
    daemon("publish", version=1)
    job = daemon.path / "gpt"
    for _ in range(3):
        assert not (job / "full/many").exists()
    for version in range(2, 30):
        slot = daemon("publish", version=version, count=3 * (version % 2))
        assert version_of((job / "full/scale.npy").read_bytes()) == version
        assert version_of((job / "job.json").read_bytes()) == version
        assert (job / "full/many/2.npy").exists() == bool(version % 2), version
        daemon("free", slot=slot - 1)


def test_a_new_job_is_seen_at_once_and_a_retracted_one_is_gone(daemon):
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            (daemon.path / "other").stat()
        links = daemon.path.stat().st_nlink
        daemon("publish", job="other")
        assert (daemon.path / "other" / "job.json").exists()
        assert daemon.path.stat().st_nlink == links + 1
        assert names(daemon.path) == [".tenplexfs", "other"]
        assert names(daemon.path / ".tenplexfs/jobs") == ["other"]
        daemon("retract", job="other")
        assert names(daemon.path) == [".tenplexfs"]


def test_what_is_open_stays_and_what_is_freed_is_estale(daemon):
    slot = daemon("publish", version=1, big=1 << 20)
    job = daemon.path / "gpt"
    mapped = np.load(job / "full/big.npy", mmap_mode="r")
    opened = (job / "full/embedding/weight.npy").open("rb")
    directory = os.open(job, os.O_RDONLY)
    try:
        assert daemon("handles", slot=slot) == [2, 1]
        daemon("publish", version=2)
        assert read_at(directory, "full/scale.npy") == 1
        daemon("free", slot=slot)
        with pytest.raises(OSError) as raised:
            read_at(directory, "layout.json")
        assert raised.value.errno == errno.ESTALE
        with pytest.raises(OSError) as raised:
            os.open("full/scale.npy", os.O_RDONLY, dir_fd=directory)
        assert raised.value.errno == errno.ESTALE
        assert os.fstat(opened.fileno()).st_size == 128 + 7 * 6 * 4
        np.testing.assert_array_equal(np.load(opened), whole(PTC, "embedding/weight", 1))
        assert mapped[12345] == 12345 % 50 + 1
        assert read_at(os.open(job, os.O_RDONLY), "full/scale.npy") == 2
    finally:
        opened.close()
        os.close(directory)
        del mapped
    deadline = time.monotonic() + 5  # the kernel releases after close, when it likes
    while daemon("handles", slot=slot) != [0, 0]:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("grace_s", [0.05, 0.5])
def test_a_storm_of_switches(daemon, grace_s):
    daemon("publish", version=0)
    job: Path = daemon.path / "gpt"
    done = threading.Event()
    problems: list[str] = []
    counts = [0, 0]

    def pinned() -> None:
        """Within one directory descriptor: one snapshot, or ESTALE."""
        while not done.is_set():
            directory = os.open(job, os.O_RDONLY)
            try:
                seen = {
                    read_at(directory, p)
                    for p in ("job.json", "full/scale.npy", "model/2/scale.npy", "ptc/1.json")
                }
                if len(seen) != 1:
                    problems.append(f"one descriptor, snapshots {seen}")
                counts[0] += 1
            except OSError as error:
                if error.errno != errno.ESTALE:
                    problems.append(f"pinned: {error!r}")
            finally:
                os.close(directory)

    def walking() -> None:
        """By absolute paths: never backwards, never an error, never older than what was answered."""
        last = 0
        while not done.is_set():
            answered = int((daemon.path / ".tenplexfs/status.json").read_text().strip("{}") or 0)
            for path in ("full/scale.npy", "job.json", "model/3/scale.npy"):
                try:
                    version = version_of((job / path).read_bytes())
                except OSError as error:
                    problems.append(f"walking: {path}: {error!r}")
                    continue
                if version < max(last, answered):
                    problems.append(f"{path}: {version} after {last}, answered {answered}")
                last = version
                counts[1] += 1

    threads = [threading.Thread(target=target) for target in (pinned, pinned, walking, walking)]
    for thread in threads:
        thread.start()
    try:
        daemon("storm", first=1, last=150, grace_s=grace_s)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert problems == []
    assert min(counts) > 10
