"""The bytes that a request for ranges gives, from arrays that are whole or still being filled."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tenplexfs.errors import InvalidError, NotFoundError
from tenplexfs.rpc.ranges import gather
from tenplexfs.rpc.wire import FetchRequest
from tenplexfs.runtime.protocols import ArraySource, GrowingArrays, Ranges

__all__ = ["messages_of"]

_Ints = npt.NDArray[np.int64]


def messages_of(arrays: ArraySource, request: FetchRequest) -> Iterator[bytes | memoryview]:
    """Yields the bytes of ``request`` from its start on, in messages.

    Of arrays that are still being filled it yields what has landed, as soon as it has, and an empty message
    now and then while it waits.

    Raises:
        NotFoundError: A tensor is not there.
        InvalidError: A box does not fit.
        UnavailableError: What has not landed does not come.
    """
    message_bytes = request.message_bytes
    parts = [(_array(arrays, part, request), part) for part in request.ranges]
    if not isinstance(arrays, GrowingArrays):
        boxes = [(array, part.boxes) for array, part in parts]
        yield from gather(boxes, start=request.start, message_bytes=message_bytes)
        return
    skip = request.start
    for array, part in parts:
        for boxes_, nbytes in _blocks(part, message_bytes):
            if skip >= nbytes:
                skip -= nbytes
                continue
            while not arrays.wait(part.rank, part.path, boxes_):
                yield b""
            yield from gather([(array, boxes_)], start=skip, message_bytes=message_bytes)
            skip = 0


def _blocks(part: Ranges, limit: int) -> Iterator[tuple[_Ints, int]]:
    """Yields the boxes of ``part`` in order, in groups of at most ``limit`` bytes; cuts big ones by rows."""
    batch: list[_Ints] = []
    held = 0
    for box in part.boxes:
        for piece in _cut(box, max(1, limit // part.itemsize)):
            nbytes = int((piece[1] - piece[0]).prod()) * part.itemsize
            if batch and held + nbytes > limit:
                yield np.array(batch), held
                batch, held = [], 0
            batch.append(piece)
            held += nbytes
    if batch:
        yield np.array(batch), held


def _cut(box: _Ints, limit: int) -> Iterator[_Ints]:
    """Yields ``box``, (2, ndim), in C order in boxes of at most ``limit`` elements."""
    extent = box[1] - box[0]
    volume = int(extent.prod())
    if volume <= limit:
        yield box
        return
    dim = int(np.argmax(extent > 1))
    step = max(1, limit * int(extent[dim]) // volume)
    for begin in range(int(box[0, dim]), int(box[1, dim]), step):
        piece = box.copy()
        piece[:, dim] = begin, min(begin + step, int(box[1, dim]))
        yield from _cut(piece, limit)


def _array(arrays: ArraySource, part: Ranges, request: FetchRequest) -> npt.NDArray[np.generic]:
    array = arrays.array(part.rank, part.path)
    where = f"job {request.job} txid {request.txid} rank {part.rank} tensor {part.path}"
    if array is None:
        raise NotFoundError(f"{where}: not on this node")
    if array.itemsize != part.itemsize:
        raise InvalidError(f"{where}: need itemsize {array.itemsize}, got {part.itemsize}")
    return array
