"""A range of what a rank holds of a tensor, in C order, block by block: from here, or from another node."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from tenplexfs.core.dtypes import itemsize_of
from tenplexfs.core.region import Boxes, box_volumes, flat_boxes
from tenplexfs.errors import InvalidError
from tenplexfs.runtime.fetching import Bytes, Wanted
from tenplexfs.runtime.snapshot import Snapshot

__all__ = ["ShardRange", "cut", "gather"]

_HERE_BYTES = 1 << 20
_AWAY_BYTES = 4 << 20  # at a time, for each block is a call to another node


class ShardRange:
    """Part of a local array of a snapshot; pins it until `close`.

    Args:
        path: As shown on ``rank``.
        start, stop: Local coordinates, stop not included; dims that are left out are whole.

    Attributes:
        dtype, shape, nbytes: Of the range.

    Raises:
        NotFoundError: The rank holds no such tensor.
        InvalidError: The range is not within it.
    """

    def __init__(
        self,
        view: Snapshot,
        rank: int,
        path: str,
        bounds: Sequence[tuple[int | None, int | None]] = (),
    ) -> None:
        shard = view.ptc.shard(rank, path)
        self.dtype = view.ptc.tensors[path].dtype
        self._start, self.shape = cut(path, shard.local_shape, bounds)
        self._itemsize = itemsize_of(self.dtype)
        self.nbytes = math.prod(self.shape) * self._itemsize
        holder = next(each for each in view.ptc.holders(path) if (rank, path) in each.keys)
        found = (view.arrays.array(*key) for key in holder.keys)
        self._here = next((each for each in found if each is not None), None)
        self._keys = holder.keys
        self._fetcher = view.fetcher
        self._nodes = () if self._here is not None else view.fetcher.nodes_of(holder.keys)
        self._fetcher.hold(self._nodes)

    async def blocks(self) -> AsyncGenerator[memoryview]:
        """Yields the bytes.

        Raises:
            TenplexError: Some are on another node, and do not come.
        """
        count = math.prod(self.shape)
        step = max(1, (_AWAY_BYTES if self._here is None else _HERE_BYTES) // self._itemsize)
        for first in range(0, count, step):
            boxes = flat_boxes(self.shape, first, min(first + step, count)) + self._start
            if self._here is None:
                (data,) = await self._fetcher.fetch([Wanted(self._keys, self._itemsize, boxes)])
            else:
                await trio.lowlevel.checkpoint()
                data = gather(self._here, boxes)
            yield data.data

    def close(self) -> None:
        """Lets go."""
        self._fetcher.drop(self._nodes)
        self._nodes, self._here = (), None


def cut(
    what: str, shape: Sequence[int], bounds: Sequence[tuple[int | None, int | None]]
) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
    """Returns where a range of an array begins, and its shape.

    Raises:
        InvalidError: It is not within the array.
    """
    if len(bounds) > len(shape):
        raise InvalidError(f"{what}: range of {len(bounds)} dims, the tensor has {len(shape)}")
    start, stop = np.zeros(len(shape), np.int64), np.array(shape, np.int64)
    for dim, (low, high) in enumerate(bounds):
        begin, end = 0 if low is None else low, shape[dim] if high is None else high
        if not 0 <= begin <= end <= shape[dim]:
            raise InvalidError(
                f"{what}: range [{begin}, {end}) of dim {dim}: need 0 <= start <= stop <= {shape[dim]}"
            )
        start[dim], stop[dim] = begin, end
    return start, tuple((stop - start).tolist())


def gather(array: npt.NDArray[np.generic], boxes: Boxes) -> Bytes:
    """Returns the elements of ``boxes``, one after the other, each in C order.

    Cost: No copy where they are a run.
    """
    if len(boxes) == 1:
        part = array[_slices(boxes[0])]
        return np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    volumes = box_volumes(boxes)
    out = np.empty(int(volumes.sum()), np.dtype(f"V{array.dtype.itemsize}"))
    end = 0
    for box, volume in zip(boxes, volumes.tolist(), strict=True):
        begin, end = end, end + volume
        extent = (box[1] - box[0]).tolist()
        out[begin:end].reshape(extent)[...] = array[_slices(box)].view(out.dtype)
    return out.view(np.uint8)


def _slices(box: npt.NDArray[np.int64]) -> tuple[Any, ...]:
    # The ellipsis makes the result an array also where there are no dims.
    return (..., *(slice(a, b) for a, b in zip(box[0].tolist(), box[1].tolist(), strict=True)))
