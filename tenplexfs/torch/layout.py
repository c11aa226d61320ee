"""Layouts from DTensors: FSDP2, HSDP, tensor and pipeline parallelism.

A tensor whose mesh is part of the root mesh is said by cuts over the root's axes, so that the layout can
follow another mesh; what no cuts say, rank by rank. Either way it is proved against the placements first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from tenplexfs.core.dtypes import dtype_of
from tenplexfs.core.held import cuts_give, explicit_layout, on_of_ranks
from tenplexfs.core.layout import Cut, ExplicitShard, Layout, Mesh, TensorEntry, has_braces
from tenplexfs.errors import InvalidError
from tenplexfs.torch.exchange import Exchange, this_rank
from tenplexfs.torch.placements import (
    MeshSpec,
    Split,
    StateSpec,
    TensorSpec,
    axes_of,
    cuts_of,
    readings,
    refuse_split,
)

__all__ = [
    "TensorLike",
    "choose",
    "describe",
    "dtype_name",
    "layout_of",
    "layout_of_ranks",
    "shard_of",
    "shards_of",
]

TensorLike: TypeAlias = torch.Tensor | tuple[Sequence[int], torch.dtype, DeviceMesh, Sequence[Placement]]
"""A DTensor, a plain tensor, or (global shape, dtype, mesh, placements)."""

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.parameter.Buffer)


def dtype_name(what: str, dtype: torch.dtype) -> str:
    """Returns our name of ``dtype``, the type of the tensor ``what``.

    Raises:
        InvalidError: It has none, as quantized and sub-byte types.
    """
    name = str(dtype).removeprefix("torch.")
    try:
        dtype_of(name)
    except InvalidError as error:
        raise InvalidError(f"{what}: {error.message}") from None
    return name


def describe(state: Mapping[str, TensorLike], *, mesh: DeviceMesh | None = None) -> StateSpec:
    """Returns what this process holds, as plain data that ranks can gather.

    Args:
        state: Tensor path (a dot is read as ``/``) and tensor.
        mesh: The root mesh; default: the largest that a tensor's mesh is a part of.

    Raises:
        InvalidError: A value is no tensor, a placement is `Partial` or unknown, or two names give one path.
    """
    meshes: dict[int, MeshSpec] = {}
    tensors: dict[str, TensorSpec] = {}
    alike: dict[object, TensorSpec] = {}
    roots: dict[int, DeviceMesh] = {} if mesh is None else {id(mesh): mesh}
    with torch.no_grad():  # so that a local array is at hand
        for name, value in state.items():
            path = name.replace(".", "/")
            if path in tensors:
                raise InvalidError(f"tensor {path!r}: two names of the state give this path")
            kind = _kind(value) or path
            if kind not in alike:
                what = f"tensor {path!r}"
                alike[kind] = _spec(what, value, meshes, None if mesh is not None else roots)
            tensors[path] = alike[kind]
    ready = dist.is_available() and dist.is_initialized()
    root = max(roots.values(), key=lambda m: m.size(), default=None)
    return StateSpec(
        dist.get_rank() if ready else None,
        dist.get_world_size() if ready else None,
        None if root is None else _mesh_spec(root),
        tensors,
    )


def layout_of(
    state: Mapping[str, TensorLike], *, mesh: DeviceMesh | None = None, world_size: int | None = None
) -> Layout:
    """Returns the layout as this process alone can tell it.

    A DTensor exists on the ranks of its mesh, a plain tensor on all. Other stages of a pipeline, and replicas
    that data parallelism keeps outside of a tensor's mesh, are known to other ranks: see `layout_of_ranks`.

    Args:
        state: Tensor path (a dot is read as ``/``) and tensor.
        mesh: The root mesh; default: the largest that a tensor's mesh is a part of.
        world_size: Default: of the process group, else the size of the root mesh.

    Raises:
        InvalidError: As `describe`; or torch has two answers and local shapes do not tell which holds.
    """
    spec = describe(state, mesh=mesh)
    ranks = [rank for t in spec.tensors.values() if t.mesh is not None for rank in t.mesh.ranks]
    least = max([len(spec.root.ranks) if spec.root else 1, *(rank + 1 for rank in ranks)])
    size = world_size or max(spec.world_size or 1, least)
    if size < least:
        raise InvalidError(f"world_size: need >= {least}, which the meshes have, got {size}")
    held = {}
    for path, tensor in spec.tensors.items():
        where = range(size) if tensor.mesh is None else tensor.mesh.ranks
        other = replace(tensor, local_shape=None)
        held[path] = {rank: tensor if rank == spec.rank else other for rank in where}
    return _layout(spec.root, size, held)


def layout_of_ranks(states: Sequence[StateSpec]) -> Layout:
    """Returns the layout of what all ranks hold, ``states[r]`` being `describe` of rank r.

    Raises:
        InvalidError: Ranks disagree about a tensor, or are not in order; or torch has two answers.
    """
    held: dict[str, dict[int, TensorSpec]] = {}
    meshes: dict[MeshSpec, MeshSpec] = {}
    for rank, state in enumerate(states):
        if state.rank not in (None, rank):
            raise InvalidError(
                f"states: place {rank} holds rank {state.rank}: need them in the order of ranks"
            )
        same: dict[int, MeshSpec | None] = {}  # so that equal meshes are one object, and cheap to compare
        for path, tensor in state.tensors.items():
            mesh = tensor.mesh
            if mesh is not None and id(mesh) not in same:
                same[id(mesh)] = meshes.setdefault(mesh, mesh) if rank in mesh.ranks else None
            shared = same[id(mesh)] if mesh is not None else None
            if mesh is None or shared is not None:  # a DTensor is empty outside of its mesh
                held.setdefault(path, {})[rank] = replace(tensor, mesh=shared)
    roots = {state.root for state in states if state.root is not None}
    root = max(roots, key=lambda m: (len(m.ranks), m.in_order, m.ranks), default=None)
    return _layout(root, len(states), held)


def shard_of(tensor: TensorLike, rank: int | None = None) -> ExplicitShard:
    """Returns the boxes that ``rank`` (default: this process) holds of ``tensor``, and where they lie.

    Raises:
        InvalidError: The rank is not of the tensor's mesh, or torch has two answers for it.
    """
    spec = _spec("tensor", tensor, {}, None)
    own = dist.get_rank() if dist.is_available() and dist.is_initialized() else None
    rank = rank if rank is not None else own
    if spec.mesh is not None and (rank is None or rank not in spec.mesh.ranks):
        raise InvalidError(f"rank {rank}: not of the tensor's mesh {list(spec.mesh.ranks)}")
    found = readings(spec, _coordinates(spec, rank or 0))
    return choose("tensor", [{0: shard} for shard in found], {0: spec.local_shape if rank == own else None})[
        0
    ]


def shards_of(tensors: Mapping[str, DTensor]) -> dict[str, ExplicitShard]:
    """Returns what this process holds of each of ``tensors``, whose meshes it is in.

    Where torch has two answers the ranks of the mesh tell each other their local shapes; they all come here
    with the same tensors then.

    Raises:
        InvalidError: The shapes do not tell.
    """
    meshes: dict[int, MeshSpec] = {}
    found: dict[str, ExplicitShard] = {}
    alike: dict[object, tuple[TensorSpec, ExplicitShard | None]] = {}
    unclear: dict[MeshSpec, dict[str, TensorSpec]] = {}
    own = this_rank()
    for name, tensor in tensors.items():
        kind = _kind(tensor)
        if kind not in alike:
            spec = _spec(f"tensor {name!r}", tensor, meshes, None)
            clear = readings(spec, _coordinates(spec, own))[0] if _is_clear(spec) else None
            alike[kind] = spec, clear
        spec, clear = alike[kind]
        assert spec.mesh is not None
        if clear is not None:
            found[name] = clear
        else:
            unclear.setdefault(spec.mesh, {})[name] = spec
    for mesh, specs in unclear.items():
        exchange = Exchange(f"shapes/{hash(mesh.ranks)}")
        exchange.post(f"of{own}", {name: spec.local_shape for name, spec in specs.items()})
        shapes = {rank: exchange.get(f"of{rank}") for rank in mesh.ranks}
        for name, spec in specs.items():
            both = {rank: readings(spec, _coordinates(spec, rank)) for rank in mesh.ranks}
            ways = [{rank: each[i] for rank, each in both.items()} for i in (0, -1)]
            seen = {rank: shapes[rank].get(name) for rank in mesh.ranks}
            found[name] = choose(f"tensor {name!r}", ways, seen)[own]
    return found


def _is_clear(spec: TensorSpec) -> bool:
    """Returns whether torch has one answer for every rank of the mesh."""
    if all(split is None or split.factor == 1 for split in spec.splits):
        return True
    return all(len(readings(spec, place)) == 1 for place in np.ndindex(*spec.ways))


def _spec(
    what: str, value: object, meshes: dict[int, MeshSpec], roots: dict[int, DeviceMesh] | None
) -> TensorSpec:
    local = None
    if isinstance(value, DTensor):
        shape, dtype, mesh, placements = value.shape, value.dtype, value.device_mesh, value.placements
        local = tuple(value.to_local().shape)
    elif isinstance(value, tuple):
        shape, dtype, mesh, placements = value
    elif isinstance(value, torch.Tensor) and (type(value) in _PLAIN):
        return TensorSpec(tuple(value.shape), dtype_name(what, value.dtype))
    else:
        raise InvalidError(f"{what}: {type(value).__name__}: need a DTensor or a plain tensor")
    if id(mesh) not in meshes:
        meshes[id(mesh)] = _mesh_spec(mesh)
        if roots is not None:
            root = _root_of(mesh)
            roots.setdefault(id(root), root)
    splits = tuple(_split(what, placement, len(shape)) for placement in placements)
    spec = TensorSpec(tuple(shape), dtype_name(what, dtype), meshes[id(mesh)], splits, local)
    refuse_split(what, spec)
    return spec


def _kind(value: object) -> object:
    """Returns what is the same for DTensors of the same spec; None for all else."""
    if not isinstance(value, DTensor):
        return None
    placements, local = value.placements, value.to_local().shape
    types = tuple(map(type, placements))  # see `_split`
    return value.shape, value.dtype, id(value.device_mesh), placements, types, local


def _root_of(mesh: DeviceMesh) -> DeviceMesh:
    if hasattr(mesh, "_get_root_mesh"):
        root: DeviceMesh = mesh._get_root_mesh()
        return root
    from torch.distributed.device_mesh import _mesh_resources  # before torch 2.9

    older: DeviceMesh = _mesh_resources.get_root_mesh(mesh)
    return older


def _mesh_spec(mesh: DeviceMesh) -> MeshSpec:
    names = None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names)
    return MeshSpec(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()), names)


def _split(what: str, placement: Placement, ndim: int) -> Split | None:
    # By type: a strided and a plain shard may compare equal. Before 2.8 the strided one was a kind of Shard.
    if isinstance(placement, _StridedShard):
        return Split(placement.dim % max(ndim, 1), int(placement.split_factor))
    if isinstance(placement, Shard):
        return Split(placement.dim % max(ndim, 1))
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, Partial):
        raise InvalidError(
            f"{what}: {placement!r} is a sum not yet taken: redistribute it before it is stored"
        )
    raise InvalidError(f"{what}: placement {placement!r} is not known here")


def _coordinates(spec: TensorSpec, rank: int) -> tuple[int, ...]:
    if spec.mesh is None:
        return ()
    place = np.unravel_index(spec.mesh.ranks.index(rank), spec.mesh.shape)
    return tuple(int(i) for i in place)


def _layout(root: MeshSpec | None, size: int, held: Mapping[str, Mapping[int, TensorSpec]]) -> Layout:
    whole = root is not None and root.in_order and len(root.ranks) == size
    mesh = root.as_mesh() if root is not None and whole else Mesh((("rank", size),))
    reader = _Reader(mesh)
    entries: list[TensorEntry] = []
    explicit: dict[str, tuple[tuple[int, ...], Mapping[int, ExplicitShard]]] = {}
    for path, specs in held.items():
        first = next(iter(specs.values()))
        shard, cuts, on = reader.read(f"tensor {path!r}", specs)
        if cuts is not None and on is not None and not has_braces(path):
            entries.append(TensorEntry(path, first.shape, first.dtype, cuts, on))
        else:
            explicit[path] = (first.shape, shard)
    return explicit_layout(mesh, explicit, entries)


_On: TypeAlias = tuple[tuple[tuple[str], tuple[int, ...]], ...]
_Read: TypeAlias = tuple[dict[int, ExplicitShard], tuple[Cut, ...] | None, _On | None]


class _Reader:
    """Works out each distinct way of holding a tensor once."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._known: dict[tuple[tuple[int, object], ...], _Read] = {}
        self._axes: dict[int, tuple[tuple[str, ...], ...] | None] = {}
        self._number: dict[tuple[object, ...], int] = {}

    def read(self, what: str, specs: Mapping[int, TensorSpec]) -> _Read:
        kinds = {(spec.shape, spec.dtype) for spec in specs.values()}
        if len(kinds) > 1:
            shown = ", ".join(sorted(f"{list(shape)} {dtype}" for shape, dtype in kinds))
            raise InvalidError(f"{what}: its shape and dtype differ by rank: {shown}")
        key = tuple((rank, self._kind(spec)) for rank, spec in specs.items())
        if key not in self._known:
            self._known[key] = self._read(what, specs)
        return self._known[key]

    def _kind(self, spec: TensorSpec) -> int:
        parts = (spec.shape, spec.dtype, id(spec.mesh), spec.splits, spec.local_shape)
        return self._number.setdefault(parts, len(self._number))

    def _read(self, what: str, specs: Mapping[int, TensorSpec]) -> _Read:
        places = {
            id(spec.mesh): dict(zip(spec.mesh.ranks, np.ndindex(*spec.mesh.shape), strict=True))
            for spec in specs.values()
            if spec.mesh is not None
        }
        literal, ordered = {}, {}
        for rank, spec in specs.items():
            found = readings(spec, places[id(spec.mesh)][rank] if spec.mesh is not None else ())
            literal[rank], ordered[rank] = found[0], found[-1]
        ways = [literal, ordered] if literal != ordered else [literal]
        chosen = choose(what, ways, {rank: spec.local_shape for rank, spec in specs.items()})
        cuts = self._cuts(specs.values())
        if cuts is not None and not cuts_give(next(iter(specs.values())).shape, cuts, self.mesh, chosen):
            cuts = None
        return chosen, cuts, on_of_ranks(self.mesh, specs)

    def _cuts(self, specs: Iterable[TensorSpec]) -> tuple[Cut, ...] | None:
        found: set[tuple[Cut, ...] | None] = set()
        for spec in specs:
            axes: tuple[tuple[str, ...], ...] | None = ()
            if spec.mesh is not None:
                if id(spec.mesh) not in self._axes:
                    self._axes[id(spec.mesh)] = axes_of(spec.mesh, self.mesh)
                axes = self._axes[id(spec.mesh)]
            found.add(cuts_of(spec, axes) if axes is not None else None)
            if len(found) > 1:
                return None
        return found.pop()


def choose(
    what: str, ways: Sequence[dict[int, ExplicitShard]], seen: Mapping[int, tuple[int, ...] | None]
) -> dict[int, ExplicitShard]:
    """Returns the one of ``ways`` to read placements that the local shapes bear out.

    Args:
        what: The tensor, for messages.
        ways: Each the shards by rank.
        seen: Local shapes by rank, None where there is none to look at.

    Raises:
        InvalidError: None does, or several.
    """
    fits = [
        held
        for held in ways
        if all(shape is None or held[rank].local_shape == shape for rank, shape in seen.items())
    ]
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise InvalidError(
            f"{what}: strided over a dim that does not divide, which FSDP2 and DTensor read in two ways: "
            f"give the states of all ranks, so that the local shapes tell"
        )
    wrong = [(r, s) for r, s in seen.items() if s is not None and ways[0][r].local_shape != s]
    rank, shape = wrong[0]
    raise InvalidError(
        f"{what}: rank {rank}: the local array is {list(shape)}, its placements say "
        f"{list(ways[0][rank].local_shape)}"
    )
