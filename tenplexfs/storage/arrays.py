"""Reading a snapshot of the store: its arrays, and whether they are what their sums say."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt
import xxhash

from tenplexfs.core.dtypes import dtype_of
from tenplexfs.core.region import Region
from tenplexfs.core.snapshot import JobName, SnapshotId
from tenplexfs.errors import StaleError
from tenplexfs.formats import npy
from tenplexfs.formats.manifest import ArrayRef, StoredSnapshot
from tenplexfs.storage.files import FileTable
from tenplexfs.storage.ingest import Key
from tenplexfs.storage.sums import box_sums

__all__ = ["Mismatch", "SnapshotArrays", "mismatches"]


class SnapshotArrays:
    """The local arrays of one snapshot; an `ArraySource`. Thread-safe.

    It pins the snapshot: until `release` every array can be had, also when the snapshot is dropped meanwhile.
    What was had stays valid for as long as it is referenced. Files are mapped when they are first asked for.
    """

    def __init__(self, stored: StoredSnapshot, *, files: FileTable, release: Callable[[], None]) -> None:
        self.stored = stored
        self._files = files
        self._maps: dict[str, mmap.mmap] = {}
        self._release: Callable[[], None] | None = release
        self._lock = threading.Lock()

    def __enter__(self) -> SnapshotArrays:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def array(self, rank: int, path: str) -> npt.NDArray[np.generic] | None:
        """Returns the read-only local array of ``path`` (canonical) on ``rank``, or None when not here.

        Raises:
            StaleError: It was released.
        """
        ref = self.stored.arrays.get((rank, path))
        return None if ref is None else self._array(ref)

    def file(self, rank: int, path: str) -> memoryview | None:
        """Returns the whole ``.npy`` of ``path`` (canonical) on ``rank``, or None when not here.

        Raises:
            StaleError: It was released.
        """
        ref = self.stored.arrays.get((rank, path))
        if ref is None:
            return None
        return memoryview(self._map(ref))[ref.offset : ref.offset + ref.header_bytes + ref.nbytes]

    def open(self, rank: int, path: str) -> tuple[int, ArrayRef] | None:
        """Returns a descriptor of the file that holds the array, for reading, and where in it; else None.

        Raises:
            StaleError: It was released.
        """
        ref = self.stored.arrays.get((rank, path))
        if ref is None:
            return None
        with self._lock:
            if self._release is None:
                raise StaleError(f"job {self.stored.job}, {self.stored.id}: was released")
            return self._files.open(ref.file), ref

    def release(self) -> None:
        """Takes the pin back; a second time does nothing."""
        with self._lock:
            release, self._release = self._release, None
            self._maps.clear()
        if release is not None:
            release()

    def _array(self, ref: ArrayRef) -> npt.NDArray[np.generic]:
        begin = ref.offset + ref.header_bytes
        return np.ndarray(ref.shape, dtype_of(ref.dtype), buffer=self._map(ref), offset=begin)

    def _map(self, ref: ArrayRef) -> mmap.mmap:
        with self._lock:
            if self._release is None:
                raise StaleError(f"job {self.stored.job}, {self.stored.id}: was released")
            mapped = self._maps.get(ref.file)
            if mapped is None:
                self._maps[ref.file] = mapped = self._files.map(ref.file)
            return mapped


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A piece whose bytes are not what they were, or, with ``piece`` -1, the header before it.

    Attributes:
        job: Name of the job.
        id: The first snapshot that has it.
        keys: Under which it is in that snapshot.
        file: Where its bytes are.
        piece: Its index in the shard.
        box: Where it lies in the local array.
        wanted: The sum in the manifest.
        got: The sum of its bytes.
    """

    job: JobName
    id: SnapshotId
    keys: tuple[Key, ...]
    file: str
    piece: int
    box: Region
    wanted: int
    got: int

    def __str__(self) -> str:
        rank, path = self.keys[0]
        what = "header" if self.piece < 0 else f"piece {self.piece}, box {self.box.start} to {self.box.stop}"
        return (
            f"job {self.job}, {self.id}, rank {rank}, {path}, {what}: "
            f"checksum {self.got:016x}, should be {self.wanted:016x} ({self.file})"
        )


def mismatches(arrays: SnapshotArrays, keys: tuple[Key, ...], ref: ArrayRef) -> Iterator[Mismatch]:
    """Yields what differs in the array ``ref`` that ``arrays`` has under ``keys``."""
    file, array = arrays.file(*keys[0]), arrays.array(*keys[0])
    if file is None or array is None:
        return
    header = npy.header(ref.shape, ref.dtype)
    checks = [
        (-1, Region((0,), (len(header),)), xxhash.xxh3_64_intdigest(header)),
        *((i, box, wanted) for i, (box, wanted) in enumerate(zip(ref.boxes, ref.sums, strict=True))),
    ]
    found = [xxhash.xxh3_64_intdigest(file[: ref.header_bytes]), *box_sums(array, ref.boxes)]
    for (piece, box, wanted), got in zip(checks, found, strict=True):
        if got != wanted:
            stored = arrays.stored
            yield Mismatch(stored.job, stored.id, keys, ref.file, piece, box, wanted, got)
