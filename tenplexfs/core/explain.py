"""What a plan means to a person: bytes node by node, and for each tensor of the layout what moves and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tenplexfs.core.layout import ByIndex, Cut, FlatCut, Layout, TensorEntry, axis_text, expand_name
from tenplexfs.core.planner import Plan
from tenplexfs.core.ptc import PTC, Placement
from tenplexfs.core.region import Ints

__all__ = ["NodeBytes", "Reason", "entry_of_path", "entry_text", "node_bytes", "reasons"]


@dataclass(frozen=True, eq=False)
class NodeBytes:
    """Bytes of each node, in the order of `Plan.nodes`; needed = kept + local + received.

    Attributes:
        needed: What it must hold, each element once.
        kept: Of it, what lies in files that stay.
        local: Of it, what lies in other files of the node.
        received: Of it, what comes from other nodes.
        sent: What other nodes take from it.
    """

    needed: Ints
    kept: Ints
    local: Ints
    received: Ints
    sent: Ints


@dataclass(frozen=True, slots=True)
class Reason:
    """What becomes of the tensors of one entry of the new layout, summed over nodes, in bytes.

    Attributes:
        key: Of the entry; a tensor path where ranks are explicit.
        tensors: How many there are.
        old: How they were cut and spread.
        new: How they are.
        kept: As in `NodeBytes`.
        local: As in `NodeBytes`.
        moved: What crosses between nodes.
        why: One phrase.
    """

    key: str
    tensors: int
    old: str
    new: str
    kept: int
    local: int
    moved: int
    why: str


def node_bytes(plan: Plan) -> NodeBytes:
    """Returns the bytes of each node."""
    count = len(plan.nodes)
    kept, needed = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for match in plan.matches:
        volumes = match.row_volumes * match.element_bytes
        np.add.at(needed, match.row_node, volumes)
        np.add.at(kept, match.row_node[match.kept], volumes[match.kept])
    received, sent = plan.matrix.sum(axis=0), plan.matrix.sum(axis=1)
    return NodeBytes(needed, kept, needed - kept - received, received, sent)


def reasons(plan: Plan) -> tuple[Reason, ...]:
    """Returns what becomes of each entry's tensors, and why; most moved bytes first, then local ones."""
    entries = [entry_of_path(ptc.layout) for ptc in (plan.old, plan.new)]
    texts: dict[tuple[object, ...], tuple[str, str]] = {}
    groups: dict[tuple[str, str, str], list[int]] = {}
    for match in plan.matches:
        rows = np.array(
            [
                match.row_volumes[chosen].sum()
                for chosen in (match.kept, ~match.kept & ~match.moved, match.moved)
            ]
        )
        for pair in match.pairs:
            old, new = (of.get(side[0].path) for of, side in zip(entries, (pair.old, pair.new), strict=True))
            alike = (pair.key, old and old.key, new and new.key)
            if alike not in texts:
                texts[alike] = (
                    entry_text(plan.old, pair.old[0], old),
                    entry_text(plan.new, pair.new[0], new),
                )
            group = (new.key if new is not None else pair.tensor.path, *texts[alike])
            sums = groups.setdefault(group, [0, 0, 0, 0])
            for k, value in enumerate((1, *(rows * pair.tensor.itemsize).tolist())):
                sums[k] += value
    found = (
        Reason(key, count, old, new, kept, local, moved, _why(old, new, kept, local, moved))
        for (key, old, new), (count, kept, local, moved) in groups.items()
    )
    return tuple(sorted(found, key=lambda r: (-r.moved, -r.local, -r.kept, r.key)))


def _why(old: str, new: str, kept: int, local: int, moved: int) -> str:
    if not moved and not local:
        return "the same arrays on the same nodes: kept" if kept else "empty"
    if old == new:
        what = "cut alike, but ranks are on other nodes"
    else:
        before, after = old.split("; "), new.split("; ")
        gone = [part for part in before if part not in after]
        come = [part for part in after if part not in before]
        changes = [_change(a, b) for a, b in zip(gone, come, strict=False)]
        changes += [f"no longer {part}" for part in gone[len(come) :]]
        what = ", ".join([*changes, *(f"now {part}" for part in come[len(gone) :])])
    return what if moved else f"{what}: every node has what it needs"


def _change(old: str, new: str) -> str:
    """Returns ``old -> new`` with what both begin with said once.

    >>> _change("dim 0 over tp 8", "dim 0 over tp 16")
    'dim 0 over tp 8 -> 16'
    """
    words, other = old.split(), new.split()
    same = 0
    while same < min(len(words), len(other)) - 1 and words[same] == other[same]:
        same += 1
    return f"{old} -> {' '.join(other[same:])}"


def entry_of_path(layout: Layout) -> dict[str, TensorEntry]:
    """Returns shown path -> entry that gives it; explicit ones are not there."""
    return {expand_name(entry.key, values): entry for entry in layout.tensors for values in entry.instances()}


def entry_text(ptc: PTC, placement: Placement, entry: TensorEntry | None) -> str:
    """Returns how a tensor is cut and where it exists, in words; parts are joined by ``; ``.

    Args:
        ptc: Whose.
        placement: Of the tensor.
        entry: That gives it, or None where ranks are explicit.
    """
    table, mask = ptc.tables[placement.cells], ptc.masks[placement.mask]
    cells = table.of_rank[mask & (table.of_rank >= 0)]
    distinct = len(np.unique(cells))
    parts = list(_words(ptc, entry)) if entry is not None else ["explicit pieces"]
    copies = len(cells) // max(distinct, 1)
    return "; ".join([*(parts or ["whole"]), f"replicas {copies}"])


def _words(ptc: PTC, entry: TensorEntry) -> Iterator[str]:
    mesh = ptc.layout.mesh_named(entry.mesh)
    if entry.flat is not None:
        axis = next(group.axis for group in ptc.layout.flat_groups if group.name == entry.flat)
        yield f"flat group {entry.flat} over {axis_text(axis)} {mesh.size_of(axis)}"
    for cut in entry.shard:
        over = f"{axis_text(cut.axis)} {mesh.size_of(cut.axis)}"
        yield f"flat over {over}" if isinstance(cut, FlatCut) else f"dim {cut.dim}{_how(cut)} over {over}"
    for axis, where in entry.on:
        if isinstance(where, ByIndex):
            yield f"{where.by} over {axis_text(axis)} {mesh.size_of(axis)}"
        else:
            size = mesh.size_of(axis)
            yield f"{axis_text(axis)} {', '.join(str(c % size) for c in where)} of {size}"


def _how(cut: Cut) -> str:
    if cut.sections is not None:
        return f" in {len(cut.sections)} sections"
    if cut.pad_to is not None or cut.pad_multiple is not None:
        return ", padded,"
    return ""
