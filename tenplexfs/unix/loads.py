"""A rank's arrays on their way to a training process: the store's files as they are, others as copies."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import trio

from tenplexfs.errors import CorruptError, NotFoundError, TenplexError
from tenplexfs.formats import npy
from tenplexfs.formats.frames import ALIGNMENT, MAX_FDS
from tenplexfs.runtime.array_sums import AnyOf
from tenplexfs.runtime.protocols import ArraySource
from tenplexfs.runtime.snapshot import Snapshot
from tenplexfs.storage.arrays import SnapshotArrays

__all__ = ["Load"]

_FILE_BYTES = 1 << 20
_DATA_BYTES = 32 << 20
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _File:
    """A file that holds an array: of the store, or made of what another node has.

    Attributes:
        path: Of a tensor in it.
        arrays: Whose it is, in the store; None where it is to be made.
        size: Bytes of it that are wanted.
    """

    path: str
    arrays: SnapshotArrays | None
    size: int


class Load:
    """What one rank holds of one snapshot; pins it until `close`.

    Attributes:
        tensors: All of them, and where they are.
    """

    def __init__(
        self,
        view: Snapshot,
        rank: int,
        open_arrays: Callable[[], AbstractContextManager[ArraySource]],
    ) -> None:
        self.view = view
        self._rank = rank
        self._pin: AbstractContextManager[ArraySource] | None = None
        self._arrays: list[SnapshotArrays] = []
        self._files: list[_File] = []
        self._small: list[tuple[str, int]] = []
        try:
            pin = open_arrays()
            arrays = pin.__enter__()
        except NotFoundError:
            pass
        else:
            self._pin = pin
            sources = arrays.sources if isinstance(arrays, AnyOf) else (arrays,)
            self._arrays = [each for each in sources if isinstance(each, SnapshotArrays)]
        self.tensors = self._columns()

    def _columns(self) -> dict[str, Any]:
        """Lists the tensors: paths, distinct kinds, of which kind each is, and where it lies.

        The place is a file and where the data begins in it; -1 for those that come as bytes.
        """
        ptc, rank = self.view.ptc, self._rank
        paths = ptc.rank_paths(rank)
        kinds: dict[tuple[str, tuple[int, ...]], int] = {}
        of: list[int] = []
        places: list[tuple[int, int]] = []
        numbers: dict[str, int] = {}
        for path in paths:
            found = next((each for each in self._arrays if (rank, path) in each.stored.arrays), None)
            if found is not None:
                ref = found.stored.arrays[rank, path]
                kind = ref.dtype, ref.shape
                begin = ref.offset + ref.header_bytes
                number = numbers.get(ref.file)
                if number is None:
                    number = numbers[ref.file] = len(self._files)
                    self._files.append(_File(path, found, begin + ref.nbytes))
                elif self._files[number].size < begin + ref.nbytes:
                    self._files[number] = _File(path, found, begin + ref.nbytes)
                places.append((number, begin))
            else:
                kind = ptc.tensors[path].dtype, ptc.shard(rank, path).local_shape
                places.append(self._elsewhere(path, *kind))
            of.append(kinds.setdefault(kind, len(kinds)))
        return {
            "paths": paths,
            "kinds": list(kinds),
            "of": np.array(of, np.uint32).tobytes(),
            "places": np.array(places, np.int64).tobytes(),
            "files": len(self._files),
        }

    def _elsewhere(self, path: str, dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
        header = npy.header_size(shape, dtype)
        size = npy.file_size(shape, dtype) - header
        if size < _FILE_BYTES:
            self._small.append((path, size))
            return -1, size
        self._files.append(_File(path, None, header + size))
        return len(self._files) - 1, header

    async def files(self, first: int) -> tuple[list[int], list[int]]:
        """Returns the sizes and descriptors of some files from ``first`` on.

        Raises:
            TenplexError: One is on another node, and cannot be had.
        """
        fds: list[int] = []
        wanted = self._files[first : first + MAX_FDS]
        try:
            for each in wanted:
                fds.append(await self._fetch(each) if each.arrays is None else self._open(each, each.arrays))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return [each.size for each in wanted], fds

    async def data(self, first: int) -> tuple[bytes, int]:
        """Returns the bytes of small tensors of other nodes, from number ``first`` on, and of how many."""
        parts: list[bytes] = []
        size = count = 0
        for path, nbytes in self._small[first:]:
            if count and size + nbytes > _DATA_BYTES:
                break
            parts += [await self._remote(path, nbytes), bytes(-nbytes % ALIGNMENT)]
            size += nbytes + -nbytes % ALIGNMENT
            count += 1
        return b"".join(parts), count

    def close(self) -> None:
        """Lets go of the snapshot; what was handed out stays."""
        pin, self._pin, self._arrays = self._pin, None, []
        if pin is not None:
            pin.__exit__(None, None, None)

    def _open(self, each: _File, arrays: SnapshotArrays) -> int:
        found = arrays.open(self._rank, each.path)
        if found is None:
            raise NotFoundError(f"{each.path} of rank {self._rank}: is not here any more")
        return found[0]

    async def _fetch(self, each: _File) -> int:
        """Returns a descriptor of a file in memory with what another node has, or a replica here."""
        fd = os.memfd_create("tenplexfs-load", os.MFD_CLOEXEC)
        try:
            content = self.view.open_shard(self._rank, each.path)
            try:
                offset = 0
                while offset < content.size:
                    data = content.read(offset, _PIECE_BYTES)
                    if data is None:
                        data = await content.read_wait(offset, _PIECE_BYTES)
                    if not data:
                        raise CorruptError(f"{each.path}: ends at byte {offset} of {content.size}")
                    await trio.to_thread.run_sync(_write, fd, data, offset)
                    offset += len(data)
            finally:
                content.close()
            return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)

    async def _remote(self, path: str, nbytes: int) -> bytes:
        content = self.view.open_shard(self._rank, path)
        try:
            begin = content.size - nbytes
            data = content.read(begin, nbytes) if nbytes else b""
            if data is None:
                data = await content.read_wait(begin, nbytes)
        finally:
            content.close()
        if len(data) != nbytes:
            raise TenplexError(f"{path} of rank {self._rank}: {len(data)} bytes of {nbytes}")
        return bytes(data)


def _write(fd: int, data: bytes | memoryview, offset: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
