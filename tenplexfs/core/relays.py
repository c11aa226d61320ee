"""Who passes on what: regions that several nodes need leave their holders once, and travel from node to node.

A region that k nodes need is cut into parts. Each part has a tree: a holder sends it to the first node of the
tree, inner nodes send it on. A node is an inner one in the tree of one part only, so that it sends about what
it receives, however many need the region, and nobody waits for a node that waits for it: what a node sends on
it has from a holder, or from an inner node of a lower number.

Source: the inner-node-disjoint trees of SplitStream (SOSP 2003).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tenplexfs.core.matching import Match
from tenplexfs.core.region import Boxes, Ints

__all__ = ["PART_BYTES", "Relays", "cut_parts", "hot_relays", "no_relays", "part_sources"]

PART_BYTES = 16 << 10
"""Regions are passed on in no smaller parts: each costs a few microseconds on both sides."""
_MOST_PARTS = 16


@lru_cache(maxsize=256)
def part_sources(count: int) -> Ints:
    """Returns (count, parts): from which of ``count`` nodes each has each part, -1 where from a holder.

    >>> part_sources(3).tolist()
    [[-1, 1, 2], [0, -1, 2], [0, 1, -1]]
    """
    parts = (
        count if count <= _MOST_PARTS else min(range(2, _MOST_PARTS + 1), key=lambda p: (_most(count, p), -p))
    )
    out = np.empty((count, parts), np.int64)
    for part in range(parts):
        inner = range(part, count, parts)
        # Each inner node sends to the next one, and the others are dealt out so that all send about as much.
        room = -(-(count - 1) // len(inner))
        slots = [node for turn in range(room) for node in inner if turn or node == inner[-1]]
        leaves = [node for node in range(count) if node not in inner]
        out[list(inner), part] = [-1, *inner[:-1]]
        out[leaves, part] = slots[: len(leaves)]
    out.flags.writeable = False
    return out


def _most(count: int, parts: int) -> float:
    """Returns what the busiest node sends, as a share of the region."""
    return -(-(count - 1) // (count // parts)) / parts


def cut_parts(boxes: Boxes, dims: Ints, parts: int) -> Boxes:
    """Cuts each of ``boxes``, (n, 2, ndim), into ``parts`` along its dim of ``dims``; (n, parts, 2, ndim)."""
    rows, steps = np.arange(len(boxes)), np.arange(parts + 1)
    start, extent = boxes[rows, 0, dims], boxes[rows, 1, dims] - boxes[rows, 0, dims]
    points = start[:, None] + extent[:, None] * steps // parts
    out = np.repeat(boxes[:, None], parts, axis=1)
    out[rows, :, 0, dims] = points[:, :-1]
    out[rows, :, 1, dims] = points[:, 1:]
    return out


@dataclass(frozen=True, eq=False)
class Relays:
    """What is passed on of one match. All columns are of one entry for each moved row, but ``order``.

    Attributes:
        order: The moved rows, by overlap and then by node.
        first: Where in ``order`` the rows of the same overlap begin.
        count: How many nodes share the overlap by passing it on; 0 where each has it from a holder.
        dim: Along which it is cut.
        held_volumes: Elements that the row's node has from a holder.
    """

    order: Ints
    first: Ints
    count: Ints
    dim: Ints
    held_volumes: Ints

    def nodes_of(self, match: Match, row: int) -> Ints:
        """Returns the nodes that share the overlap of moved row ``row``, in order."""
        first = self.first[row]
        moved = match.row_node[match.moved]
        return np.asarray(moved[self.order[first : first + self.count[row]]])

    def add_to(self, matrix: Ints, match: Match) -> None:
        """Adds the bytes that nodes pass on to ``matrix``, (nodes, nodes), source by target."""
        nodes, overlaps = match.row_node[match.moved], match.row_overlap[match.moved]
        for count in np.unique(self.count[self.count > 0]).tolist():
            firsts = np.unique(self.first[self.count == count])
            rows = self.order[firsts[:, None] + np.arange(count)]
            sources = part_sources(count)
            boxes = cut_parts(match.boxes[overlaps[rows[:, 0]]], self.dim[rows[:, 0]], sources.shape[1])
            nbytes = (boxes[:, :, 1] - boxes[:, :, 0]).prod(axis=2) * match.element_bytes
            node, part = np.nonzero(sources >= 0)
            givers, takers = nodes[rows[:, sources[node, part]]], nodes[rows[:, node]]
            np.add.at(matrix, (givers, takers), nbytes[:, part])


def no_relays(match: Match) -> Relays:
    """Returns that nothing of ``match`` is passed on."""
    rows = int(match.moved.sum())
    nothing = np.zeros(rows, np.int64)
    return Relays(np.arange(rows), nothing, nothing, nothing, match.row_volumes[match.moved])


def hot_relays(match: Match, sources: npt.NDArray[np.int32], hot: Ints, part_bytes: int) -> Relays:
    """Returns that what ``hot`` nodes would send more than once is passed on, as far as it is big enough.

    Args:
        match: The match.
        sources: (moved rows, tensors), the holder that would send each.
        hot: Numbers of nodes.
        part_bytes: The least size of a part.
    """
    rows = np.flatnonzero(match.moved)
    overlap, volumes = match.row_overlap[rows], match.row_volumes[rows]
    order = np.argsort(overlap, kind="stable")
    _, first, of_row, count = np.unique(
        overlap[order], return_index=True, return_inverse=True, return_counts=True
    )
    place = np.empty(len(rows), np.int64)
    place[order] = np.arange(len(rows))
    group = of_row[place]
    is_hot = np.zeros(len(first), bool)
    is_hot[group[np.isin(sources, hot).any(axis=1)]] = True
    parts = np.array([part_sources(k).shape[1] if k > 1 else 1 for k in range(count.max(initial=1) + 1)])
    extents = match.boxes[overlap, 1] - match.boxes[overlap, 0]
    wide = extents >= parts[count[group], None]
    fits = wide.any(axis=1) & (volumes * match.sizes.min() >= part_bytes * parts[count[group]])
    shared = np.where(is_hot[group] & (count[group] > 1) & fits, count[group], 0)
    dim = np.argmax(wide, axis=1) if extents.shape[1] else np.zeros(len(rows), np.int64)
    index = place - first[group]
    held = volumes.copy()
    for k in np.unique(shared[shared > 0]).tolist():
        mine, ways = np.flatnonzero(shared == k), int(parts[k])
        boxes = cut_parts(match.boxes[overlap[mine]], dim[mine], ways)
        nbytes = (boxes[:, :, 1] - boxes[:, :, 0]).prod(axis=2)
        heads = index[mine] < ways
        held[mine] = np.where(heads, nbytes[np.arange(len(mine)), np.minimum(index[mine], ways - 1)], 0)
    return Relays(order, first[group], shared, dim, held)
