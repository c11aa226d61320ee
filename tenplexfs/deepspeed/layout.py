"""Layouts of ZeRO's partitions: said by the rule where it gives exactly the runs that the ranks have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tenplexfs.core.build import build_ptc
from tenplexfs.core.held import explicit_layout, refuse_overlap, whole_shard
from tenplexfs.core.layout import ExplicitShard, FlatCut, FlatGroup, Layout, Mesh, TensorEntry, has_braces
from tenplexfs.core.ptc import PTC, Shard
from tenplexfs.core.region import Region, flat_boxes
from tenplexfs.deepspeed.fragments import Spec
from tenplexfs.errors import InvalidError

__all__ = ["layout_of_specs", "relayout"]

_AXIS = "dp"
_ALIGN = 2
"""A flat group is padded to a multiple of this times the ranks (`nccl_start_alignment_factor`)."""


def layout_of_specs(states: Sequence[Mapping[str, Spec]]) -> Layout:
    """Returns the layout of what all ranks hold, ``states[r]`` being `specs_of` of rank r.

    Raises:
        InvalidError: Ranks disagree about a tensor, or do not hold each element once.
    """
    mesh = Mesh(((_AXIS, len(states)),))
    first: dict[str, Spec] = {}
    for rank, state in enumerate(states):
        for path, spec in state.items():
            known = first.setdefault(path, spec)
            if (spec.shape, spec.dtype, spec.run is None) != (known.shape, known.dtype, known.run is None):
                raise InvalidError(
                    f"tensor {path!r}: rank {rank}: {list(spec.shape)} {spec.dtype}, "
                    f"elsewhere {list(known.shape)} {known.dtype}"
                )
    held = {path: _held(path, states) for path, spec in first.items() if spec.run is not None}
    ruled = _by_rule(mesh, first, states, held)
    entries = [
        TensorEntry(path, spec.shape, spec.dtype)
        for path, spec in first.items()
        if spec.run is None and not has_braces(path)
    ]
    explicit = {path: (first[path].shape, shards) for path, shards in held.items() if path not in ruled[0]}
    for path, spec in first.items():
        if spec.run is None and has_braces(path):
            shards = dict.fromkeys(range(mesh.size), whole_shard(spec.shape, spec.dtype))
            explicit[path] = (spec.shape, shards)
    layout = explicit_layout(mesh, explicit, [*entries, *ruled[0].values()])
    return replace(layout, flat_groups=ruled[1])


def relayout(layout: Layout, size: int) -> Layout:
    """Returns the layout that the same model has with ZeRO over ``size`` ranks.

    Raises:
        InvalidError: Some of it is said rank by rank, or the mesh has other axes.
    """
    if [name for name, _ in layout.mesh.axes] != [_AXIS] or layout.explicit is not None:
        raise InvalidError(
            "layout: is not one of ZeRO by its rule: give the layout that a run of the new size would save"
        )
    groups = tuple(replace(group, pad_to_multiple=_ALIGN * size) for group in layout.flat_groups)
    return replace(layout, mesh=Mesh(((_AXIS, size),)), nodes=(), devices=(), flat_groups=groups)


def _held(path: str, states: Sequence[Mapping[str, Spec]]) -> dict[int, ExplicitShard]:
    shards: dict[int, ExplicitShard] = {}
    boxes: list[tuple[Region, str]] = []
    for rank, state in enumerate(states):
        spec = state.get(path)
        if spec is None or spec.run is None:
            continue
        start, count = spec.run
        pieces, at = [], 0
        for low, high in flat_boxes(spec.shape, start, start + count).tolist() if count else ():
            region = Region(tuple(low), tuple(high))
            pieces.append((region, (at,)))
            boxes.append((region, f"rank {rank}"))
            at += region.volume
        shards[rank] = ExplicitShard((count,), spec.dtype, tuple(pieces))
    shape = next(state[path].shape for state in states if path in state)
    refuse_overlap(f"tensor {path!r}", shape, boxes, "need ZeRO over all ranks, without model parallelism")
    return shards


def _by_rule(
    mesh: Mesh,
    first: Mapping[str, Spec],
    states: Sequence[Mapping[str, Spec]],
    held: Mapping[str, Mapping[int, ExplicitShard]],
) -> tuple[dict[str, TensorEntry], tuple[FlatGroup, ...]]:
    """Returns the tensors that the rules of ZeRO leave where they are, and their flat groups."""
    members: dict[str, list[str]] = {}
    for state in states:
        runs = [(spec.group, path) for path, spec in state.items() if spec.group is not None]
        for (name, _), path in sorted(runs):
            if path not in (known := members.setdefault(name, [])):
                known.append(path)
    entries: dict[str, TensorEntry] = {}
    groups = []
    for name, paths in members.items():
        group = FlatGroup(name, tuple(paths), (_AXIS,), 1, _ALIGN * mesh.size)
        made = {
            path: TensorEntry(path, first[path].shape, first[path].dtype, flat=name)
            for path in paths
            if not has_braces(path)
        }
        if len(made) == len(paths) and _gives(Layout(mesh, tuple(made.values()), flat_groups=(group,)), held):
            entries.update(made)
            groups.append(group)
    for path, spec in first.items():
        if spec.run is not None and spec.group is None and not has_braces(path):
            entry = TensorEntry(path, spec.shape, spec.dtype, (FlatCut((_AXIS,), 1),))
            if _gives(Layout(mesh, (entry,)), held):
                entries[path] = entry
    return entries, tuple(groups)


def _gives(layout: Layout, held: Mapping[str, Mapping[int, ExplicitShard]]) -> bool:
    ptc: PTC = build_ptc(layout)
    return all(
        _runs(ptc.shard(rank, path)) == _runs(held[path].get(rank))
        for rank in ptc.ranks()
        for path in ptc.rank_paths(rank)
    )


def _runs(shard: Shard | ExplicitShard | None) -> list[Region]:
    """Returns the regions of a raveled shard, in order; nothing where there is none."""
    if shard is None:
        return []
    pieces = shard.pieces or ()
    return [each[0] if isinstance(each, tuple) else each.region for each in pieces]
