"""How many nodes hold each part of a job's state, by its layout alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np

from tenplexfs.core.dtypes import dtype_of
from tenplexfs.core.ptc import PTC
from tenplexfs.core.region import disjoint_atoms
from tenplexfs.core.snapshot import NodeName

__all__ = ["sole_bytes", "survives"]


def survives(ptc: PTC, keepers: Mapping[str, Collection[str]] | None = None) -> int:
    """Returns how many nodes may be lost, whichever they are, before a region is held by none.

    Args:
        ptc: Who holds what.
        keepers: Node -> the nodes that have all of its part; left out: each its own.
    """
    having = {node: {node} for node in ptc.nodes} if keepers is None else keepers

    def count(nodes: Iterable[str]) -> int:
        return len({keeper for node in nodes for keeper in having.get(node, ())})

    least = min([count(ptc.nodes), *(count(nodes) for _, nodes in _held(ptc))])
    return max(least - 1, 0)


def sole_bytes(ptc: PTC) -> dict[NodeName, int]:
    """Returns for each node the bytes that no other node holds; ties once, padding not."""
    found = dict.fromkeys(map(NodeName, ptc.nodes), 0)
    for nbytes, nodes in _held(ptc):
        if len(nodes) == 1:
            (node,) = nodes
            found[NodeName(node)] += nbytes
    return found


def _held(ptc: PTC) -> Iterator[tuple[int, set[str]]]:
    """Yields bytes and the nodes that hold them: of each region once for all tensors that are cut alike."""
    alike: dict[object, tuple[str, int]] = {}
    for path, names in ptc.names.items():
        tensor = names[0].tensor
        kind = (tensor.shape, tuple((p.cells, p.mask) for p in names))
        first, itemsizes = alike.get(kind, (path, 0))
        alike[kind] = (first, itemsizes + dtype_of(tensor.dtype).itemsize)
    for path, itemsizes in alike.values():
        holders = ptc.holders(path)
        boxes = [(p.region.start, p.region.stop) for holder in holders for p in holder.shard.pieces]
        nodes = [{ptc.node_of(r) for r, _ in holder.keys} for holder in holders for _ in holder.shard.pieces]
        ndim = len(ptc.names[path][0].tensor.shape)
        atoms, box, atom = disjoint_atoms(np.array(boxes, np.int64).reshape(len(boxes), 2, ndim))
        held: list[set[str]] = [set() for _ in atoms]
        for b, a in zip(box.tolist(), atom.tolist(), strict=True):
            held[a] |= nodes[b]
        volumes = (atoms[:, 1, :] - atoms[:, 0, :]).prod(axis=1).tolist()
        yield from ((volume * itemsizes, who) for volume, who in zip(volumes, held, strict=True))
