"""From one PTC to another with the least bytes.

A node that needs a region takes it, in this order, from a file that stays as it is, from another file of its
own, or from a node that holds it; each region crosses to a node once. Tensors that are cut and held alike are
planned together (`core.matching`), so the work grows with the number of distinct ways, not with the number of
ranks times tensors. Sources among replicas are balanced (`core.balance`). The same PTCs give the same plan on
any machine: every part computes it by itself. Where holders would send more than any node must receive, what
several nodes need is passed on between them (`core.relays`).

Source: Tenplex (SOSP 2024), section 4.2, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tenplexfs.core.balance import balanced_quotas, deal
from tenplexfs.core.matching import Flags, Match, match_all, match_tensors
from tenplexfs.core.ptc import PTC
from tenplexfs.core.region import Ints, find_hole, region_text
from tenplexfs.core.relays import PART_BYTES, Relays, hot_relays, no_relays
from tenplexfs.errors import NoReplicaError

__all__ = ["Nodes", "Plan", "plan"]

Nodes = npt.NDArray[np.int32]
"""Numbers of nodes."""

_SLACK = 1.02
_NAMED_COUNT = 5


def plan(
    old: PTC,
    new: PTC,
    *,
    drop: Sequence[str] = (),
    lost: Collection[str] = (),
    part_bytes: int = PART_BYTES,
) -> Plan:
    """Returns the plan that turns ``old`` into ``new``.

    Args:
        old: What is held now.
        new: What is wanted.
        drop: Patterns of tensors that the new layout may lack.
        lost: Nodes that hold nothing of ``old`` any more, so that they are no sources; ``new`` may have them.
        part_bytes: What several nodes need is passed on between them in parts no smaller than this.

    Raises:
        InvalidError: The tensors do not fit; all such are named.
        NoReplicaError: Only lost nodes held what is wanted; names every tensor, with a region of it.

    Cost: linear in the overlaps of distinct pieces, times the nodes that need them.
    """
    pairs = match_tensors(old, new, drop)
    nodes = tuple(sorted({*old.nodes, *new.nodes}))
    numbers = {node: number for number, node in enumerate(nodes)}
    matches = tuple(match_all(pairs, old, new, numbers, lost=lost))
    if lost:
        _check_held(matches, lost)
    return Plan(old, new, nodes, matches, part_bytes)


def _check_held(matches: Sequence[Match], lost: Collection[str]) -> None:
    gone: dict[str, str] = {}
    for match in matches:
        found = np.zeros(len(match.wanted.atoms), np.int64)
        np.add.at(found, match.overlap_wanted, match.volumes)
        wanted = np.unique(match.wanted.node_atoms[1])
        for atom in wanted[found[wanted] < match.wanted.volumes[wanted]][:1].tolist():
            hole = find_hole(match.wanted.atoms[atom], match.boxes[match.overlap_wanted == atom])
            if hole is not None:
                gone |= {pair.tensor.path: region_text(hole) for pair in match.pairs}
    if gone:
        first = ", ".join(f"{path} {region}" for path, region in sorted(gone.items())[:_NAMED_COUNT])
        more = f" and {len(gone) - _NAMED_COUNT} tensors more" if len(gone) > _NAMED_COUNT else ""
        raise NoReplicaError(
            f"no node that is left holds {first}{more}; lost: {', '.join(sorted(lost))}",
            tensors=dict(sorted(gone.items())),
            lost=sorted(lost),
        )


class Plan:
    """What moves where; columnar, objects are made only for what somebody looks at.

    Attributes:
        old: The PTC before.
        new: The PTC after.
        nodes: Names of all nodes of both, sorted; numbers elsewhere index it.
        matches: One for each kind of tensors.
        sources: For each match, int32 (moved rows, tensors): the holder that sends each.
        relays: For each match, what nodes pass on of it instead.
        matrix: Bytes that each node (row) sends to each other (column).
    """

    def __init__(
        self, old: PTC, new: PTC, nodes: tuple[str, ...], matches: tuple[Match, ...], part_bytes: int
    ) -> None:
        self.old, self.new, self.nodes, self.matches = old, new, nodes, matches
        count = len(nodes)
        self.relays = tuple(map(no_relays, matches))
        self.sources = _choose_sources(matches, self.relays, np.zeros((count, count), np.int64))
        self.matrix = _count_bytes(matches, self.relays, self.sources, count)
        sends, receives = self.matrix.sum(axis=1), self.matrix.sum(axis=0)
        hot = np.flatnonzero(sends > _SLACK * receives.max(initial=0))
        if not len(hot):
            return
        relays = tuple(
            hot_relays(match, source, hot, part_bytes)
            for match, source in zip(matches, self.sources, strict=True)
        )
        passed = np.zeros((count, count), np.int64)
        for match, relay in zip(matches, relays, strict=True):
            relay.add_to(passed, match)
        sources = _choose_sources(matches, relays, passed)
        matrix = passed + _count_bytes(matches, relays, sources, count)
        if matrix.sum(axis=1).max() < sends.max():
            self.relays, self.sources, self.matrix = relays, sources, matrix

    def _bytes(self, match: Match, rows: Flags) -> int:
        return int(match.row_volumes[rows].sum()) * match.element_bytes

    @cached_property
    def totals(self) -> dict[str, int]:
        """Bytes needed, kept, local, moved, their lower bound, and padding; summed over nodes."""
        kept = sum(self._bytes(m, m.kept) for m in self.matches)
        moved = int(self.matrix.sum())
        needed = bound = padding = 0
        for m in self.matches:
            need = int(m.wanted.volumes[m.wanted.node_atoms[1]].sum()) * m.element_bytes
            needed += need
            # Of what a node needs, what none of its own ranks held before: these bytes no plan could save.
            bound += need - self._bytes(m, m.own)
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
            merge += _merges(m, parts) * len(m.pairs)
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


def _count_bytes(
    matches: Sequence[Match], relays: Sequence[Relays], sources: Sequence[Nodes], count: int
) -> Ints:
    """Returns what holders send, by holder and target."""
    out = np.zeros(count * count, np.int64)
    for match, relay, source in zip(matches, relays, sources, strict=True):
        target = match.row_node[match.moved][:, None]
        nbytes = relay.held_volumes[:, None] * match.sizes
        np.add.at(out, (source * np.int64(count) + target).ravel(), nbytes.ravel())
    return out.reshape(count, count)


def _choose_sources(matches: Sequence[Match], relays: Sequence[Relays], passed: Ints) -> tuple[Nodes, ...]:
    """Chooses for each moved row and tensor the holder that sends it; ``passed`` is sent in any case."""
    number: dict[bytes, int] = {}
    candidates: list[Ints] = []
    demands: list[int] = []
    of_rows: list[Ints] = []
    load = passed.sum(axis=1)
    for m, relay in zip(matches, relays, strict=True):
        atoms, of_row = np.unique(m.overlap_held[m.row_overlap[m.moved]], return_inverse=True)
        owner, node = m.held.holders_of(atoms)
        bounds = np.searchsorted(owner, np.arange(len(atoms) + 1))
        nbytes = np.zeros(len(atoms), np.int64)
        np.add.at(nbytes, of_row, relay.held_volumes * m.element_bytes)
        # What one node alone holds needs no choice: the node stands for it as -1 - node.
        ids = -1 - node[bounds[:-1]]
        alone = np.diff(bounds) == 1
        np.add.at(load, -1 - ids[alone], nbytes[alone])
        for k in np.flatnonzero(~alone).tolist():
            holders = node[bounds[k] : bounds[k + 1]]
            ids[k] = number.setdefault(holders.tobytes(), len(number))
            if ids[k] == len(candidates):
                candidates.append(holders)
                demands.append(0)
            demands[ids[k]] += int(nbytes[k])
        of_rows.append(ids[of_row])
    quotas = balanced_quotas(candidates, demands, load)
    dealt = [0] * len(candidates)
    out = []
    for m, relay, of_row in zip(matches, relays, of_rows, strict=True):
        sizes = relay.held_volumes[:, None] * m.sizes
        chosen = np.repeat((-1 - of_row).astype(np.int32)[:, None], len(m.sizes), axis=1)
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


def _merges(match: Match, parts: Ints) -> int:
    """Returns the shards (rank by rank) that are made of more than one transfer."""
    side, fresh = match.wanted, ~match.kept_cells
    owner, pieces = side.pieces_of(side.node_cells[1][fresh], side.node_cells[2][fresh])
    again, atom = side.atoms_of(pieces)
    count = np.bincount(owner[again], parts[atom], int(fresh.sum()))
    return int(side.cell_ranks[fresh][count > 1].sum())
