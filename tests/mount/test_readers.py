"""Many processes that read while snapshots change: nothing fails, and nothing is left behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

READER = Path(__file__).with_name("reader.py")
# Seconds here, minutes in `make soak`.
SECONDS = float(os.environ.get("TENPLEXFS_SOAK_S", "6"))
PROCESSES = 8
BIG = 200_000


def until(what, patience_s=10.0):
    deadline = time.monotonic() + patience_s
    while (found := what()) is not True:
        assert time.monotonic() < deadline, found


def test_readers_while_snapshots_change(daemon):
    daemon("publish", version=0, big=BIG)
    for warm in range(3):  # what is made once: threads, and libfuse's pipe for its first long answer
        slot = daemon("publish", version=warm, big=BIG)
        daemon("free", slot=slot - 1)
        (daemon.path / "gpt/full/big.npy").read_bytes()
    until(lambda: daemon("handles", slot=slot) == [0, 0])
    before = daemon("counts")
    readers = [
        subprocess.Popen(
            [sys.executable, READER, daemon.path / "gpt", str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(PROCESSES)
    ]
    past = []
    version, end = 2, time.monotonic() + SECONDS
    while time.monotonic() < end:
        version += 1
        past.append(daemon("publish", version=version % 50, big=BIG) - 1)
        tick = time.monotonic() + min(1.0, SECONDS / 10)
        # As the daemon does: what nobody has open goes, after a moment.
        for slot in past[:-1]:
            if daemon("handles", slot=slot) == [0, 0]:
                daemon("free", slot=slot)
                past.remove(slot)
        until(lambda tick=tick: time.monotonic() > tick)
    counts = []
    for reader in readers:
        out, err = reader.communicate("stop", timeout=60)
        assert (reader.returncode, err) == (0, ""), err
        counts.append(int(out))
    assert min(counts) > 10
    for slot in past:
        until(lambda slot=slot: daemon("handles", slot=slot) == [0, 0])
        daemon("free", slot=slot)
    until(lambda: (after := daemon("counts")) == before or f"{before} before, {after} after")
