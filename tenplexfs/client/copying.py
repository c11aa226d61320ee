"""Writing tensors into files that the daemon handed out: one copy, straight from where they are.

`pwritev` takes headers, many small tensors and what is between them in one call. Into pages that are there it
is faster than a map, too: mapping costs more than it saves, the more so with huge pages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tenplexfs.client.arrays import Source
from tenplexfs.client.staging import Lane, pieces
from tenplexfs.formats.frames import ALIGNMENT

__all__ = ["Placed", "Task", "raw_bytes", "write_tasks"]

Array: TypeAlias = npt.NDArray[np.generic]
Buffer: TypeAlias = "bytes | memoryview"
Task: TypeAlias = Callable[[], None]

_TASK_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 20
_BUFFERS = 1000  # of one call; Linux takes 1024
_ZEROS = bytes(ALIGNMENT)


class Placed(NamedTuple):
    """A tensor, and where it goes in a file.

    Attributes:
        offset: Of the header.
        header: What stands before the data.
        source: The tensor, of any strides; read until it is written.
    """

    offset: int
    header: bytes
    source: Source


def write_tasks(
    fd: int, tensors: Sequence[Placed], lanes: Callable[[Source], Lane | None] = lambda _: None
) -> Iterator[tuple[int, Task]]:
    """Yields what writes ``tensors`` in C order into ``fd``, in parts that may run at once; with their bytes.

    Args:
        fd: Writable; stays the caller's, who closes it when all have run.
        tensors: In the order of their offsets.
        lanes: What gives a lane for a tensor on a device.
    """
    run: list[Placed] = []
    size = 0
    for placed in tensors:
        nbytes = placed.source.nbytes
        if nbytes >= _BLOCK_BYTES:
            lane = lanes(placed.source)
            if lane is None:
                yield from _big_tasks(fd, placed)
            else:
                yield nbytes, partial(_write_staged, fd, placed, lane)
            continue
        # What is between two neighbours is less than the alignment, and written with them.
        is_next = run and placed.offset == _end(run[-1])
        if run and (not is_next or size + nbytes > _TASK_BYTES or len(run) * 3 >= _BUFFERS - 3):
            yield size, _run_task(fd, run)
            run, size = [], 0
        run.append(placed)
        size += nbytes
    if run:
        yield size, _run_task(fd, run)


def raw_bytes(array: Array) -> memoryview:
    """Returns the bytes of a C-contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def _end(placed: Placed) -> int:
    """Returns where the next tensor begins that follows at once."""
    end = placed.offset + len(placed.header) + placed.source.nbytes
    return -(-end // ALIGNMENT) * ALIGNMENT


def _run_task(fd: int, run: Sequence[Placed]) -> Task:
    def write() -> None:
        buffers: list[Buffer] = []
        for placed in run:
            data = raw_bytes(np.ascontiguousarray(placed.source.array()))
            buffers += (placed.header, data, _ZEROS[: -(len(placed.header) + len(data)) % ALIGNMENT])
        _write(fd, buffers, run[0].offset)

    return write


def _big_tasks(fd: int, placed: Placed) -> Iterator[tuple[int, Task]]:
    array = placed.source.array()
    begin = placed.offset + len(placed.header)
    if not array.flags.c_contiguous:
        yield array.nbytes, lambda: _write_strided(fd, placed, array)
        return
    view = raw_bytes(array)

    def part(at: int) -> Task:
        data = view[at : at + _TASK_BYTES]
        if at:
            return lambda: _write(fd, [data], begin + at)
        return lambda: _write(fd, [placed.header, data], placed.offset)

    for at in range(0, len(view), _TASK_BYTES):
        yield min(_TASK_BYTES, len(view) - at), part(at)


def _write_staged(fd: int, placed: Placed, lane: Lane) -> None:
    _write(fd, [placed.header], placed.offset)
    offset = placed.offset + len(placed.header)
    for piece in pieces(lane, placed.source.value):
        _write(fd, [piece], offset)
        offset += len(piece)


def _write_strided(fd: int, placed: Placed, array: Array) -> None:
    _write(fd, [placed.header], placed.offset)
    offset = placed.offset + len(placed.header)
    for block in _blocks(array):
        _write(fd, [raw_bytes(block)], offset)
        offset += block.nbytes


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
    """Yields contiguous copies of about a block each that, joined, are ``array`` in C order."""
    if array.nbytes <= _BLOCK_BYTES or array.ndim == 0:
        yield np.ascontiguousarray(array)
        return
    row_bytes = array.nbytes // len(array)
    if row_bytes > _BLOCK_BYTES:
        for row in array:
            yield from _blocks(row)
        return
    rows = max(1, _BLOCK_BYTES // row_bytes)
    for begin in range(0, len(array), rows):
        yield np.ascontiguousarray(array[begin : begin + rows])
