"""What a plan means to a person: bytes node by node, and for each tensor of the layout what moves and why."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tenplexfs.core.layout import ByIndex, Cut, FlatCut, Layout, TensorEntry, axis_text, expand_name
from tenplexfs.core.planner import Plan
from tenplexfs.core.ptc import PTC, Placement
from tenplexfs.core.region import Boxes, Ints

__all__ = [
    "Alike",
    "NodeBytes",
    "Reason",
    "drawn_dims",
    "entry_of_path",
    "entry_text",
    "node_bytes",
    "ranks_alike",
    "reasons",
    "stored_bytes",
]


_NUMBERS = re.compile(r"\d+")


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
    """What becomes of the tensors of one or more entries of the new layout that are alike in all of this.

    Bytes are summed over nodes and over the entries.

    Attributes:
        keys: Of the entries; tensor paths where ranks are explicit.
        tensors: How many there are.
        old: How they were cut and spread.
        new: How they are.
        kept: As in `NodeBytes`.
        local: As in `NodeBytes`.
        moved: What crosses between nodes.
        why: One phrase.
    """

    keys: tuple[str, ...]
    tensors: int
    old: str
    new: str
    kept: int
    local: int
    moved: int
    why: str

    @property
    def name(self) -> str:
        """The first key, and how many more there are."""
        return self.keys[0] + (f" and {len(self.keys) - 1} alike" if len(self.keys) > 1 else "")


@dataclass(frozen=True, slots=True)
class Alike:
    """Ranks that show the same tensors with local arrays of the same shapes.

    Attributes:
        ranks: Ascending.
        shapes: For each entry of the layout (a tensor path where ranks are explicit) the local shapes of its
            tensors there, and how many have each; in the order of the entries.
        nbytes: Of all local arrays of one such rank, padding included, each name counted.
    """

    ranks: tuple[int, ...]
    shapes: Mapping[str, Mapping[tuple[int, ...], int]]
    nbytes: int


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
            kind = (pair.key, old and old.key, new and new.key)
            if kind not in texts:
                texts[kind] = (
                    entry_text(plan.old, pair.old[0], old),
                    entry_text(plan.new, pair.new[0], new),
                )
            group = (new.key if new is not None else pair.tensor.path, *texts[kind])
            sums = groups.setdefault(group, [0, 0, 0, 0])
            for k, value in enumerate((1, *(rows * pair.tensor.itemsize).tolist())):
                sums[k] += value
    alike: dict[tuple[str, str, int, int, int, int], list[str]] = {}
    for (key, old_text, new_text), sums in groups.items():
        alike.setdefault((old_text, new_text, sums[0], sums[1], sums[2], sums[3]), []).append(key)
    found = [
        Reason(
            tuple(sorted(keys)),
            count * len(keys),
            old_text,
            new_text,
            kept * len(keys),
            local * len(keys),
            moved * len(keys),
            _why(old_text, new_text, kept, local, moved),
        )
        for (old_text, new_text, count, kept, local, moved), keys in alike.items()
    ]
    return tuple(sorted(found, key=lambda r: (-r.moved, -r.local, -r.kept, r.keys)))


def _why(old: str, new: str, kept: int, local: int, moved: int) -> str:
    if not moved and not local:
        return "the same arrays on the same nodes: kept" if kept else "empty"
    if old == new:
        what = "cut alike, but ranks are on other nodes"
    else:
        before, after = old.split("; "), new.split("; ")
        gone = [part for part in before if part not in after]
        come = [part for part in after if part not in before]
        alike = {_NUMBERS.sub("", part): part for part in come}
        changes = []
        for part in gone:
            other = alike.pop(_NUMBERS.sub("", part), None)
            changes.append(f"no longer {part}" if other is None else _change(part, other))
        what = ", ".join([*changes, *(f"now {part}" for part in alike.values())])
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


def ranks_alike(ptc: PTC) -> tuple[Alike, ...]:
    """Returns all ranks, grouped; the order is that of their first ranks."""
    entries = entry_of_path(ptc.layout)
    kinds: dict[tuple[int, int], list[Placement]] = {}
    for placement in ptc.placements.values():
        kinds.setdefault((placement.cells, placement.mask), []).append(placement)
    columns, shapes = [np.zeros(ptc.world_size, np.int64)], []
    for cells, mask in kinds:
        table = ptc.tables[cells]
        distinct, shape = np.unique(table.local_shapes, axis=0, return_inverse=True)
        there = ptc.masks[mask] & (table.of_rank >= 0)
        columns.append(np.where(there, shape.reshape(-1)[table.of_rank], -1))
        shapes.append([tuple(each) for each in distinct.tolist()])
    unique, first, group = np.unique(
        np.stack(columns, axis=1), axis=0, return_index=True, return_inverse=True
    )
    found = []
    for number in np.argsort(first).tolist():
        held: dict[str, dict[tuple[int, ...], int]] = {entry.key: {} for entry in ptc.layout.tensors}
        nbytes = 0
        for kind, of, index in zip(kinds.values(), shapes, unique[number, 1:].tolist(), strict=True):
            for placement in kind if index >= 0 else ():
                entry = entries.get(placement.path)
                counts = held.setdefault(placement.path if entry is None else entry.key, {})
                counts[of[index]] = counts.get(of[index], 0) + 1
                nbytes += math.prod(of[index]) * placement.tensor.itemsize
        ranks = tuple(np.flatnonzero(group.reshape(-1) == number).tolist())
        found.append(Alike(ranks, held, nbytes))
    return tuple(found)


def stored_bytes(ptc: PTC) -> dict[str, tuple[int, int]]:
    """Returns node -> bytes of its arrays, each distinct one once, and how many of them are padding."""
    nodes = list(ptc.nodes)
    node_of = np.empty(ptc.world_size, np.int64)
    for number, node in enumerate(nodes):
        node_of[list(ptc.nodes[node])] = number
    kinds: dict[tuple[tuple[int, int], ...], int] = {}
    for names in ptc.names.values():
        key = tuple((p.cells, p.mask) for p in names)
        kinds[key] = kinds.get(key, 0) + names[0].tensor.itemsize
    total = np.zeros((len(nodes), 2), np.int64)
    for key, itemsize in kinds.items():
        seen: dict[tuple[int, bytes], tuple[int, int]] = {}
        for cells, mask in key:
            table = ptc.tables[cells]
            there = np.flatnonzero(ptc.masks[mask] & (table.of_rank >= 0))
            pads = np.bincount(
                table.pad_cell, (table.pads[:, 1] - table.pads[:, 0]).prod(axis=1), len(table.local_shapes)
            )
            pairs = np.unique(np.stack([node_of[there], table.of_rank[there]], axis=1), axis=0)
            for number, cell in pairs.tolist():
                seen[number, table.signatures[cell]] = (
                    math.prod(table.local_shapes[cell].tolist()),
                    int(pads[cell]),
                )
        for (number, _), (volume, padding) in seen.items():
            total[number] += np.array((volume, padding)) * itemsize
    return {node: (int(total[k, 0]), int(total[k, 1])) for k, node in enumerate(nodes)}


def drawn_dims(shape: tuple[int, ...], boxes: Boxes) -> list[int]:
    """Returns the at most two dims in which boxes of a tensor are told apart best, ascending."""
    points = [len(np.unique(boxes[:, :, d])) for d in range(len(shape))]
    return sorted(sorted(range(len(shape)), key=lambda d: (-points[d], -shape[d], d))[:2])
