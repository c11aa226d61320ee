"""What a layout says: meshes, nodes, and for each tensor how it is cut and where it exists.

These are the words of the layout JSON, checked one by one. `core.ptc.build_ptc` works out what they mean
together; `formats.layout_json` reads and writes them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

import numpy as np

from tenplexfs.core.dtypes import check_shape
from tenplexfs.core.region import Ints, Region
from tenplexfs.core.snapshot import NodeName, check_node_name
from tenplexfs.errors import InvalidError

__all__ = [
    "Axis",
    "ByIndex",
    "Cut",
    "Dataset",
    "Explicit",
    "ExplicitShard",
    "FlatCut",
    "FlatGroup",
    "Layout",
    "Mesh",
    "Rule",
    "Section",
    "TensorEntry",
    "axis_text",
    "expand_name",
    "has_braces",
    "place_in_order",
]

Axis = tuple[str, ...]
"""Names of mesh axes taken as one, row-major."""

Rule = Literal["exact", "ceil", "balanced"]

_INDEX = re.compile(r"\{([A-Za-z_]\w*)(?:\+(\d+))?\}")
_BRACES = " (a tensor whose own name has braces needs the explicit form, 'ranks')"
_MAX_RANKS = 1 << 17
_MAX_AXES = 31  # and one more are the dims that numpy 1 has
_MAX_TENSORS = 1 << 20
_MAX_PADDING = 1 << 40  # elements; times the ways it still fits int64
_MAX_BATCH = 1 << 48


def axis_text(axis: Axis) -> str:
    """Returns ``axis`` as messages show it."""
    return axis[0] if len(axis) == 1 else "(" + ", ".join(axis) + ")"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes of ranks, in order; rank = row-major index, so the last axis varies fastest."""

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(names) > _MAX_AXES:
            raise InvalidError(f"mesh: {len(names)} axes, at most {_MAX_AXES}")
        if len(set(names)) != len(names):
            raise InvalidError(f"mesh: axis named twice in {names}")
        for name, size in self.axes:
            if size < 1:
                raise InvalidError(f"mesh: axis {name!r}: need a size >= 1, got {size}")
        if self.size > _MAX_RANKS:
            raise InvalidError(f"mesh: {self.size} ranks, at most {_MAX_RANKS}")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    def size_of(self, axis: Axis) -> int:
        """Returns the number of coordinates of ``axis``.

        Raises:
            InvalidError: The mesh has no such axis, or a name is given twice.
        """
        sizes = dict(self.axes)
        for name in axis:
            if name not in sizes:
                raise InvalidError(f"unknown axis {name!r}: the mesh has {', '.join(sizes) or 'none'}")
        if len(set(axis)) != len(axis):
            raise InvalidError(f"axis {axis_text(axis)} names an axis twice")
        return math.prod(sizes[name] for name in axis)

    def coordinates(self, axis: Axis) -> Ints:
        """Returns the coordinate of every rank on ``axis``, int64 (size,)."""
        self.size_of(axis)
        grid = np.indices([size for _, size in self.axes], np.int64).reshape(len(self.axes), -1)
        place = {name: grid[i] for i, (name, _) in enumerate(self.axes)}
        sizes = dict(self.axes)
        total = np.zeros(self.size, np.int64)
        for name in axis:
            total = total * sizes[name] + place[name]
        return total


@dataclass(frozen=True, slots=True)
class Section:
    """A run of a dim that is cut on its own: in ``ways`` parts (None: as many as the axis has)."""

    width: int
    ways: int | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut of one dim over one axis, applied to what the cuts before left.

    Attributes:
        axis: Whose coordinate says which part a rank takes.
        dim: The dim that is cut.
        rule: How the parts are sized where nothing below says so.
        cuts: Explicit points in the global dim, both ends included.
        sections: Widths along the global dim, each cut on its own, the parts joined.
        pad_to: Size to which the global dim is padded first.
        pad_multiple: The global dim is padded to the next multiple of this times the ways.
    """

    axis: Axis
    dim: int
    rule: Rule = "exact"
    cuts: tuple[int, ...] | None = None
    sections: tuple[Section, ...] | None = None
    pad_to: int | None = None
    pad_multiple: int | None = None

    def __post_init__(self) -> None:
        given = [n for n in ("cuts", "sections", "pad_to", "pad_multiple") if getattr(self, n) is not None]
        if len(given) > 1:
            raise InvalidError(f"shard of dim {self.dim}: give one of {' and '.join(given)}")
        if self.dim < 0:
            raise InvalidError(f"shard: dim: need >= 0, got {self.dim}")
        if self.pad_multiple is not None and not 1 <= self.pad_multiple <= _MAX_PADDING:
            raise InvalidError(
                f"shard of dim {self.dim}: pad_multiple: need 1 to {_MAX_PADDING}, got {self.pad_multiple}"
            )
        if self.pad_to is not None and self.pad_to > _MAX_PADDING:
            raise InvalidError(
                f"shard of dim {self.dim}: pad_to: need at most {_MAX_PADDING}, got {self.pad_to}"
            )

    @property
    def speaks_of_global(self) -> bool:
        """Whether the cut is given in terms of the whole dim, so that it must be the first of its dim."""
        return not (
            self.cuts is None and self.sections is None and self.pad_to is None and self.pad_multiple is None
        )


@dataclass(frozen=True, slots=True)
class FlatCut:
    """The shard so far, raveled in C order, padded, cut into equal runs. Last and once."""

    axis: Axis
    pad_to_multiple: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.pad_to_multiple <= _MAX_PADDING:
            raise InvalidError(
                f"flat shard: pad_to_multiple: need 1 to {_MAX_PADDING}, got {self.pad_to_multiple}"
            )


@dataclass(frozen=True, slots=True)
class ByIndex:
    """Coordinates at which a tensor exists, by an index of its path: ``owner[index]``, one or several."""

    by: str
    owner: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One entry of the layout: a tensor, or one for each value of the indices in its key.

    Attributes:
        key: Tensor path with ``{i}`` or ``{i+8}`` where an index is written.
        shape: Global shape.
        dtype: Name of the element type.
        shard: Cuts in order; a `FlatCut` is last.
        on: Where it exists: axis, and coordinates or an index that gives them. All must hold.
        mesh: Name of the other mesh that its axes are of, or None.
        count: Indices and how many values each takes, from 0.
        flat: Name of the flat group it is a member of, or None.
        alias: Key of the entry to which it is tied, or None.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    shard: tuple[Cut | FlatCut, ...] = ()
    on: tuple[tuple[Axis, tuple[int, ...] | ByIndex], ...] = ()
    mesh: str | None = None
    count: tuple[tuple[str, int], ...] = ()
    flat: str | None = None
    alias: str | None = None

    def __post_init__(self) -> None:
        what = f"tensor {self.key!r}"
        check_shape(what, self.shape, self.dtype)
        written = {name for name, _ in _INDEX.findall(self.key)}
        counted = {name for name, _ in self.count}
        if written != counted:
            raise InvalidError(
                f"{what}: its key writes the indices {sorted(written)}, its count gives {sorted(counted)}"
                f"{_BRACES if written - counted else ''}"
            )
        if has_braces(_INDEX.sub("", self.key)):
            raise InvalidError(f"{what}: a brace that writes no index{_BRACES}")
        sizes = dict(self.count)
        for axis, where in self.on:
            if not isinstance(where, ByIndex):
                continue
            if where.by not in sizes:
                raise InvalidError(f"{what}: on {axis_text(axis)}: by {where.by!r} is no index of its key")
            if len(where.owner) != sizes[where.by]:
                raise InvalidError(
                    f"{what}: on {axis_text(axis)}: owner has {len(where.owner)} items, "
                    f"the count of {where.by!r} is {sizes[where.by]}"
                )

    def instances(self) -> Iterator[dict[str, int]]:
        """Yields the values of the indices, one dict a tensor, the last index fastest."""
        names = [name for name, _ in self.count]
        for values in product(*(range(n) for _, n in self.count)):
            yield dict(zip(names, values, strict=True))


def has_braces(path: str) -> bool:
    """Returns whether a tensor path can be said in the explicit form only: in a key braces write an index."""
    return "{" in path or "}" in path


def expand_name(key: str, values: Mapping[str, int]) -> str:
    """Returns ``key`` with its indices written: ``{i}`` as the value, ``{i+8}`` as the value plus 8.

    >>> expand_name("layers/{i+8}/w", {"i": 3})
    'layers/11/w'
    """
    return _INDEX.sub(lambda m: str(values[m[1]] + int(m[2] or 0)), key)


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """Members that are raveled, joined with alignment, padded and cut into equal runs together.

    Attributes:
        name: How entries refer to it.
        members: Tensor paths, in the order in which they are joined.
        align: Elements; each member begins at a multiple.
        pad_to_multiple: The end is padded to the next multiple of lcm(this, ways).
        axis: Whose coordinate says which run a rank takes.
    """

    name: str
    members: tuple[str, ...]
    axis: Axis
    align: int = 1
    pad_to_multiple: int = 1

    def __post_init__(self) -> None:
        if not (1 <= self.align <= _MAX_PADDING and 1 <= self.pad_to_multiple <= _MAX_PADDING):
            raise InvalidError(
                f"flat group {self.name!r}: need align and pad_to_multiple from 1 to {_MAX_PADDING}, "
                f"got {self.align} and {self.pad_to_multiple}"
            )
        if len(set(self.members)) != len(self.members):
            raise InvalidError(f"flat group {self.name!r}: a member is named twice")


@dataclass(frozen=True, slots=True)
class ExplicitShard:
    """What a rank holds of a tensor, said outright; ``pieces`` None where only the local shape is known."""

    local_shape: tuple[int, ...]
    dtype: str | None
    pieces: tuple[tuple[Region, tuple[int, ...]], ...] | None
    padding: tuple[Region, ...] = ()


@dataclass(frozen=True, slots=True)
class Explicit:
    """The explicit form: rank by rank, path by path.

    Attributes:
        ranks: One mapping from tensor path to shard for each rank.
        shapes: Global shape of each tensor path.
    """

    ranks: tuple[Mapping[str, ExplicitShard], ...]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Dataset:
    """How the samples are spread: over ``axis``, ``global_batch`` samples a step."""

    axis: Axis
    global_batch: int
    uneven: str | None = None
    tail: str | None = None
    context: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """The JSON that says how a job is parallelised, checked.

    Attributes:
        mesh: The main mesh.
        tensors: Entries of the mesh form.
        nodes: Node and its ranks, in the order given; empty when left out or given as ``devices``.
        devices: Node and its number of devices, where the planner places the ranks.
        keep_together: Axes whose ranks stay on one node when the planner places them.
        meshes: Other factorisations of the same ranks, by name.
        flat_groups: By name, in the order given.
        explicit: The explicit form, or None.
        dataset: Or None.
    """

    mesh: Mesh
    tensors: tuple[TensorEntry, ...] = ()
    nodes: tuple[tuple[NodeName, tuple[int, ...]], ...] = ()
    devices: tuple[tuple[NodeName, int], ...] = ()
    keep_together: tuple[str, ...] = ()
    meshes: tuple[tuple[str, Mesh], ...] = ()
    flat_groups: tuple[FlatGroup, ...] = ()
    explicit: Explicit | None = None
    dataset: Dataset | None = field(default=None)

    def __post_init__(self) -> None:
        size = self.mesh.size
        tensors = sum(math.prod(n for _, n in entry.count) for entry in self.tensors)
        if tensors > _MAX_TENSORS:
            raise InvalidError(f"tensors: their counts give {tensors}, at most {_MAX_TENSORS}")
        for name, mesh in self.meshes:
            if mesh.size != size:
                raise InvalidError(f"mesh {name!r}: {mesh.size} ranks, the main mesh has {size}")
        for name, _ in (*self.nodes, *self.devices):
            check_node_name(name)
        if self.nodes:
            self._check_nodes(size)
        for name, devices in self.devices:
            if devices < 0:
                raise InvalidError(f"nodes: {name}: need a number of devices >= 0, got {devices}")
        if self.devices and sum(n for _, n in self.devices) < size:
            raise InvalidError(
                f"nodes: {sum(n for _, n in self.devices)} devices on {len(self.devices)} nodes, "
                f"the mesh has {size} ranks"
            )
        if self.keep_together:
            self.mesh.size_of(self.keep_together)
        if self.explicit is not None and len(self.explicit.ranks) != size:
            raise InvalidError(f"ranks: {len(self.explicit.ranks)} given, the mesh has {size}")
        if self.dataset is not None:
            self.mesh.size_of(self.dataset.axis)
            if not 1 <= self.dataset.global_batch <= _MAX_BATCH:
                raise InvalidError(
                    f"dataset: global_batch: need 1 to {_MAX_BATCH}, got {self.dataset.global_batch}"
                )

    def _check_nodes(self, size: int) -> None:
        seen: dict[int, str] = {}
        for node, ranks in self.nodes:
            for rank in ranks:
                if not 0 <= rank < size:
                    raise InvalidError(f"nodes: {node}: rank {rank}: the mesh has ranks 0 to {size - 1}")
                if rank in seen:
                    raise InvalidError(f"nodes: rank {rank} is on {seen[rank]} and on {node}")
                seen[rank] = node
        if len(seen) < size:
            missing = [rank for rank in range(size) if rank not in seen]
            raise InvalidError(f"nodes: ranks {missing[:8]} are on no node ({len(missing)} of {size})")

    def mesh_named(self, name: str | None) -> Mesh:
        """Returns the main mesh, or the one called ``name``.

        Raises:
            InvalidError: There is none of that name.
        """
        if name is None:
            return self.mesh
        for other, mesh in self.meshes:
            if other == name:
                return mesh
        raise InvalidError(f"unknown mesh {name!r}: the layout has {[n for n, _ in self.meshes]}")


def place_in_order(layout: Layout, fallback: str = "node0") -> Layout:
    """Returns ``layout`` with every rank on a node: as given, else filled in order by device counts.

    Args:
        layout: Its ``nodes`` stay when there are any.
        fallback: The node of all ranks when the layout names no node at all.
    """
    if layout.nodes:
        return layout
    size = layout.mesh.size
    devices = layout.devices or ((check_node_name(fallback), size),)
    nodes, first = [], 0
    for node, count in devices:
        ranks = tuple(range(first, min(first + count, size)))
        if ranks:
            nodes.append((node, ranks))
        first += count
    return replace(layout, nodes=tuple(nodes), devices=())
