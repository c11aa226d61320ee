"""`save` and `load` of Megatron-Core's sharded state dicts, at any parallelism.

A rank saves every box that it holds, replicas too, so that its node has them. What is no tensor is kept
beside: a `ShardedObject` under its key and place of its grid, plain values at their place in the dict.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from tenplexfs.client.arrays import to_torch
from tenplexfs.client.connection import patiently
from tenplexfs.client.regions import OpenSnapshot, place_of_job
from tenplexfs.core.layout import Layout, Mesh
from tenplexfs.core.ptc import PTC
from tenplexfs.core.region import Region
from tenplexfs.errors import InvalidError, NotFoundError, PreconditionError
from tenplexfs.formats.rng import is_random_state
from tenplexfs.megatron.layout import (
    boxes_of,
    describe,
    is_factory,
    is_object,
    is_tensor,
    layout_of_specs,
    leaves_of,
    object_name,
)
from tenplexfs.megatron.objects import derived, pack, unpack
from tenplexfs.sharded import TENSOR, OpenJob, wanted_snapshot
from tenplexfs.torch.exchange import Exchange, this_rank
from tenplexfs.torch.together import save_together, together

__all__ = ["load", "load_common", "save"]

_Keys: TypeAlias = tuple[Any, ...]
_ById: TypeAlias = Mapping[int, Any]

_ABSENT = object()
_NOTHING = Region((), ())
_SHARD = "shard_"


def save(
    sharded_state_dict: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    step: int,
    mesh: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    snapshot: str | None = None,
    consumed: int | None = None,
    allow_pickle: bool = False,
) -> None:
    """Saves a step of a job; all ranks call it. Returns once the step is committed on all nodes.

    A job that is not there is made, with the layout of the state.

    Args:
        sharded_state_dict: As Megatron's `sharded_state_dict` methods give it, with data.
        path: ``<mount>/<job>``.
        step: Must be past the newest one that is committed.
        mesh: Axis and size of all ranks, the last varies fastest; default: one axis, ``rank``.
        shapes: Key and true global shape of tensors that allow a mismatch, as padded vocabularies: what lies
            past it is padding, which is not stored. Of use when the job is made.
        snapshot: As for `tenplexfs.save`.
        consumed: As for `tenplexfs.save`.
        allow_pickle: Whether objects are kept that need pickle.

    Raises:
        InvalidError: Main replicas do not hold each element once, or replicas differ.
        PreconditionError: The job is laid out in another way: reconfigure it first.
        TenplexError: Some rank failed; the step before stays.
    """
    place = place_of_job(path)
    if place.step is not None:
        raise InvalidError(f"{path}: a kept step never changes; need <mount>/<job>")

    def layout_of(specs: list[Any]) -> Layout:
        axes = Mesh(tuple(mesh.items())) if mesh is not None else None
        return layout_of_specs(specs, shapes=shapes, mesh=axes)

    save_together(
        place,
        describe(sharded_state_dict),
        layout_of,
        lambda ptc: _state(sharded_state_dict, ptc, place.job),
        step=step,
        snapshot=snapshot,
        consumed=consumed,
        allow_pickle=allow_pickle,
    )


def load(
    sharded_state_dict: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    snapshot: str | None = None,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Fills the data of a sharded state dict; all ranks call it, each with its own, at any parallelism.

    Returns what `megatron.core.dist_checkpointing.load` does: the dict with tensors in place of their
    objects, factories merged, local objects as they are. A plain value is what was saved at its place, else
    as given.

    Args:
        sharded_state_dict: Of the new parallelism. Tensors that have data are filled in place.
        path: ``<mount>/<job>``, or ``<mount>/<job>@<step>``.
        step: A kept one; default the newest.
        snapshot: The one that is wanted; default ``TENPLEXFS_SNAPSHOT``, unless a step is asked for.
        allow_pickle: Whether objects that were saved with pickle are made again.

    Raises:
        NotFoundError: There is no such job, step, or object.
        InvalidError: Tensors are not there, or of other shapes or dtypes; all are named.
        TenplexError: Some rank failed.
    """
    place = place_of_job(path)
    wanted = wanted_snapshot(place, step, snapshot)

    def work(exchange: Exchange) -> dict[str, Any]:
        if exchange.rank == 0:
            with patiently(lambda: OpenSnapshot(place, step=wanted[0], snapshot=wanted[1])) as opened:
                exchange.post("snapshot", opened.snapshot)
        name = exchange.get("snapshot")

        def fetch() -> dict[str, Any]:
            with OpenJob(place, step=wanted[0], snapshot=name) as opened:
                return _Load(opened, allow_pickle=allow_pickle).dict_of(sharded_state_dict)

        return patiently(fetch)

    return together(f"load/{place.job}", work)


def load_common(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    snapshot: str | None = None,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Returns the plain values of the dict that this rank saved, as `load_common_state_dict` does.

    Args:
        path: ``<mount>/<job>``, or ``<mount>/<job>@<step>``.
        step: A kept one; default the newest.
        snapshot: The one that is wanted; default ``TENPLEXFS_SNAPSHOT``, unless a step is asked for.
        allow_pickle: Whether objects that were saved with pickle are made again.

    Raises:
        NotFoundError: There is no such job or step.
    """
    place = place_of_job(path)
    wanted = wanted_snapshot(place, step, snapshot)

    def fetch() -> Any:  # noqa: ANN401
        with OpenJob(place, step=wanted[0], snapshot=wanted[1]) as opened:
            return _common(next(opened.states(this_rank(), allow_pickle=allow_pickle)))

    found: dict[str, Any] = unpack(patiently(fetch))
    return found


def _common(state: Any) -> Any:  # noqa: ANN401
    """Returns ``state`` without tensors and sharded objects, and without what holds nothing else."""
    if state is TENSOR:
        return _ABSENT
    if type(state) is dict and state:
        kept = {key: found for key, value in state.items() if (found := _common(value)) is not _ABSENT}
        is_sharded = all(isinstance(key, str) and key.startswith(_SHARD) for key in state)
        return kept if kept and not is_sharded else _ABSENT
    if type(state) is list and state:
        items = [_common(value) for value in state]
        return _ABSENT if all(item is _ABSENT for item in items) else items
    return state


def _state(state: Mapping[str, Any], ptc: PTC, job: str) -> dict[str, Any]:
    """Returns what this rank saves: local arrays and objects by key, plain values at their place."""
    root: dict[str, Any] = {
        key: kept for key, value in state.items() if (kept := _plain(value)) is not _ABSENT
    }
    boxes: dict[str, list[tuple[Region, Any]]] = {}
    names: dict[str, str] = {}
    for path, leaf in leaves_of(state):
        if is_object(leaf):
            places = root.setdefault(leaf.key, {})
            if not isinstance(places, dict):
                raise InvalidError(f"state: {leaf.key}: is a sharded object and a plain value")
            places[object_name(leaf.global_offset, leaf.global_shape)] = pack(leaf.data)
        elif is_tensor(leaf):
            boxes.setdefault(path, []).extend(boxes_of(path, leaf))
            names[path] = leaf.key
    for path, found in boxes.items():
        if names[path] in root:
            raise InvalidError(f"state: {names[path]}: is a sharded tensor and a plain value")
        root[names[path]] = _local(job, ptc, path, found)
    return root


def _plain(value: Any) -> Any:  # noqa: ANN401
    """Returns what of ``value`` is kept at its place in the dict."""
    if is_factory(value) or is_object(value) or is_tensor(value) or _is_local(value):
        return _ABSENT
    if isinstance(value, Mapping) and value:
        kept = {key: found for key, each in value.items() if (found := _plain(each)) is not _ABSENT}
        return kept or _ABSENT
    if type(value) in (list, tuple):
        kept_items = [_plain(each) for each in value]
        if value and all(item is _ABSENT for item in kept_items):
            return _ABSENT
        return type(value)(None if item is _ABSENT else item for item in kept_items)
    return value


def _is_local(value: object) -> bool:
    return type(value).__name__ == "LocalNonpersistentObject"


def _local(job: str, ptc: PTC, path: str, boxes: Sequence[tuple[Region, Any]]) -> torch.Tensor:
    """Returns the local array that the layout of the job says this rank has, made of its boxes."""
    rank = this_rank()
    if path not in ptc.rank_paths(rank):
        raise PreconditionError(
            f"job {job}: {path} on rank {rank}: its layout has none; reconfigure it first"
        )
    shard = ptc.shard(rank, path)
    of_start = {box.start: (box, data) for box, data in boxes if box.volume}
    known = {piece.region.start for piece in shard.pieces}
    shape = ptc.tensors[path].shape
    spare = [box for box, _ in of_start.values() if box.start not in known and _inside(box, shape)]
    made: torch.Tensor | None = None
    for piece in shard.pieces:
        box, data = of_start.get(piece.region.start, (_NOTHING, boxes[0][1]))
        if piece.region.stop != tuple(map(min, box.stop, shape)) or spare:
            held = " ".join(str(each) for each, _ in boxes[:4])
            raise PreconditionError(
                f"job {job}: {path} on rank {rank}: its layout has {piece.region}, this run {held}; "
                "reconfigure it first (tenplexfs reconfigure), or save into another job"
            )
        inner = tuple(slice(0, n) for n in piece.region.shape[len(shape) - data.ndim :])
        part: torch.Tensor = data.detach()[inner] if box != piece.region and not shard.flat else data.detach()
        if tuple(part.shape) == shard.local_shape:
            return part
        if made is None:  # what no piece fills is padding
            made = torch.zeros(shard.local_shape, dtype=data.dtype, device=data.device)
        if shard.flat:
            made[piece.at[0] : piece.at[0] + piece.region.volume] = part.reshape(-1)
        else:
            made[tuple(slice(a, a + n) for a, n in zip(piece.at, part.shape, strict=True))] = part
    if made is None:
        data = boxes[0][1]
        made = torch.zeros(shard.local_shape, dtype=data.dtype, device=data.device)
    return made


def _inside(box: Region, shape: Sequence[int]) -> bool:
    return all(start < size for start, size in zip(box.start, shape, strict=True))


class _Load:
    """Fills one sharded state dict."""

    def __init__(self, opened: OpenJob, *, allow_pickle: bool) -> None:
        self._opened = opened
        self._rank = this_rank()
        self._allow_pickle = allow_pickle
        self._states: list[Any] = []

    def dict_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns ``state``, filled."""
        built: dict[int, Any] = {}
        tensors = [(path, leaf) for path, leaf in leaves_of(state, built=built) if not is_object(leaf)]
        self._check(tensors)
        filled = self._fill(tensors)
        self._states = list(self._opened.states(self._rank, allow_pickle=self._allow_pickle))
        made: dict[str, Any] = self._made(state, (), filled, built)
        return made

    def _check(self, tensors: Sequence[tuple[str, Any]]) -> None:
        wanted: dict[str, tuple[Sequence[int], str]] = {}
        for path, leaf in tensors:
            shape = tuple(leaf.global_shape) if is_tensor(leaf) else tuple(leaf.shape)
            stored = self._opened.ptc.tensors.get(path)
            is_free = getattr(leaf, "allow_shape_mismatch", False)
            if stored is not None and is_free and len(shape) == len(stored.shape):
                shape = stored.shape
            wanted[path] = shape, str(leaf.dtype).removeprefix("torch.")
        self._opened.check(wanted)

    def _fill(self, tensors: Sequence[tuple[str, Any]]) -> dict[int, torch.Tensor]:
        """Reads all boxes at once; returns the tensor of each object."""
        filled: dict[int, torch.Tensor] = {}
        wanted: list[tuple[str, Region]] = []
        targets: list[torch.Tensor] = []
        for path, leaf in tensors:
            if not is_tensor(leaf):
                leaf_data = leaf
            elif leaf.data is not None:
                leaf_data = leaf.data
            else:
                run = getattr(leaf, "flattened_range", None)
                size = tuple(leaf.local_shape) if run is None else (run.stop - run.start,)
                leaf_data = torch.empty(size, dtype=leaf.dtype)
                leaf.data = leaf_data
            filled[id(leaf)] = leaf_data
            stored = self._opened.ptc.tensors[path].shape
            for box, data in boxes_of(path, leaf):
                region = Region(tuple(map(min, box.start, stored)), tuple(map(min, box.stop, stored)))
                target = data.detach()
                if region != box:  # what is past the stored shape is padding, of an object that allows it
                    target.zero_()
                    target = target[tuple(slice(0, n) for n in region.shape[len(stored) - target.ndim :])]
                if region.volume:
                    wanted.append((path, region))
                    targets.append(target)
        for target, found in zip(targets, self._opened.read(wanted), strict=True):
            source = to_torch(np.ascontiguousarray(found).reshape(tuple(target.shape)))
            assert isinstance(source, torch.Tensor)
            target.copy_(source)
        return filled

    def _made(self, value: Any, keys: _Keys, filled: _ById, built: _ById) -> Any:  # noqa: ANN401
        if id(value) in built:
            return value.merge_fn(self._made(built[id(value)], keys, filled, built))
        if is_object(value):
            return self._object(value)
        if id(value) in filled:
            return filled[id(value)]
        if _is_local(value):
            return value.obj
        if isinstance(value, Mapping):
            return {key: self._made(each, (*keys, key), filled, built) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._made(each, (*keys, i), filled, built) for i, each in enumerate(value))
        return self._saved(value, keys)

    def _saved(self, value: Any, keys: _Keys) -> Any:  # noqa: ANN401
        for state in self._states:
            found = state
            for key in keys:
                try:
                    found = found[key]
                except (KeyError, IndexError, TypeError):
                    found = _ABSENT
                    break
            if found is not _ABSENT and found is not TENSOR:
                return unpack(found)
        return value

    def _object(self, leaf: Any) -> Any:  # noqa: ANN401
        """Returns the value of a place of a grid; a random-number state also of a grid of another shape."""
        name = object_name(leaf.global_offset, leaf.global_shape)
        places: dict[str, Any] = {}
        for state in self._states:
            found = state.get(leaf.key) if isinstance(state, Mapping) else None
            if isinstance(found, Mapping):
                places.update({key: each for key, each in found.items() if key not in places})
        if name in places:
            return unpack(places[name])
        shape = tuple(leaf.global_shape)
        number = int(np.ravel_multi_index(tuple(leaf.global_offset), shape))
        others = sorted((each for each in places if each.startswith(_SHARD)), key=_order)
        if not others or not is_random_state(leaf.key):
            raise NotFoundError(
                f"object {leaf.key!r} at {tuple(leaf.global_offset)} of {shape}: was not saved"
            )
        source = places[others[number % len(others)]]
        return unpack(source if number < len(others) else derived(source, leaf.key, number))


def _order(name: str) -> list[int]:
    return [int(part) for part in name.removeprefix(_SHARD).split("_")[0].split("-")]
