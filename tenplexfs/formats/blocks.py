"""One tensor's pieces as a picture of text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tenplexfs.core.explain import drawn_dims
from tenplexfs.core.region import Region

__all__ = ["pieces_text"]

_UP, _DOWN, _LEFT, _RIGHT = 1, 2, 4, 8
_LINES = " ╵╷│╴┘┐┤╶└┌├─┴┬┼"


def pieces_text(
    shape: Sequence[int], pieces: Sequence[tuple[Region, str]], *, width: int = 64, height: int = 16
) -> str:
    """Draws the two dims of a tensor that are cut most, the earlier one going down.

    Args:
        shape: Of the tensor.
        pieces: Regions, and what is written into each as far as there is room.
        width: Characters.
        height: Lines, at most.

    >>> halves = [(Region((0, 0), (2, 6)), "0"), (Region((2, 0), (4, 6)), "1, 3")]
    >>> print(pieces_text((4, 6), halves, width=12, height=4))
    ┌──────────┐
    │    0     │
    ├──────────┤
    │   1, 3   │
    └──────────┘
    """
    boxes = np.array([(region.start, region.stop) for region, _ in pieces], np.int64)
    dims = drawn_dims(tuple(shape), boxes.reshape(len(pieces), 2, len(shape)))
    sizes = [1] * (2 - len(dims)) + [max(shape[d], 1) for d in dims]
    cuts = len({region.start[dims[0]] for region, _ in pieces}) if len(dims) == 2 else 1
    tall = min(height, max(2 * cuts, 4)) if len(dims) == 2 else 2
    lines = np.zeros((tall + 1, width), np.uint8)
    text = np.full((tall + 1, width), " ", "<U1")
    for region, label in pieces:
        spans = [(0, 1)] * (2 - len(dims)) + [(region.start[d], region.stop[d]) for d in dims]
        if any(a == b for a, b in spans):
            continue
        (top, bottom), (left, right) = (
            (a * extent // size, b * extent // size)
            for (a, b), size, extent in zip(spans, sizes, (tall, width - 1), strict=True)
        )
        for y in {top, bottom}:
            lines[y, left:right] |= _RIGHT
            lines[y, left + 1 : right + 1] |= _LEFT
        for x in {left, right}:
            lines[top:bottom, x] |= _DOWN
            lines[top + 1 : bottom + 1, x] |= _UP
        room = right - left - 1
        if bottom - top >= 2 and room >= 1:
            shown = label if len(label) <= room else label[: room - 1] + "…"
            begin = left + 1 + (room - len(shown)) // 2
            text[(top + bottom) // 2, begin : begin + len(shown)] = list(shown)
    drawn = np.where(lines > 0, np.array(list(_LINES))[lines], text)
    return "\n".join("".join(row).rstrip() for row in drawn.tolist())
