"""Whole tensors of any bits, and what ranks hold of them, element by element."""

from __future__ import annotations

import numpy as np

from tenplexfs.core.dtypes import dtype_of
from tenplexfs.core.ptc import PTC


def tensors_of(ptc: PTC, seed: int = 0) -> dict[str, np.ndarray]:
    """Whole tensors by canonical path, any bits."""
    rng = np.random.default_rng(seed)
    whole = {}
    for path in ptc.names:
        tensor = ptc.tensors[path]
        raw = rng.integers(0, 256, tensor.nbytes, np.uint8).tobytes()
        whole[path] = np.frombuffer(raw, dtype_of(tensor.dtype)).reshape(tensor.shape)
    return whole


def shard_of(ptc: PTC, rank: int, path: str, whole: np.ndarray) -> np.ndarray:
    """What a rank's file holds, by the pieces, element by element."""
    shard = ptc.shard(rank, path)
    local = np.zeros(shard.local_shape, whole.dtype)
    for piece in shard.pieces:
        data = whole[piece.region.as_slices()]
        if shard.flat:
            local.reshape(-1)[piece.at[0] : piece.at[0] + data.size] = data.reshape(-1)
        else:
            place = tuple(slice(a, a + n) for a, n in zip(piece.at, data.shape, strict=True))
            local[place] = data
    return local
