"""Kills a process at chosen instants of its work on a store, and checks what the next owner finds.

Run as a program: ``crash_driver.py DIRECTORY audit|timed SEED``. It forks, which pytest's process must not.
"""

import os
import random
import select
import signal
import sys
from pathlib import Path

import numpy as np

from tenplexfs.core.ptc import Piece, Shard
from tenplexfs.core.region import Region
from tenplexfs.core.snapshot import JobName, SnapshotId, TxId
from tenplexfs.storage.store import Store, Wanted

SHAPES = {"big": (300, 1000), "small": (5, 3), "empty": (0, 3), "scalar": (), "last": (7,)}
LIMIT = 64 << 20


def shape_of(txid, path):
    """Returns a shape that changes, so that files that are used again are cut and grown."""
    return (200 + 100 * (ord(txid) % 3), 1000) if path == "big" and txid > "b" else SHAPES[path]


def content(txid, path):
    seed = int.from_bytes(f"{txid}{path}".encode(), "little")
    return np.random.default_rng(seed).random(shape_of(txid, path), "f4")


def whole(txid, path):
    shape = shape_of(txid, path)
    return Shard(shape, (Piece(Region((0,) * len(shape), shape), (0,) * len(shape)),))


def work(root, say):
    """Makes snapshots a, b, c, ..., each sharing ``last`` with the first, and drops all but two.

    What is dropped is used again.
    """
    store = Store.open(root, node="n", limit_bytes=LIMIT)
    first = None
    for number, txid in enumerate("abcde"):
        say(f"seal {txid}")
        with store.ingest(JobName("j"), SnapshotId(1, number, TxId(txid)), txid.encode(), 1) as ingest:
            paths = [path for path in SHAPES if first is None or path != "last"]
            ingest.reserve(
                [Wanted(((0, path), (1, path)), shape_of(txid, path), "float32") for path in paths]
            )
            if first is not None:
                ingest.share([(0, "last"), (1, "last")], first)
            for path in paths:
                ingest.pwrite((0, path), 0, content(txid, path))
            stored = ingest.seal({(0, path): whole(txid, path) for path in SHAPES})
        first = stored.arrays[(0, "last")]
        say(f"commit {txid}")
        store.commit("j", txid)
        if number >= 2:
            say(f"drop {'abcde'[number - 2]}")
            store.drop("j", "abcde"[number - 2])
    say("end")


def apply(state, line):
    verb, _, txid = line.partition(" ")
    if verb == "seal":
        return {**state, txid: False}
    if verb == "commit":
        return {**state, txid: True}
    return {key: value for key, value in state.items() if key != txid}


def check(root, said):
    """Refuses a store that is neither as before nor as after the operation that was begun last."""
    allowed = [{}]
    for line in said:
        allowed = allowed[-1:] if line == "end" else [allowed[-1], apply(allowed[-1], line)]
    store = Store.open(root, node="n", limit_bytes=LIMIT)
    found = {stored.id.txid: stored.committed for stored in store.snapshots()}
    assert found in allowed, (found, allowed)
    assert not list(store.verify())
    for stored in store.snapshots("j"):
        assert stored.layout_json == stored.id.txid.encode()
        assert {path for _, path in stored.arrays} == set(SHAPES)
        with store.arrays(stored) as arrays:
            for path in SHAPES:
                txid = "a" if path == "last" else stored.id.txid
                assert np.array_equal(arrays.array(1, path), content(txid, path)), (stored.id, path)
    named = {ref.file for stored in store.snapshots() for ref in stored.arrays.values()}
    there = {f"{kind}/{file.name}" for kind in ("objects", "segments") for file in (root / kind).iterdir()}
    assert there == named, (there, named)
    for stored in store.snapshots():
        store.drop(stored.job, stored.id.txid)
    assert store.used_bytes == 0
    store.close()


def round_of(root, kill_at, wait_s):
    """Returns what a child said that was killed at an audit event, or after a time."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        events = 0

        def hook(event, _arguments):
            nonlocal events
            events += 1
            if events == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        status = 1
        try:
            work(root, lambda line: os.write(write_end, f"{line}\n".encode()))
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    if wait_s is not None:
        select.select([], [], [], wait_s)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), status
    with os.fdopen(read_end) as said:
        return said.read().split("\n")[:-1]


def main():
    root, mode, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rng = random.Random(seed)
    kills = 0
    event = 0
    while True:
        event += 1 if event < 60 else rng.randint(1, 8)
        said = round_of(root, event, None) if mode == "audit" else round_of(root, 0, rng.uniform(0, 0.05))
        check(root, said)
        kills += "end" not in said
        if (mode == "audit" and "end" in said) or (mode == "timed" and event > 100):
            break
    sys.stdout.write(f"{kills}\n")


if __name__ == "__main__":
    main()
