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

from tenplexfs.core.dtypes import dtype_of
from tenplexfs.core.held import clipped, explicit_layout, local_arrays, refuse_overlap
from tenplexfs.core.layout import ExplicitShard, Layout, Mesh
from tenplexfs.core.paths import escape_component, path_of_name
from tenplexfs.core.region import Region, flat_boxes
from tenplexfs.errors import InvalidError

__all__ = ["ObjectShard", "Part", "layout_of_ranks", "objects_of_ranks", "parts_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """Data of a rank and where it begins in the local array of a tensor.

    Attributes:
        data: The framework's array, of the local array's dims; raveled in C order where that one is raveled.
        at: One offset for each dim of the local array.
    """

    data: Any
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ObjectShard:
    """A value that is no tensor, one of a grid that cannot be cut anew.

    Attributes:
        path: Its key and its place, as ``rng_state/shard_0%2E1_2%2E4``: each place is a value of its own.
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
    true = {path_of_name(key): tuple(shape) for key, shape in (shapes or {}).items()}
    tensors: dict[str, _Tensor] = {}
    for rank, state in enumerate(states):
        for path, leaf in _leaves(state):
            if _is_tensor(leaf):
                seen = tensors.setdefault(path, _Tensor(path, tuple(leaf.global_shape), _dtype(path, leaf)))
                seen.add(rank, leaf)
            elif not _is_object(leaf):
                seen = tensors.setdefault(path, _Tensor(path, tuple(leaf.shape), _dtype(path, leaf)))
                seen.add_plain(rank, leaf)
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
        for path, leaf in _leaves(state):
            if not _is_object(leaf):
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
            text = f"shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shapes[path]))}"
            out.append(ObjectShard(f"{path}/{escape_component(text)}", offset, shapes[path], mains[0], ranks))
    return tuple(out)


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
    for path, leaf in _leaves(state):
        if _is_object(leaf):
            continue
        if path not in shards:
            raise InvalidError(f"tensor {path!r}: the layout has nothing of it on rank {rank}")
        place = {region.start: (region, at) for region, at in shards[path].pieces or ()}
        parts = out.setdefault(path, {})
        if not _is_tensor(leaf):
            parts[()] = Part(leaf, (0,) * len(leaf.shape))
            continue
        data, first, flat = leaf.data, 0, getattr(leaf, "flattened_range", None) is not None
        for box in _boxes(path, leaf):
            if box.start in place:  # else all of it is padding
                region, at = place[box.start]
                lead = len(box.start) - len(leaf.local_shape)
                inner = tuple(slice(0, n) for n in region.shape[lead:])
                part = data[first : first + box.volume] if flat else data[inner]
                parts[box.start] = Part(part, at)
            first += box.volume
    return {path: tuple(parts.values()) for path, parts in out.items()}


class _Tensor:
    """Collects what the ranks say of one tensor."""

    def __init__(self, path: str, shape: tuple[int, ...], dtype: str) -> None:
        self.what = f"tensor {path!r}"
        self.path, self.shape, self.dtype = path, shape, dtype
        self.held: dict[int, list[Region]] = {}
        self.mains: list[tuple[Region, str]] = []
        self.flat = False
        self.padded = False
        self.plain: bool | None = None

    def add(self, rank: int, leaf: Any) -> None:  # noqa: ANN401 - a ShardedTensor by its attributes
        self._same(rank, tuple(leaf.global_shape), _dtype(self.path, leaf), plain=False)
        boxes = _boxes(self.path, leaf)
        self.held.setdefault(rank, []).extend(boxes)
        if _is_main(leaf):
            self.mains += [(box, f"rank {rank}") for box in boxes]
        lead = len(self.shape) - len(leaf.local_shape)
        self.flat |= lead > 0 or getattr(leaf, "flattened_range", None) is not None
        self.padded |= bool(getattr(leaf, "allow_shape_mismatch", False))

    def add_plain(self, rank: int, leaf: Any) -> None:  # noqa: ANN401 - a tensor of some framework
        self._same(rank, tuple(leaf.shape), _dtype(self.path, leaf), plain=True)
        self.held[rank] = [Region((0,) * len(self.shape), self.shape)]

    def _same(self, rank: int, shape: tuple[int, ...], dtype: str, *, plain: bool) -> None:
        if self.plain is None:
            self.plain = plain
        if (shape, dtype, plain) != (self.shape, self.dtype, self.plain):
            raise InvalidError(
                f"{self.what}: rank {rank}: {list(shape)} {dtype}{' plain' if plain else ''}, "
                f"elsewhere {list(self.shape)} {self.dtype}{' plain' if self.plain else ''}"
            )

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


def _leaves(state: object, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the path and object of every sharded object and plain tensor; factories are built."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            part = path_of_name(str(key))
            yield from _leaves(value, f"{at}/{part}" if at else part)
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from _leaves(value, f"{at}/{index}" if at else str(index))
    elif hasattr(state, "build_fn") and hasattr(state, "build"):
        yield from _leaves(state.build(), at)
    elif hasattr(state, "global_shape") and hasattr(state, "global_offset"):
        yield path_of_name(str(getattr(state, "key", ""))), state
    elif hasattr(state, "shape") and hasattr(state, "dtype"):
        yield at, state


def _is_tensor(leaf: object) -> bool:
    return hasattr(leaf, "global_offset") and hasattr(leaf, "local_shape")


def _is_object(leaf: object) -> bool:
    return hasattr(leaf, "global_offset") and not hasattr(leaf, "local_shape")


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
