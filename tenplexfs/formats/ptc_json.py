"""What one rank holds, as ``ptc/<rank>.json`` shows it: the explicit form of a layout, rank by rank."""

from __future__ import annotations

from typing import Any

from tenplexfs.core.layout import ExplicitShard
from tenplexfs.core.ptc import PTC
from tenplexfs.formats.explicit_json import leaf_json

__all__ = ["ptc_document"]


def ptc_document(ptc: PTC, rank: int) -> dict[str, Any]:
    """Returns the PTC of ``rank`` as explicit pieces.

    The ``tensors`` of all ranks, in order, are the ``ranks`` of a layout in the explicit form, and the
    ``global`` of all together its ``global``.
    """
    paths = ptc.rank_paths(rank)
    ties = {path: ptc.tensors[path].path for path in paths if ptc.tensors[path].path != path}
    return {
        "format": "tenplexfs-ptc",
        "version": 1,
        "rank": rank,
        "node": ptc.node_of(rank),
        "tensors": {path: _leaf(ptc, rank, path) for path in paths},
        "global": {path: list(ptc.tensors[path].shape) for path in paths},
        **({"aliases": ties} if ties else {}),
    }


def _leaf(ptc: PTC, rank: int, path: str) -> Any:  # noqa: ANN401 - JSON
    shard = ptc.shard(rank, path)
    pieces = tuple((piece.region, piece.at) for piece in shard.pieces)
    return leaf_json(ExplicitShard(shard.local_shape, ptc.tensors[path].dtype, pieces, shard.padding))
