"""Writing tensors into files that the daemon handed out, and summing them up on the way.

Where `xxhash` is installed each block is copied into a buffer that stays in the cache, summed up there and
written from there: the sum costs next to nothing, and is that of what was written, even if somebody changes
the tensor meanwhile. Without it the daemon reads the files once more. A header is written last: it says that
its array is there.

`pwritev` takes headers, many small tensors and what is between them in one call. Into pages that are there it
is faster than a map, too: mapping costs more than it saves, the more so with huge pages.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tenplexfs.client.arrays import Source
from tenplexfs.client.staging import Lane, pieces
from tenplexfs.formats.frames import ALIGNMENT

__all__ = ["Copier", "Placed", "Task", "raw_bytes"]

Array: TypeAlias = npt.NDArray[np.generic]
Buffer: TypeAlias = "bytes | memoryview"
Task: TypeAlias = Callable[[], None]

_BIG_BYTES = 1 << 20
_PART_BYTES = 64 << 20  # bigger ones are written by several threads, and summed up by the daemon
_BLOCK_BYTES = 1 << 19  # half of the cache of a core
_BUFFERS = 1000  # of one call; Linux takes 1024
_ZEROS = bytes(ALIGNMENT)


class Placed(NamedTuple):
    """A tensor, and where it goes in a file.

    Attributes:
        offset: Of the header.
        header: What stands before the data.
        source: The tensor, of any strides; read until it is written.
        number: By which its sum is known.
    """

    offset: int
    header: bytes
    source: Source
    number: int


class Copier:
    """Writes the tensors of one save.

    Args:
        lanes: What gives a lane for a tensor on a device.

    Attributes:
        sums: Number -> xxh3_64 of the bytes in C order, of those that are written and could be summed up.
    """

    def __init__(self, lanes: Callable[[Source], Lane | None] = lambda _: None) -> None:
        self.sums: dict[int, int] = {}
        self._lanes = lanes
        self._own = threading.local()
        self._xxhash = _xxhash()

    def tasks(self, fd: int, tensors: Sequence[Placed]) -> Iterator[tuple[int, Task]]:
        """Yields what writes ``tensors`` in C order, in parts that may run at once; with their bytes.

        Args:
            fd: Writable; stays the caller's, who closes it when all have run.
            tensors: In the order of their offsets.
        """
        run: list[Placed] = []
        size = 0
        for placed in tensors:
            nbytes = placed.source.nbytes
            if nbytes >= _BIG_BYTES:
                yield from self._big_tasks(fd, placed)
                continue
            # What is between two neighbours is less than the alignment, and written with them.
            is_next = run and placed.offset == _end(run[-1])
            if run and (not is_next or size + nbytes > _BLOCK_BYTES or len(run) * 3 >= _BUFFERS - 3):
                yield size, partial(self._write_run, fd, run)
                run, size = [], 0
            run.append(placed)
            size += nbytes
        if run:
            yield size, partial(self._write_run, fd, run)

    def _big_tasks(self, fd: int, placed: Placed) -> Iterator[tuple[int, Task]]:
        lane = self._lanes(placed.source)
        if lane is not None:
            yield placed.source.nbytes, lambda: self._write(fd, placed, pieces(lane, placed.source.value))
            return
        array = placed.source.array()
        if array.nbytes <= _PART_BYTES or not array.flags.c_contiguous:
            yield array.nbytes, lambda: self._write(fd, placed, self._buffered(array))
        else:
            yield from _part_tasks(fd, placed, raw_bytes(array))

    def _write_run(self, fd: int, run: Sequence[Placed]) -> None:
        buffers: list[Buffer] = []
        for placed in run:
            data = raw_bytes(np.ascontiguousarray(placed.source.array()))
            buffers += (placed.header, data, _ZEROS[: -(len(placed.header) + len(data)) % ALIGNMENT])
        if self._xxhash is not None:
            buffers = [memoryview(b"".join(buffers))]
            for placed in run:
                begin = placed.offset - run[0].offset + len(placed.header)
                data = memoryview(buffers[0])[begin : begin + placed.source.nbytes]
                self.sums[placed.number] = self._xxhash.xxh3_64_intdigest(data)
        _write(fd, buffers, run[0].offset)

    def _write(self, fd: int, placed: Placed, blocks: Iterable[memoryview]) -> None:
        """Writes a tensor whose bytes are ``blocks``, which nobody changes while they are at hand."""
        state = None if self._xxhash is None else self._xxhash.xxh3_64()
        offset = placed.offset + len(placed.header)
        for block in blocks:
            if state is not None:
                state.update(block)
            _write(fd, [block], offset)
            offset += len(block)
        _write(fd, [placed.header], placed.offset)
        if state is not None:
            self.sums[placed.number] = state.intdigest()

    def _buffered(self, array: Array) -> Iterator[memoryview]:
        """Yields the bytes of ``array``, in a buffer of this thread where they are to be summed up."""
        if self._xxhash is None:
            whole = array.flags.c_contiguous
            yield from map(raw_bytes, [array] if whole else map(np.ascontiguousarray, _blocks(array)))
            return
        buffer = getattr(self._own, "buffer", None)
        if buffer is None:
            buffer = self._own.buffer = np.empty(_BLOCK_BYTES, np.uint8)
        flat = array.reshape(-1) if array.flags.c_contiguous else array
        for block in _blocks(flat):
            own = buffer[: block.nbytes]
            np.copyto(own.view(block.dtype).reshape(block.shape), block)
            yield own.data


@cache
def _xxhash() -> Any:  # noqa: ANN401
    """Returns the library, or None where it is not installed: the client alone does not need it."""
    try:
        import xxhash
    except ImportError:
        return None
    return xxhash


def raw_bytes(array: Array) -> memoryview:
    """Returns the bytes of a C-contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def _end(placed: Placed) -> int:
    """Returns where the next tensor begins that follows at once."""
    end = placed.offset + len(placed.header) + placed.source.nbytes
    return -(-end // ALIGNMENT) * ALIGNMENT


def _part_tasks(fd: int, placed: Placed, view: memoryview) -> Iterator[tuple[int, Task]]:
    """Yields what writes a very big tensor; the last part that is written writes the header."""
    left = [*range(0, len(view), _PART_BYTES)]

    def write(at: int) -> None:
        _write(fd, [view[at : at + _PART_BYTES]], placed.offset + len(placed.header) + at)
        left.pop()
        if not left:
            _write(fd, [placed.header], placed.offset)

    for at in tuple(left):
        yield min(_PART_BYTES, len(view) - at), partial(write, at)


def _write(fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Writes all of ``buffers``, one after the other."""
    while True:
        done = os.pwritev(fd, buffers, offset)
        offset += done
        left = []
        for buffer in buffers:
            if done >= len(buffer):
                done -= len(buffer)
            else:
                left.append(memoryview(buffer)[done:])
                done = 0
        if not left:
            return
        buffers = left


def _blocks(array: Array) -> Iterator[Array]:
    """Yields views of at most a block each that, joined, are ``array`` in C order."""
    if array.nbytes <= _BLOCK_BYTES or array.ndim == 0:
        yield array
        return
    row_bytes = array.nbytes // len(array)
    if row_bytes > _BLOCK_BYTES:
        for row in array:
            yield from _blocks(row)
        return
    rows = max(1, _BLOCK_BYTES // row_bytes)
    for begin in range(0, len(array), rows):
        yield array[begin : begin + rows]
