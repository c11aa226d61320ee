"""A plan written out: every transfer of every rank, as ``plan --operations`` lists them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tenplexfs.core.node_part import Target, node_part
from tenplexfs.core.planner import Plan

__all__ = ["list_transfers"]


def list_transfers(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yields each element of each target shard once, as boxes of the local arrays of both sides.

    What stays in place is listed too, padding and empty shards are not. The list alone suffices to carry the
    plan out: where source and target box differ in shape, elements go in C order. A tied tensor is listed
    under each name that a rank shows. Of those of a node that list the same bytes from afar, ``wire`` is true
    for the one for which they cross; ``via`` names the node that passes them on to it, where one does.

    Cost: one dict for each box of each rank.
    """
    for node in plan.nodes:
        for target in node_part(plan, node).targets:
            for number, (rank, path) in enumerate(target.keys):
                yield from _of_rank(target, rank, path, crosses=number == 0)


def _of_rank(target: Target, rank: int, path: str, *, crosses: bool) -> Iterator[dict[str, Any]]:
    for moves in target.moves:
        source_rank, source_path = moves.source
        other_name = {"source_tensor": source_path} if source_path != path else {}
        for source, to in zip(moves.source_boxes.tolist(), moves.target_boxes.tolist(), strict=True):
            yield {
                "tensor": path,
                **other_name,
                "source_rank": source_rank,
                "source_start": source[0],
                "source_stop": source[1],
                "target_rank": rank,
                "target_start": to[0],
                "target_stop": to[1],
                "wire": crosses and moves.way == "wire",
                **({"via": moves.via.node} if crosses and moves.via is not None else {}),
            }
