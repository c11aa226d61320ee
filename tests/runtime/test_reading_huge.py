"""A read inside a huge assembled tensor touches what it needs: counted by the kernel, in pages."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from tenplexfs.core.build import build_ptc
from tenplexfs.core.layout import Cut, Layout, Mesh, TensorEntry
from tenplexfs.formats import npy
from tenplexfs.runtime.reading import FullTensor
from tests.runtime.test_reading import World

MIB = 1 << 20
ROWS, COLUMNS = 1 << 20, 1280  # 5 GiB of float32
SHM = Path("/dev/shm")


class Shards:
    """Sparse files in memory: a page is there once it was read."""

    def __init__(self, ptc, base: Path) -> None:
        self.files = {rank: base / f"{rank}.npy" for rank in range(ptc.world_size)}
        self.arrays = {}
        for rank, file in self.files.items():
            with file.open("wb") as made:
                made.truncate(ROWS * COLUMNS)
            shape = ptc.shard(rank, "w").local_shape
            self.arrays[rank] = np.memmap(file, np.float32, "r+", shape=shape)

    def array(self, rank: int, path: str) -> np.ndarray:
        return self.arrays[rank]

    def touched_bytes(self) -> int:
        return sum(file.stat().st_blocks * 512 for file in self.files.values())


@pytest.mark.skipif(not SHM.is_dir(), reason="no tmpfs to count pages in")
@pytest.mark.parametrize("dim", [0, 1])
def test_a_mebibyte_of_five_gibibytes(tmp_path, dim):
    entry = TensorEntry("w", (ROWS, COLUMNS), "float32", (Cut(("tp",), dim),))
    ptc = build_ptc(Layout(Mesh((("tp", 4),)), (entry,)))
    base = SHM / f"tenplexfs-huge-{os.getpid()}-{dim}"
    base.mkdir()
    try:
        shards = Shards(ptc, base)
        tensor = ptc.tensors["w"]
        header = npy.header(tensor.shape, tensor.dtype)
        file = FullTensor(World("node0").view.fetcher, header, tensor, ptc.holders("w"), shards)
        chosen = random.Random(dim)
        for _ in range(8):
            row = chosen.randrange(ROWS)
            column = chosen.randrange(COLUMNS)
            rank = row // (ROWS // 4) if dim == 0 else column // (COLUMNS // 4)
            at = (row - rank * (ROWS // 4), column) if dim == 0 else (row, column - rank * (COLUMNS // 4))
            shards.arrays[rank][at] = 7.5
            offset = len(header) + (row * COLUMNS + column) * 4
            before = shards.touched_bytes()
            data = file.read(offset, MIB)
            assert np.frombuffer(data[:4], np.float32)[0] == 7.5
            # Whole pages at both ends of each run; runs of a row are longer than a page.
            assert shards.touched_bytes() - before <= 1.6 * MIB
        file.close()
    finally:
        for each in base.iterdir():
            each.unlink()
        base.rmdir()
