"""Where the pieces of two PTCs meet: the geometry of a plan, once for all tensors cut and held alike.

A `Match` speaks of atoms: the source's pieces (``held``) and the target's (``wanted``), each cut into
disjoint boxes, and the overlaps of the two. Nodes are numbers in the order of their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
        on_node: (nodes, atoms), whether some rank of the node holds the atom.
        node_cells: Triples (node, placement, cell) that exist, three columns, sorted.
    """

    ptc: PTC
    key: Key
    atoms: Boxes
    volumes: Ints
    piece_place: Ints
    piece_index: Ints
    members: tuple[Ints, Ints]
    on_node: Flags
    node_cells: tuple[Ints, Ints, Ints]

    def pieces_of(self, place: Ints, cell: Ints) -> tuple[Ints, Ints]:
        """Returns (owner, piece of this side) for all pieces of the given (placement, cell)s, in order."""
        lows, highs = np.empty(len(place), np.int64), np.empty(len(place), np.int64)
        for number, (table, _) in enumerate(self.key):
            mine = place == number
            bounds = self.ptc.tables[table].bounds
            lows[mine], highs[mine] = bounds[cell[mine]], bounds[cell[mine] + 1]
        owner, index = expand_spans(lows, highs)
        keyed = self.piece_place * _WIDE + self.piece_index
        return owner, np.searchsorted(keyed, place[owner] * _WIDE + index)

    def atoms_of(self, pieces: Ints) -> tuple[Ints, Ints]:
        """Returns (owner, atom) for all atoms of the given pieces, in order."""
        bounds = np.searchsorted(self.members[0], np.arange(len(self.piece_place) + 1))
        owner, place = expand_spans(bounds[pieces], bounds[pieces + 1])
        return owner, self.members[1][place]


_WIDE = 1 << 40


def _make_side(ptc: PTC, key: Key, node_numbers: Mapping[str, int]) -> Side:
    """Collects what the tensors of one kind are made of in ``ptc``."""
    node_of = np.empty(ptc.world_size, np.int64)
    for node, ranks in ptc.nodes.items():
        node_of[list(ranks)] = node_numbers[node]
    boxes, places, indices, triples = [], [], [], []
    for number, (table_number, mask_number) in enumerate(key):
        table = ptc.tables[table_number]
        there = np.flatnonzero(ptc.masks[mask_number] & (table.of_rank >= 0))
        cells = table.of_rank[there]
        index = np.flatnonzero(np.isin(table.piece_cell, cells))
        boxes.append(table.pieces[index])
        places.append(np.full(len(index), number))
        indices.append(index)
        unique = np.unique(node_of[there] * _WIDE + cells)
        triples.append(np.stack([unique // _WIDE, np.full(len(unique), number), unique % _WIDE]))
    atoms, piece, atom = disjoint_atoms(np.concatenate(boxes))
    columns = np.concatenate(triples, axis=1)
    ordered = columns[:, np.lexsort(columns[::-1])]
    side = Side(
        ptc,
        key,
        atoms,
        box_volumes(atoms),
        np.concatenate(places),
        np.concatenate(indices),
        (piece, atom),
        np.zeros((len(node_numbers), len(atoms)), bool),
        (ordered[0], ordered[1], ordered[2]),
    )
    owner, pieces = side.pieces_of(side.node_cells[1], side.node_cells[2])
    again, atom = side.atoms_of(pieces)
    side.on_node[side.node_cells[0][owner[again]], atom] = True
    return side


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
        moved: (rows,).
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
    moved: Flags
    sizes: Ints = field(repr=False)

    @property
    def row_volumes(self) -> Ints:
        """Elements of each row."""
        return self.volumes[self.row_overlap]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of all the tensors together."""
        return int(self.sizes.sum())


def match_all(pairs: Iterable[Pair], old: PTC, new: PTC, node_numbers: Mapping[str, int]) -> Iterator[Match]:
    """Yields the match of each kind of tensors: those that have one `Pair.key`."""
    kinds: dict[tuple[Key, Key], list[Pair]] = {}
    for pair in pairs:
        kinds.setdefault(pair.key, []).append(pair)
    held: dict[Key, Side] = {}
    wanted: dict[Key, Side] = {}
    for (old_key, new_key), alike in kinds.items():
        if old_key not in held:
            held[old_key] = _make_side(old, old_key, node_numbers)
        if new_key not in wanted:
            wanted[new_key] = _make_side(new, new_key, node_numbers)
        yield _meet(alike, held[old_key], wanted[new_key])


def _meet(pairs: Sequence[Pair], held: Side, wanted: Side) -> Match:
    s, u = join(held.atoms, wanted.atoms)
    by = np.lexsort((s, u))
    s, u = s[by], u[by]
    boxes = np.stack(
        [
            np.maximum(held.atoms[s, 0], wanted.atoms[u, 0]),
            np.minimum(held.atoms[s, 1], wanted.atoms[u, 1]),
        ],
        axis=1,
    )
    kept_cells = _kept_cells(held, wanted)
    kept_atoms = np.zeros_like(wanted.on_node)
    node, place, cell = (column[kept_cells] for column in wanted.node_cells)
    owner, pieces = wanted.pieces_of(place, cell)
    again, atom = wanted.atoms_of(pieces)
    kept_atoms[node[owner[again]], atom] = True
    need_node, need_atom = np.nonzero(wanted.on_node)
    bounds = np.searchsorted(u, np.arange(len(wanted.atoms) + 1))
    owner, row_overlap = expand_spans(bounds[need_atom], bounds[need_atom + 1])
    row_node = need_node[owner]
    kept = kept_atoms[row_node, need_atom[owner]]
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
        ~kept & ~held.on_node[row_node, s[row_overlap]],
        np.array([pair.tensor.itemsize for pair in pairs], np.int64),
    )


def signature_numbers(held: Side, wanted: Side) -> tuple[Ints, Ints]:
    """Numbers the local arrays of both sides' node cells: equal numbers are equal arrays."""
    number: dict[bytes, int] = {}
    out = []
    for side in (held, wanted):
        tables = [side.ptc.tables[table] for table, _ in side.key]
        places, cells = side.node_cells[1].tolist(), side.node_cells[2].tolist()
        ids = [
            number.setdefault(tables[p].signatures[c], len(number))
            for p, c in zip(places, cells, strict=True)
        ]
        out.append(np.array(ids, np.int64))
    return out[0], out[1]


def _kept_cells(held: Side, wanted: Side) -> Flags:
    have, want = signature_numbers(held, wanted)
    return np.isin(wanted.node_cells[0] * _WIDE + want, held.node_cells[0] * _WIDE + have)
