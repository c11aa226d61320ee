"""From a layout to a PTC, with the proof that every tensor is covered."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from tenplexfs.core.cells import Cells, boxed_cells, check_cells, flat_runs, flattened
from tenplexfs.core.dtypes import check_shape
from tenplexfs.core.explicit import explicit_cells
from tenplexfs.core.layout import (
    Axis,
    ByIndex,
    Cut,
    FlatCut,
    FlatGroup,
    Layout,
    TensorEntry,
    axis_text,
    expand_name,
    place_in_order,
)
from tenplexfs.core.ptc import PTC, Mask, Placement, Tensor, check_tensor_path
from tenplexfs.core.region import Boxes, Ints, find_hole, region_text
from tenplexfs.errors import InvalidError

__all__ = ["build_ptc"]


def build_ptc(layout: Layout) -> PTC:
    """Works out what every rank holds, and proves that it is everything, exactly.

    Args:
        layout: Ranks without a node are placed in order.

    Raises:
        InvalidError: Something does not fit, a name is given twice, or a tensor is not covered; one line.
    """
    return _Builder(place_in_order(layout)).build()


class _Builder:
    """Collects tables and masks, each distinct one once."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.entries = {entry.key: entry for entry in layout.tensors}
        self.tables: list[Cells] = []
        self.masks: list[Mask] = []
        self._table_of: dict[bytes, int] = {}
        self._mask_of: dict[bytes, int] = {}
        self._cut_alike: dict[object, int] = {}
        self._on_alike: dict[object, int] = {}
        self._cells_held: dict[tuple[int, int], tuple[int, bytes]] = {}
        self._covered: dict[tuple[tuple[int, bytes], ...], Boxes | None] = {}

    def build(self) -> PTC:
        if len(self.entries) != len(self.layout.tensors):
            raise InvalidError("tensors: an entry is given twice")
        placements = [*self._mesh_form(), *self._explicit_form()]
        seen: set[str] = set()
        for placement in placements:
            if placement.path in seen:
                raise InvalidError(f"tensor {placement.path!r}: two entries give this path")
            seen.add(placement.path)
            check_tensor_path(placement.path)
        placements = list(self._grouped(placements))
        ptc = PTC(self.layout, placements, self.tables, self.masks)
        for path, names in ptc.names.items():
            self._check_cover(path, names)
        return ptc

    def _mesh_form(self) -> Iterator[Placement]:
        for entry in self.layout.tensors:
            target = self._target(entry)
            if (target.shape, target.dtype, target.count) != (entry.shape, entry.dtype, entry.count):
                raise InvalidError(
                    f"tensor {entry.key!r}: tied to {target.key!r} of another shape, dtype or count"
                )
            if target is not entry and entry.flat is not None:
                raise InvalidError(f"tensor {entry.key!r}: a tied name cannot be in a flat group")
            table = self._table(entry)
            for values in entry.instances():
                tensor = Tensor(expand_name(target.key, values), entry.shape, entry.dtype)
                path = expand_name(entry.key, values)
                yield Placement(path, tensor, table, self._mask(entry, values))

    def _target(self, entry: TensorEntry) -> TensorEntry:
        seen = [entry.key]
        while entry.alias is not None:
            if entry.alias not in self.entries:
                raise InvalidError(f"tensor {seen[-1]!r}: alias of {entry.alias!r}, which is no entry")
            entry = self.entries[entry.alias]
            if entry.key in seen:
                raise InvalidError(f"tensor {seen[0]!r}: its aliases go in a circle")
            seen.append(entry.key)
        return entry

    def _table(self, entry: TensorEntry) -> int:
        what = f"tensor {entry.key!r}"
        alike = (entry.shape, entry.shard, entry.mesh)
        known = self._cut_alike.get(alike)
        if known is not None:
            return known
        mesh = self.layout.mesh_named(entry.mesh)
        boxed = [cut for cut in entry.shard if isinstance(cut, Cut)]
        flat = [cut for cut in entry.shard if isinstance(cut, FlatCut)]
        if flat and (len(flat) > 1 or entry.shard[-1] is not flat[0]):
            raise InvalidError(f"{what}: a flat shard comes last and once")
        try:
            cells = boxed_cells(what, entry.shape, boxed, mesh)
            if flat:
                cells = flattened(what, cells, flat[0], mesh)
        except InvalidError as error:
            raise InvalidError(error.message if what in error.message else f"{what}: {error}") from None
        number = self._intern_table(what, cells)
        self._cut_alike[alike] = number
        return number

    def _mask(self, entry: TensorEntry, values: dict[str, int]) -> int:
        where_to = tuple(
            (axis, where.owner[values[where.by]] if isinstance(where, ByIndex) else where)
            for axis, where in entry.on
        )
        alike = (entry.mesh, where_to)
        if alike not in self._on_alike:
            what = f"tensor {expand_name(entry.key, values)!r}"
            self._on_alike[alike] = self._intern_mask(self._ranks_on(what, entry.mesh, where_to))
        return self._on_alike[alike]

    def _ranks_on(
        self, what: str, mesh_name: str | None, where_to: tuple[tuple[Axis, tuple[int, ...]], ...]
    ) -> Mask:
        mesh = self.layout.mesh_named(mesh_name)
        mask = np.ones(mesh.size, bool)
        for axis, wanted in where_to:
            try:
                size = mesh.size_of(axis)
            except InvalidError as error:
                raise InvalidError(f"{what}: on: {error}") from None
            for coordinate in wanted:
                if not -size <= coordinate < size:
                    raise InvalidError(
                        f"{what}: on {axis_text(axis)}: coordinate {coordinate} of an axis of size {size}"
                    )
            mask &= np.isin(mesh.coordinates(axis), [c % size for c in wanted])
        return mask

    def _explicit_form(self) -> Iterator[Placement]:
        explicit = self.layout.explicit
        if explicit is None:
            return
        everywhere = self._intern_mask(np.ones(self.layout.mesh.size, bool))
        for path in sorted({path for rank in explicit.ranks for path in rank}):
            what = f"tensor {path!r}"
            held = [rank.get(path) for rank in explicit.ranks]
            if path not in explicit.shapes:
                raise InvalidError(
                    f"{what}: its global shape is not given (global, --global or a committed job)"
                )
            dtypes = {shard.dtype for shard in held if shard is not None}
            if dtypes == {None}:
                raise InvalidError(f"{what}: its dtype is not given (dtype, --global or a committed job)")
            if len(dtypes) > 1:
                raise InvalidError(f"{what}: need one dtype on all ranks, got {sorted(map(str, dtypes))}")
            shape, dtype = explicit.shapes[path], str(dtypes.pop())
            check_shape(what, shape, dtype)
            table = self._intern_table(what, explicit_cells(what, shape, held))
            yield Placement(path, Tensor(path, shape, dtype), table, everywhere)

    def _grouped(self, placements: list[Placement]) -> Iterator[Placement]:
        """Replaces the members of flat groups by their runs."""
        by_path = {placement.path: placement for placement in placements}
        member_of = {
            expand_name(entry.key, values): entry.flat
            for entry in self.layout.tensors
            if entry.flat is not None
            for values in entry.instances()
        }
        known = {group.name for group in self.layout.flat_groups}
        for path, name in member_of.items():
            if name not in known:
                raise InvalidError(f"tensor {path!r}: unknown flat group {name!r}")
        for group in self.layout.flat_groups:
            missing = [path for path in group.members if member_of.get(path) != group.name]
            extra = sorted({p for p, name in member_of.items() if name == group.name} - set(group.members))
            if missing or extra:
                raise InvalidError(
                    f"flat group {group.name!r}: members without an entry that says so: {missing[:4]}; "
                    f"entries that are no members: {extra[:4]}"
                )
            by_path |= self._members(group, [by_path[path] for path in group.members])
        yield from by_path.values()

    def _members(self, group: FlatGroup, members: list[Placement]) -> dict[str, Placement]:
        what = f"flat group {group.name!r}"
        meshes = {entry.mesh for entry in self.layout.tensors if entry.flat == group.name}
        if len(meshes) > 1:
            raise InvalidError(f"{what}: its members are of several meshes {sorted(map(str, meshes))}")
        mesh = self.layout.mesh_named(meshes.pop() if meshes else None)
        try:
            ways = mesh.size_of(group.axis)
        except InvalidError as error:
            raise InvalidError(f"{what}: {error}") from None
        end = np.zeros(mesh.size, np.int64)
        spans: list[tuple[Ints, Ints]] = []
        for member in members:
            table, mask = self.tables[member.cells], self.masks[member.mask]
            begin = -(-end // group.align) * group.align
            size = np.where(mask, table.local_shapes.prod(axis=1)[table.of_rank], 0)
            spans.append((begin, size))
            end = np.where(mask, begin + size, end)
        unit = math.lcm(group.pad_to_multiple, ways)
        run = -(-end // unit) * unit // ways
        first = run * mesh.coordinates(group.axis)
        out = {}
        for member, (begin, size) in zip(members, spans, strict=True):
            low = np.clip(first - begin, 0, size)
            high = np.clip(first + run - begin, 0, size)
            where = f"tensor {member.path!r}"
            cells = flat_runs(where, self.tables[member.cells], low, high, keep_padding=False)
            number = self._intern_table(where, cells)
            out[member.path] = Placement(member.path, member.tensor, number, member.mask)
        return out

    def _check_cover(self, path: str, names: tuple[Placement, ...]) -> None:
        key = tuple(sorted({self._held_cells(placement.cells, placement.mask) for placement in names}))
        if key not in self._covered:
            self._covered[key] = self._uncovered(names[0].tensor.shape, key)
        hole = self._covered[key]
        if hole is not None:
            shape = list(names[0].tensor.shape)
            raise InvalidError(f"tensor {path!r}: no rank holds {region_text(hole)} of its shape {shape}")

    def _held_cells(self, table: int, mask: int) -> tuple[int, bytes]:
        """Returns the table and which of its cells some rank of the mask holds; the same for many masks."""
        key = (table, mask)
        if key not in self._cells_held:
            cells = self.tables[table]
            held = np.zeros(len(cells.local_shapes), bool)
            held[cells.of_rank[self.masks[mask] & (cells.of_rank >= 0)]] = True
            self._cells_held[key] = (table, held.tobytes())
        return self._cells_held[key]

    def _uncovered(self, shape: tuple[int, ...], key: tuple[tuple[int, bytes], ...]) -> Boxes | None:
        """Returns a box (2, ndim) that nobody holds, or None."""
        whole = np.stack([np.zeros(len(shape), np.int64), np.array(shape, np.int64)])
        pieces = []
        for table_number, held in key:
            table = self.tables[table_number]
            pieces.append(table.pieces[np.frombuffer(held, bool)[table.piece_cell]])
        return find_hole(whole, np.concatenate(pieces))

    def _intern_table(self, what: str, cells: Cells) -> int:
        number = self._table_of.get(cells.identity)
        if number is None:
            check_cells(what, cells)
            number = self._table_of[cells.identity] = len(self.tables)
            self.tables.append(cells)
        return number

    def _intern_mask(self, mask: Mask) -> int:
        number = self._mask_of.setdefault(mask.tobytes(), len(self.masks))
        if number == len(self.masks):
            self.masks.append(mask)
        return number
