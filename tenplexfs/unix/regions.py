"""Regions of tensors on their way to a training process that is laid out in another way.

What is on this node the process maps and cuts by itself; what is not is fetched here, once for all ranks of
the node that want the same, and handed over as a file in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import msgpack
import numpy as np
import trio

from tenplexfs.core.ptc import Tensor
from tenplexfs.core.region import Boxes
from tenplexfs.core.snapshot import JobName, NodeName, TxId
from tenplexfs.errors import InvalidError, NotFoundError
from tenplexfs.formats import npy
from tenplexfs.formats.frames import ALIGNMENT, MAX_FDS
from tenplexfs.formats.manifest import ArrayRef
from tenplexfs.runtime.array_sums import AnyOf
from tenplexfs.runtime.fetching import Bytes, Wanted
from tenplexfs.runtime.protocols import ArraySource
from tenplexfs.runtime.reading import FullTensor
from tenplexfs.runtime.snapshot import Snapshot
from tenplexfs.storage.arrays import SnapshotArrays

__all__ = ["Regions", "SharedRegions"]

_MAX_READ_BYTES = 1 << 30
_KEPT_S = 60.0


@dataclass
class _Shared:
    """A file in memory that some ranks of this node have not asked for yet."""

    lock: trio.Lock = field(default_factory=trio.Lock)
    fd: int = -1
    size: int = 0
    uses: int = 0
    until_s: float = float("inf")


class SharedRegions:
    """What was fetched for several ranks of this node. Belongs to the trio thread."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Shared] = {}

    def entry(self, key: bytes) -> _Shared:
        """Returns what is kept under ``key``, and forgets what nobody came for."""
        now = trio.current_time()
        for old, each in list(self._known.items()):
            if each.until_s < now and not each.lock.locked():
                self._forget(old)
        return self._known.setdefault(key, _Shared())

    def settle(self, key: bytes) -> None:
        """Forgets what nobody waits for any more."""
        each = self._known.get(key)
        # Locked by who waited: the lock is handed over when it is let go.
        if each is not None and each.uses <= 0 and not each.lock.locked():
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        each = self._known.pop(key)
        if each.fd >= 0:
            os.close(each.fd)


class Regions:
    """One snapshot, of which a process wants regions; pins it until `close`.

    Attributes:
        of_rank: Rank -> the number of its document.
    """

    def __init__(
        self,
        view: Snapshot,
        open_arrays: Callable[[], AbstractContextManager[ArraySource]],
        shared: SharedRegions,
    ) -> None:
        self._view = view
        self._shared = shared
        self._documents: list[bytes] = []
        self.of_rank: list[int] = []
        self._list_documents()
        self._held: tuple[NodeName, ...] = ()
        self._pin: AbstractContextManager[ArraySource] | None = None
        self._arrays: ArraySource = view.arrays
        self._parts: list[SnapshotArrays] = []
        self._files: list[list[Any]] = []  # part, rank, path, bytes that are wanted
        try:
            pin = open_arrays()
            arrays = pin.__enter__()
        except NotFoundError:
            return
        self._pin = pin
        self._arrays = arrays  # those of the view go when the job has switched
        sources = arrays.sources if isinstance(arrays, AnyOf) else (arrays,)
        self._parts = [each for each in sources if isinstance(each, SnapshotArrays)]

    def _list_documents(self) -> None:
        known: dict[object, int] = {}
        for rank in self._view.ptc.ranks():
            own = self._view.ptc.rank_paths(rank)
            # Without values the paths tell the structure, and ranks of the same paths have the same.
            key: object = self._view.structure(rank) if self._view.values else id(own)
            if key not in known:
                known[key] = len(self._documents)
                self._documents.append(self._view.structure(rank))
            self.of_rank.append(known[key])

    def document(self, index: int) -> bytes:
        """Returns the structure of some ranks.

        Raises:
            NotFoundError: There is none of this number.
        """
        if index >= len(self._documents):
            raise NotFoundError(f"regions: no document {index}: there are {len(self._documents)}")
        return self._documents[index]

    def here(self, keys: Sequence[object]) -> list[tuple[int, int]]:
        """Returns for each (rank, path) of this node its file, of those of `files`, and where it begins."""
        self._files.clear()
        numbers: dict[str, int] = {}
        places: list[tuple[int, int]] = []
        for key in keys:
            match key:
                case [int(rank), str(path)] if (found := self._stored(rank, path)) is not None:
                    part, ref = found
                case _:
                    raise NotFoundError(f"regions: {key!r:.100}: is not on this node")
            begin = ref.offset + ref.header_bytes
            number = numbers.setdefault(ref.file, len(self._files))
            if number == len(self._files):
                self._files.append([part, rank, path, 0])
            self._files[number][3] = max(self._files[number][3], begin + ref.nbytes)
            places.append((number, begin))
        return places

    def _stored(self, rank: int, path: str) -> tuple[SnapshotArrays, ArrayRef] | None:
        for part in self._parts:
            if (ref := part.stored.arrays.get((rank, path))) is not None:
                return part, ref
        return None

    def files(self, first: int) -> tuple[list[int], list[int]]:
        """Returns the sizes and descriptors of some files of `here` from ``first`` on."""
        fds: list[int] = []
        wanted = self._files[first : first + MAX_FDS]
        for part, rank, path, _ in wanted:
            found = part.open(rank, path)
            assert found is not None
            fds.append(found[0])
        return [size for *_, size in wanted], fds

    async def read(self, items: Sequence[object], uses: int) -> tuple[int, int]:
        """Returns a file with regions of whole tensors, each aligned, and its size.

        Args:
            items: Path, start and stop of each, in global coordinates.
            uses: How many ranks of this node ask for the very same.

        Raises:
            TenplexError: Some of it cannot be had.
        """
        wanted = [self._item(each) for each in items]
        size = sum(_aligned(_nbytes(tensor, box)) for tensor, box in wanted)
        if size > _MAX_READ_BYTES:
            raise InvalidError(f"regions.read: {size} bytes at once, at most {_MAX_READ_BYTES}")
        await self._hold()
        named = msgpack.packb([self._view.job, self._view.id.text, items])
        key = blake2b(named, digest_size=16).digest()
        entry = self._shared.entry(key)
        async with entry.lock:
            if entry.fd < 0:
                entry.fd, entry.size, entry.uses = await self._fetch(wanted), size, uses
                entry.until_s = trio.current_time() + _KEPT_S
            entry.uses -= 1
            fd = os.open(f"/proc/self/fd/{entry.fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._shared.settle(key)
        return fd, size

    def _item(self, each: object) -> tuple[Tensor, Boxes]:
        match each:
            case [str(path), list(start), list(stop)] if path in self._view.ptc.tensors:
                tensor = self._view.ptc.tensors[path]
                edges = zip(start, stop, tensor.shape, strict=True)
                if len(start) == len(stop) == len(tensor.shape) and all(
                    0 <= a <= b <= n for a, b, n in edges
                ):
                    return tensor, np.array([start, stop], np.int64).reshape(1, 2, len(start))
        raise InvalidError(f"regions.read: {each!r:.200}: need path, start and stop within the tensor")

    async def _fetch(self, wanted: Sequence[tuple[Tensor, Boxes]]) -> int:
        parts, elsewhere = await trio.to_thread.run_sync(self._gather, wanted)
        fetched = await self._view.fetcher.fetch([each for each, _ in elsewhere])

        def finish() -> int:
            for data, (_, target) in zip(fetched, elsewhere, strict=True):
                target[...] = data.view(target.dtype).reshape(target.shape)
            return _file_of([part.data for part in parts])

        return await trio.to_thread.run_sync(finish)

    def _gather(self, wanted: Sequence[tuple[Tensor, Boxes]]) -> tuple[list[Bytes], list[tuple[Wanted, Any]]]:
        view = self._view
        fetcher = replace(view.fetcher, handles=_HeldAlready())
        parts, elsewhere = [], []
        for tensor, box in wanted:
            header = npy.header(tensor.shape, tensor.dtype)
            whole = FullTensor(fetcher, header, tensor, view.ptc.holders(tensor.path), self._arrays)
            try:
                part, missing = whole.gather(box)
            finally:
                whole.close()
            parts.append(part)
            elsewhere += missing
        return parts, elsewhere

    async def _hold(self) -> None:
        """Keeps the snapshot on the other nodes, too, until `close`: more is going to be read."""
        if not self._held:
            self._held = self._view.fetcher.others()
            self._view.fetcher.hold(self._held)
            await self._view.fetcher.handles.settle()

    def close(self) -> None:
        """Lets go of the snapshot; what was handed out stays."""
        held, self._held = self._held, ()
        self._view.fetcher.drop(held)
        pin, self._pin, self._parts = self._pin, None, []
        if pin is not None:
            pin.__exit__(None, None, None)


class _HeldAlready:
    """Counts nothing: the snapshot is held on all nodes while a file is made."""

    def hold(self, node: NodeName, job: JobName, txid: TxId) -> None:
        """Does nothing."""

    def drop(self, node: NodeName, job: JobName, txid: TxId) -> None:
        """Does nothing."""

    async def settle(self) -> None:
        """Does nothing."""
        await trio.lowlevel.checkpoint()


def _nbytes(tensor: Tensor, box: Boxes) -> int:
    return int((box[0, 1] - box[0, 0]).prod()) * tensor.itemsize


def _file_of(parts: Sequence[memoryview]) -> int:
    """Returns a descriptor of a file in memory that holds ``parts``, each aligned."""
    fd = os.memfd_create("tenplexfs-regions", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, sum(_aligned(part.nbytes) for part in parts))
        offset = 0
        for part in parts:
            done = 0
            while done < part.nbytes:
                done += os.pwrite(fd, part[done:], offset + done)
            offset += _aligned(part.nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
