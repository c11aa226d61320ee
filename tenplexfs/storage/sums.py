"""Checksums of the pieces of local arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from tenplexfs.core.region import Region
from tenplexfs.errors import InvalidError

if TYPE_CHECKING:
    from tenplexfs.core.ptc import Shard

__all__ = ["as_bytes", "box_sums", "byte_blocks", "piece_boxes", "piece_sums", "zero_boxes"]

_BLOCK_BYTES = 1 << 20


def piece_sums(array: npt.NDArray[np.generic], shard: Shard) -> tuple[int, ...]:
    """Returns the xxh3_64 of the C-order bytes of each piece of ``array``, in the order of the pieces.

    Equal pieces have equal sums wherever they lie. Padding is in none.

    Cost: Reads the array once; copies blocks of at most about 1 MiB of what is not contiguous.
    """
    return box_sums(array, piece_boxes(shard))


def piece_boxes(shard: Shard) -> tuple[Region, ...]:
    """Returns where each piece of ``shard`` lies in its local array, as `box_sums` takes it."""
    ndim = len(shard.local_shape)
    boxes = []
    for piece in shard.pieces:
        shape = piece.region.shape
        if len(shape) != ndim:
            shape = (piece.region.volume,)
        boxes.append(Region(piece.at, tuple(a + n for a, n in zip(piece.at, shape, strict=True))))
    return tuple(boxes)


def box_sums(array: npt.NDArray[np.generic], boxes: Sequence[Region]) -> tuple[int, ...]:
    """Returns the xxh3_64 of each box of ``array``; boxes of one dim are of the raveled array.

    Raises:
        InvalidError: A box does not lie in the array.
    """
    sums = []
    for box in boxes:
        within = array if box.ndim == array.ndim else array.reshape(-1)
        if box.ndim != within.ndim or any(b > n for b, n in zip(box.stop, within.shape, strict=True)):
            raise InvalidError(f"box {box.start} to {box.stop}: not within an array of shape {array.shape}")
        state = xxhash.xxh3_64()
        for block in byte_blocks(within[tuple(map(slice, box.start, box.stop))]):
            state.update(block)
        sums.append(state.intdigest())
    return tuple(sums)


def zero_boxes(array: npt.NDArray[np.generic], boxes: Iterable[Region]) -> None:
    """Zeroes boxes of ``array``; those of one dim are of the raveled array."""
    for box in boxes:
        within = array if box.ndim == array.ndim else array.reshape(-1)
        within[box.as_slices()] = 0


def as_bytes(array: npt.NDArray[np.generic]) -> memoryview:
    """Returns the bytes of a C-contiguous ``array`` without a copy; of types, too, that have no buffer."""
    return array.reshape(-1).view(np.uint8).data


def byte_blocks(array: npt.NDArray[np.generic]) -> Iterator[memoryview]:
    """Yields the bytes of ``array`` in C order: all at once where they lie so, else in blocks.

    Cost: copies what is not contiguous, about 1 MiB at a time.
    """
    if array.size == 0:
        return
    if array.flags.c_contiguous:
        yield as_bytes(array)
        return
    row_bytes = array.nbytes // len(array)
    if row_bytes > _BLOCK_BYTES:
        for row in array:
            yield from byte_blocks(row)
        return
    rows = max(1, _BLOCK_BYTES // row_bytes)
    for begin in range(0, len(array), rows):
        yield as_bytes(np.ascontiguousarray(array[begin : begin + rows]))
