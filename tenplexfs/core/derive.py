"""A new layout from a committed one and a mesh: what ``reconfigure --mesh tp=4,dp=2`` means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tenplexfs.core.layout import ByIndex, Cut, Layout, Mesh, TensorEntry, axis_text
from tenplexfs.core.snapshot import check_node_name
from tenplexfs.errors import InvalidError

__all__ = ["derive_layout", "with_nodes"]


def derive_layout(
    layout: Layout, mesh: Mapping[str, int], nodes: Mapping[str, int | None] | None = None
) -> Layout:
    """Returns ``layout`` with other sizes of its axes.

    Axes keep their order, those that ``mesh`` does not name keep their size. An ``owner`` over an axis whose
    size changes becomes the even split of its index, a virtual one (which comes back to a stage) keeping its
    number of chunks. Padding to a multiple follows the new size; padding to a size stays.

    Args:
        layout: The committed layout.
        mesh: New size of each axis that changes.
        nodes: Devices of each node (None: an even share); left out: the committed nodes with the devices that
            they use.

    Raises:
        InvalidError: Names the axis, tensor, mesh or nodes that do not fit the new sizes.
    """
    sizes = dict(layout.mesh.axes)
    for axis in mesh:
        layout.mesh.size_of((axis,))
    changed = {axis for axis, size in mesh.items() if size != sizes[axis]}
    if changed and layout.explicit is not None:
        raise InvalidError(
            "the committed layout gives explicit ranks, which no mesh can change: give a layout"
        )
    new_mesh = Mesh(tuple((axis, mesh.get(axis, size)) for axis, size in layout.mesh.axes))
    meshes = []
    for name, other in layout.meshes:
        follows = Mesh(tuple((axis, mesh.get(axis, size)) for axis, size in other.axes))
        if follows.size != new_mesh.size:
            raise InvalidError(
                f"mesh {name!r} ({_axes(follows)}) has {follows.size} ranks, the new mesh {new_mesh.size}: "
                f"give a layout"
            )
        meshes.append((name, follows))
    fresh = replace(
        layout,
        mesh=new_mesh,
        meshes=tuple(meshes),
        tensors=tuple(_entry(entry, mesh, changed) for entry in layout.tensors),
        nodes=(),
        devices=(),
    )
    if nodes is None:
        nodes = dict(layout.devices) or {node: len(ranks) for node, ranks in layout.nodes}
    return with_nodes(fresh, nodes)


def with_nodes(layout: Layout, nodes: Mapping[str, int | None]) -> Layout:
    """Returns ``layout`` on other nodes, given by their devices; the planner says which rank goes where.

    Args:
        layout: Its own nodes are forgotten.
        nodes: Devices of each node; None for an even share of the ranks that are left.

    Raises:
        InvalidError: There are fewer devices than ranks.
    """
    size = layout.mesh.size
    for node, given in nodes.items():
        if given is not None and given < 0:
            raise InvalidError(f"nodes: {node}: need a number of devices >= 0, got {given}")
    open_nodes = [node for node, devices in nodes.items() if devices is None]
    left = size - sum(devices for devices in nodes.values() if devices is not None)
    shares = iter(len(part) for part in np.array_split(range(max(left, 0)), len(open_nodes) or 1))
    devices = tuple(
        (check_node_name(node), next(shares) if count is None else count) for node, count in nodes.items()
    )
    total = sum(count for _, count in devices)
    if total < size:
        raise InvalidError(
            f"nodes: {total} devices on {', '.join(f'{node}:{count}' for node, count in devices)}, "
            f"the mesh ({_axes(layout.mesh)}) needs {size}; name nodes with more (--nodes node0:4,node1:4)"
        )
    return replace(layout, nodes=(), devices=devices)


def _axes(mesh: Mesh) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in mesh.axes)


def _entry(entry: TensorEntry, mesh: Mapping[str, int], changed: set[str]) -> TensorEntry:
    for cut in entry.shard:
        if isinstance(cut, Cut) and cut.cuts is not None and changed & set(cut.axis):
            raise InvalidError(
                f"tensor {entry.key!r}: dim {cut.dim}: explicit cuts over {axis_text(cut.axis)} "
                f"do not follow a change of its size: give a layout"
            )
    on = tuple(
        (axis, replace(where, owner=_owner(entry.key, where.owner, mesh[axis[0]])))
        if isinstance(where, ByIndex) and axis[0] in changed
        else (axis, where)
        for axis, where in entry.on
    )
    return replace(entry, on=on)


def _owner(key: str, owner: Sequence[tuple[int, ...]], size: int) -> tuple[tuple[int, ...], ...]:
    """Returns the even split of an index over ``size`` stages, in as many chunks of each as before."""
    if any(len(stages) != 1 for stages in owner):
        raise InvalidError(
            f"tensor {key!r}: an owner of several stages does not follow a change: give a layout"
        )
    before = [stages[0] for stages in owner]
    runs = [stage for k, stage in enumerate(before) if k == 0 or before[k - 1] != stage]
    chunks = max((runs.count(stage) for stage in runs), default=1)
    parts = np.array_split(range(len(owner)), size * chunks)
    return tuple((k % size,) for k, part in enumerate(parts) for _ in part)
