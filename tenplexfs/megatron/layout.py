"""Layouts from Megatron-Core's sharded state dicts, by the attributes of their objects: it is not imported.

A `ShardedTensor` says which box of a global tensor a rank holds. Axes that Megatron stacked in front
(``prepend_axis_num``: layers, experts) are dims of the tensor in which the box has extent 1; the local array
has them not, so it lies raveled. A `ShardedTensorFactory` is asked for what it builds: the two halves of a
SwiGLU weight are two boxes, joined again in the local array in the order of their places.
`allow_shape_mismatch` marks a tensor that was padded (a vocabulary); its true shape is not in the objects and
must be told.

Source: megatron-core 0.16, `dist_checkpointing/mapping.py`, `transformer/mlp.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from tenplexfs.core.dtypes import dtype_of
from tenplexfs.core.held import clipped, explicit_layout, local_arrays, refuse_overlap
from tenplexfs.core.layout import ExplicitShard, Layout, Mesh
from tenplexfs.core.paths import path_of_name
from tenplexfs.core.region import Region, flat_boxes
from tenplexfs.errors import InvalidError

__all__ = [
    "ObjectShard",
    "Part",
    "Spec",
    "boxes_of",
    "describe",
    "is_factory",
    "is_object",
    "is_tensor",
    "layout_of_ranks",
    "layout_of_specs",
    "leaves_of",
    "object_name",
    "objects_of_ranks",
    "parts_of",
]


@dataclass(frozen=True, slots=True)
class Part:
    """Data of a rank and where it begins in the local array of a tensor.

    Attributes:
        data: The framework's array, of the local array's dims; raveled in C order where that one is raveled.
        at: One offset for each dim of the local array.
    """

    data: Any
    at: tuple[int, ...]


@dataclass(frozen=True)
class Spec:
    """What a `ShardedTensor`, or a plain tensor, says without its data, so that ranks can gather it.

    Attributes:
        plain: Whether it is a plain tensor, which every rank that has it holds whole.
        dtype: Our name of its type.
        boxes: Of the global tensor, in the order in which the data lies raveled.
        main: Whether it is the main replica.
        flat: Whether the local array has other dims than the tensor.
        padded: Whether its global shape may be a padded one.
    """

    global_shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Region, ...]
    plain: bool = False
    main: bool = False
    flat: bool = False
    padded: bool = False


@dataclass(frozen=True, slots=True)
class ObjectShard:
    """A value that is no tensor, one of a grid that cannot be cut anew.

    Attributes:
        path: Its key and its place, as ``rng_state/shard_0-1_2-4``: each place is a value of its own.
        offset: Place in the grid.
        shape: Of the grid.
        main: The rank whose value counts.
        ranks: All that hold it.
    """

    path: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    main: int
    ranks: tuple[int, ...]


def layout_of_ranks(
    states: Sequence[Mapping[str, Any]],
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    mesh: Mesh | None = None,
) -> Layout:
    """Returns the layout of the sharded state dicts of all ranks, ``states[r]`` being rank r's.

    Plain tensors are replicas under their place in the dict; other values are not in a layout.

    Args:
        states: Nested dicts and lists as `sharded_state_dict` gives them.
        shapes: Key and true global shape of tensors that allow a mismatch; what lies past it is padding.
            Where a tensor is not named, its padded shape is the true one.
        mesh: Of all ranks; default: one axis, ``rank``.

    Raises:
        InvalidError: Ranks disagree about a tensor; the main replicas do not hold each element once; a box is
            outside of its tensor; a true shape does not fit. Names the tensor and the ranks.
    """
    return layout_of_specs([describe(state) for state in states], shapes=shapes, mesh=mesh)


def describe(state: Mapping[str, Any]) -> list[tuple[str, Spec]]:
    """Returns the path and spec of each tensor of one rank, plain data without any framework's objects.

    Raises:
        InvalidError: A box is outside of its tensor, or data is of another shape than its object says.
    """
    return [(path, _spec(path, leaf)) for path, leaf in leaves_of(state) if not is_object(leaf)]


def layout_of_specs(
    states: Sequence[Sequence[tuple[str, Spec]]],
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    mesh: Mesh | None = None,
) -> Layout:
    """Returns the layout of what all ranks hold, ``states[r]`` being `describe` of rank r.

    Args:
        states: As `describe` gives them.
        shapes: As for `layout_of_ranks`.
        mesh: As for `layout_of_ranks`.

    Raises:
        InvalidError: As `layout_of_ranks`.
    """
    true = {path_of_name(key): tuple(shape) for key, shape in (shapes or {}).items()}
    tensors: dict[str, _Tensor] = {}
    for rank, state in enumerate(states):
        for path, spec in state:
            tensors.setdefault(path, _Tensor(path, spec)).add(rank, spec)
    unknown = sorted(true.keys() - tensors.keys())
    if unknown:
        raise InvalidError(f"shapes: {unknown[:4]}: no such tensors in the states")
    found = {path: tensor.shards(true.get(path)) for path, tensor in sorted(tensors.items())}
    return explicit_layout(mesh if mesh is not None else Mesh((("rank", len(states)),)), found)


def objects_of_ranks(states: Sequence[Mapping[str, Any]]) -> tuple[ObjectShard, ...]:
    """Returns the sharded values of all ranks that are no tensors, by path.

    Raises:
        InvalidError: A value has no or several main replicas, or its grid has holes.
    """
    grids: dict[str, dict[tuple[int, ...], list[tuple[int, bool]]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, state in enumerate(states):
        for path, leaf in leaves_of(state):
            if not is_object(leaf):
                continue
            shape = tuple(leaf.global_shape)
            if shapes.setdefault(path, shape) != shape:
                raise InvalidError(f"object {path!r}: rank {rank}: grid {shape}, elsewhere {shapes[path]}")
            places = grids.setdefault(path, {})
            places.setdefault(tuple(leaf.global_offset), []).append((rank, _is_main(leaf)))
    out = []
    for path, places in sorted(grids.items()):
        wanted = set(product(*map(range, shapes[path])))
        if wanted != places.keys():
            odd = sorted(wanted ^ places.keys())
            raise InvalidError(f"object {path!r}: grid {shapes[path]}: {odd[:4]} missing, or not of it")
        for offset, holders in sorted(places.items()):
            mains = [rank for rank, main in holders if main]
            if len(mains) != 1:
                raise InvalidError(
                    f"object {path!r} at {offset}: need one main replica (replica_id all zeros), "
                    f"ranks {mains} of {[rank for rank, _ in holders]} say so"
                )
            ranks = tuple(sorted({rank for rank, _ in holders}))
            name = f"{path}/{object_name(offset, shapes[path])}"
            out.append(ObjectShard(name, offset, shapes[path], mains[0], ranks))
    return tuple(out)


def object_name(offset: Sequence[int], shape: Sequence[int]) -> str:
    """Returns under which name, below its key, a place of the grid of a `ShardedObject` is kept.

    >>> object_name((0, 1), (2, 4))
    'shard_0-1_2-4'
    """
    return f"shard_{'-'.join(map(str, offset))}_{'-'.join(map(str, shape))}"


def parts_of(layout: Layout, rank: int, state: Mapping[str, Any]) -> dict[str, tuple[Part, ...]]:
    """Returns the data of ``rank``'s state and where it lies in its local arrays, padding left out.

    Args:
        layout: As `layout_of_ranks` gives it for these states.
        rank: Whose state it is.
        state: Its sharded state dict, with data.

    Raises:
        InvalidError: The layout has not what the state holds.
    """
    explicit = layout.explicit
    shards = explicit.ranks[rank] if explicit is not None and rank < len(explicit.ranks) else {}
    out: dict[str, dict[tuple[int, ...], Part]] = {}
    for path, leaf in leaves_of(state):
        if is_object(leaf):
            continue
        if path not in shards:
            raise InvalidError(f"tensor {path!r}: the layout has nothing of it on rank {rank}")
        place = {region.start: (region, at) for region, at in shards[path].pieces or ()}
        parts = out.setdefault(path, {})
        for box, data in boxes_of(path, leaf):
            if box.start in place:  # else all of it is padding
                region, at = place[box.start]
                inner = tuple(slice(0, n) for n in region.shape[len(region.shape) - data.ndim :])
                parts[box.start] = Part(data if region == box else data[inner], at)
    return {path: tuple(parts.values()) for path, parts in out.items()}


def boxes_of(path: str, leaf: Any) -> Iterator[tuple[Region, Any]]:  # noqa: ANN401
    """Yields the boxes of a tensor and the data of each; dims that were stacked in front it has not."""
    if not is_tensor(leaf):
        yield Region((0,) * len(leaf.shape), tuple(leaf.shape)), leaf
        return
    first, flat = 0, getattr(leaf, "flattened_range", None) is not None
    for box in _boxes(path, leaf):
        yield box, leaf.data[first : first + box.volume] if flat else leaf.data
        first += box.volume


class _Tensor:
    """Collects what the ranks say of one tensor."""

    def __init__(self, path: str, first: Spec) -> None:
        self.what = f"tensor {path!r}"
        self.shape, self.dtype, self.plain = first.global_shape, first.dtype, first.plain
        self.held: dict[int, list[Region]] = {}
        self.mains: list[tuple[Region, str]] = []
        self.flat = False
        self.padded = False

    def add(self, rank: int, spec: Spec) -> None:
        if (spec.global_shape, spec.dtype, spec.plain) != (self.shape, self.dtype, self.plain):
            raise InvalidError(
                f"{self.what}: rank {rank}: {list(spec.global_shape)} {spec.dtype}{' plain' * spec.plain}, "
                f"elsewhere {list(self.shape)} {self.dtype}{' plain' * self.plain}"
            )
        self.held.setdefault(rank, []).extend(spec.boxes)
        if spec.main:
            self.mains += [(box, f"rank {rank}") for box in spec.boxes]
        self.flat |= spec.flat
        self.padded |= spec.padded

    def shards(self, true: tuple[int, ...] | None) -> tuple[tuple[int, ...], dict[int, ExplicitShard]]:
        if not self.plain:
            hint = "the main replicas (replica_id all zeros) must hold each element once"
            refuse_overlap(self.what, self.shape, self.mains, hint)
        shards = local_arrays(self.held, self.dtype, flat=self.flat)
        if true is None or true == self.shape:
            return self.shape, shards
        if not self.padded or len(true) != len(self.shape) or any(map(int.__gt__, true, self.shape)):
            raise InvalidError(
                f"{self.what}: true shape {list(true)}: need one within {list(self.shape)}, "
                f"of a tensor that allows a shape mismatch"
            )
        return true, {rank: clipped(self.what, shard, true) for rank, shard in shards.items()}


def leaves_of(
    state: object, at: str = "", *, built: dict[int, Any] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yields the path and object of every sharded object and plain tensor.

    Args:
        state: Nested dicts and lists.
        at: Path of ``state``.
        built: Gets what each factory builds, by the factory's id.
    """
    if isinstance(state, Mapping):
        for key, value in state.items():
            part = path_of_name(str(key))
            yield from leaves_of(value, f"{at}/{part}" if at else part, built=built)
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from leaves_of(value, f"{at}/{index}" if at else str(index), built=built)
    elif is_factory(state):
        factory: Any = state
        made = factory.build()
        if built is not None:
            built[id(state)] = made
        yield from leaves_of(made, at, built=built)
    elif hasattr(state, "global_shape") and hasattr(state, "global_offset"):
        yield path_of_name(str(getattr(state, "key", ""))), state
    elif hasattr(state, "shape") and hasattr(state, "dtype") and not isinstance(state, np.generic):
        yield at, state


def is_factory(leaf: object) -> bool:
    """Returns whether ``leaf`` is a `ShardedTensorFactory`."""
    return hasattr(leaf, "build_fn") and hasattr(leaf, "build")


def is_tensor(leaf: object) -> bool:
    """Returns whether ``leaf`` is a `ShardedTensor`."""
    return hasattr(leaf, "global_offset") and hasattr(leaf, "local_shape")


def is_object(leaf: object) -> bool:
    """Returns whether ``leaf`` is a `ShardedObject`."""
    return hasattr(leaf, "global_offset") and not hasattr(leaf, "local_shape")


def _spec(path: str, leaf: Any) -> Spec:  # noqa: ANN401
    if not is_tensor(leaf):
        shape = tuple(leaf.shape)
        return Spec(shape, _dtype(path, leaf), (Region((0,) * len(shape), shape),), plain=True)
    shape = tuple(leaf.global_shape)
    boxes = tuple(_boxes(path, leaf))
    flat = len(shape) > len(leaf.local_shape) or getattr(leaf, "flattened_range", None) is not None
    padded = bool(getattr(leaf, "allow_shape_mismatch", False))
    return Spec(shape, _dtype(path, leaf), boxes, main=_is_main(leaf), flat=flat, padded=padded)


def _is_main(leaf: Any) -> bool:  # noqa: ANN401
    replica = leaf.replica_id
    return replica == 0 if isinstance(replica, int) else all(place == 0 for place in replica)


def _dtype(path: str, leaf: Any) -> str:  # noqa: ANN401
    name = str(leaf.dtype).removeprefix("torch.")
    try:
        dtype_of(name)
    except InvalidError as error:
        raise InvalidError(f"tensor {path!r}: {error.message}") from None
    return name


def _boxes(path: str, leaf: Any) -> list[Region]:  # noqa: ANN401
    """Returns the boxes of a `ShardedTensor`, in the order in which its data lies raveled."""
    what = f"tensor {path!r}"
    lead = getattr(leaf, "prepend_axis_num", 0)
    local, shape, offset = tuple(leaf.local_shape), tuple(leaf.global_shape), tuple(leaf.global_offset)
    extent = (1,) * lead + local
    if len(extent) != len(shape) or len(offset) != len(shape):
        raise InvalidError(
            f"{what}: local shape {list(local)} and {lead} axes in front, offset {list(offset)}: "
            f"need the {len(shape)} dims of {list(shape)}"
        )
    whole = Region(offset, tuple(a + n for a, n in zip(offset, extent, strict=True)))
    whole.check_inside(shape, what)
    run = getattr(leaf, "flattened_range", None)
    data = leaf.data
    wanted = local if run is None else (run.stop - run.start,)
    if data is not None and tuple(data.shape) != wanted:
        raise InvalidError(f"{what}: data {list(data.shape)}: its object says {list(wanted)}")
    _check_grid(what, leaf, whole, lead)
    if run is None:
        return [whole]
    return [
        Region(
            tuple(a + b for a, b in zip(offset, box[0], strict=True)),
            tuple(a + b for a, b in zip(offset, box[1], strict=True)),
        )
        for box in flat_boxes(extent, run.start, run.stop).tolist()
    ]


def _check_grid(what: str, leaf: Any, box: Region, lead: int) -> None:  # noqa: ANN401
    """Refuses a box that is not of the regular grid that its object claims."""
    grid = getattr(leaf, "axis_fragmentations", None)
    if grid is None or getattr(leaf, "allow_shape_mismatch", False) or not box.volume:
        return
    for dim in range(lead, box.ndim):
        ways, start, width = grid[dim], box.start[dim], box.shape[dim]
        if start % width or ways * width != leaf.global_shape[dim]:
            raise InvalidError(
                f"{what}: dim {dim}: [{start}, {start + width}) is none of {ways} equal parts "
                f"of {leaf.global_shape[dim]}"
            )
