"""What the file of the registry promises; the contract of both kinds is in tests/rpc/test_registry.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tenplexfs.core.snapshot import Head, SnapshotId
from tenplexfs.errors import ConflictError, CorruptError, ExistsError, UnavailableError
from tenplexfs.storage.registry_sqlite import SqliteRegistry


def head(generation):
    return Head(SnapshotId(generation, 0, f"{generation:016x}"), "digest", ("n0",))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "registry.sqlite"


@pytest.fixture
def registry(path):
    registry = SqliteRegistry(path, kept_count=5)
    yield registry
    registry.close()


def test_one_owner(registry, path):
    with pytest.raises(ExistsError, match="in use by another daemon"):
        SqliteRegistry(path)
    registry.close()
    SqliteRegistry(path).close()
    with pytest.raises(UnavailableError, match=r"registry .*: Cannot operate on a closed database"):
        registry.heads()


def test_a_registry_made_anew_gives_later_locks_than_the_lost_one(tmp_path):
    began_ms = time.time_ns() // 1_000_000
    registry = SqliteRegistry(tmp_path / "registry.sqlite")
    assert registry.lock("gpt", "n0", ttl_s=1000) > began_ms
    registry.close()


def test_no_registry_is_refused_and_left_alone(path):
    path.write_bytes(b"precious " * 1000)
    with pytest.raises(CorruptError, match="rebuild it from the nodes' manifests"):
        SqliteRegistry(path)
    assert path.read_bytes() == b"precious " * 1000


def test_old_changes_are_told_by_what_became_of_each_job(registry):
    token = registry.lock("gpt", "n0", ttl_s=1000)
    for generation in range(10):
        expected = head(generation) if generation else None
        assert registry.compare_and_set("gpt", token, expected, head(generation + 1)) == generation + 1
    gone = registry.lock("gone", "n0", ttl_s=1000)
    registry.compare_and_set("gone", gone, None, head(1))
    registry.compare_and_set("gone", gone, head(1), None)
    assert registry.events(10) == [(11, "gone", head(1)), (12, "gone", None)]
    assert [revision for revision, _, _ in registry.events(7)] == [8, 9, 10, 11, 12]
    assert registry.events(3) == [(10, "gpt", head(10)), (12, "gone", None)]
    assert registry.events(12) == []


def test_threads(registry):
    token = registry.lock("gpt", "n0", ttl_s=1000)
    moved = []

    def move():
        for _ in range(25):
            heads = registry.heads()[1]
            found = heads.get("gpt")
            try:
                new = head(found.snapshot.generation + 1 if found else 1)
                moved.append(registry.compare_and_set("gpt", token, found, new))
            except ConflictError:
                continue

    threads = [threading.Thread(target=move) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    revision, heads = registry.heads()
    assert sorted(moved) == list(range(1, revision + 1))
    assert heads["gpt"].snapshot.generation == revision


WRITER = """
import sys
from pathlib import Path
from tenplexfs.core.snapshot import Head, SnapshotId
from tenplexfs.storage.registry_sqlite import SqliteRegistry
registry = SqliteRegistry(Path(sys.argv[1]))
token = registry.lock("gpt", "n0", ttl_s=1000)
found = None
for generation in range(1, 100000):
    new = Head(SnapshotId(generation, 0, f"{generation:016x}"), "digest", ("n0",))
    registry.compare_and_set("gpt", token, found, new)
    found = new
    print(generation, flush=True)
"""


def test_what_was_answered_survives_a_kill(path):
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    ) as child:
        for line in child.stdout:
            if int(line) == 50:
                break
        os.kill(child.pid, signal.SIGKILL)
        answered = [50, *map(int, child.stdout.read().split())][-1]
    registry = SqliteRegistry(path)
    revision, heads = registry.heads()
    assert answered <= revision <= answered + 1
    assert heads["gpt"] == head(revision)
    registry.close()
