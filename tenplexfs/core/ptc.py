"""The parallelizable tensor collection, PTC = (T, σ, φ, α).

T are the tensors; the slicing σ is a table of distinct shards for each way of cutting (`core.cells`); the
partitioning φ is a mask over ranks for each tensor, where it exists; the allocation α gives each rank a node.

Thousands of ranks times thousands of tensors are never written out: tensors that are cut alike share one
table, tensors that exist alike share one mask, and `Shard` objects are made only for what somebody looks at.

Source: Tenplex (SOSP 2024), section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from tenplexfs.core.cells import Cells
from tenplexfs.core.dtypes import itemsize_of
from tenplexfs.core.layout import Layout
from tenplexfs.core.region import Region
from tenplexfs.errors import InvalidError, NotFoundError

__all__ = ["PTC", "Holder", "Piece", "Placement", "Shard", "Tensor"]

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of a tensor and where it lies in the local array of a shard; the unit of moving.

    Attributes:
        region: In global coordinates.
        at: Where it begins in the local array; one flat offset, at which the region lies raveled in C order,
            where the local array has other dims than the tensor.
    """

    region: Region
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """What a rank holds of a tensor.

    Attributes:
        local_shape: Of the local array.
        pieces: Ordered; with the padding they cover the local array exactly.
        padding: Boxes in local coordinates that hold no data.
        flat: Whether the local array is raveled.
    """

    local_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    padding: tuple[Region, ...] = ()
    flat: bool = False


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the collection: canonical path, global shape, element type."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return itemsize_of(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Placement:
    """One name of a tensor: how it is cut there, and on which ranks it exists.

    Attributes:
        path: As shown; the canonical path, or another name where the tensor is tied.
        tensor: What it is a name of.
        cells: Index into `PTC.tables`.
        mask: Index into `PTC.masks`.
    """

    path: str
    tensor: Tensor
    cells: int
    mask: int


@dataclass(frozen=True, slots=True)
class Holder:
    """A distinct shard of a tensor, and the (rank, shown path) under which it is held."""

    shard: Shard
    keys: tuple[tuple[int, str], ...]


class PTC:
    """A checked collection: every shard covered exactly, every tensor covered by what is held.

    `core.build.build_ptc` makes it of a layout.

    Attributes:
        layout: What it was built of, every rank on a node.
        world_size: Number of ranks.
        nodes: Node and its ranks, ascending.
        placements: Shown path and its placement, in the order of the paths.
        tables: Distinct ways of cutting.
        masks: Distinct sets of ranks, bool (ranks,).
    """

    def __init__(
        self,
        layout: Layout,
        placements: Iterable[Placement],
        tables: Iterable[Cells],
        masks: Iterable[Mask],
    ) -> None:
        self.layout = layout
        self.world_size = layout.mesh.size
        self.nodes: Mapping[str, tuple[int, ...]] = MappingProxyType(
            {node: tuple(sorted(ranks)) for node, ranks in layout.nodes}
        )
        self.tables = tuple(tables)
        self.masks = tuple(masks)
        by_path = sorted(placements, key=lambda placement: placement.path)
        self.placements: Mapping[str, Placement] = MappingProxyType({p.path: p for p in by_path})
        self._node_of = {rank: node for node, ranks in self.nodes.items() for rank in ranks}

    def __reduce__(self) -> tuple[object, ...]:
        return PTC, (self.layout, tuple(self.placements.values()), self.tables, self.masks)

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every shown path, names of tied tensors included, and its tensor."""
        return MappingProxyType({path: placement.tensor for path, placement in self.placements.items()})

    @cached_property
    def names(self) -> Mapping[str, tuple[Placement, ...]]:
        """Canonical path and all placements of the tensor, in the order of their paths."""
        grouped: dict[str, list[Placement]] = {}
        for placement in self.placements.values():
            grouped.setdefault(placement.tensor.path, []).append(placement)
        return MappingProxyType({path: tuple(group) for path, group in sorted(grouped.items())})

    def node_of(self, rank: int) -> str:
        """Returns the node of ``rank``.

        Raises:
            NotFoundError: There is no such rank.
        """
        self._check_rank(rank)
        return self._node_of[rank]

    def rank_paths(self, rank: int) -> tuple[str, ...]:
        """Returns the paths shown on ``rank``, sorted; the same object for all ranks that show the same."""
        self._check_rank(rank)
        return self._path_sets[self._path_set_of[rank]]

    def shard(self, rank: int, path: str) -> Shard:
        """Returns what ``rank`` holds under ``path``, a shown path.

        Raises:
            NotFoundError: There is no such rank or path, or it is not on that rank.
        """
        self._check_rank(rank)
        placement = self.placements.get(path)
        if placement is None:
            raise NotFoundError(f"no tensor {path!r}")
        cell = self.cell(rank, placement)
        if cell < 0:
            raise NotFoundError(f"tensor {path!r} is not on rank {rank}")
        return self.shard_of(placement.cells, cell)

    def cell(self, rank: int, placement: Placement) -> int:
        """Returns the cell of ``placement`` on ``rank``, or -1 when it is not there."""
        return int(self.tables[placement.cells].of_rank[rank]) if self.masks[placement.mask][rank] else -1

    def holders(self, path: str) -> tuple[Holder, ...]:
        """Returns the distinct shards of the tensor ``path`` (any name), each with who holds it.

        Raises:
            NotFoundError: There is no such tensor.
        """
        if path not in self.placements:
            raise NotFoundError(f"no tensor {path!r}")
        found: dict[bytes, tuple[Shard, list[tuple[int, str]]]] = {}
        for placement in self.names[self.placements[path].tensor.path]:
            table = self.tables[placement.cells]
            ranks = np.flatnonzero(self.masks[placement.mask] & (table.of_rank >= 0))
            for rank in ranks.tolist():
                cell = int(table.of_rank[rank])
                signature = table.signatures[cell]
                if signature not in found:
                    found[signature] = (self.shard_of(placement.cells, cell), [])
                found[signature][1].append((rank, placement.path))
        return tuple(Holder(shard, tuple(keys)) for shard, keys in found.values())

    def ranks(self) -> Iterator[int]:
        """Yields every rank."""
        yield from range(self.world_size)

    def local_bytes(self, rank: int) -> int:
        """Returns the bytes of all local arrays of ``rank``, padding included, each name counted."""
        return sum(
            math.prod(self.shard(rank, path).local_shape) * self.tensors[path].itemsize
            for path in self.rank_paths(rank)
        )

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise NotFoundError(f"no rank {rank}: the job has ranks 0 to {self.world_size - 1}")

    def shard_of(self, table: int, cell: int) -> Shard:
        """Returns cell ``cell`` of table ``table`` as an object; the same one at each call."""
        cells = self.tables[table]
        known = self._shards.get((table, cell))
        if known is None:
            a, b = cells.bounds[cell : cell + 2]
            c, d = cells.pad_bounds[cell : cell + 2]
            known = Shard(
                tuple(cells.local_shapes[cell].tolist()),
                tuple(
                    Piece(Region(tuple(box[0]), tuple(box[1])), tuple(at))
                    for box, at in zip(cells.pieces[a:b].tolist(), cells.at[a:b].tolist(), strict=True)
                ),
                tuple(Region(tuple(box[0]), tuple(box[1])) for box in cells.pads[c:d].tolist()),
                cells.flat,
            )
            self._shards[table, cell] = known
        return known

    @cached_property
    def _shards(self) -> dict[tuple[int, int], Shard]:
        return {}

    @cached_property
    def _path_sets(self) -> tuple[tuple[str, ...], ...]:
        paths = tuple(self.placements)
        sets: dict[bytes, tuple[str, ...]] = {}
        for row in self._presence:
            if row.tobytes() not in sets:
                sets[row.tobytes()] = tuple(paths[i] for i in np.flatnonzero(row).tolist())
        return tuple(sets.values())

    @cached_property
    def _path_set_of(self) -> tuple[int, ...]:
        number: dict[bytes, int] = {}
        return tuple(number.setdefault(row.tobytes(), len(number)) for row in self._presence)

    @cached_property
    def _presence(self) -> Mask:
        """Whether each rank (row) shows each placement (column)."""
        held = [self.masks[p.mask] & (self.tables[p.cells].of_rank >= 0) for p in self.placements.values()]
        return np.ascontiguousarray(np.stack(held, axis=1)) if held else np.zeros((self.world_size, 0), bool)


def check_tensor_path(path: str) -> None:
    """Refuses a path that could leave its tree or be no name of a file.

    Raises:
        InvalidError: A component is empty, dots only, too long, or holds NUL.
    """
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise InvalidError(f"tensor path {path!r}: no UTF-8 text: {error}") from None
    for component in path.split("/"):
        if not component or set(component) <= {"."} or len(component.encode()) > 240 or "\0" in component:
            raise InvalidError(f"tensor path {path!r}: component {component!r} is no name of a file here")
