"""Where the pieces of two PTCs meet: the geometry of a plan, once for all tensors cut and held alike.

A `Match` speaks of atoms: the source's pieces (``held``) and the target's (``wanted``), each cut into
disjoint boxes, and the overlaps of the two. Nodes are numbers in the order of their names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

from tenplexfs.core.ptc import PTC, Placement, Tensor
from tenplexfs.core.region import Boxes, Ints, box_volumes, disjoint_atoms, expand_spans, join
from tenplexfs.errors import InvalidError

__all__ = ["Match", "Pair", "Side", "match_all", "match_tensors"]

Flags = npt.NDArray[np.bool_]
Key = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of the new PTC and the one of the old PTC that its bytes come from."""

    new: tuple[Placement, ...]
    old: tuple[Placement, ...]

    @property
    def tensor(self) -> Tensor:
        """The new tensor."""
        return self.new[0].tensor

    @property
    def key(self) -> tuple[Key, Key]:
        """Equal for pairs that have the same plan, apart from the size of an element."""
        return tuple((p.cells, p.mask) for p in self.old), tuple((p.cells, p.mask) for p in self.new)


def match_tensors(old: PTC, new: PTC, drop: Sequence[str]) -> list[Pair]:
    """Finds the source of every new tensor; names decide, tied ones included.

    Args:
        old: What is held.
        new: What is wanted.
        drop: Patterns (as a shell's) of old tensors that may go.

    Raises:
        InvalidError: Names every tensor that the old PTC lacks, has otherwise, or that would be lost.
    """
    pairs, wrong, used = [], [], set()
    for path, names in new.names.items():
        sources = {old.placements[p.path].tensor.path for p in names if p.path in old.placements}
        if not sources:
            wrong.append(f"{path}: not in the old layout")
            continue
        if len(sources) > 1:
            wrong.append(f"{path}: ties {', '.join(sorted(sources))}, which the old layout holds apart")
            continue
        have, want = old.names[sources.pop()], names[0].tensor
        tensor = have[0].tensor
        used.add(tensor.path)
        if (tensor.shape, tensor.dtype) != (want.shape, want.dtype):
            is_now = f"{path}: is {tensor.dtype} {list(tensor.shape)}"
            wrong.append(f"{is_now}, the new layout says {want.dtype} {list(want.shape)}")
            continue
        pairs.append(Pair(names, have))
    for path, names in old.names.items():
        if path not in used and not any(fnmatchcase(p.path, pattern) for p in names for pattern in drop):
            wrong.append(f"{path}: the new layout lacks it (--drop lets it go)")
    if wrong:
        raise InvalidError(f"{len(wrong)} tensors do not fit: " + "; ".join(wrong), tensors=wrong)
    return pairs


@dataclass(frozen=True, eq=False)
class Side:
    """The pieces of one PTC for tensors of one kind, and the atoms they make.

    Attributes:
        ptc: Whose.
        key: (table, mask) of each placement.
        atoms: (atoms, 2, ndim), disjoint.
        volumes: (atoms,).
        piece_place: (pieces,), the placement of each piece.
        piece_index: (pieces,), its index in the placement's table.
        members: Pairs (piece, atom), two columns, sorted.
        node_cells: Triples (node, placement, cell) that exist, three columns, sorted.
        cell_ranks: (node cells,), how many ranks of the node hold the cell.
        cell_arrays: (node cells,), a number for the local array; equal ones, of either side, are the same.
        node_atoms: Pairs (node, atom) such that some rank of the node holds the atom, two columns, sorted.
    """

    ptc: PTC
    key: Key
    atoms: Boxes
    volumes: Ints
    piece_place: Ints
    piece_index: Ints
    members: tuple[Ints, Ints]
    node_cells: tuple[Ints, Ints, Ints]
    cell_ranks: Ints
    cell_arrays: Ints
    node_atoms: tuple[Ints, Ints]

    def pieces_of(self, place: Ints, cell: Ints) -> tuple[Ints, Ints]:
        """Returns (owner, piece of this side) for all pieces of the given (placement, cell)s, in order."""
        return _pieces_of(self.ptc, self.key, (self.piece_place, self.piece_index), place, cell)

    def atoms_of(self, pieces: Ints) -> tuple[Ints, Ints]:
        """Returns (owner, atom) for all atoms of the given pieces, in order."""
        return _atoms_of(self.members, pieces)

    def holds(self, node: Ints, atom: Ints) -> Flags:
        """Returns whether each node holds each atom, pair by pair."""
        return _contains(_keyed(*self.node_atoms), _keyed(node, atom))

    def holders_of(self, atoms: Ints) -> tuple[Ints, Ints]:
        """Returns (owner, node) for all nodes that hold the given atoms, in order."""
        nodes, atom = self.node_atoms
        by = np.argsort(atom, kind="stable")
        ordered = atom[by]
        low, high = np.searchsorted(ordered, atoms), np.searchsorted(ordered, atoms, side="right")
        owner, place = expand_spans(low, high)
        return owner, nodes[by[place]]

    def table(self, first: int, last: int) -> Flags:
        """Returns whether each of the nodes [first, last) holds each atom, (nodes, atoms)."""
        low, high = np.searchsorted(self.node_atoms[0], [first, last])
        out = np.zeros((last - first, len(self.atoms)), bool)
        out[self.node_atoms[0][low:high] - first, self.node_atoms[1][low:high]] = True
        return out


_WIDE = 1 << 40


def _keyed(major: Ints, minor: Ints) -> Ints:
    return major * _WIDE + minor


def _contains(ordered: Ints, wanted: Ints) -> Flags:
    """Returns whether each of ``wanted`` is in ``ordered``, which ascends."""
    if not len(ordered):
        return np.zeros(len(wanted), bool)
    found = ordered[np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)]
    return np.asarray(found == wanted)


def _pieces_of(ptc: PTC, key: Key, columns: tuple[Ints, Ints], place: Ints, cell: Ints) -> tuple[Ints, Ints]:
    lows, highs = np.empty(len(place), np.int64), np.empty(len(place), np.int64)
    for number, (table, _) in enumerate(key):
        mine = place == number
        bounds = ptc.tables[table].bounds
        lows[mine], highs[mine] = bounds[cell[mine]], bounds[cell[mine] + 1]
    owner, index = expand_spans(lows, highs)
    return owner, np.searchsorted(_keyed(*columns), _keyed(place[owner], index))


def _atoms_of(members: tuple[Ints, Ints], pieces: Ints) -> tuple[Ints, Ints]:
    low, high = np.searchsorted(members[0], pieces), np.searchsorted(members[0], pieces, side="right")
    owner, place = expand_spans(low, high)
    return owner, members[1][place]


class _Sides:
    """Makes the sides of one PTC, each once."""

    def __init__(
        self,
        ptc: PTC,
        node_numbers: Mapping[str, int],
        arrays: dict[bytes, int],
        lost: Collection[str] = (),
    ) -> None:
        """``arrays`` numbers distinct local arrays, for both PTCs; ``lost`` nodes hold nothing."""
        self.ptc, self._arrays = ptc, arrays
        self._is_lost = np.array([ptc.node_of(rank) in lost for rank in ptc.ranks()])
        self._node_of = np.empty(ptc.world_size, np.int64)
        for node, ranks in ptc.nodes.items():
            self._node_of[list(ranks)] = node_numbers[node]
        self._made: dict[Key, Side] = {}
        self._table_arrays: dict[int, Ints] = {}

    def side(self, key: Key) -> Side:
        if key not in self._made:
            self._made[key] = self._make(key)
        return self._made[key]

    def _make(self, key: Key) -> Side:
        columns = []
        for number, (table_number, mask_number) in enumerate(key):
            table = self.ptc.tables[table_number]
            held = self.ptc.masks[mask_number] & (table.of_rank >= 0) & ~self._is_lost
            there = np.flatnonzero(held)
            unique, ranks = np.unique(_keyed(self._node_of[there], table.of_rank[there]), return_counts=True)
            node, cell = unique // _WIDE, unique % _WIDE
            columns.append((node, np.full(len(node), number), cell, ranks, self._numbers(table_number)[cell]))
        node, place, cell, ranks, arrays = (np.concatenate(column) for column in zip(*columns, strict=True))
        if len(key) > 1:
            by = np.lexsort((cell, place, node))
            node, place, cell, ranks, arrays = (c[by] for c in (node, place, cell, ranks, arrays))
        boxes, places, indices = [], [], []
        for number, (table_number, _) in enumerate(key):
            table = self.ptc.tables[table_number]
            cells = np.unique(cell[place == number])
            index = expand_spans(table.bounds[cells], table.bounds[cells + 1])[1]
            boxes.append(table.pieces[index])
            places.append(np.full(len(index), number))
            indices.append(index)
        atoms, of, atom = disjoint_atoms(np.concatenate(boxes))
        pieces, members = (np.concatenate(places), np.concatenate(indices)), (of, atom)
        owner, piece = _pieces_of(self.ptc, key, pieces, place, cell)
        again, atom = _atoms_of(members, piece)
        by_node = np.unique(_keyed(node[owner[again]], atom))
        return Side(
            self.ptc,
            key,
            atoms,
            box_volumes(atoms),
            *pieces,
            members,
            (node, place, cell),
            ranks,
            arrays,
            (by_node // _WIDE, by_node % _WIDE),
        )

    def _numbers(self, table: int) -> Ints:
        """Returns the number of the local array of each cell of a table."""
        if table not in self._table_arrays:
            numbers = [
                self._arrays.setdefault(s, len(self._arrays)) for s in self.ptc.tables[table].signatures
            ]
            self._table_arrays[table] = np.array(numbers, np.int64)
        return self._table_arrays[table]


@dataclass(frozen=True, eq=False)
class Match:
    """How tensors of one kind come from the old PTC to the new one.

    Rows are the pairs (node, overlap) that a node needs: what is `kept` lies in a file that stays, what is
    `local` lies in other files of the node, the rest is `moved`.

    Attributes:
        pairs: The tensors, in the order of their paths.
        held: The old side.
        wanted: The new side.
        overlap_held: (overlaps,), atom of the old side.
        overlap_wanted: (overlaps,), atom of the new side, ascending.
        boxes: (overlaps, 2, ndim).
        volumes: (overlaps,), elements.
        kept_cells: (node cells of the new side,), whether the node has the very same array.
        row_node: (rows,), ascending.
        row_overlap: (rows,), ascending within the node.
        kept: (rows,).
        own: (rows,), whether some rank of the node held it.
        moved: (rows,), neither.
        sizes: (pairs,), bytes of an element of each tensor.
    """

    pairs: tuple[Pair, ...]
    held: Side
    wanted: Side
    overlap_held: Ints
    overlap_wanted: Ints
    boxes: Boxes
    volumes: Ints
    kept_cells: Flags
    row_node: Ints
    row_overlap: Ints
    kept: Flags
    own: Flags
    moved: Flags
    sizes: Ints

    @property
    def row_volumes(self) -> Ints:
        """Elements of each row."""
        return self.volumes[self.row_overlap]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of all the tensors together."""
        return int(self.sizes.sum())


def match_all(
    pairs: Iterable[Pair],
    old: PTC,
    new: PTC,
    node_numbers: Mapping[str, int],
    *,
    lost: Collection[str] = (),
) -> Iterator[Match]:
    """Yields the match of each kind of tensors: those that have one `Pair.key`.

    What is held on ``lost`` nodes is held no more; what only they held has no overlap.
    """
    kinds: dict[tuple[Key, Key], list[Pair]] = {}
    for pair in pairs:
        kinds.setdefault(pair.key, []).append(pair)
    arrays: dict[bytes, int] = {}
    held, wanted = _Sides(old, node_numbers, arrays, lost), _Sides(new, node_numbers, arrays)
    for (old_key, new_key), alike in kinds.items():
        yield _meet(alike, held.side(old_key), wanted.side(new_key))


def _meet(pairs: Sequence[Pair], held: Side, wanted: Side) -> Match:
    s, u = join(held.atoms, wanted.atoms)
    by = np.lexsort((s, u))
    s, u = s[by], u[by]
    starts = np.maximum(held.atoms[s, 0], wanted.atoms[u, 0])
    boxes = np.stack([starts, np.minimum(held.atoms[s, 1], wanted.atoms[u, 1])], axis=1)
    have = np.unique(_keyed(held.node_cells[0], held.cell_arrays))
    kept_cells = _contains(have, _keyed(wanted.node_cells[0], wanted.cell_arrays))
    node, place, cell = (column[kept_cells] for column in wanted.node_cells)
    owner, pieces = wanted.pieces_of(place, cell)
    again, atom = wanted.atoms_of(pieces)
    kept_atoms = np.unique(_keyed(node[owner[again]], atom))
    need_node, need_atom = wanted.node_atoms
    low, high = np.searchsorted(u, need_atom), np.searchsorted(u, need_atom, side="right")
    owner, row_overlap = expand_spans(low, high)
    row_node = need_node[owner]
    kept = _contains(kept_atoms, _keyed(need_node, need_atom))[owner]
    own = held.holds(row_node, s[row_overlap])
    return Match(
        tuple(pairs),
        held,
        wanted,
        s,
        u,
        boxes,
        box_volumes(boxes),
        kept_cells,
        row_node,
        row_overlap,
        kept,
        own,
        ~kept & ~own,
        np.array([pair.tensor.itemsize for pair in pairs], np.int64),
    )
