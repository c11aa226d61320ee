"""Which node takes which rank, where a layout gives devices only: so that the least is moved.

What matters is who wants and who has what: overlaps of old and new pieces that are wanted and held alike
count as one class. Blocks of ranks are placed one at a time, first the one that loses most by not getting its
best node; what is placed on a node costs the next block there nothing. Then blocks move or change places as
long as that saves something. Filling in order is tried as well, so the outcome is never worse.

Prior art: Vogel's approximation for the transportation problem, with an exchange step. Sums are of whole
bytes below 2**53, exact in floating point, so that every machine places alike.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from tenplexfs.core.build import build_ptc
from tenplexfs.core.layout import Layout
from tenplexfs.core.matching import Flags, match_all, match_tensors
from tenplexfs.core.ptc import PTC
from tenplexfs.core.region import Ints
from tenplexfs.core.snapshot import NodeName
from tenplexfs.errors import InvalidError

__all__ = ["place"]

_MOST_EXACT = 10
_MOST_STEPS = 1 << 19
_MOST_EXCHANGED = 96


def place(old: PTC, layout: Layout, *, drop: Sequence[str] = (), lost: Collection[str] = ()) -> Layout:
    """Returns ``layout`` with every rank on a node.

    Args:
        old: What is held now.
        layout: Where it gives ranks it stays; where it gives ``devices`` the ranks are placed, those that
            differ only in the axes of ``keep_together`` on one node.
        drop: As for the planner.
        lost: As for the planner.

    Raises:
        InvalidError: The tensors do not fit, or the nodes have no room for the ranks to keep together.

    Cost: grows with blocks x nodes x classes; up to ten blocks the outcome is the optimum, past some thousand
    each block looks only once.
    """
    if not layout.devices:
        return layout
    blocks = _blocks(layout)
    room = np.array([devices // len(blocks[0]) for _, devices in layout.devices])
    if room.sum() < len(blocks):
        raise InvalidError(
            f"nodes: {len(blocks)} groups of {len(blocks[0])} ranks to keep together "
            f"({', '.join(layout.keep_together)}), the nodes have room for {room.sum()}"
        )
    wishes = _wishes(old, layout, blocks, drop, lost)
    in_order = np.repeat(np.arange(len(room)), room)[: len(blocks)]
    tried = [in_order]
    if len(blocks) <= _MOST_EXACT and len(room) <= 2 * _MOST_EXACT:
        tried.append(wishes.exact(room))
    elif len(blocks) * len(room) > _MOST_STEPS:
        tried.append(wishes.at_one_look(room))
    else:
        tried.append(wishes.by_regret(room))
        if len(blocks) <= _MOST_EXCHANGED:
            tried += [wishes.exchanged(start, room) for start in tuple(tried)]
    chosen = min(tried, key=wishes.cost)
    node_of = np.empty(layout.mesh.size, np.int64)
    for block, node in zip(blocks, chosen.tolist(), strict=True):
        node_of[block] = node
    held = (
        (node, tuple(np.flatnonzero(node_of == k).tolist())) for k, (node, _) in enumerate(layout.devices)
    )
    return replace(layout, nodes=tuple((node, ranks) for node, ranks in held if ranks), devices=())


def _blocks(layout: Layout) -> list[Ints]:
    """Returns the ranks of each block: alike in all axes that are not kept together."""
    others = tuple(axis for axis, _ in layout.mesh.axes if axis not in layout.keep_together)
    group = layout.mesh.coordinates(others)
    order = np.argsort(group, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(group[order])) + 1)


def _wishes(
    old: PTC, layout: Layout, blocks: Sequence[Ints], drop: Sequence[str], lost: Collection[str]
) -> _Wishes:
    """Finds the classes of overlaps, with every block as if it were a node of its own."""
    names = [node for node, _ in layout.devices]
    alone = tuple((NodeName(f"block-{k}"), tuple(block.tolist())) for k, block in enumerate(blocks))
    new = build_ptc(replace(layout, nodes=alone, devices=()))
    everyone = [*names, *(name for name, _ in alone), *(node for node in old.nodes if node not in names)]
    numbers = {name: number for number, name in enumerate(everyone)}
    pairs = match_tensors(old, new, drop)
    classes: dict[bytes, int] = {}
    weight: list[int] = []
    wants: list[Flags] = []
    for match in match_all(pairs, old, new, numbers, lost=lost):
        first = len(names)
        wanted = match.wanted.table(first, first + len(blocks))[:, match.overlap_wanted]
        held = match.held.table(0, len(names))[:, match.overlap_held]
        columns = np.concatenate([held, wanted]).T
        for column, volume in zip(columns, match.volumes.tolist(), strict=True):
            number = classes.setdefault(column.tobytes(), len(weight))
            if number == len(weight):
                weight.append(0)
                wants.append(column)
            weight[number] += volume * match.element_bytes
    table = np.stack(wants, axis=1) if wants else np.zeros((len(names) + len(blocks), 0), bool)
    return _Wishes(np.array(weight, float), table[len(names) :], table[: len(names)])


@dataclass(frozen=True, eq=False)
class _Wishes:
    """Who wants what and who has it.

    Attributes:
        weight: Bytes of each class.
        wanted: (blocks, classes).
        held: (nodes, classes).
    """

    weight: npt.NDArray[np.float64]
    wanted: Flags
    held: Flags

    def cost(self, node_of: Ints) -> float:
        """Returns the bytes that all nodes lack."""
        return sum(self._lacks(node, np.flatnonzero(node_of == node)) for node in range(len(self.held)))

    def _lacks(self, node: int, blocks: Ints) -> float:
        return float(self.weight[self.wanted[blocks].any(axis=0) & ~self.held[node]].sum())

    def exact(self, room: Ints) -> Ints:
        """Finds the optimum, node by node over all sets of blocks."""
        count = len(self.wanted)
        sets = np.arange(1 << count)
        members = (sets[:, None] >> np.arange(count)) & 1 == 1
        lacks = np.stack([[self._lacks(n, np.flatnonzero(m)) for m in members] for n in range(len(room))])
        best = np.where(sets == 0, 0.0, np.inf)
        taken = np.zeros((len(room), len(sets)), np.int64)
        for node, places in enumerate(room.tolist()):
            before, best = best, best.copy()
            for part in np.flatnonzero((members.sum(axis=1) <= places) & (sets > 0)).tolist():
                whole = sets[sets & part == part]
                value = before[whole ^ part] + lacks[node, part]
                better = whole[value < best[whole]]
                best[better], taken[node, better] = before[better ^ part] + lacks[node, part], part
        out, left = np.empty(count, np.int64), len(sets) - 1
        for node in range(len(room) - 1, -1, -1):
            out[members[taken[node, left]]] = node
            left ^= int(taken[node, left])
        return out

    def by_regret(self, room: Ints) -> Ints:
        """Places block by block, first the one whose second choice is worst against its first."""
        kinds, kind_of = np.unique(self.wanted, axis=0, return_inverse=True)
        waiting = [np.flatnonzero(kind_of.reshape(-1) == k).tolist() for k in range(len(kinds))]
        wanted, held, free = kinds.astype(float), self.held.copy(), room.copy()
        lacks = wanted @ (self.weight * ~held).T
        out = np.empty(len(self.wanted), np.int64)
        for _ in range(len(out)):
            live = np.flatnonzero([bool(w) for w in waiting])
            open_nodes = np.flatnonzero(free)
            offers = lacks[np.ix_(live, open_nodes)]
            best = offers.argmin(axis=1)
            lowest = offers[np.arange(len(live)), best]
            offers[np.arange(len(live)), best] = np.inf
            second = offers.min(axis=1)
            chosen = int(np.where(np.isinf(second), -lowest, second - lowest).argmax())
            kind, node = live[chosen], open_nodes[best[chosen]]
            out[waiting[kind].pop(0)] = node
            free[node] -= 1
            held[node] |= kinds[kind]
            lacks[:, node] = wanted @ (self.weight * ~held[node])
        return out

    def at_one_look(self, room: Ints) -> Ints:
        """Gives each block, those with most to keep first, the node with room that has most of it."""
        has = (self.wanted * self.weight) @ self.held.T.astype(float)
        free, out = room.copy(), np.empty(len(self.wanted), np.int64)
        for block in np.argsort(-has.max(axis=1, initial=0), kind="stable").tolist():
            out[block] = int(np.where(free > 0, has[block], -1).argmax())
            free[out[block]] -= 1
        return out

    def exchanged(self, node_of: Ints, room: Ints) -> Ints:
        """Moves blocks to free places and swaps pairs while that saves bytes."""
        node_of = node_of.copy()
        better = True
        while better:
            better = False
            for block in range(len(node_of)):
                for node in np.flatnonzero(np.bincount(node_of, minlength=len(room)) < room).tolist():
                    better |= self._try(node_of, {block: node})
            for a, b in combinations(range(len(node_of)), 2):
                if node_of[a] != node_of[b]:
                    better |= self._try(node_of, {a: int(node_of[b]), b: int(node_of[a])})
        return node_of

    def _try(self, node_of: Ints, moves: dict[int, int]) -> bool:
        """Carries out ``moves`` in ``node_of`` if they save bytes."""
        after = node_of.copy()
        after[list(moves)] = list(moves.values())
        nodes = {*node_of[list(moves)].tolist(), *moves.values()}
        before_bytes = sum(self._lacks(n, np.flatnonzero(node_of == n)) for n in nodes)
        after_bytes = sum(self._lacks(n, np.flatnonzero(after == n)) for n in nodes)
        if after_bytes >= before_bytes:
            return False
        node_of[:] = after
        return True
