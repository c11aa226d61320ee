"""Samples through the mount against mosaicml-streaming, from a local disk, in the same loader of torch.

``pip install mosaicml-streaming`` first; nothing else of the project needs it.
"""

# ruff: noqa: D102

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from bench_dataset import BATCH, COUNT, SIZE, add, layout
from harness import Node, cluster, measure, run
from streaming import MDSWriter, StreamingDataset
from torch.utils.data import DataLoader

from tenplexfs.torch import Dataset

RESIZES = 5


class Both:
    """The same rows as a dataset of each."""

    def __init__(self, node: Node, directory: Path) -> None:
        self.node, self.shards = node, directory / "shards"
        rows = np.random.default_rng(0).integers(0, 256, (COUNT, SIZE), np.uint8)
        np.save(directory / "rows.npy", rows)
        with MDSWriter(out=str(self.shards), columns={"row": f"ndarray:uint8:{SIZE}"}) as writer:
            for row in rows:
                writer.write({"row": row})
        self.mounted = add(node, "samples", directory / "rows.npy")
        self.epoch = 0
        self.theirs = self.their_dataset()

    def their_dataset(self) -> StreamingDataset:
        return StreamingDataset(local=str(self.shards), shuffle=True, shuffle_seed=1, batch_size=BATCH)

    def read_theirs(self, workers: int) -> None:
        for _ in DataLoader(self.theirs, batch_size=BATCH, num_workers=workers):
            pass

    def read_ours(self, workers: int) -> None:
        self.epoch += 1
        for _ in DataLoader(
            Dataset(self.mounted, rank=0, epoch=self.epoch), batch_size=BATCH, num_workers=workers
        ):
            pass

    def their_first_batch(self) -> float:
        """Returns how long a dataset takes that goes on in the middle of an epoch."""
        state: dict[str, Any] = self.theirs.state_dict(COUNT // 2, from_beginning=True)
        begin = time.perf_counter()
        dataset = self.their_dataset()
        dataset.load_state_dict(state)
        next(iter(DataLoader(dataset, batch_size=BATCH)))
        return time.perf_counter() - begin

    def our_first_batch(self, degree: int) -> tuple[float, float]:
        """Returns how long the change of degree takes, and then the first batch."""
        file = layout(self.node.socket.parent / "new.json", degree)
        begin = time.perf_counter()
        run("reconfigure", "samples", file, "--socket", self.node.socket)
        changed = time.perf_counter()
        dataset = Dataset(self.mounted, rank=degree - 1)
        next(iter(DataLoader(dataset, batch_size=dataset.local_batch)))
        return changed - begin, time.perf_counter() - changed


def main() -> None:
    """Prints the comparison."""
    warnings.filterwarnings("ignore")
    with cluster(("node0",)) as (node,), tempfile.TemporaryDirectory() as directory:
        both = Both(node, Path(directory))
        total = COUNT * SIZE
        for workers in (0, 2):
            work = {
                "mosaicml-streaming": (total, lambda n=workers: both.read_theirs(n)),
                "mount, cold": (total, lambda n=workers: both.read_ours(n)),
            }
            measure(f"{COUNT} samples of {SIZE} bytes, torch's loader, {workers} workers", work, rounds=3)
        theirs, changes, ours = [], [], []
        for degree in (2, 4, 2, 4, 1)[:RESIZES]:
            theirs.append(both.their_first_batch())
            change, first = both.our_first_batch(degree)
            changes.append(change)
            ours.append(first)
        print(
            f"\nfirst batch of a loader that goes on in mid-epoch\n"
            f"  mosaicml-streaming {statistics.median(theirs) * 1e3:.0f} ms, "
            f"mount {statistics.median(ours) * 1e3:.0f} ms "
            f"(the command that changed the degree: {statistics.median(changes):.2f} s)"
        )


if __name__ == "__main__":
    main()
