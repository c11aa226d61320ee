"""The way into a store: room is taken first, then arrays are filled, then all is sealed as one snapshot."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from tenplexfs.core.dtypes import dtype_of
from tenplexfs.core.region import Region
from tenplexfs.errors import InvalidError, NotFoundError, PreconditionError
from tenplexfs.formats import npy
from tenplexfs.formats.manifest import ArrayRef, StoredSnapshot
from tenplexfs.storage.directory import OBJECTS, SEGMENTS, Directory
from tenplexfs.storage.files import FileTable
from tenplexfs.storage.sums import as_bytes, box_sums, byte_blocks, piece_boxes, zero_boxes
from tenplexfs.storage.writers import FileWriter, MapWriter, Writer

if TYPE_CHECKING:
    from tenplexfs.core.ptc import Shard

__all__ = ["Ingest", "Key", "Wanted", "lay_out"]

Key = tuple[int, str]
"""A rank and a canonical tensor path."""

_OBJECT_BYTES = 1 << 20
_WRITE_BYTES = 1 << 18
_SEGMENT_BYTES = 64 << 20
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Wanted:
    """A local array that is to be stored once, under each of its keys.

    Attributes:
        keys: At least one.
        shape: Local shape.
        dtype: Name of the element type.
    """

    keys: tuple[Key, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where an array goes; its sums are known when it is sealed."""

    ref: ArrayRef
    fresh: bool


class Ingest:
    """A snapshot that is being filled; a `Store` makes it.

    Until `seal` answers nothing of it is in the manifest, and leaving the ``with`` block drops it. `array`,
    `pwrite`, `put` and `sums` may be called by many threads at once, `reserve` too for different keys, the
    other methods by one.
    """

    def __init__(
        self,
        snapshot: StoredSnapshot,
        *,
        directory: Directory,
        files: FileTable,
        publish: Callable[[StoredSnapshot, frozenset[str]], None],
        check_room: Callable[[int, Iterable[str]], None],
    ) -> None:
        self._snapshot = snapshot
        self._directory = directory
        self._files = files
        self._publish = publish
        self._check_room = check_room
        self._slots: dict[Key, _Slot] = {}
        self._held: set[str] = set()
        self._fresh: list[str] = []
        self._maps: dict[str, mmap.mmap] = {}
        self._boxes: dict[int, tuple[Shard, tuple[Region, ...]]] = {}  # many arrays are cut alike
        self._lock = threading.Lock()
        self._open = True

    def __enter__(self) -> Ingest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()

    def reserve(self, wanted: Sequence[Wanted]) -> None:
        """Takes the room for ``wanted``, of any content: every element will be written, padding by `seal`.

        Cost: The file system zeroes pages that are fresh; no system call for each small array.

        Raises:
            NoRoomError: There is no room; the message has the numbers. Nothing was taken.
            InvalidError: A key is there already, or no array can be of that shape and type.
        """
        self._check_open()
        self._directory.check_open()
        self._check_new(key for one in wanted for key in one.keys)
        sizes, places = lay_out(wanted)
        self._check_room(sum(size for _, size in sizes), self._held)
        names = self._files.allocate(sizes, recycle=True)
        self._held.update(names)
        self._fresh += names
        for one, (file, offset) in zip(wanted, places, strict=True):
            header = npy.header(one.shape, one.dtype)
            nbytes = npy.file_size(one.shape, one.dtype) - len(header)
            ref = ArrayRef(names[file], offset, len(header), nbytes, one.shape, one.dtype, (), ())
            self._slots.update(dict.fromkeys(one.keys, _Slot(ref, fresh=True)))
            if sizes[file][0] == SEGMENTS:
                self._map(ref.file)[offset : offset + len(header)] = header
            else:
                self._write(ref.file, 0, memoryview(header))

    def share(self, keys: Key | Sequence[Key], ref: ArrayRef) -> None:
        """Takes an array of another snapshot of the store as it is: the same file, nothing is copied.

        Raises:
            StaleError: Its file was dropped.
            InvalidError: A key is there already.
        """
        self._check_open()
        several = cast("Sequence[Key]", (keys,) if isinstance(keys[0], int) else keys)
        self._check_new(several)
        if ref.file not in self._held:
            self._files.hold([ref.file])
            self._held.add(ref.file)
        self._slots.update(dict.fromkeys(several, _Slot(ref, fresh=False)))

    def array(self, key: Key) -> npt.NDArray[np.generic]:
        """Returns the local array under ``key``, to be written until the ingest is sealed, not after."""
        return self._array(self._writable(key))

    def pwrite(
        self, key: Key, offset_bytes: int, data: bytes | bytearray | memoryview | npt.NDArray[np.generic]
    ) -> None:
        """Writes contiguous ``data`` from byte ``offset_bytes`` of the local array under ``key`` on.

        Cost: One copy, into pages that need not be mapped first: for big arrays faster than `array`.

        Raises:
            InvalidError: It would pass the end of the array.
        """
        ref = self._writable(key)
        view = as_bytes(data) if isinstance(data, np.ndarray) else memoryview(data).cast("B")
        if not 0 <= offset_bytes <= ref.nbytes - len(view):
            raise InvalidError(
                f"rank {key[0]}, {key[1]}: {len(view)} bytes at byte {offset_bytes}: "
                f"the array has {ref.nbytes}"
            )
        begin = ref.offset + ref.header_bytes + offset_bytes
        if ref.file.startswith(SEGMENTS):
            self._map(ref.file)[begin : begin + len(view)] = view
        else:
            self._write(ref.file, begin, view)

    def writer(self, key: Key, within: npt.NDArray[np.generic], place: npt.NDArray[np.generic]) -> Writer:
        """Returns what writes over ``place``, a contiguous view of the array ``within`` as `put` has it.

        For one thread, which closes it before the ingest is sealed or dropped.
        """
        ref = self._writable(key)
        at = place.__array_interface__["data"][0] - within.__array_interface__["data"][0]
        begin = ref.offset + ref.header_bytes + at
        if ref.file.startswith(SEGMENTS) or place.nbytes < _WRITE_BYTES:
            mapped = memoryview(self._map(ref.file))
            return MapWriter(mapped[begin : begin + place.nbytes])
        fd = os.open(self._directory.path / ref.file, os.O_WRONLY | os.O_CLOEXEC)
        return FileWriter(fd, begin, place.nbytes)

    def put(
        self,
        key: Key,
        within: npt.NDArray[np.generic],
        place: npt.NDArray[np.generic],
        data: npt.NDArray[np.generic],
    ) -> None:
        """Writes ``data``, of the same type and any strides, over ``place``, a view of ``within``.

        Args:
            key: Of the array.
            within: The array as `array` returns it, or raveled.
            place: As many elements as ``data``, which take them in C order.
            data: What is written.

        Cost: One copy. What is big and contiguous does not touch the map: a page fault for each fresh page,
        and zeroing it, would cost more than the copy.
        """
        if place.nbytes < _WRITE_BYTES or not place.flags.c_contiguous:
            place[...] = data.reshape(place.shape)
            return
        at = place.__array_interface__["data"][0] - within.__array_interface__["data"][0]
        for block in byte_blocks(data):
            self.pwrite(key, at, block)
            at += len(block)

    def sums(self, key: Key, shard: Shard) -> tuple[int, ...]:
        """Returns the sums of the pieces of an array that is written, as `seal` takes them."""
        return self._sums(self._writable(key), piece_boxes(shard))

    def seal(
        self, pieces: Mapping[Key, Shard], *, sums: Mapping[Key, tuple[int, ...]] | None = None
    ) -> StoredSnapshot:
        """Zeroes padding, sums up the pieces, makes the files read-only, and writes the manifest, as staged.

        Args:
            pieces: The shard under each key. Keys that share an array need one entry between them; an
                array of another snapshot needs none if it is cut in pieces as before.
            sums: Sums of pieces that are known, and not made again.

        Cost: Reads every new array once.

        Raises:
            InvalidError: A shard is missing or does not fit its array.
            ExistsError: The store has the snapshot.
            NoRoomError: No room for the manifest. The ingest is as before.
        """
        self._check_open()
        self._directory.check_open()
        known = sums or {}
        done: dict[int, ArrayRef] = {}
        shards = {id(slot): (key, pieces[key]) for key, slot in self._slots.items() if key in pieces}
        given = {id(slot): known[key] for key, slot in self._slots.items() if key in known}
        for key, slot in self._slots.items():
            if id(slot) not in done:
                done[id(slot)] = self._sealed(key, slot, shards.get(id(slot)), given.get(id(slot)))
        arrays = {key: done[id(slot)] for key, slot in self._slots.items()}
        for name in self._fresh:
            (self._directory.path / name).chmod(0o400)
            if not self._directory.in_memory:
                self._directory.sync(name)
        if self._fresh and not self._directory.in_memory:
            self._directory.sync(OBJECTS)
            self._directory.sync(SEGMENTS)
        stored = replace(self._snapshot, arrays=arrays)
        self._publish(stored, frozenset(self._held))
        self._open = False
        self._maps.clear()
        return stored

    def drop(self) -> None:
        """Gives back everything, unless it is sealed."""
        if self._open:
            self._open = False
            self._maps.clear()
            self._files.let_go(self._held)

    def _sealed(
        self, key: Key, slot: _Slot, given: tuple[Key, Shard] | None, sums: tuple[int, ...] | None
    ) -> ArrayRef:
        ref = slot.ref
        if given is None:
            if slot.fresh:
                raise InvalidError(f"rank {key[0]}, {key[1]}: no shard says what the array holds")
            return ref
        (rank, path), shard = given
        if shard.local_shape != ref.shape:
            raise InvalidError(
                f"rank {rank}, {path}: the shard is {shard.local_shape}, the array {ref.shape}"
            )
        boxes = self._boxes_of(shard)
        if not slot.fresh and boxes == ref.boxes:
            return ref
        if slot.fresh and shard.padding:
            zero_boxes(self._array(ref), shard.padding)
        if sums is None:
            sums = self._sums(ref, boxes)
        if len(sums) != len(boxes):
            raise InvalidError(f"rank {rank}, {path}: {len(sums)} sums for {len(boxes)} pieces")
        return ArrayRef(ref.file, ref.offset, ref.header_bytes, ref.nbytes, ref.shape, ref.dtype, sums, boxes)

    def _boxes_of(self, shard: Shard) -> tuple[Region, ...]:
        known = self._boxes.get(id(shard))
        if known is None:
            known = self._boxes[id(shard)] = (shard, piece_boxes(shard))
        return known[1]

    def _array(self, ref: ArrayRef) -> npt.NDArray[np.generic]:
        begin = ref.offset + ref.header_bytes
        return np.ndarray(ref.shape, dtype_of(ref.dtype), buffer=self._map(ref.file), offset=begin)

    def _sums(self, ref: ArrayRef, boxes: tuple[Region, ...]) -> tuple[int, ...]:
        mapped = self._maps.get(ref.file) or self._files.map(ref.file)
        begin = ref.offset + ref.header_bytes
        return box_sums(np.ndarray(ref.shape, dtype_of(ref.dtype), buffer=mapped, offset=begin), boxes)

    def _check_open(self) -> None:
        if not self._open:
            raise PreconditionError(
                f"job {self._snapshot.job}, {self._snapshot.id}: sealed or dropped already"
            )

    def _check_new(self, keys: Iterable[Key]) -> None:
        seen: set[Key] = set()
        for key in keys:
            if key in self._slots or key in seen:
                raise InvalidError(f"rank {key[0]}, {key[1]}: is there already")
            seen.add(key)

    def _writable(self, key: Key) -> ArrayRef:
        self._check_open()
        slot = self._slots.get(key)
        if slot is None or not slot.fresh:
            raise NotFoundError(f"rank {key[0]}, {key[1]}: no room was reserved for it")
        return slot.ref

    def _map(self, name: str) -> mmap.mmap:
        mapped = self._maps.get(name)
        if mapped is None:
            with self._lock:
                mapped = self._maps.get(name)
                if mapped is None:
                    self._maps[name] = mapped = self._files.map_writable(name)
        return mapped

    def _write(self, name: str, offset: int, data: memoryview) -> None:
        fd = os.open(self._directory.path / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], offset + done)
        finally:
            os.close(fd)


def lay_out(wanted: Sequence[Wanted]) -> tuple[list[tuple[str, int]], list[tuple[int, int]]]:
    """Returns the (kind, size) of the files, and for each wanted array its file and offset."""
    sizes: list[tuple[str, int]] = []
    places: list[tuple[int, int]] = []
    segment, end = -1, _SEGMENT_BYTES
    for one in wanted:
        size = npy.file_size(one.shape, one.dtype)
        if size - npy.header_size(one.shape, one.dtype) >= _OBJECT_BYTES:
            places.append((len(sizes), 0))
            sizes.append((OBJECTS, size))
            continue
        if end + size > _SEGMENT_BYTES:
            segment, end = len(sizes), 0
            sizes.append((SEGMENTS, 0))
        places.append((segment, end))
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
        sizes[segment] = (SEGMENTS, end)
    return sizes, places
