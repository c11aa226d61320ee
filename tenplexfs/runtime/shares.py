"""Who writes what of a step: each distinct local array once, by the node of the first rank that holds it.

Every function here runs in the process of `runtime.compute`.
"""

from __future__ import annotations

from dataclasses import replace

from tenplexfs.core.build import build_ptc
from tenplexfs.core.ptc import PTC
from tenplexfs.core.snapshot import NodeName
from tenplexfs.formats.layout_json import layout_text, parse_layout
from tenplexfs.storage.checkpoint_writer import Share

__all__ = ["PERSISTED", "layout_of_persisted", "shares_of", "what_is"]

PERSISTED = NodeName("persisted")
"""The node that plans have a persisted step on; the store is no node, and this name only stands for it."""


def shares_of(layout_json: bytes, node: str) -> tuple[Share, ...]:
    """Returns the arrays that ``node`` writes, in the order of ranks and paths."""
    ptc = build_ptc(parse_layout(layout_json))
    shares = []
    for path in ptc.names:
        for holder in ptc.holders(path):
            rank, shown = min(holder.keys)
            if ptc.node_of(rank) == node:
                shares.append(Share(rank, shown, ptc.tensors[path].dtype, holder.shard.local_shape))
    return tuple(sorted(shares, key=lambda share: (share.rank, share.path)))


def layout_of_persisted(layout_json: bytes) -> bytes:
    """Returns the layout of a persisted step as a plan takes it: all ranks in one place."""
    layout = parse_layout(layout_json)
    return layout_text(replace(layout, nodes=((PERSISTED, tuple(range(layout.mesh.size))),)))


def what_is(ptc: PTC, rank: int, path: str) -> tuple[str, bytes] | None:
    """Returns what tells the array of ``path`` on ``rank`` from others; equal for equal ones."""
    placement = ptc.placements.get(path)
    if placement is None or (cell := ptc.cell(rank, placement)) < 0:
        return None
    return placement.tensor.path, ptc.tables[placement.cells].signatures[cell]
