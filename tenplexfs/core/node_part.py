"""What one node does of a plan: its arrays, and for each where every element comes from.

Boxes here are in the coordinates of local arrays, so that the part alone suffices to carry the plan out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tenplexfs.core.joining import join_neighbours
from tenplexfs.core.matching import Flags, Match, Pair, Side
from tenplexfs.core.moves import Copies, Key, Moves, NodePart, Target, Via, Way
from tenplexfs.core.planner import Nodes, Plan
from tenplexfs.core.region import Boxes, Ints, expand_spans, ravel_strides, split_runs
from tenplexfs.core.relays import Relays, cut_parts, part_sources
from tenplexfs.errors import NotFoundError

__all__ = ["Copies", "Key", "Moves", "NodePart", "Target", "Via", "Way", "node_part"]


def node_part(plan: Plan, node: str) -> NodePart:
    """Returns what ``node`` does.

    Raises:
        NotFoundError: The node is in neither layout.
    """
    if node not in plan.nodes:
        raise NotFoundError(f"no node {node!r} in either layout")
    number = plan.nodes.index(node)
    targets: list[Target] = []
    for match, sources, relays in zip(plan.matches, plan.sources, plan.relays, strict=True):
        first, last = np.searchsorted(match.wanted.node_cells[0], [number, number + 1])
        if first < last:
            targets += _MatchPart(plan, match, sources, relays, number).targets(len(targets))
    return NodePart(node, tuple(targets))


@dataclass(frozen=True, eq=False)
class _Kind:
    """A distinct new array of the node, and its rows: (piece, overlap), ascending by piece.

    ``cells`` and ``kept`` are (placement, cell) of the new and the old side.
    """

    cells: tuple[tuple[int, int], ...]
    kept: tuple[int, int] | None
    piece: Ints
    overlap: Ints
    row: Ints


@dataclass(frozen=True, eq=False)
class _Giver:
    """`Via` without the name of its tensor."""

    node: int
    rank: int
    place: int
    source_boxes: Boxes
    target_boxes: Boxes


@dataclass(frozen=True, eq=False)
class _Geometry:
    """Moves without the name of their tensor."""

    rank: int
    place: int
    node: int
    way: Way
    source_boxes: Boxes
    target_boxes: Boxes
    giver: _Giver | None = None


class _MatchPart:
    """What one node does for the tensors of one match."""

    def __init__(self, plan: Plan, match: Match, sources: Nodes, relays: Relays, number: int) -> None:
        self.plan, self.match, self.sources, self.number = plan, match, sources, number
        self._relays = relays
        self._others: dict[int, _MatchPart] = {}
        self._moved_index = np.cumsum(match.moved) - 1
        self._holders: dict[int, tuple[Ints, Ints, Ints, Ints]] = {}
        self._geometry: dict[tuple[int, bytes], tuple[_Geometry, ...]] = {}
        self.kinds = tuple(self._make_kinds())
        # The first array of the node that lacks an overlap has it sent; the others take it from there.
        self._claims: dict[int, int] = {}
        for index, kind in enumerate(self.kinds):
            if kind.kept is None:
                for overlap in kind.overlap[match.moved[kind.row]].tolist():
                    self._claims.setdefault(overlap, index)

    def targets(self, first: int) -> Iterator[Target]:
        """Yields the targets tensor by tensor; ``first`` is the index of the first one in the part."""
        copies = [self._copies(index) for index in range(len(self.kinds))]
        ranks = [self._ranks(kind) for kind in self.kinds]
        for column, pair in enumerate(self.match.pairs):
            base = first + column * len(self.kinds)
            for index, kind in enumerate(self.kinds):
                place, cell = kind.cells[0]
                keys = sorted((rank, pair.new[p].path) for rank, p in ranks[index])
                moves = tuple(
                    Moves(
                        (g.rank, pair.old[g.place].path),
                        self.plan.nodes[g.node],
                        g.way,
                        g.source_boxes,
                        g.target_boxes,
                        None if g.giver is None else self._via(g.giver, pair),
                    )
                    for g in self._moves(index, column)
                )
                yield Target(
                    pair.tensor.path,
                    tuple(keys),
                    self.plan.new.shard_of(pair.new[place].cells, cell),
                    pair.tensor.dtype,
                    self._kept_key(kind, column),
                    moves,
                    tuple(Copies(base + other, source, target) for other, source, target in copies[index]),
                )

    def _via(self, giver: _Giver, pair: Pair) -> Via:
        key = (giver.rank, pair.new[giver.place].path)
        return Via(self.plan.nodes[giver.node], key, giver.source_boxes, giver.target_boxes)

    def _make_kinds(self) -> Iterator[_Kind]:
        match, wanted, held = self.match, self.match.wanted, self.match.held
        stays: dict[int, tuple[int, int]] = {}
        for array, place, cell in self._cells(held):
            stays.setdefault(array, (place, cell))
        alike: dict[int, list[tuple[int, int]]] = {}
        for array, place, cell in self._cells(wanted):
            alike.setdefault(array, []).append((place, cell))
        first, last = np.searchsorted(match.row_node, [self.number, self.number + 1]).tolist()
        bounds = np.searchsorted(match.overlap_wanted, np.arange(len(wanted.atoms) + 1))
        for signature, cells in alike.items():
            pieces = wanted.pieces_of(*np.array(cells[:1]).T)[1]
            owner, atom = wanted.atoms_of(pieces)
            again, overlap = expand_spans(bounds[atom], bounds[atom + 1])
            row = first + np.searchsorted(match.row_overlap[first:last], overlap)
            yield _Kind(tuple(cells), stays.get(signature), pieces[owner[again]], overlap, row)

    def _cells(self, side: Side) -> Iterator[tuple[int, int, int]]:
        """Yields (number of the local array, placement, cell) of what this node holds."""
        nodes, place, cell = side.node_cells
        here = slice(*np.searchsorted(nodes, [self.number, self.number + 1]))
        columns = (side.cell_arrays[here], place[here], cell[here])
        yield from zip(*(column.tolist() for column in columns), strict=True)

    def _ranks(self, kind: _Kind) -> list[tuple[int, int]]:
        """Returns the (rank, placement) that hold an array of ``kind`` on this node."""
        side = self.match.wanted
        here = np.array(side.ptc.nodes[self.plan.nodes[self.number]])
        return [
            (rank, place)
            for place, cell in kind.cells
            for rank in here[_cells_of(side, place, here) == cell].tolist()
        ]

    def _kept_key(self, kind: _Kind, column: int) -> Key | None:
        if kind.kept is None:
            return None
        place, cell = kind.kept
        here = np.array(self.plan.old.nodes[self.plan.nodes[self.number]])
        rank = here[_cells_of(self.match.held, place, here) == cell][0]
        return int(rank), self.match.pairs[column].old[place].path

    def _moves(self, index: int, column: int) -> tuple[_Geometry, ...]:
        kind, match = self.kinds[index], self.match
        if kind.kept is not None:
            key = (index, b"")
            if key not in self._geometry:
                self._geometry[key] = tuple(self._stay(kind))
            return self._geometry[key]
        moved = match.moved[kind.row]
        node = np.full(len(kind.row), self.number)
        node[moved] = self.sources[self._moved_index[kind.row[moved]], column]
        key = (index, node.tobytes())
        if key not in self._geometry:
            self._geometry[key] = tuple(self._arrive(index, node, moved))
        return self._geometry[key]

    def _stay(self, kind: _Kind) -> Iterator[_Geometry]:
        rank, _ = self._kept_key(kind, 0) or (0, "")
        place, cell = kind.kept or (0, 0)
        side = self.match.held
        pieces = side.pieces_of(np.array([place]), np.array([cell]))[1]
        if not len(pieces):
            return
        table = side.ptc.tables[side.key[place][0]]
        index = side.piece_index[pieces]
        extent = table.pieces[index, 1] - table.pieces[index, 0]
        if table.flat:
            extent = extent.prod(axis=1)[:, None]
        boxes = np.stack([table.at[index], table.at[index] + extent], axis=1)
        yield _Geometry(rank, place, self.number, "kept", *join_neighbours(boxes, boxes))

    def _arrive(self, index: int, node: Ints, moved: Flags) -> Iterator[_Geometry]:
        kind, match = self.kinds[index], self.match
        prefer = np.array(sorted({rank for rank, _ in self._ranks(kind)}))
        claimed = np.array([self._claims.get(o, -1) == index for o in kind.overlap.tolist()], bool)
        rank, place, piece = (np.empty(len(node), np.int64) for _ in range(3))
        for one in np.unique(node).tolist():
            rows = np.flatnonzero(node == one)
            found = self._pick(one, match.overlap_held[kind.overlap[rows]], prefer)
            rank[rows], place[rows], piece[rows] = found
        way = np.where(~moved, 0, np.where(claimed, 1, 2))
        row, boxes, via = self._parts(kind, way == 1)
        order = np.lexsort((kind.overlap[row], via[:, 1], via[:, 0], way[row], place[row], rank[row]))
        group = np.column_stack([rank[row], place[row], way[row], via])[order]
        edges = np.flatnonzero(np.any(group[1:] != group[:-1], axis=1)) + 1
        for some in np.split(order, edges):
            if not len(some):
                continue
            rows = row[some]
            source, target = _local_boxes(
                match.held, piece[rows], match.wanted, kind.piece[rows], boxes[some]
            )
            k, giver = rows[0], None
            if (other := int(via[some[0], 0])) >= 0:
                giver = self._giver(other, int(via[some[0], 1]), kind, rows, boxes[some])
            yield _Geometry(int(rank[k]), int(place[k]), int(node[k]), _WAYS[way[k]], source, target, giver)

    def _parts(self, kind: _Kind, wire: Flags) -> tuple[Ints, Boxes, Ints]:
        """Cuts what is passed on into parts.

        Returns:
            For each part its row of ``kind``, its box, and (node, array there) that it comes through, or -1.
        """
        match, relays = self.match, self._relays
        row, boxes, via = [np.arange(0)], [match.boxes[:0]], [np.empty((0, 2), np.int64)]
        moved = self._moved_index[kind.row]
        count = np.where(wire, relays.count[moved] if len(relays.count) else 0, 0)
        whole = np.flatnonzero(count == 0)
        row.append(whole)
        boxes.append(match.boxes[kind.overlap[whole]])
        via.append(np.full((len(whole), 2), -1))
        for k in np.flatnonzero(count).tolist():
            nodes = relays.nodes_of(match, int(moved[k]))
            source = part_sources(len(nodes))[int(np.searchsorted(nodes, self.number))]
            overlap, ways = int(kind.overlap[k]), len(source)
            givers = [-1 if s < 0 else int(nodes[s]) for s in source.tolist()]
            arrays = [-1 if g < 0 else self._other(g)._claims[overlap] for g in givers]
            row.append(np.full(ways, k))
            boxes.append(cut_parts(match.boxes[[overlap]], relays.dim[moved[[k]]], ways)[0])
            via.append(np.array([givers, arrays], np.int64).T)
        return np.concatenate(row), np.concatenate(boxes), np.concatenate(via)

    def _other(self, number: int) -> _MatchPart:
        """Returns what another node does for the same tensors."""
        if number not in self._others:
            self._others[number] = _MatchPart(self.plan, self.match, self.sources, self._relays, number)
        return self._others[number]

    def _giver(self, node: int, array: int, kind: _Kind, rows: Ints, boxes: Boxes) -> _Giver:
        wanted, giver = self.match.wanted, self._other(node).kinds[array]
        by = np.argsort(giver.overlap, kind="stable")
        theirs = giver.piece[by][np.searchsorted(giver.overlap[by], kind.overlap[rows])]
        rank, place = min(self._other(node)._ranks(giver))
        source, target = _local_boxes(wanted, theirs, wanted, kind.piece[rows], boxes)
        return _Giver(node, rank, place, source, target)

    def _pick(self, node: int, atoms: Ints, prefer: Ints) -> tuple[Ints, Ints, Ints]:
        """Chooses (rank, placement, piece) on ``node`` for each old atom, the ranks of ``prefer`` first."""
        if node not in self._holders:
            self._holders[node] = self._find_holders(node)
        atom, rank, place, piece = self._holders[node]
        by = np.lexsort((place, rank, ~np.isin(rank, prefer), atom))
        first = by[np.searchsorted(atom[by], atoms)]
        return rank[first], place[first], piece[first]

    def _find_holders(self, node: int) -> tuple[Ints, Ints, Ints, Ints]:
        side = self.match.held
        ranks, places, cells = [], [], []
        here = np.array(side.ptc.nodes[self.plan.nodes[node]])
        for number in range(len(side.key)):
            found = _cells_of(side, number, here)
            there = found >= 0
            ranks.append(here[there])
            places.append(np.full(int(there.sum()), number))
            cells.append(found[there])
        rank, place, cell = (np.concatenate(column) for column in (ranks, places, cells))
        owner, piece = side.pieces_of(place, cell)
        again, atom = side.atoms_of(piece)
        return atom, rank[owner[again]], place[owner[again]], piece[again]

    def _copies(self, index: int) -> list[tuple[int, Boxes, Boxes]]:
        """Returns (kind, its boxes, own boxes) for what another array of the node had sent."""
        kind, match = self.kinds[index], self.match
        if kind.kept is not None:
            return []
        rows = np.flatnonzero(match.moved[kind.row])
        claims = np.array([self._claims[o] for o in kind.overlap[rows].tolist()], np.int64)
        out = []
        for other in np.unique(claims[claims != index]).tolist():
            mine = rows[claims == other]
            giver = self.kinds[other]
            by = np.argsort(giver.overlap, kind="stable")
            theirs = giver.piece[by][np.searchsorted(giver.overlap[by], kind.overlap[mine])]
            boxes = match.boxes[kind.overlap[mine]]
            out.append((other, *_local_boxes(match.wanted, theirs, match.wanted, kind.piece[mine], boxes)))
        return out


_WAYS: tuple[Way, ...] = ("local", "wire", "shared")


def _cells_of(side: Side, place: int, ranks: Ints) -> Ints:
    """Returns the cell of each rank under the placement, -1 where it is not there."""
    table, mask = side.key[place]
    return np.where(side.ptc.masks[mask][ranks], side.ptc.tables[table].of_rank[ranks], -1)


def _local_boxes(held: Side, source: Ints, wanted: Side, target: Ints, boxes: Boxes) -> tuple[Boxes, Boxes]:
    """Maps boxes of the tensor into the local arrays of both sides.

    They are cut so that a flat side takes runs, and joined where neighbours are one box on both sides.

    Args:
        held: Side of the sources; all pieces of one placement.
        source: (n,), piece of ``held`` that holds each box.
        wanted: Side of the targets; all pieces of one placement.
        target: (n,), piece of ``wanted`` that holds each box.
        boxes: (n, 2, ndim), in global coordinates.
    """
    ends = [_piece_columns(held, source), _piece_columns(wanted, target)]
    rows = np.arange(len(boxes))
    for flat, pieces, _ in ends:
        if flat:
            start = pieces[rows, 0][:, None]
            owner, parts, _ = split_runs(pieces[rows, 1] - pieces[rows, 0], boxes - start)
            boxes, rows = parts + start[owner], rows[owner]
    out = []
    for flat, pieces, at in ends:
        relative = boxes - pieces[rows, 0][:, None]
        if flat:
            strides = ravel_strides(pieces[rows, 1] - pieces[rows, 0])
            offset = (relative[:, 0] * strides).sum(axis=1)
            volume = (relative[:, 1] - relative[:, 0]).prod(axis=1)
            begin = at[rows, 0] + offset
            out.append(np.stack([begin, begin + volume], axis=1)[:, :, None])
        else:
            out.append(relative + at[rows][:, None])
    return join_neighbours(out[0], out[1])


def _piece_columns(side: Side, pieces: Ints) -> tuple[bool, Boxes, Ints]:
    """Returns whether the pieces' local arrays are flat, their regions, and where they lie."""
    table = side.ptc.tables[side.key[int(side.piece_place[pieces[0]])][0]]
    index = side.piece_index[pieces]
    return table.flat, table.pieces[index], table.at[index]
