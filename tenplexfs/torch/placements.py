"""What DTensor placements mean, as plain data: no torch is needed to read this file, nor to gather its specs.

A placement is applied mesh dim by mesh dim, left to right, to what those before it left. ``Shard(d)`` takes a
run, as `torch.chunk` does. ``_StridedShard(d, split_factor=f)`` first cuts what is left in f runs, then takes
its run of each, and joins them: so that cutting a dim over the dims of the mesh *to the right* first (tensor
parallelism first, FSDP within) can be written left to right. `Split` is both.

The two ways are the same only where every run is full. On uneven dims FSDP2 holds what the true order leaves,
while DTensor's own arithmetic says otherwise: 7 rows over (dp 3, tp 2) leave row 6 to the rank at (2, 1), by
the placements to (2, 0). Local shapes then tell which is meant, and where they do not, it is refused.

Source: torch 2.13, `distributed/tensor/placement_types.py`, `_utils.py`, `fsdp/_fully_shard/_fsdp_param.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from tenplexfs.core.layout import Axis, Cut, ExplicitShard, Mesh
from tenplexfs.core.region import Ints, Region
from tenplexfs.errors import InvalidError

__all__ = ["MeshSpec", "Split", "StateSpec", "TensorSpec", "axes_of", "cuts_of", "readings"]


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """A `DeviceMesh`: global ranks in row-major order, and names of its dims or None."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...] | None = None

    @property
    def in_order(self) -> bool:
        """Whether the row-major index is the global rank."""
        return self.ranks == tuple(range(len(self.ranks)))

    def as_mesh(self) -> Mesh:
        """Returns the mesh of a layout; dims without a name are called dim0, dim1, ..."""
        names = self.names or tuple(f"dim{i}" for i in range(len(self.shape)))
        return Mesh(tuple(zip(names, self.shape, strict=True)))


@dataclass(frozen=True, slots=True)
class Split:
    """A cut of tensor dim ``dim`` over one mesh dim; ``factor`` is the split factor of a strided one."""

    dim: int
    factor: int = 1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """How one process sees one tensor.

    Attributes:
        shape: Global.
        dtype: Our name of its type.
        mesh: Over which it is spread; None for a plain tensor.
        splits: One for each dim of the mesh; None where it is replicated.
        local_shape: Of the local array, None where there is none to look at.
    """

    shape: tuple[int, ...]
    dtype: str
    mesh: MeshSpec | None = None
    splits: tuple[Split | None, ...] = ()
    local_shape: tuple[int, ...] | None = None

    @property
    def ways(self) -> tuple[int, ...]:
        """Size of each mesh dim."""
        return self.mesh.shape if self.mesh is not None else ()


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What one process holds; plain data, so that ranks can gather it.

    Attributes:
        rank: Of the process, None where no process group is there.
        world_size: Likewise.
        root: The mesh that all others are parts of, where there is one.
        tensors: Tensor path and its spec.
    """

    rank: int | None
    world_size: int | None
    root: MeshSpec | None
    tensors: Mapping[str, TensorSpec]


Segments = tuple[tuple[int, int], ...]
"""(start, stop) in the global dim, in local order."""
_Step = tuple[int, int, int]
"""Ways, coordinate, factor."""


@cache
def _segments(size: int, steps: tuple[_Step, ...]) -> Segments:
    segments: list[tuple[int, int]] = [(0, size)] if size else []
    for ways, coordinate, factor in steps:
        length = sum(b - a for a, b in segments)
        chunk = -(-length // factor)
        taken: list[tuple[int, int]] = []
        for first in range(0, length, max(chunk, 1)):
            width = min(chunk, length - first)
            step = -(-width // ways)
            low, high = min(width, step * coordinate), min(width, step * (coordinate + 1))
            taken += _clip(segments, first + low, first + high)
        segments = taken
    return tuple(segments)


def _clip(segments: Sequence[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    out, first = [], 0
    for a, b in segments:
        low, high = max(begin - first, 0), min(end - first, b - a)
        if low < high:
            out.append((a + low, a + high))
        first += b - a
    return out


def readings(spec: TensorSpec, coordinates: Sequence[int]) -> tuple[ExplicitShard, ...]:
    """Returns what the rank at ``coordinates`` of the spec's mesh holds.

    Two shards where torch has two answers: first what the placements say, then what the true order leaves.
    """
    literal: list[Segments] = []
    ordered: list[Segments] = []
    for dim, size in enumerate(spec.shape):
        steps = [
            (spec.ways[m], coordinates[m], split.factor)
            for m, split in enumerate(spec.splits)
            if split is not None and split.dim == dim
        ]
        literal.append(_segments(size, tuple(steps)))
        order = _true_order(spec, dim)
        if order is not None:
            ordered.append(_segments(size, tuple((spec.ways[m], coordinates[m], 1) for m in order)))
    found = [_shard(spec, literal)]
    if len(ordered) == len(literal) and _merged(ordered) != _merged(literal):
        found.append(_shard(spec, ordered))
    return tuple(found)


def _merged(parts: Sequence[Segments]) -> list[Segments]:
    """Returns the segments with adjacent ones joined: they say the same."""
    out = []
    for segments in parts:
        joined: list[tuple[int, int]] = []
        for a, b in segments:
            if joined and joined[-1][1] == a:
                joined[-1] = (joined[-1][0], b)
            else:
                joined.append((a, b))
        out.append(tuple(joined))
    return out


def _shard(spec: TensorSpec, parts: Sequence[Segments]) -> ExplicitShard:
    merged = _merged(parts)
    shape = tuple(sum(b - a for a, b in segments) for segments in merged)
    placed: list[list[tuple[int, int, int]]] = []
    for segments in merged:
        end, row = 0, []
        for a, b in segments:
            row.append((a, b, end))
            end += b - a
        placed.append(row)
    pieces = tuple(
        (Region(tuple(a for a, _, _ in box), tuple(b for _, b, _ in box)), tuple(at for _, _, at in box))
        for box in product(*placed)
    )
    return ExplicitShard(shape, spec.dtype, pieces)


def _true_order(spec: TensorSpec, dim: int) -> list[int] | None:
    """Returns the mesh dims that cut ``dim`` in the order of plain cuts, or None where none is.

    A strided split by a factor comes after the first dims to its right whose ways multiply to the factor.
    """
    order: list[int] = []
    for mesh_dim in reversed(range(len(spec.splits))):
        split = spec.splits[mesh_dim]
        if split is None or split.dim != dim:
            continue
        for place in range(len(order) + 1):
            if math.prod(spec.ways[m] for m in order[:place]) == split.factor:
                order.insert(place, mesh_dim)
                break
        else:
            return None
    return order


def cuts_of(spec: TensorSpec, axes: Sequence[Axis]) -> tuple[Cut, ...] | None:
    """Returns the cuts in their true order, ``axes`` being the axes of each mesh dim; None where none is."""
    cuts: list[Cut] = []
    for dim in range(len(spec.shape)):
        order = _true_order(spec, dim)
        if order is None:
            return None
        cuts += [Cut(axes[m], dim, "ceil") for m in order if axes[m]]
    return tuple(cuts)


def axes_of(mesh: MeshSpec, root: Mesh) -> tuple[Axis, ...] | None:
    """Returns the axes of ``root`` that each dim of ``mesh`` runs over, or None where it is no part of it.

    By the ranks, not by the names: a flattened dim is several axes. A dim of size 1 has the axis of its name,
    or none.
    """
    if max(mesh.ranks) >= root.size:
        return None
    places = {name: root.coordinates((name,)) for name, _ in root.axes}
    grid = np.array(mesh.ranks, np.int64).reshape(mesh.shape)
    axes: list[Axis] = []
    for dim, size in enumerate(mesh.shape):
        line = np.moveaxis(grid, dim, 0).reshape(size, -1)[:, 0]
        varying = tuple(name for name, _ in root.axes if len(np.unique(places[name][line])) > 1)
        name = mesh.names[dim] if mesh.names else ""
        if not varying and dict(root.axes).get(name) == size:
            varying = (name,)
        if (root.size_of(varying) if varying else 1) != size:
            return None
        axes.append(varying)
    indices: Ints = np.indices(mesh.shape, np.int64)
    for dim, axis in enumerate(axes):
        if axis and (root.coordinates(axis)[grid] != indices[dim]).any():
            return None
    return tuple(axes)


def refuse_split(what: str, spec: TensorSpec) -> None:
    """Refuses splits that do not fit the tensor or its mesh.

    Raises:
        InvalidError: Names the split.
    """
    if spec.mesh is None:
        return
    if len(spec.splits) != len(spec.mesh.shape):
        raise InvalidError(f"{what}: {len(spec.splits)} placements for a mesh of {len(spec.mesh.shape)} dims")
    for split in spec.splits:
        if split is not None and not (0 <= split.dim < len(spec.shape) and split.factor >= 1):
            raise InvalidError(f"{what}: {split}: the tensor is {list(spec.shape)}")
