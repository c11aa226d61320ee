"""Boxes of arrays to a stream of bytes, and back, in one copy each way.

The stream is the concatenation of all boxes, each in C order. `gather` cuts it into messages; `Scatter` puts
it into place, wherever the messages were cut. Three ways of copying, chosen for whole runs of boxes at once:

- big boxes one by one, in blocks of rows of about a message (``.tobytes()`` of a block is as fast as memory,
  row by row is 10 to 100 times slower);
- small boxes that are contiguous in memory as spans of one memoryview, joined;
- runs of equal small boxes, tiny or not contiguous, by one fancy index into a window view.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tenplexfs.errors import InvalidError

__all__ = ["MESSAGE_BYTES", "Scatter", "gather"]

MESSAGE_BYTES = 1 << 20
_SMALL_BYTES = 1 << 16
_TINY_BYTES = 1 << 10
_RUN_COUNT = 8

_Array = npt.NDArray[np.generic]
_Ints = npt.NDArray[np.int64]
_ONE, _SPANS, _WINDOWS = 0, 1, 2


def gather(
    parts: Sequence[tuple[_Array, _Ints]], *, start: int = 0, message_bytes: int = MESSAGE_BYTES
) -> Iterator[bytes | memoryview]:
    """Yields the bytes of the boxes of all ``parts`` in order, from byte ``start`` of them on.

    What is contiguous is yielded as a view of its array.

    Args:
        parts: An array and its boxes, int64 (n, 2, ndim), half-open.
        start: In bytes of the whole stream.
        message_bytes: No message is longer; all but few are longer than half of it.

    Raises:
        InvalidError: A box is out of bounds, before anything is yielded of its array.

    Cost: one copy of what is not contiguous; a few microseconds for each message, 0.2 for each small box.
    """
    pending: list[bytes | memoryview] = []
    held = 0
    for array, boxes in parts:
        strip = _strip(array, boxes)
        skip, start = min(start, strip.nbytes), max(0, start - strip.nbytes)
        for batch, nbytes in strip.read(skip, message_bytes):
            if pending and held + nbytes > message_bytes:
                yield _joined(pending)
                pending, held = [], 0
            pending += batch
            held += nbytes
    if held:
        yield _joined(pending)


def _joined(parts: list[bytes | memoryview]) -> bytes | memoryview:
    return parts[0] if len(parts) == 1 else b"".join(parts)


class Scatter:
    """Writes a stream of bytes into boxes of arrays; the inverse of `gather`.

    Args:
        targets: A writable array and its boxes, int64 (n, 2, ndim), in the order of the stream. Source boxes
            of other shapes are fine: elements go in C order.

    Attributes:
        nbytes: Length of the whole stream.
    """

    def __init__(self, targets: Sequence[tuple[_Array, _Ints]]) -> None:
        self._strips = [_strip(array, boxes) for array, boxes in targets]
        self._ends = np.cumsum([strip.nbytes for strip in self._strips], dtype=np.int64).tolist()
        self.nbytes: int = self._ends[-1] if self._ends else 0

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Writes ``data``, the bytes of the stream from ``offset`` on. Calls may come in any order.

        Raises:
            InvalidError: It goes beyond the stream.
        """
        if offset < 0 or offset + len(data) > self.nbytes:
            raise InvalidError(f"stream of {self.nbytes} bytes: got [{offset}, {offset + len(data)})")
        view = memoryview(data)
        index = bisect_right(self._ends, offset)
        while len(view):
            strip = self._strips[index]
            at = offset - (self._ends[index] - strip.nbytes)
            count = min(len(view), strip.nbytes - at)
            if count:
                strip.write(at, view[:count])
            view, offset, index = view[count:], offset + count, index + 1

    def close(self) -> None:
        """Nothing is to be given back."""


class _Lone:
    """One box: a view of words."""

    __slots__ = ("flat", "nbytes", "view")

    def __init__(self, view: _Array) -> None:
        self.view = view
        self.nbytes = view.nbytes
        self.flat = view.reshape(-1).view(np.uint8) if view.flags.c_contiguous else None

    def read(self, start: int, limit: int) -> Iterator[tuple[list[bytes | memoryview], int]]:
        """Yields buffers of at most ``limit`` bytes (or one element), and their bytes, from ``start`` on."""
        if self.flat is None:
            for block in _blocks(self.view, start, self.nbytes, limit):
                yield [block], len(block)
            return
        flat, itemsize = self.flat.data, self.view.itemsize
        step = max(1, limit // itemsize) * itemsize
        for at in range(start, self.nbytes, step):
            part = flat[at : at + step]
            yield [part], len(part)

    def write(self, at: int, data: memoryview) -> None:
        """Writes ``data`` at byte ``at``; it ends within the box."""
        if self.flat is None:
            _fill(self.view, at, data)
        else:
            # numpy copies without the GIL, so that the next message comes in meanwhile
            self.flat[at : at + len(data)] = np.frombuffer(data, np.uint8)


@dataclass(frozen=True, slots=True)
class _Strip:
    """Boxes of one array, none empty, with what copying needs: all columns are of one entry for each box.

    Attributes:
        array: Elements as plain unsigned words, so that numpy moves them without converting.
        flat: All bytes of the array, when it is C-contiguous.
        first: Byte of the array where the box begins.
        ends: Bytes of the stream up to the end of the box.
        contiguous: The box is one span of memory.
        kind: How it is copied.
        run_end: First box that is not copied together with this one.
    """

    array: _Array
    flat: memoryview
    boxes: _Ints
    first: _Ints
    ends: _Ints
    contiguous: npt.NDArray[np.bool_]
    kind: _Ints
    run_end: _Ints

    @property
    def nbytes(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def box(self, index: int) -> _Lone:
        return _Lone(_cut(self.array, *self.boxes[index].tolist()))

    def spans(self, i: int, j: int) -> Iterator[tuple[int, int]]:
        """Returns begin and end in `flat` of the contiguous boxes [i, j)."""
        sizes = np.diff(self.ends[i:j], prepend=self.ends[i - 1] if i else 0)
        return zip(self.first[i:j].tolist(), (self.first[i:j] + sizes).tolist(), strict=True)

    def windows(self, i: int, j: int) -> tuple[_Array, tuple[_Ints, ...], tuple[int, ...]]:
        """Returns a view, an index and a shape such that ``view[index]`` are the equal boxes [i, j)."""
        array, boxes = self.array, self.boxes[i:j]
        extents = tuple((boxes[0, 1] - boxes[0, 0]).tolist())
        starts = tuple(boxes[:, 0].T)
        if self.contiguous[i]:
            array, extents = array.reshape(-1), (int(np.prod(extents)),)
            starts = (self.first[i:j] // array.itemsize,)
        room = tuple(n - e + 1 for n, e in zip(array.shape, extents, strict=True))
        view = np.lib.stride_tricks.as_strided(array, room + extents, array.strides * 2)
        return view, starts, (j - i, *extents)

    def read(self, start: int, limit: int) -> Iterator[tuple[list[bytes | memoryview], int]]:
        """Yields buffers of at most ``limit`` bytes together, and their bytes, from byte ``start`` on."""
        i, count = int(np.searchsorted(self.ends, start, side="right")), len(self.ends)
        while i < count:
            begin = int(self.ends[i - 1]) if i else 0
            inner = max(0, start - begin)
            j = min(int(self.run_end[i]), int(np.searchsorted(self.ends, begin + limit, side="right")))
            if self.kind[i] == _ONE or inner or j == i:
                yield from self.box(i).read(inner, limit)
                i += 1
                continue
            if self.kind[i] == _SPANS:
                flat = self.flat
                batch: list[bytes | memoryview] = [flat[a:b] for a, b in self.spans(i, j)]
            else:
                view, index, _ = self.windows(i, j)
                batch = [view[index].tobytes()]
            yield batch, int(self.ends[j - 1]) - begin
            i = j

    def write(self, at: int, data: memoryview) -> None:
        """Writes ``data`` at byte ``at`` of the strip; it ends within the strip."""
        i, end = int(np.searchsorted(self.ends, at, side="right")), at + len(data)
        while at < end:
            begin = int(self.ends[i - 1]) if i else 0
            j = min(int(self.run_end[i]), int(np.searchsorted(self.ends, end, side="right")))
            if self.kind[i] == _ONE or at > begin or j == i:
                j, stop = i + 1, min(end, int(self.ends[i]))
                self.box(i).write(at - begin, data[: stop - at])
            else:
                stop = int(self.ends[j - 1])
                self._write_run(i, j, data[: stop - at])
            data, at, i = data[stop - at :], stop, j

    def _write_run(self, i: int, j: int, data: memoryview) -> None:
        if self.kind[i] == _WINDOWS:
            view, index, shape = self.windows(i, j)
            view[index] = np.frombuffer(data, self.array.dtype).reshape(shape)
            return
        flat, at = self.flat, 0
        for a, b in self.spans(i, j):
            flat[a:b] = data[at : at + b - a]
            at += b - a


def _strip(array: _Array, boxes: _Ints) -> _Strip | _Lone:
    if boxes.shape == (1, 2, array.ndim):
        # twenty times faster than what follows: models have many small tensors
        start, stop = boxes[0].tolist()
        if all(0 <= a <= b <= n for a, b, n in zip(start, stop, array.shape, strict=True)):
            return _Lone(_cut(array, start, stop).view(_word(array.dtype.itemsize)))
    _check(array, boxes)
    if not array.flags.c_contiguous:
        raise InvalidError(f"array of shape {array.shape}: need C order, got strides {array.strides}")
    words = array.view(_word(array.dtype.itemsize))
    if words.ndim == 0:
        words, boxes = words.reshape(1), np.broadcast_to(np.array([[0], [1]], np.int64), (len(boxes), 2, 1))
    extents = boxes[:, 1] - boxes[:, 0]
    if not extents.all():
        some = extents.all(axis=1)
        boxes, extents = boxes[some], extents[some]
    strides = np.array(words.strides, np.int64)
    sizes = extents.prod(axis=1) * words.itemsize
    first = boxes[:, 0] @ strides
    contiguous = (extents - 1) @ strides + words.itemsize == sizes
    small = sizes < _SMALL_BYTES
    equal = [*extents.T, contiguous]
    _, length = _runs(equal)
    windows = small & (~contiguous | (sizes < _TINY_BYTES)) & (length >= _RUN_COUNT)
    kind = np.where(windows, _WINDOWS, np.where(contiguous & small, _SPANS, _ONE))
    run_end, _ = _runs([kind, *(np.where(windows, column, 0) for column in equal)])
    flat = memoryview(words.reshape(-1).view(np.uint8).data) if words.size else memoryview(b"")
    return _Strip(words, flat, boxes, first, np.cumsum(sizes), contiguous, kind, run_end)


def _cut(array: _Array, start: list[int], stop: list[int]) -> _Array:
    # the dots make it a view also without dims
    index: tuple[Any, ...] = (*map(slice, start, stop), ...)
    view: _Array = array[index]
    return view


def _runs(columns: Sequence[npt.NDArray[np.generic]]) -> tuple[_Ints, _Ints]:
    """Returns, for each entry, one past the end of its run of equal ones, and how long that is."""
    last = np.zeros(len(columns[0]), np.bool_)
    last[-1:] = True
    for column in columns:
        last[:-1] |= column[1:] != column[:-1]
    stops = np.flatnonzero(last) + 1
    lengths = np.diff(stops, prepend=0)
    return np.repeat(stops, lengths), np.repeat(lengths, lengths)


def _word(itemsize: int) -> np.dtype[np.generic]:
    plain = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
    return np.dtype(plain.get(itemsize, f"V{itemsize}"))


def _check(array: _Array, boxes: _Ints) -> None:
    if boxes.ndim != 3 or boxes.shape[1:] != (2, array.ndim):
        raise InvalidError(f"boxes: need shape (n, 2, {array.ndim}), got {boxes.shape}")
    start, stop = boxes[:, 0], boxes[:, 1]
    wrong = ((start < 0) | (start > stop) | (stop > np.array(array.shape, np.int64))).any(axis=1)
    if wrong.any():
        i = int(np.argmax(wrong))
        got = f"[{start[i].tolist()}, {stop[i].tolist()})"
        raise InvalidError(f"box {i}: need 0 <= start <= stop <= {array.shape}, got {got}")


def _blocks(view: _Array, begin: int, end: int, limit: int) -> Iterator[bytes]:
    """Yields bytes [begin, end) of ``view`` in C order, at most ``limit`` (or one element) at once."""
    if view.ndim == 0:
        yield view.tobytes()[begin:end]
        return
    row = view.nbytes // len(view)
    (i, head), (j, tail) = divmod(begin, row), divmod(end, row)
    if head:
        yield from _blocks(view[i], head, row if i < j else tail, limit)
        i += 1
    step = limit // row
    if step or view.ndim == 1:
        for k in range(i, j, max(1, step)):
            yield view[k : min(j, k + max(1, step))].tobytes()
    else:
        for k in range(i, j):
            yield from _blocks(view[k], 0, row, limit)
    if tail and i <= j:
        yield from _blocks(view[j], 0, tail, limit)


def _fill(view: _Array, begin: int, data: memoryview) -> None:
    """Writes ``data`` at byte ``begin`` of ``view`` in C order; the inverse of `_blocks`."""
    if view.ndim == 0:
        patched = bytearray(view.tobytes())
        patched[begin : begin + len(data)] = data
        view[()] = np.frombuffer(patched, view.dtype)[0]
        return
    row, end = view.nbytes // len(view), begin + len(data)
    (i, head), (j, tail) = divmod(begin, row), divmod(end, row)
    if head:
        count = min(row - head, len(data))
        _fill(view[i, ...], head, data[:count])
        data, i = data[count:], i + 1
    if i < j:
        body = (j - i) * row
        view[i:j] = np.frombuffer(data[:body], view.dtype).reshape(j - i, *view.shape[1:])
        data = data[body:]
    if tail and i <= j:
        _fill(view[j, ...], 0, data)
