"""Writing a tensor into a file that the daemon handed out: one copy, several threads for big ones."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

__all__ = ["copy_tasks", "raw_bytes"]

Array = npt.NDArray[np.generic]

_TASK_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 20


def copy_tasks(fd: int, offset: int, array: Array, *, recycled: bool) -> list[Callable[[], None]]:
    """Returns what writes ``array`` in C order at ``offset`` of ``fd``, in parts that may run at once.

    Args:
        fd: Writable; stays the caller's, who closes it when all have run.
        offset: Where the array begins in the file.
        array: Any strides; read until all have run.
        recycled: The file has pages already: a mapped copy is faster then, else writing is.
    """
    if not array.nbytes:
        return []
    if not array.flags.c_contiguous:
        return [lambda: _copy_strided(fd, offset, array, recycled=recycled)]
    view = raw_bytes(array)
    write = _copy_mapped if recycled else _copy_written

    def task(begin: int) -> Callable[[], None]:
        part = view[begin : begin + _TASK_BYTES]
        return lambda: write(fd, offset + begin, part)

    return [task(begin) for begin in range(0, len(view), _TASK_BYTES)]


def raw_bytes(array: Array) -> npt.NDArray[np.uint8]:
    """Returns the bytes of a C-contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8)


def _copy_written(fd: int, offset: int, data: npt.NDArray[np.uint8]) -> None:
    view, done = data.data, 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def _copy_mapped(fd: int, offset: int, data: npt.NDArray[np.uint8]) -> None:
    begin = offset - offset % mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(fd, offset + len(data) - begin, offset=begin) as mapped:
        target = np.frombuffer(mapped, np.uint8)
        np.copyto(target[offset - begin :], data)
        del target  # else the map could not be closed, and the daemon would see a writer


def _copy_strided(fd: int, offset: int, array: Array, *, recycled: bool) -> None:
    if recycled:
        begin = offset - offset % mmap.ALLOCATIONGRANULARITY
        with mmap.mmap(fd, offset + array.nbytes - begin, offset=begin) as mapped:
            target = np.ndarray(array.shape, array.dtype, buffer=mapped, offset=offset - begin)
            target[...] = array
            del target
        return
    for block in _blocks(array):
        _copy_written(fd, offset, raw_bytes(block))
        offset += block.nbytes


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
