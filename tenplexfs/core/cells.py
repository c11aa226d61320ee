"""The distinct shards of a tensor, and which rank holds which: the slicing function of the PTC.

Many ranks hold the same shard and many tensors are cut alike, so shards are worked out once for each distinct
way of cutting and kept as arrays. `Cells` is that table: cell c is one distinct shard, ``of_rank`` says which
cell each rank takes. Where a tensor exists (its ``on``) is kept apart, as a mask over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tenplexfs.core.dtypes import MAX_TENSOR_BYTES
from tenplexfs.core.layout import Cut, FlatCut, Mesh, Section, axis_text
from tenplexfs.core.region import Boxes, Ints, box_volumes, find_overlap, join, runs_to_boxes, union_volume
from tenplexfs.errors import InvalidError

__all__ = ["Cells", "boxed_cells", "check_cells", "flat_runs", "flattened"]

_PAD = -1


@dataclass(frozen=True, eq=False)
class Cells:
    """Distinct shards of tensors of one shape, as columns.

    Attributes:
        shape: Global shape of the tensor.
        local_shapes: (cells, local ndim).
        piece_cell: (pieces,), ascending: the cell that each piece is of.
        pieces: (pieces, 2, ndim), regions of the tensor.
        at: (pieces, local ndim), where each piece begins in the local array. With other local dims than the
            tensor's it is one flat offset, and the region lies there raveled in C order.
        pad_cell: (pads,), ascending.
        pads: (pads, 2, local ndim), padding, in local coordinates.
        of_rank: (ranks,), the cell that each rank takes; -1 for none.
        flat: Whether local arrays are raveled.
    """

    shape: tuple[int, ...]
    local_shapes: Ints
    piece_cell: Ints
    pieces: Boxes
    at: Ints
    pad_cell: Ints
    pads: Boxes
    of_rank: Ints
    flat: bool = False

    @cached_property
    def bounds(self) -> Ints:
        """First piece of each cell, and past the last: (cells + 1,)."""
        return np.searchsorted(self.piece_cell, np.arange(len(self.local_shapes) + 1))

    @cached_property
    def pad_bounds(self) -> Ints:
        """First padding box of each cell, and past the last: (cells + 1,)."""
        return np.searchsorted(self.pad_cell, np.arange(len(self.local_shapes) + 1))

    @cached_property
    def signatures(self) -> tuple[bytes, ...]:
        """For each cell, what tells its shard from all others: equal ones are the same local array."""
        out = []
        for cell in range(len(self.local_shapes)):
            a, b = self.bounds[cell : cell + 2]
            c, d = self.pad_bounds[cell : cell + 2]
            parts = (self.local_shapes[cell], self.pieces[a:b], self.at[a:b], self.pads[c:d])
            out.append(b"|".join(part.tobytes() for part in parts))
        return tuple(out)

    @cached_property
    def identity(self) -> bytes:
        """What tells this table from all others."""
        head = repr((self.shape, self.flat)).encode()
        columns = (
            self.local_shapes,
            self.piece_cell,
            self.pieces,
            self.at,
            self.pad_cell,
            self.pads,
            self.of_rank,
        )
        return b"|".join([head, *(column.tobytes() for column in columns)])


def boxed_cells(what: str, shape: tuple[int, ...], shard: Sequence[Cut], mesh: Mesh) -> Cells:
    """Cuts a tensor dim by dim.

    Args:
        what: The tensor, for messages.
        shape: Global shape.
        shard: Cuts in order.
        mesh: That the axes are of.

    Raises:
        InvalidError: A cut does not fit; names the tensor, dim, size and ways.
    """
    per_dim: list[list[Cut]] = [[] for _ in shape]
    for cut in shard:
        if cut.dim >= len(shape):
            raise InvalidError(f"{what}: shard of dim {cut.dim}: the tensor has {len(shape)} dims")
        if per_dim[cut.dim] and cut.speaks_of_global:
            raise InvalidError(f"{what}: dim {cut.dim}: cuts, sections and padding belong to its first entry")
        per_dim[cut.dim].append(cut)
    key = np.zeros((mesh.size, len(shape)), np.int64)
    parts: list[dict[int, list[tuple[int, int]]]] = []
    for dim, cuts in enumerate(per_dim):
        coordinates = [mesh.coordinates(cut.axis) for cut in cuts]
        ways = [mesh.size_of(cut.axis) for cut in cuts]
        for coordinate, way in zip(coordinates, ways, strict=True):
            key[:, dim] = key[:, dim] * way + coordinate
        table: dict[int, list[tuple[int, int]]] = {}
        for value in np.unique(key[:, dim]).tolist():
            rest, of_cut = value, []
            for way in reversed(ways):
                rest, coordinate_of = divmod(rest, way)
                of_cut.append(coordinate_of)
            table[value] = _segments(f"{what}: dim {dim}", shape[dim], cuts, ways, of_cut[::-1])
        parts.append(table)
    unique, of_rank = np.unique(key, axis=0, return_inverse=True)
    return _product(
        shape,
        [[table[k] for k in unique[:, d].tolist()] for d, table in enumerate(parts)],
        len(unique),
        of_rank.reshape(-1),
    )


def _segments(
    what: str, size: int, cuts: Sequence[Cut], ways: Sequence[int], coordinates: Sequence[int]
) -> list[tuple[int, int]]:
    """Returns what the coordinates take of a dim: (global start or _PAD, length), in local order."""
    segments = [(0, size)] if size else []
    for cut, way, coordinate in zip(cuts, ways, coordinates, strict=True):
        where = f"{what}: size {size}, {way} ways (axis {axis_text(cut.axis)})"
        padded = _padded(where, size, cut, way)
        if padded > size:
            segments = [*segments, (_PAD, padded - size)]
        length = sum(n for _, n in segments)
        taken: list[tuple[int, int]] = []
        for begin, end in _intervals(where, length, cut, way, coordinate):
            taken += _clip(segments, begin, end)
        segments = taken
    return segments


def _padded(where: str, size: int, cut: Cut, ways: int) -> int:
    if cut.pad_multiple is not None:
        unit = cut.pad_multiple * ways
        return -(-size // unit) * unit
    if cut.pad_to is None:
        return size
    if cut.pad_to < size:
        raise InvalidError(f"{where}: pad_to {cut.pad_to} is less than the size")
    return cut.pad_to


def _intervals(where: str, length: int, cut: Cut, ways: int, coordinate: int) -> list[tuple[int, int]]:
    if cut.cuts is not None:
        points = cut.cuts
        if (
            len(points) != ways + 1
            or points[0] != 0
            or points[-1] != length
            or list(points) != sorted(points)
        ):
            raise InvalidError(
                f"{where}: cuts: need {ways + 1} ascending points from 0 to {length}, got {list(points)}"
            )
        return [(points[coordinate], points[coordinate + 1])]
    if cut.sections is None:
        return [_part(where, length, ways, coordinate, cut)]
    total = sum(section.width for section in cut.sections)
    if total != length or any(section.width < 0 for section in cut.sections):
        raise InvalidError(
            f"{where}: sections {[s.width for s in cut.sections]} sum to {total}, the size is {length}"
        )
    out, first = [], 0
    for section in cut.sections:
        begin, end = _section(where, section, ways, coordinate, cut)
        out.append((first + begin, first + end))
        first += section.width
    return out


def _section(where: str, section: Section, ways: int, coordinate: int, cut: Cut) -> tuple[int, int]:
    if section.ways is None:
        return _part(f"{where}: section of {section.width}", section.width, ways, coordinate, cut)
    if section.ways < 1 or ways % section.ways:
        raise InvalidError(
            f"{where}: section of {section.width}: its {section.ways} ways do not divide {ways}"
        )
    index = coordinate // (ways // section.ways)
    return _part(
        f"{where}: section of {section.width} in {section.ways}", section.width, section.ways, index, cut
    )


def _part(where: str, length: int, ways: int, index: int, cut: Cut) -> tuple[int, int]:
    if cut.rule == "ceil":
        step = -(-length // ways)
        return min(length, step * index), min(length, step * (index + 1))
    step, more = divmod(length, ways)
    if cut.rule == "exact" and more:
        raise InvalidError(
            f"{where}: {length} does not divide by {ways}: give rule ceil or balanced, cuts, or pad_to"
        )
    return step * index + min(index, more), step * (index + 1) + min(index + 1, more)


def _clip(segments: Sequence[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    out, first = [], 0
    for start, length in segments:
        a, b = max(begin - first, 0), min(end - first, length)
        if a < b:
            out.append((_PAD if start == _PAD else start + a, b - a))
        first += length
    return out


def _product(
    shape: tuple[int, ...], parts: list[list[list[tuple[int, int]]]], count: int, of_rank: Ints
) -> Cells:
    """Makes cells from the segments of each dim: the pieces are all combinations of segments."""
    ndim = len(shape)
    owner = np.arange(count)
    columns: list[tuple[Ints, Ints, Ints]] = []  # global start, local start, length of each segment taken
    local = np.zeros((count, ndim), np.int64)
    for dim, per_cell in enumerate(parts):
        counts = np.array([len(segments) for segments in per_cell], np.int64)
        flat = np.array([s for segments in per_cell for s in segments], np.int64).reshape(-1, 2)
        first = np.cumsum(counts) - counts
        ends = np.cumsum(flat[:, 1])
        base = np.concatenate([[0], ends])[first]
        begins = ends - flat[:, 1] - np.repeat(base, counts)
        local[:, dim] = np.concatenate([[0], ends])[first + counts] - base
        again = np.repeat(np.arange(len(owner)), counts[owner])
        within = np.arange(len(again)) - np.repeat(np.cumsum(counts[owner]) - counts[owner], counts[owner])
        owner = owner[again]
        place = first[owner] + within
        columns = [(a[again], b[again], c[again]) for a, b, c in columns]
        columns.append((flat[place, 0], begins[place], flat[place, 1]))
    if ndim:
        start, at, length = (np.stack(column, axis=1) for column in zip(*columns, strict=True))
    else:
        start = at = length = np.zeros((count, 0), np.int64)
    real = (start != _PAD).all(axis=1)
    pieces = np.stack([start, start + length], axis=1)[real]
    pads = np.stack([at, at + length], axis=1)[~real]
    return Cells(shape, local, owner[real], pieces, at[real], owner[~real], pads, of_rank)


def flattened(what: str, base: Cells, cut: FlatCut, mesh: Mesh) -> Cells:
    """Ravels the shards of ``base``, pads each, and cuts it into equal runs over ``cut.axis``."""
    ways = mesh.size_of(cut.axis)
    volumes = base.local_shapes.prod(axis=1)
    unit = math.lcm(cut.pad_to_multiple, ways)
    run = -(-volumes // unit) * unit // ways
    held = np.maximum(base.of_rank, 0)
    begins = run[held] * mesh.coordinates(cut.axis)
    return flat_runs(
        what, base, begins, np.where(base.of_rank < 0, begins, begins + run[held]), keep_padding=True
    )


def flat_runs(what: str, base: Cells, begins: Ints, ends: Ints, *, keep_padding: bool) -> Cells:
    """Gives each rank a run of its raveled shard.

    Args:
        what: The tensor, for messages.
        base: What each rank's run is taken of.
        begins: (ranks,), first element of the run.
        ends: (ranks,), past the last; elements past the shard's end are padding.
        keep_padding: Whether those are in the local array.

    Raises:
        InvalidError: The shards are raveled already.
    """
    if base.flat:
        raise InvalidError(f"{what}: a flat shard cannot be cut flat again")
    key = np.stack([base.of_rank, begins, ends], axis=1)
    unique, of_rank = np.unique(key, axis=0, return_inverse=True)
    cell, begin, end = unique.T
    volume = np.where(cell < 0, 0, base.local_shapes.prod(axis=1)[cell])
    low, high = np.minimum(begin, volume), np.minimum(end, volume)
    pieces = _map_runs(base, cell, low, high, base.piece_cell, base.pieces, base.at)
    inner = _map_runs(base, cell, low, high, base.pad_cell, base.pads, base.pads[:, 0])
    length = end - begin if keep_padding else high - low
    tail = np.flatnonzero(length > high - low)
    pad_cell = np.concatenate([inner[0], tail])
    pad_start = np.concatenate([inner[2], (high - low)[tail]])
    pad_stop = np.concatenate([inner[2] + box_volumes(inner[1]), length[tail]])
    by = np.lexsort((pad_start, pad_cell))
    pads = np.stack([pad_start, pad_stop], axis=1)[by][:, :, None]
    held = np.where(base.of_rank < 0, -1, of_rank.reshape(-1))
    local = length[:, None]
    return Cells(
        base.shape, local, pieces[0], pieces[1], pieces[2][:, None], pad_cell[by], pads, held, flat=True
    )


def _map_runs(
    base: Cells, cell: Ints, begins: Ints, ends: Ints, part_cell: Ints, parts: Boxes, at: Ints
) -> tuple[Ints, Boxes, Ints]:
    """Maps runs of raveled cells to boxes of ``parts`` (pieces or padding), each one run of the result.

    Returns:
        (run, box, offset of the box in the run), sorted by run and offset.
    """
    columns: list[tuple[Ints, Boxes, Ints]] = []
    bounds = np.searchsorted(part_cell, np.arange(len(base.local_shapes) + 1))
    for one in np.unique(cell[(ends > begins) & (cell >= 0)]).tolist():
        runs = np.flatnonzero((cell == one) & (ends > begins))
        wanted = np.stack([begins[runs], ends[runs]], axis=1)[:, :, None]
        shape = base.local_shapes[one]
        strides = np.array([int(shape[d + 1 :].prod()) for d in range(len(shape))], np.int64)
        for part in range(bounds[one], bounds[one + 1]):
            # A part lies in the raveled cell as rows, one for each index of its leading dims.
            extent = parts[part, 1] - parts[part, 0]
            lead = _leading(extent, shape)
            row = int(extent[lead:].prod())
            index = (
                np.indices(tuple(extent[:lead])).reshape(lead, -1).T if lead else np.zeros((1, 0), np.int64)
            )
            start = (index + at[part, :lead]) @ strides[:lead] + int(at[part, lead:] @ strides[lead:])
            r, s = join(wanted, np.stack([start, start + row], axis=1)[:, :, None])
            low = np.maximum(wanted[r, 0, 0], start[s]) - start[s]
            high = np.minimum(wanted[r, 1, 0], start[s] + row) - start[s]
            of, inner = runs_to_boxes(tuple(extent[lead:].tolist()), low, high)
            outer = np.stack([index[s[of]], index[s[of]] + 1], axis=1)
            found = np.concatenate([outer, inner], axis=2) + parts[part, 0]
            # The boxes of one run follow each other: each begins where those before it end.
            ahead = np.cumsum(box_volumes(found)) - box_volumes(found)
            offset = start[s[of]] + low[of] + ahead - ahead[np.searchsorted(of, of)] - wanted[r[of], 0, 0]
            columns.append((runs[r[of]], found, offset))
    if not columns:
        return np.empty(0, np.int64), np.empty((0, 2, parts.shape[2]), np.int64), np.empty(0, np.int64)
    run, boxes, offset = (np.concatenate(column) for column in zip(*columns, strict=True))
    by = np.lexsort((offset, run))
    return run[by], boxes[by], offset[by]


def _leading(extent: Ints, shape: Ints) -> int:
    """Returns how many leading dims must be taken index by index, so that the rest is one run of the cell."""
    for dim in range(len(shape) - 1, -1, -1):
        if extent[dim] != shape[dim]:
            return dim
    return 0


def check_cells(what: str, cells: Cells) -> None:
    """Proves that every cell is covered exactly by its pieces and padding.

    Raises:
        InvalidError: Something is out of bounds, overlaps, or the volumes do not sum; names the values.
    """
    ndim, size = len(cells.shape), np.array(cells.shape, np.int64)
    if len(cells.local_shapes) and cells.local_shapes.astype(float).prod(axis=1).max() > MAX_TENSOR_BYTES:
        raise InvalidError(f"{what}: padded to more than {MAX_TENSOR_BYTES} elements on a rank")
    outside = (
        (cells.pieces[:, 0] < 0) | (cells.pieces[:, 0] > cells.pieces[:, 1]) | (cells.pieces[:, 1] > size)
    ).any(axis=1)
    if outside.any():
        box = cells.pieces[np.flatnonzero(outside)[0]]
        raise InvalidError(
            f"{what}: need 0 <= start <= stop <= {list(cells.shape)}, "
            f"got start {box[0].tolist()} stop {box[1].tolist()}"
        )
    local = _local_boxes(cells)
    cell = np.concatenate([cells.piece_cell, cells.pad_cell])
    limit = cells.local_shapes[cell]
    outside = ((local[:, 0] < 0) | (local[:, 0] > local[:, 1]) | (local[:, 1] > limit)).any(axis=1)
    if outside.any():
        k = int(np.flatnonzero(outside)[0])
        raise InvalidError(
            f"{what}: local start {local[k, 0].tolist()} stop {local[k, 1].tolist()} "
            f"is outside the local array {limit[k].tolist()}"
        )
    for where, boxes, of in (("local array", local, cell), ("tensor", cells.pieces, cells.piece_cell)):
        keyed = np.concatenate([np.stack([of, of + 1], axis=1)[:, :, None], boxes], axis=2)
        pair = find_overlap(keyed)
        if pair is not None:
            a, b = (boxes[k] for k in pair)
            raise InvalidError(
                f"{what}: two pieces of one shard overlap in the {where}: "
                f"{a[0].tolist()}:{a[1].tolist()} and {b[0].tolist()}:{b[1].tolist()}"
            )
    volume = np.zeros(len(cells.local_shapes), np.int64)
    np.add.at(volume, cell, box_volumes(local))
    wanted = cells.local_shapes.prod(axis=1)
    wrong = np.flatnonzero(volume != wanted)
    if len(wrong):
        k = int(wrong[0])
        raise InvalidError(
            f"{what}: the pieces and padding of a local array {cells.local_shapes[k].tolist()} "
            f"hold {volume[k]} of its {wanted[k]} elements"
        )
    if ndim == 0 and union_volume(cells.pieces) > 1:
        raise InvalidError(f"{what}: more than one element of a tensor without dims")


def _local_boxes(cells: Cells) -> Boxes:
    extent = cells.pieces[:, 1] - cells.pieces[:, 0]
    if cells.flat:
        extent = extent.prod(axis=1)[:, None]
    return np.concatenate([np.stack([cells.at, cells.at + extent], axis=1), cells.pads])
