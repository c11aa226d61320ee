"""How a node comes to have copies of what others have: whose, by which plan, and that they are the same.

`layout_with`, `copying` and `survives_with` run in the process of `runtime.compute`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tenplexfs.core.build import build_ptc
from tenplexfs.core.copies import survives
from tenplexfs.core.node_part import Target
from tenplexfs.core.snapshot import NodeName, SnapshotId
from tenplexfs.errors import CorruptError
from tenplexfs.formats.layout_json import layout_text, parse_layout
from tenplexfs.formats.manifest import StoredSnapshot
from tenplexfs.runtime.orders import StoredPart
from tenplexfs.runtime.planning import StagePart, stage_part
from tenplexfs.storage.store import ArrayRef, Key
from tenplexfs.storage.sums import piece_boxes

__all__ = [
    "Copying",
    "check_sums",
    "copying",
    "having_of",
    "layout_with",
    "owners_of",
    "shared",
    "survives_with",
    "unchanged",
]


def owners_of(nodes: Sequence[NodeName], node: NodeName, count: int) -> tuple[NodeName, ...]:
    """Returns the nodes whose state ``node`` keeps: the ``count`` before it, round.

    >>> owners_of(["a", "b", "c"], "a", 1), owners_of(["a", "b", "c"], "b", 5)
    (('c',), ('a', 'c'))
    """
    if node not in nodes:
        return ()
    at = nodes.index(node)
    return tuple(nodes[at - turn] for turn in range(1, min(count, len(nodes) - 1) + 1))


def layout_with(layout_json: bytes, node: NodeName, owners: Collection[NodeName]) -> bytes:
    """Returns the layout in which ``node`` has the ranks of ``owners`` too. For the process of `compute`."""
    layout = parse_layout(layout_json)
    ranks = dict(layout.nodes)
    own = tuple(sorted(rank for each in (node, *owners) for rank in ranks.get(each, ())))
    moved = tuple((each, own if each == node else held) for each, held in layout.nodes if each not in owners)
    return layout_text(replace(layout, nodes=moved))


@dataclass(frozen=True)
class Copying:
    """What a node does to have copies.

    Attributes:
        owner_of: Of each rank whose arrays are copied, the node.
    """

    layout_json: bytes
    part: StagePart
    owner_of: Mapping[int, NodeName]


def copying(layout_json: bytes, node: NodeName, owners: tuple[NodeName, ...]) -> Copying:
    """Returns how ``node`` comes to have what ``owners`` have. For the process of `compute`."""
    together = layout_with(layout_json, node, owners)
    ptc = build_ptc(parse_layout(layout_json))
    owner_of = {rank: owner for owner in owners for rank in ptc.nodes[owner]}
    return Copying(together, stage_part(layout_json, together, (), (), node), owner_of)


def survives_with(layout_json: bytes, keepers: Mapping[NodeName, Collection[NodeName]]) -> int:
    """Returns how many nodes may be lost; see `core.copies.survives`. For the process of `compute`."""
    having = {str(node): each for node, each in keepers.items()}
    return survives(build_ptc(parse_layout(layout_json)), having)


def having_of(
    snapshot: SnapshotId, stock: Mapping[NodeName, Sequence[StoredPart]]
) -> dict[NodeName, frozenset[NodeName]]:
    """Returns, of each node that answered, the nodes whose parts of ``snapshot`` it has, its own too."""
    having: dict[NodeName, frozenset[NodeName]] = {}
    for node, parts in stock.items():
        of = [part.copies_of or (node,) for part in parts if part.snapshot == snapshot and part.committed]
        having[node] = frozenset(each for names in of for each in names)
    return having


def unchanged(
    before: StoredSnapshot, made: Copying, sums: Mapping[Key, tuple[int, ...]]
) -> dict[Key, ArrayRef]:
    """Returns the arrays of an earlier set that are what they should be now, by their sums."""
    found: dict[Key, ArrayRef] = {}
    for target in made.part.part.targets:
        boxes = piece_boxes(target.shard)
        for key in target.keys:
            ref = before.arrays.get(key)
            if key[0] not in made.owner_of or ref is None or sums.get(key) != ref.sums:
                continue
            if (ref.shape, ref.dtype, ref.boxes) == (target.shard.local_shape, target.dtype, boxes):
                found[key] = ref
    return found


def shared(made: Copying, refs: Mapping[Key, ArrayRef]) -> tuple[Target, ...]:
    """Returns the targets; those that ``refs`` has are taken as they are, unless another copies from them."""
    targets = made.part.part.targets
    copied_from = {copies.target for target in targets for copies in target.copies}
    result = []
    for index, target in enumerate(targets):
        key = next((key for key in target.keys if key in refs), None)
        if target.kept_from is None and key is not None and index not in copied_from:
            result.append(replace(target, kept_from=key, moves=(), copies=()))
        else:
            result.append(target)
    return tuple(result)


def check_sums(stored: StoredSnapshot, made: Copying, sums: Mapping[Key, tuple[int, ...]]) -> None:
    """Refuses copies that are not what their owners have."""
    for key, ref in stored.arrays.items():
        if key[0] in made.owner_of and sums.get(key) != ref.sums:
            rank, path = key
            raise CorruptError(
                f"copy of {path} of rank {rank}: sums {ref.sums}, its owner has {sums.get(key)}"
            )
