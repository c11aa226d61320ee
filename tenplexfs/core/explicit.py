"""The explicit form of a layout: shards said rank by rank, with their pieces or with shapes alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tenplexfs.core.cells import Cells
from tenplexfs.core.layout import ExplicitShard
from tenplexfs.core.region import Region
from tenplexfs.errors import InvalidError

__all__ = ["explicit_cells"]


def explicit_cells(what: str, shape: tuple[int, ...], held: Sequence[ExplicitShard | None]) -> Cells:
    """Makes the table of one tensor's explicit shards.

    Args:
        what: The tensor, for messages.
        shape: Global shape.
        held: What each rank holds, None for nothing.

    Raises:
        InvalidError: Shards mix forms or dims, or shapes alone leave it open how the tensor is cut.
    """
    present = {rank: shard for rank, shard in enumerate(held) if shard is not None}
    if any(shard.pieces is None for shard in present.values()):
        present = _inferred(what, shape, present)
    flat = any(len(shard.local_shape) != len(shape) for shard in present.values())
    number: dict[ExplicitShard, int] = {}
    of_rank = np.full(len(held), -1, np.int64)
    for rank, shard in present.items():
        local_ndim = 1 if flat else len(shape)
        if len(shard.local_shape) != local_ndim:
            raise InvalidError(
                f"{what}: rank {rank}: local shape {list(shard.local_shape)} of a tensor {list(shape)}: "
                f"need the same dims on all ranks, or one dim on all"
            )
        of_rank[rank] = number.setdefault(shard, len(number))
    cells = list(number)
    pieces = [(c, region, at) for c, shard in enumerate(cells) for region, at in shard.pieces or ()]
    pads = [(c, region) for c, shard in enumerate(cells) for region in shard.padding]
    ndim, local_ndim = len(shape), 1 if flat else len(shape)
    for cell, region, at in pieces:
        if region.ndim != ndim or len(at) != local_ndim:
            raise InvalidError(
                f"{what}: piece {region} at {list(at)}: need {ndim} dims and {local_ndim} in 'at'"
            )
        region.check_inside(shape, f"{what}: local array {list(cells[cell].local_shape)}")
    for _, region in pads:
        if region.ndim != local_ndim:
            raise InvalidError(f"{what}: padding {region}: need {local_ndim} dims")
    return Cells(
        shape,
        np.array([shard.local_shape for shard in cells], np.int64).reshape(len(cells), local_ndim),
        np.array([cell for cell, _, _ in pieces], np.int64),
        np.array([(r.start, r.stop) for _, r, _ in pieces], np.int64).reshape(len(pieces), 2, ndim),
        np.array([at for _, _, at in pieces], np.int64).reshape(len(pieces), local_ndim),
        np.array([cell for cell, _ in pads], np.int64),
        np.array([(r.start, r.stop) for _, r in pads], np.int64).reshape(len(pads), 2, local_ndim),
        of_rank,
        flat=flat,
    )


def _inferred(
    what: str, shape: tuple[int, ...], present: dict[int, ExplicitShard]
) -> dict[int, ExplicitShard]:
    """Works out pieces from shapes: the one dim that differs is cut, by rank order (as Tenplex writes it)."""
    if any(shard.pieces is not None for shard in present.values()):
        raise InvalidError(f"{what}: some ranks give pieces, others a shape alone")
    shapes = {rank: shard.local_shape for rank, shard in present.items()}
    for rank, local in shapes.items():
        if len(local) != len(shape) or any(n > size for n, size in zip(local, shape, strict=True)):
            raise InvalidError(f"{what}: rank {rank}: local shape {list(local)}: the tensor is {list(shape)}")
    cut = sorted({dim for local in shapes.values() for dim, n in enumerate(local) if n != shape[dim]})
    if len(cut) > 1:
        raise InvalidError(f"{what}: dims {cut} are both cut; shapes alone do not say how: give pieces")
    dim = cut[0] if cut else None
    total = sum(local[dim] for local in shapes.values()) if dim is not None else 0
    if dim is not None and total != shape[dim]:
        raise InvalidError(
            f"{what}: dim {dim}: the ranks hold {total} of {shape[dim]}; shapes alone do not say "
            f"{'which are replicas' if total > shape[dim] else 'what is missing'}: give pieces"
        )
    out, first = {}, 0
    for rank in sorted(present):
        local = shapes[rank]
        start = [0] * len(shape)
        stop = list(local)
        if dim is not None:
            start[dim], stop[dim] = first, first + local[dim]
            first += local[dim]
        region = Region(tuple(start), tuple(stop))
        out[rank] = ExplicitShard(local, present[rank].dtype, ((region, (0,) * len(shape)),))
    return out
