"""Whether a rank holds what the layout of its job says, before any of it is saved.

Local shapes do not tell: with a mesh of the same size in another order, or with other placements, a rank may
hold other boxes of the very same shapes.
"""

from __future__ import annotations

import numpy as np

from tenplexfs.core.layout import ExplicitShard
from tenplexfs.core.ptc import PTC, Piece, Shard
from tenplexfs.errors import NotFoundError, PreconditionError
from tenplexfs.sharded import check_held, check_shard
from tenplexfs.torch.layout import choose
from tenplexfs.torch.placements import StateSpec, TensorSpec, readings

__all__ = ["check_spec"]


def check_spec(job: str, ptc: PTC, spec: StateSpec, rank: int) -> None:
    """Refuses what ``rank`` holds if it is not what the layout says. Every rank must ask, of its own.

    Args:
        job: Its name.
        ptc: Of the job.
        spec: Of the rank's state.
        rank: Of this process.

    Raises:
        PreconditionError: Names the first tensor that differs.
        InvalidError: torch has two answers for a tensor, and local shapes do not tell which holds.

    Cost: Tensors that are held alike are worked out once.
    """
    held: dict[str, Shard] = {}
    known: dict[object, Shard] = {}
    for path, tensor in spec.tensors.items():
        there = ptc.placements.get(path)
        kind = id(tensor), there and (there.cells, there.mask)
        if kind not in known:
            known[kind] = _shard(job, ptc, path, tensor, rank)
        held[path] = known[kind]
    check_held(job, ptc, {rank: held})


def _shard(job: str, ptc: PTC, path: str, tensor: TensorSpec, rank: int) -> Shard:
    """Returns what ``rank`` holds; where torch has two answers of one local shape, that of the layout.

    Where the other one holds, some rank has a local shape that is not the layout's, and fails.
    """
    what, seen = f"tensor {path!r}", {rank: tensor.local_shape}
    ranks = tensor.mesh.ranks if tensor.mesh is not None else (rank,)
    places = dict(zip(ranks, np.ndindex(*tensor.ways), strict=True))
    own = readings(tensor, places[rank])
    if len({each.local_shape for each in own}) == len(own) or path not in ptc.placements:
        return _as_shard(choose(what, [{rank: each} for each in own], seen)[rank])
    ways = [{r: readings(tensor, place)[i] for r, place in places.items()} for i in (0, -1)]
    if all(ways[0][r].local_shape == ways[1][r].local_shape for r in ranks):
        choose(what, ways, seen)  # refuses
    for way in ways:
        try:
            for r, shard in way.items():
                check_shard(job, ptc, r, path, _as_shard(shard))
            return _as_shard(way[rank])
        except (NotFoundError, PreconditionError) as error:
            failure = error
    raise failure


def _as_shard(shard: ExplicitShard) -> Shard:
    return Shard(shard.local_shape, tuple(Piece(region, at) for region, at in shard.pieces or ()))
