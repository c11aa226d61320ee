"""From boxes that ranks hold, as frameworks tell them, to the explicit form of a layout.

Adapters read a framework's own structures into boxes of the tensor. Here boxes become local arrays, and a
guess at the cuts behind them is proved or dropped: a layout that names its mesh axes can follow another mesh,
one that only lists pieces cannot.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tenplexfs.core.cells import boxed_cells
from tenplexfs.core.layout import Cut, Explicit, ExplicitShard, Layout, Mesh, TensorEntry
from tenplexfs.core.region import Region, find_overlap
from tenplexfs.errors import InvalidError

__all__ = [
    "clipped",
    "counted",
    "cuts_give",
    "explicit_layout",
    "local_arrays",
    "on_of_ranks",
    "refuse_overlap",
    "whole_shard",
]

_INDICES = "ijklmn"


def local_arrays(
    held: Mapping[int, Iterable[Region]], dtype: str, *, flat: bool = False
) -> dict[int, ExplicitShard]:
    """Makes one local array a rank of the boxes that it holds, in the order of their starts.

    Boxes that differ along one dim only are joined along it. Where those of some rank do not join so, or with
    ``flat``, the local arrays of all ranks are 1-d: the boxes raveled in C order, one after the other.

    >>> a, b = Region((0, 0), (2, 3)), Region((6, 0), (8, 3))
    >>> local_arrays({0: [b, a]}, "float32")[0].local_shape
    (4, 3)

    Args:
        held: Rank and its boxes; equal ones count once.
        dtype: Of the tensor.
        flat: Whether to ravel in any case.
    """
    ordered = {rank: _solid(boxes) for rank, boxes in held.items()}
    if not flat:
        joined = {rank: _joined(boxes, dtype) for rank, boxes in ordered.items()}
        if None not in joined.values():
            return {rank: shard for rank, shard in joined.items() if shard is not None}
    return {rank: _raveled(boxes, dtype) for rank, boxes in ordered.items()}


def _solid(boxes: Iterable[Region]) -> list[Region]:
    """Returns the boxes in order, without the empty ones unless all are."""
    ordered = sorted(set(boxes), key=lambda box: (box.start, box.stop))
    return [box for box in ordered if box.volume] or ordered[:1]


def _joined(boxes: Sequence[Region], dtype: str) -> ExplicitShard | None:
    if not boxes:
        return None
    first = boxes[0]
    differ = {
        dim
        for box in boxes
        for dim in range(first.ndim)
        if (box.start[dim], box.stop[dim]) != (first.start[dim], first.stop[dim])
    }
    if len(differ) > 1:
        return None
    dim = differ.pop() if differ else 0
    shape = list(first.shape)
    pieces, end = [], 0
    for box in boxes:
        at = [0] * first.ndim
        if first.ndim:
            at[dim] = end
            end += box.shape[dim]
        pieces.append((box, tuple(at)))
    if first.ndim:
        shape[dim] = end
    return ExplicitShard(tuple(shape), dtype, tuple(p for p in pieces if p[0].volume))


def _raveled(boxes: Sequence[Region], dtype: str) -> ExplicitShard:
    pieces, end = [], 0
    for box in boxes:
        pieces.append((box, (end,)))
        end += box.volume
    return ExplicitShard((end,), dtype, tuple(p for p in pieces if p[0].volume))


def clipped(what: str, shard: ExplicitShard, shape: tuple[int, ...]) -> ExplicitShard:
    """Returns ``shard`` with what lies past ``shape``, the true one of a padded tensor, labelled as padding.

    Raises:
        InvalidError: The shard is raveled, and some of it is padding.
    """
    pieces, padding = [], list(shard.padding)
    for region, at in shard.pieces or ():
        stop = tuple(map(min, region.stop, shape))
        if stop == region.stop:
            pieces.append((region, at))
            continue
        if len(shard.local_shape) != len(shape):
            raise InvalidError(
                f"{what}: {region} is past its true shape {list(shape)}, in a raveled local array"
            )
        kept = tuple(max(b - a, 0) for a, b in zip(region.start, stop, strict=True))
        if math.prod(kept):
            pieces.append((Region(region.start, stop), at))
        else:
            kept = (0, *region.shape[1:])
        for dim, size in enumerate(region.shape):
            if kept[dim] < size:
                low = [at[d] + (kept[d] if d == dim else 0) for d in range(len(shape))]
                high = [at[d] + (kept[d] if d < dim else region.shape[d]) for d in range(len(shape))]
                padding.append(Region(tuple(low), tuple(high)))
    return ExplicitShard(shard.local_shape, shard.dtype, tuple(pieces), tuple(padding))


def refuse_overlap(what: str, shape: Sequence[int], boxes: Sequence[tuple[Region, str]], hint: str) -> None:
    """Refuses boxes that must tile a tensor, each element once, and do not.

    Args:
        what: The tensor, for messages.
        shape: Its global shape.
        boxes: Each with who holds it.
        hint: The end of the message.

    Raises:
        InvalidError: Two share an element, or some element is in none.
    """
    solid = [box for box in boxes if box[0].volume]
    table = np.array([(b.start, b.stop) for b, _ in solid], np.int64).reshape(len(solid), 2, len(shape))
    pair = find_overlap(table)
    if pair is not None:
        (a, holder), (b, other) = (solid[k] for k in pair)
        raise InvalidError(f"{what}: {a} of {holder} and {b} of {other} overlap: {hint}")
    whole = math.prod(shape)
    volume = sum(box.volume for box, _ in solid)
    if volume != whole:
        raise InvalidError(f"{what}: {volume} of {whole} elements are there: {hint}")


def cuts_give(
    shape: tuple[int, ...], cuts: Sequence[Cut], mesh: Mesh, held: Mapping[int, ExplicitShard]
) -> bool:
    """Returns whether ``cuts`` over ``mesh`` leave each rank of ``held`` exactly what it holds."""
    try:
        cells = boxed_cells("", shape, cuts, mesh)
    except InvalidError:
        return False
    for cell, shard in {(int(cells.of_rank[rank]), shard) for rank, shard in held.items()}:
        a, b = cells.bounds[cell : cell + 2]
        if tuple(cells.local_shapes[cell].tolist()) != shard.local_shape or len(shard.pieces or ()) != b - a:
            return False
        made = sorted(
            (*box, at) for box, at in zip(cells.pieces[a:b].tolist(), cells.at[a:b].tolist(), strict=True)
        )
        if made != sorted((list(r.start), list(r.stop), list(at)) for r, at in shard.pieces or ()):
            return False
    return True


def on_of_ranks(mesh: Mesh, ranks: Iterable[int]) -> tuple[tuple[tuple[str], tuple[int, ...]], ...] | None:
    """Returns the ``on`` of an entry that exists on exactly ``ranks``, or None where no such one exists.

    >>> on_of_ranks(Mesh((("pp", 2), ("tp", 2))), [2, 3])
    ((('pp',), (1,)),)
    """
    wanted = sorted(set(ranks))
    mask = np.ones(mesh.size, bool)
    on = []
    for name, size in mesh.axes:
        coordinates = mesh.coordinates((name,))
        places = np.unique(coordinates[wanted])
        if len(places) < size:
            on.append(((name,), tuple(places.tolist())))
            mask &= np.isin(coordinates, places)
    return tuple(on) if np.flatnonzero(mask).tolist() == wanted else None


def counted(entries: Iterable[TensorEntry]) -> tuple[TensorEntry, ...]:
    """Joins entries of single tensors that differ in indices of their keys alone, where none is left out.

    >>> entries = [TensorEntry(f"layers/{i}/w", (4,), "float32") for i in range(3)]
    >>> counted(entries)
    (TensorEntry(key='layers/{i}/w', shape=(4,), dtype='float32', shard=(), on=(), mesh=None, \
count=(('i', 3),), flat=None, alias=None),)
    """
    groups: dict[tuple[str, TensorEntry], dict[tuple[int, ...], TensorEntry]] = {}
    for entry in entries:
        parts = entry.key.split("/")
        at = [k for k, part in enumerate(parts) if part.isdecimal() and str(int(part)) == part]
        values = tuple(int(parts[k]) for k in at[: len(_INDICES)])
        for k, index in zip(at, _INDICES, strict=False):
            parts[k] = f"{{{index}}}"
        groups.setdefault(("/".join(parts), replace(entry, key="")), {})[values] = entry
    joined: list[TensorEntry] = []
    for (key, alike), members in groups.items():
        sizes = [1 + max(values) for values in zip(*members, strict=True)]
        if len(members) == 1 or len(members) != math.prod(sizes):
            joined += members.values()
        else:
            joined.append(replace(alike, key=key, count=tuple(zip(_INDICES, sizes, strict=False))))
    return tuple(joined)


def whole_shard(shape: tuple[int, ...], dtype: str) -> ExplicitShard:
    """Returns the shard of a rank that holds all of a tensor."""
    origin = (0,) * len(shape)
    return ExplicitShard(shape, dtype, ((Region(origin, shape), origin),))


def explicit_layout(
    mesh: Mesh,
    tensors: Mapping[str, tuple[tuple[int, ...], Mapping[int, ExplicitShard]]],
    entries: Sequence[TensorEntry] = (),
) -> Layout:
    """Makes a layout of what each rank holds.

    Args:
        mesh: All ranks.
        tensors: Path, its global shape, and its shard by rank.
        entries: Of the tensors that are said by their cuts.

    Raises:
        InvalidError: A rank is not of the mesh, or the mesh itself is wrong.
    """
    ranks: list[dict[str, ExplicitShard]] = [{} for _ in range(mesh.size)]
    for path, (_, held) in tensors.items():
        for rank, shard in held.items():
            if not 0 <= rank < mesh.size:
                raise InvalidError(f"tensor {path!r}: rank {rank}: the mesh has ranks 0 to {mesh.size - 1}")
            ranks[rank][path] = shard
    shapes = {path: shape for path, (shape, _) in tensors.items()}
    return Layout(mesh, tuple(entries), explicit=Explicit(tuple(ranks), shapes) if tensors else None)
