"""What one node does of a plan, as data. Boxes are in the coordinates of local arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tenplexfs.core.ptc import Shard
from tenplexfs.core.region import Boxes

__all__ = ["Copies", "Key", "Moves", "NodePart", "Target", "Via", "Way"]

Key = tuple[int, str]
"""A rank, and a path as shown there: what an array is kept under."""

Way = Literal["kept", "local", "wire", "shared"]


@dataclass(frozen=True, eq=False)
class Via:
    """A node that has the bytes of a move sent to it as well, and passes them on.

    Attributes:
        node: Which.
        source: Key in the new PTC of its array.
        source_boxes: (n, 2, local ndim of that array).
        target_boxes: (n, 2, target local ndim); the elements of the move, maybe cut otherwise.
    """

    node: str
    source: Key
    source_boxes: Boxes
    target_boxes: Boxes


@dataclass(frozen=True, eq=False)
class Moves:
    """Boxes that a target array takes of one source array.

    Where a source and its target box differ in dims (flat against boxed), elements go in C order.

    Attributes:
        source: Key in the old PTC.
        node: Where the source is.
        way: ``kept``: they stay where they are; ``local``: copied on the node; ``wire``: sent to the node for
            this array; ``shared``: sent to it for another one, and taken from there by `Target.copies`.
        source_boxes: (n, 2, source local ndim).
        target_boxes: (n, 2, target local ndim).
        via: From whom they come, when not from the source; the source still has them, should that one fail.
    """

    source: Key
    node: str
    way: Way
    source_boxes: Boxes
    target_boxes: Boxes
    via: Via | None = None


@dataclass(frozen=True, eq=False)
class Copies:
    """Boxes that a target array takes of another new array of its node, once they are there.

    Attributes:
        target: Index into `NodePart.targets`.
        source_boxes: (n, 2, local ndim of that target).
        target_boxes: (n, 2, local ndim).
    """

    target: int
    source_boxes: Boxes
    target_boxes: Boxes


@dataclass(frozen=True, eq=False)
class Target:
    """One distinct local array that a node must have; equal arrays of several ranks or names are one.

    Attributes:
        path: Canonical path in the new PTC.
        keys: Under which it is held, sorted.
        shard: Local shape, pieces and padding.
        dtype: Element type.
        kept_from: Key of the array on this node that is the very same, or None.
        moves: Every element once, padding not at all.
        copies: How the ``shared`` ones arrive.
    """

    path: str
    keys: tuple[Key, ...]
    shard: Shard
    dtype: str
    kept_from: Key | None
    moves: tuple[Moves, ...]
    copies: tuple[Copies, ...]


@dataclass(frozen=True, eq=False)
class NodePart:
    """All arrays of one node in the new PTC."""

    node: str
    targets: tuple[Target, ...]
