"""Writes a share and is killed in the midst of it: `python -m tests.storage.persist_driver DIR MIB`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tenplexfs.core.snapshot import JobName, SnapshotId, TxId
from tenplexfs.formats.checkpoint import CheckpointFile
from tenplexfs.formats.manifest import ArrayRef, StoredSnapshot
from tenplexfs.storage.checkpoint_writer import Share, ShareWriter
from tenplexfs.storage.places import Place

SNAPSHOT = SnapshotId(2, 150, TxId("00000000000000ab"))


def arrays() -> dict[tuple[int, str], np.ndarray]:
    rng = np.random.default_rng(1)
    return {(rank, "w"): rng.integers(0, 255, (20, 1 << 20), np.uint8) for rank in (0, 1)}


class Arrays:
    """What `ShareWriter` wants of a snapshot of the store."""

    def __init__(self, arrays: dict[tuple[int, str], np.ndarray]) -> None:
        self.arrays = arrays
        refs = {
            key: ArrayRef("f", 0, 0, a.nbytes, a.shape, a.dtype.name, (zlib.crc32(a.tobytes()),), ())
            for key, a in arrays.items()
        }
        self.stored = StoredSnapshot(JobName("gpt"), SNAPSHOT, True, b"", 0, refs)

    def array(self, rank: int, path: str) -> np.ndarray | None:
        return self.arrays.get((rank, path))


def shares(arrays: dict[tuple[int, str], np.ndarray]) -> list[Share]:
    return [Share(rank, path, a.dtype.name, a.shape) for (rank, path), a in sorted(arrays.items())]


def write(
    place: Path,
    arrays: dict[tuple[int, str], np.ndarray],
    report: Callable[[int], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> list[CheckpointFile]:
    writer = ShareWriter(Place(str(place)), Arrays(arrays), shares(arrays), report, stop or threading.Event())
    return writer.run()


def main(place: str, limit_bytes: int) -> None:
    def report(nbytes: int) -> None:
        if nbytes >= limit_bytes:
            os.kill(os.getpid(), signal.SIGKILL)

    write(Path(place), arrays(), report)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) << 20)
