"""The way into a store for training processes, which write into its files themselves, headers and all.

A file is theirs from `hand_out` to `settle`, which proves that nobody can write it any more. Only then it is
looked at: the headers must be those that were arranged, and what the sums say is what stays.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import xxhash

from tenplexfs.core.dtypes import dtype_of
from tenplexfs.errors import ExistsError, InvalidError, PreconditionError
from tenplexfs.formats.manifest import ArrayRef, StoredSnapshot
from tenplexfs.storage.arrangement import Arrangement, Slot
from tenplexfs.storage.directory import OBJECTS, SEGMENTS, Directory
from tenplexfs.storage.files import FileTable
from tenplexfs.storage.holders import has_writer
from tenplexfs.storage.ingest import Key
from tenplexfs.storage.sums import box_sums, zero_boxes

__all__ = ["RankFiles", "SaveIngest"]

_BLOCK_BYTES = 1 << 18  # stays in the cache of its core
_BLANKED = 1024  # at a time, for other threads wait for it


@dataclass(eq=False)
class RankFiles:
    """The files of one rank of a save.

    Attributes:
        arrangement: What is in them.
        names: Of the files, relative to the store.
        handed: Numbers of those that a client was given.
        given: Slot -> the sum of its array, where the client made it of what it wrote; not of several pieces.
        sums: Slot -> the sums of its pieces, once they are known.
        instead: Slot -> the rank and slot whose equal array is kept for it.
    """

    arrangement: Arrangement
    names: list[str]
    handed: set[int] = field(default_factory=set)
    given: dict[int, int] = field(default_factory=dict)
    sums: dict[int, tuple[int, ...]] = field(default_factory=dict)
    instead: dict[int, tuple[RankFiles, int]] = field(default_factory=dict)


class SaveIngest:
    """A snapshot that is being saved; a `Store` makes it.

    Until `seal` answers nothing of it is in the manifest. `reserve`, `hand_out` and `settle` may be called by
    several threads, each for files of its own; the other methods by one.
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
        self._root = str(directory.path)
        self._files = files
        self._publish = publish
        self._check_room = check_room
        self._parts: list[RankFiles] = []
        self._held: set[str] = set()
        self._lock = threading.Lock()
        self._open = True

    def reserve(self, arrangement: Arrangement) -> RankFiles:
        """Takes the files of a rank, of any content: every byte that counts will be written.

        Raises:
            NoRoomError: There is no room; the message has the numbers. Nothing was taken.
            ExistsError: A rank of the same keys is there already.
        """
        self._check_open()
        self._directory.check_open()
        self._check_room(sum(size for _, size in arrangement.sizes), self._held)
        names = self._files.allocate(arrangement.sizes, recycle=True)
        made = RankFiles(arrangement, names)
        with self._lock:
            self._held.update(names)
            self._parts.append(made)
        return made

    def adopt(self, other: SaveIngest, part: RankFiles) -> None:
        """Takes the files of a rank from another save of this store, which has them no more.

        Raises:
            NoRoomError: There is no room in this one's job; the other one keeps them.
            PreconditionError: One of the two was sealed or dropped; the files are given back.
        """
        self._check_room(sum(size for _, size in part.arrangement.sizes), self._held)
        with other._lock:
            other._check_open()
            other._held.difference_update(part.names)
            other._parts.remove(part)
        with self._lock:
            self._held.update(part.names)
            self._parts.append(part)
            is_open = self._open
        if not is_open:
            for name in part.names:
                self._forget(name)
            self._check_open()

    def hand_out(self, part: RankFiles, numbers: Sequence[int]) -> list[int]:
        """Opens files for whoever fills them, and closes the descriptors.

        Headers that an earlier use left are blanked: who does not write them has not written the arrays.

        Raises:
            PreconditionError: It was sealed or dropped, or one is settled: its bytes stay as they are.
        """
        self._check_open()
        for number in numbers if part.sums else ():
            if not part.sums.keys().isdisjoint(part.arrangement.in_file[number]):
                raise PreconditionError(f"{self._what}: file {number} of a rank is sealed already")
        fds: list[int] = []
        try:
            for number in numbers:
                fds.append(self._opened(part.names[number], os.O_RDWR))
                if number not in part.handed and self._files.is_used_again(part.names[number]):
                    slots = part.arrangement.slots
                    _blank(fds[-1], [slots[i].offset for i in part.arrangement.in_file[number]])
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        part.handed.update(numbers)
        return fds

    def settle(self, part: RankFiles, numbers: Iterable[int]) -> list[int]:
        """Takes files back: makes them unwritable, checks headers, zeroes padding, sums up what has no sum.

        Returns:
            Those that somebody can still write into, of which no more was done.

        Raises:
            InvalidError: A header is not what it must be: it was not written, or something else was.

        Cost: Reads every byte once of which the client gives no sum; about 2 us an array.
        """
        self._check_open()
        late = []
        block = bytearray(_BLOCK_BYTES)
        for number in numbers:
            fd = self._opened(part.names[number], os.O_RDONLY)
            try:
                os.fchmod(fd, 0o400)
                if has_writer(fd):
                    late.append(number)
                else:
                    self._finish(part, number, fd, block)
            finally:
                os.close(fd)
        return late

    def copy_out(self, part: RankFiles, number: int) -> None:
        """Puts what a file holds into one that nobody else has ever had.

        Raises:
            NoRoomError: There is no room for it twice.
        """
        self._check_open()
        old = part.names[number]
        (name,) = self._files.allocate([part.arrangement.sizes[number]])
        with self._lock:
            self._held.add(name)
            is_open = self._open
        if not is_open:
            self._forget(name)
            self._check_open()
        with Path(self._path(old)).open("rb") as source, Path(self._path(name)).open("r+b") as target:
            while os.sendfile(target.fileno(), source.fileno(), None, 1 << 30):
                pass
        part.names[number] = name
        for i in part.arrangement.in_file[number]:  # somebody may have written since
            part.given.pop(i, None)
        self._forget(old)

    def _finish(self, part: RankFiles, number: int, fd: int, block: bytearray) -> None:
        slots = [(i, part.arrangement.slots[i]) for i in part.arrangement.in_file[number]]
        if any(slot.padding for _, slot in slots):
            _zero_padding(self._path(part.names[number]), [slot for _, slot in slots])
        if len(slots) == 1 and slots[0][1].is_whole:
            ((i, slot),) = slots
            given = part.given.get(i)
            _check_header(slot, os.pread(fd, len(slot.header), 0))
            part.sums[i] = (_file_sum(fd, slot, block) if given is None else given,)
        else:
            part.sums.update(_map_sums(fd, slots, part.given))

    def _opened(self, name: str, flags: int) -> int:
        """Opens a file that is held: once it is dropped it may be another save's."""
        with self._lock:
            self._check_open()
            return os.open(self._path(name), flags | os.O_CLOEXEC)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def join(self, groups: Iterable[Sequence[tuple[RankFiles, int]]]) -> None:
        """Keeps the first of each group of equal arrays for all; files without any are given back.

        Args:
            groups: Rank and slot of each.

        Raises:
            InvalidError: They differ in shape or type.
        """
        for first, *others in groups:
            kept, at = _kept(*first)
            slot = kept.arrangement.slots[at]
            for each in others:
                part, i = _kept(*each)
                other = part.arrangement.slots[i]
                if (other.shape, other.dtype) != (slot.shape, slot.dtype):
                    rank, path = other.keys[0]
                    raise InvalidError(
                        f"rank {rank}, {path}: {other.shape}, rank {slot.keys[0][0]} has {slot.shape}"
                    )
                if (part, i) != (kept, at):
                    part.instead[i] = kept, at
        used = {
            part.names[file]
            for part in self._parts
            for file, numbers in enumerate(part.arrangement.in_file)
            if not all(i in part.instead for i in numbers)
        }
        for name in self._held - used:
            self._forget(name)

    def set_values(self, values: bytes, settings_json: bytes, fence: int) -> None:
        """Says what else goes with it; of the settings a save may say how far data is."""
        self._snapshot = replace(self._snapshot, values=values, settings_json=settings_json, fence=fence)

    def seal(self) -> StoredSnapshot:
        """Writes the snapshot into the manifest as staged. Every file is settled.

        Raises:
            ExistsError: The store has the snapshot, or two ranks have the same key.
            NoRoomError: No room for the manifest.
        """
        self._check_open()
        self._directory.check_open()
        refs = [
            {
                i: ArrayRef(
                    part.names[slot.file],
                    slot.offset,
                    len(slot.header),
                    slot.nbytes,
                    slot.shape,
                    slot.dtype,
                    part.sums[i],
                    slot.boxes,
                )
                for i, slot in enumerate(part.arrangement.slots)
                if i not in part.instead
            }
            for part in self._parts
        ]
        where = {id(part): number for number, part in enumerate(self._parts)}
        arrays: dict[Key, ArrayRef] = {}
        count = 0
        for part, own in zip(self._parts, refs, strict=True):
            for i, slot in enumerate(part.arrangement.slots):
                kept, at = _kept(part, i)
                ref = own[i] if kept is part and at == i else refs[where[id(kept)]][at]
                for key in slot.keys:
                    arrays[key] = ref
                count += len(slot.keys)
        if len(arrays) != count:
            raise ExistsError(f"{self._what}: a rank is there twice")
        if self._held and not self._directory.in_memory:
            for name in (*self._held, OBJECTS, SEGMENTS):
                self._directory.sync(name)
        stored = replace(self._snapshot, arrays=arrays)
        self._publish(stored, frozenset(self._held))
        self._open = False
        return stored

    def drop(self) -> None:
        """Gives back everything, unless it is sealed; what no client has is kept for the next save."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            held, self._held = self._held, set()
        self._files.let_go(held, recycle=True)

    def _forget(self, name: str) -> None:
        with self._lock:
            if name not in self._held:  # given back already
                return
            self._held.discard(name)
        self._files.let_go([name], recycle=True)

    @property
    def _what(self) -> str:
        return f"job {self._snapshot.job}, {self._snapshot.id}"

    def _check_open(self) -> None:
        if not self._open:
            raise PreconditionError(f"{self._what}: sealed or dropped already")


def _kept(part: RankFiles, number: int) -> tuple[RankFiles, int]:
    """Returns the rank and slot whose array is kept for a slot."""
    while (other := part.instead.get(number)) is not None:
        part, number = other
    return part, number


def _blank(fd: int, offsets: Sequence[int]) -> None:
    """Makes what begins at ``offsets`` no headers."""
    if len(offsets) == 1:
        os.pwrite(fd, b"\0", offsets[0])
        return
    with mmap.mmap(fd, 0) as mapped:
        array = np.frombuffer(mapped, np.uint8)
        for at in range(0, len(offsets), _BLANKED):
            array[offsets[at : at + _BLANKED]] = 0
        del array


def _zero_padding(path: str, slots: Sequence[Slot]) -> None:
    """Zeroes the padding of arrays in a file that nobody else can write into."""
    file = Path(path)
    file.chmod(0o600)
    try:
        with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
            for slot in slots:
                if slot.padding:
                    _zero(mapped, slot)
    finally:
        file.chmod(0o400)


def _zero(mapped: mmap.mmap, slot: Slot) -> None:
    begin = slot.offset + len(slot.header)
    zero_boxes(np.ndarray(slot.shape, dtype_of(slot.dtype), buffer=mapped, offset=begin), slot.padding)


def _file_sum(fd: int, slot: Slot, block: bytearray) -> int:
    """Returns the sum of an array that is one piece, and has the file for itself.

    Cost: Read into one buffer, again and again, which takes half the time of mapping the file.
    """
    state = xxhash.xxh3_64()
    at, end = len(slot.header), len(slot.header) + slot.nbytes
    with memoryview(block) as view:
        while at < end:
            got = os.preadv(fd, [view[: end - at]], at)
            if not got:
                raise InvalidError(f"save: {slot.keys[0][1]}: its file ends at byte {at} of {end}")
            state.update(view[:got])
            at += got
    return state.intdigest()


def _map_sums(
    fd: int, slots: Sequence[tuple[int, Slot]], given: Mapping[int, int]
) -> dict[int, tuple[int, ...]]:
    """Returns the sums of arrays that share a file, or that are more than one piece."""
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
        return {i: _slot_sums(mapped, view, slot, given.get(i)) for i, slot in slots}


def _slot_sums(mapped: mmap.mmap, view: memoryview, slot: Slot, given: int | None) -> tuple[int, ...]:
    begin = slot.offset + len(slot.header)
    _check_header(slot, mapped[slot.offset : begin])
    if not slot.is_whole:
        return box_sums(np.ndarray(slot.shape, dtype_of(slot.dtype), buffer=mapped, offset=begin), slot.boxes)
    return (xxhash.xxh3_64_intdigest(view[begin : begin + slot.nbytes]) if given is None else given,)


def _check_header(slot: Slot, found: bytes) -> None:
    if found != slot.header:
        rank, path = slot.keys[0]
        raise InvalidError(f"save: rank {rank}, {path}: never came: no header of it is in its file")
