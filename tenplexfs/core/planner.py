"""From one PTC to another with the least bytes.

A node that needs a region takes it, in this order, from a file that stays as it is, from another file of its
own, or from a node that holds it; each region crosses to a node once. Tensors that are cut and held alike are
planned together (`core.matching`), so the work grows with the number of distinct ways, not with the number of
ranks times tensors. Sources among replicas are balanced (`core.balance`). The same PTCs give the same plan on
any machine: every part computes it by itself.

Source: Tenplex (SOSP 2024), section 4.2, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tenplexfs.core.balance import balanced_quotas, deal
from tenplexfs.core.matching import Flags, Match, match_all, match_tensors
from tenplexfs.core.ptc import PTC
from tenplexfs.core.region import Ints

__all__ = ["Plan", "plan"]


def plan(old: PTC, new: PTC, *, drop: Sequence[str] = ()) -> Plan:
    """Returns the plan that turns ``old`` into ``new``.

    Args:
        old: What is held now.
        new: What is wanted.
        drop: Patterns of tensors that the new layout may lack.

    Raises:
        InvalidError: The tensors do not fit; all such are named.

    Cost: linear in the overlaps of distinct pieces, times the nodes that need them.
    """
    pairs = match_tensors(old, new, drop)
    nodes = tuple(sorted({*old.nodes, *new.nodes}))
    numbers = {node: number for number, node in enumerate(nodes)}
    return Plan(old, new, nodes, tuple(match_all(pairs, old, new, numbers)))


class Plan:
    """What moves where; columnar, objects are made only for what somebody looks at.

    Attributes:
        old: The PTC before.
        new: The PTC after.
        nodes: Names of all nodes of both, sorted; numbers elsewhere index it.
        matches: One for each kind of tensors.
        sources: For each match, int32 (moved rows, tensors): the node that sends each.
    """

    def __init__(self, old: PTC, new: PTC, nodes: tuple[str, ...], matches: tuple[Match, ...]) -> None:
        self.old, self.new, self.nodes, self.matches = old, new, nodes, matches
        self.sources = _choose_sources(matches, len(nodes))

    @cached_property
    def matrix(self) -> Ints:
        """Bytes that each node (row) sends to each other (column)."""
        count = len(self.nodes)
        out = np.zeros(count * count, np.int64)
        for match, source in zip(self.matches, self.sources, strict=True):
            target = match.row_node[match.moved][:, None]
            nbytes = match.row_volumes[match.moved][:, None] * match.sizes
            np.add.at(out, (source * count + target).ravel(), nbytes.ravel())
        return out.reshape(count, count)

    def _bytes(self, match: Match, rows: Flags) -> int:
        return int(match.row_volumes[rows].sum()) * match.element_bytes

    @cached_property
    def totals(self) -> dict[str, int]:
        """Bytes needed, kept, local, moved, their lower bound, and padding; summed over nodes."""
        kept = sum(self._bytes(m, m.kept) for m in self.matches)
        moved = int(self.matrix.sum())
        needed = bound = padding = 0
        for m in self.matches:
            need = m.wanted.on_node @ m.wanted.volumes
            # Of what a node needs, what its own ranks held before: these bytes no plan could save.
            had = np.zeros(len(self.nodes), np.int64)
            own = m.held.on_node[m.row_node, m.overlap_held[m.row_overlap]]
            np.add.at(had, m.row_node[own], m.row_volumes[own])
            needed += int(need.sum()) * m.element_bytes
            bound += int((need - had).sum()) * m.element_bytes
            padding += _padding(m) * m.element_bytes
        return {
            "needed": needed,
            "kept": kept,
            "local": needed - kept - moved,
            "moved": moved,
            "moved_lower_bound": bound,
            "padding": padding,
        }

    @cached_property
    def operations(self) -> dict[str, int]:
        """Source pieces cut for several transfers, transfers that cross nodes, shards made of several."""
        split = move = merge = 0
        for m in self.matches:
            used = m.row_overlap[~m.kept]
            cuts = np.bincount(m.overlap_held[np.unique(used)], minlength=1)
            parts = np.bincount(m.overlap_wanted, minlength=len(m.wanted.atoms))
            split += int((cuts > 1).sum()) * len(m.pairs)
            move += int(m.moved.sum()) * len(m.pairs)
            merge += _merges(m, parts, self.nodes) * len(m.pairs)
        return {"split": split, "move": move, "merge": merge}

    def summary(self) -> dict[str, Any]:
        """Returns what ``plan --json`` prints, without format and version."""
        matrix = self.matrix
        rows, columns = np.nonzero(matrix)
        pairs: dict[str, dict[str, int]] = {}
        for i, j in zip(rows.tolist(), columns.tolist(), strict=True):
            pairs.setdefault(self.nodes[i], {})[self.nodes[j]] = int(matrix[i, j])
        sends, receives = matrix.sum(axis=1).tolist(), matrix.sum(axis=0).tolist()
        return {
            "bytes": self.totals,
            "nodes": {
                node: {"sends": sends[k], "receives": receives[k]} for k, node in enumerate(self.nodes)
            },
            "matrix": pairs,
            "operations": self.operations,
            "values": [],
            "dataset": {},
        }


def _choose_sources(matches: Sequence[Match], node_count: int) -> tuple[Ints, ...]:
    """Chooses for each moved row and tensor the node that sends it."""
    number: dict[bytes, int] = {}
    candidates: list[Ints] = []
    demands: list[int] = []
    of_rows: list[Ints] = []
    load = np.zeros(node_count, np.int64)
    for m in matches:
        atoms, of_row = np.unique(m.overlap_held[m.row_overlap[m.moved]], return_inverse=True)
        holders = m.held.on_node[:, atoms]
        nbytes = np.zeros(len(atoms), np.int64)
        np.add.at(nbytes, of_row, m.row_volumes[m.moved] * m.element_bytes)
        # What one node alone holds needs no choice: the node stands for it as -1 - node.
        ids = -1 - holders.argmax(axis=0)
        alone = holders.sum(axis=0) == 1
        np.add.at(load, -1 - ids[alone], nbytes[alone])
        for k in np.flatnonzero(~alone).tolist():
            ids[k] = number.setdefault(holders[:, k].tobytes(), len(number))
            if ids[k] == len(candidates):
                candidates.append(np.flatnonzero(holders[:, k]))
                demands.append(0)
            demands[ids[k]] += int(nbytes[k])
        of_rows.append(ids[of_row])
    quotas = balanced_quotas(candidates, demands, load)
    dealt = [0] * len(candidates)
    out = []
    for m, of_row in zip(matches, of_rows, strict=True):
        sizes = m.row_volumes[m.moved][:, None] * m.sizes
        chosen = np.repeat((-1 - of_row)[:, None], len(m.sizes), axis=1)
        for k in np.unique(of_row[of_row >= 0]).tolist():
            mine = of_row == k
            part = sizes[mine]
            chosen[mine] = candidates[k][deal(part.ravel(), dealt[k], quotas[k])].reshape(part.shape)
            dealt[k] += int(part.sum())
        out.append(chosen)
    return tuple(out)


def _padding(match: Match) -> int:
    """Returns the elements of padding in the arrays of all nodes, each distinct one of a node once."""
    total = 0
    _, place, cell = match.wanted.node_cells
    for number, (table_number, _) in enumerate(match.wanted.key):
        table = match.wanted.ptc.tables[table_number]
        if not len(table.pads):
            continue
        per_cell = np.bincount(
            table.pad_cell, (table.pads[:, 1] - table.pads[:, 0]).prod(axis=1), len(table.local_shapes)
        )
        total += int(per_cell[cell[place == number]].sum())
    return total


def _merges(match: Match, parts: Ints, nodes: Sequence[str]) -> int:
    """Returns the shards (rank by rank) that are made of more than one transfer."""
    total = 0
    side = match.wanted
    node, place, cell = (column[~match.kept_cells] for column in side.node_cells)
    owner, pieces = side.pieces_of(place, cell)
    again, atom = side.atoms_of(pieces)
    count = np.bincount(owner[again], parts[atom], len(node))
    for k in np.flatnonzero(count > 1).tolist():
        table, mask = side.key[place[k]]
        ranks = list(side.ptc.nodes[nodes[node[k]]])
        total += int((side.ptc.masks[mask][ranks] & (side.ptc.tables[table].of_rank[ranks] == cell[k])).sum())
    return total
