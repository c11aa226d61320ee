"""The data files of a store: allocated whole before use, counted, mapped, unlinked when nothing names them.

A file is used again, or truncated, only when the kernel says that nobody has it open or mapped: what is
mapped keeps its bytes for as long as it is mapped. What can be used again is *spare*: memory that is there
already, under a new name, for whatever comes next, of any job and generation. It counts as free, and is freed
when there is no room, or when nothing has come for a while.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from tenplexfs.errors import CorruptError, NoRoomError, StaleError
from tenplexfs.storage.directory import OBJECTS, SEGMENTS
from tenplexfs.storage.holders import is_alone
from tenplexfs.storage.spares import Spare, Spares, pages

__all__ = ["FileTable", "Pressure"]


class Pressure(Protocol):
    """What can be done when there is no room. Called in the thread that needs it, holding no lock."""

    def relieve(self) -> bool:
        """Frees something that is not needed any more, and returns whether there was anything."""
        ...

    def holders(self) -> Sequence[str]:
        """Returns who holds what could be freed otherwise: process ids, with names."""
        ...


class FileTable:
    """Which files there are, by name relative to the store, and how often each is named. Thread-safe.

    Args:
        root: Directory of the store.
        limit_bytes: What the files may take together, in whole pages.
        new_id: Gives a name that was never given before.
        clock: Seconds that never go back.

    Attributes:
        pressure: Asked when there is no room; None is as if it could do nothing.
    """

    def __init__(
        self,
        root: Path,
        *,
        limit_bytes: int,
        new_id: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pressure: Pressure | None = None
        self._root = root
        self._limit_bytes = limit_bytes
        self._new_id = new_id
        self._clock = clock
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}
        self._names: Counter[str] = Counter()
        self._maps: weakref.WeakValueDictionary[str, mmap.mmap] = weakref.WeakValueDictionary()
        self._writers: dict[str, list[weakref.ref[mmap.mmap]]] = {}
        self._dying_bytes = 0
        self._unlinked: list[tuple[int, list[weakref.ref[mmap.mmap]]]] = []
        self._lingering: list[tuple[int, int]] = []  # unlinked, and held by other processes: size, descriptor
        self._spares = Spares()
        self._used_again: set[str] = set()

    def adopt(self, wanted: Mapping[str, int]) -> None:
        """Takes over the files of an earlier owner: ``wanted`` says which, and the least size of each.

        All others are what a crash left behind, and are deleted.

        Raises:
            CorruptError: One is missing or too short. Nothing was deleted.
        """
        present = {
            f"{kind}/{entry.name}": entry.stat(follow_symlinks=False).st_size
            for kind in (OBJECTS, SEGMENTS)
            for entry in os.scandir(self._root / kind)
        }
        for name, size in wanted.items():
            if present.get(name, -1) < size:
                found = f"has {present[name]} bytes" if name in present else "is missing"
                raise CorruptError(f"store {self._root}: {name} {found}, the manifest needs {size}")
        for name in present.keys() - wanted.keys():
            (self._root / name).unlink()
        self._bytes = {name: pages(present[name]) for name in wanted}

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, with those that are unlinked and still mapped here."""
        with self._lock:
            return self._used()

    @property
    def spare_bytes(self) -> int:
        """Bytes of files that are kept to be used again, and given back for whatever needs the room."""
        with self._lock:
            return self._spares.nbytes

    def allocate(self, wanted: Sequence[tuple[str, int]], *, recycle: bool = False) -> list[str]:
        """Makes a file for each (kind, size): all or none. They are zeros, and named once.

        Args:
            wanted: Of each, "objects" or "segments", and its bytes.
            recycle: Files may hold what spare ones held, and cost no new pages.

        Raises:
            NoRoomError: They would pass the limit, or the file system is full.
        """
        needed = sum(pages(size) for _, size in wanted)
        self._make_room(needed)
        with self._lock:
            used = self._used()
            if used + needed > self._limit_bytes:
                raise self._no_room(needed, used, "the limit")
            spares = self._spares.take(wanted) if recycle else {}
            names = [
                spares[i].name if i in spares else self._new_name(kind) for i, (kind, _) in enumerate(wanted)
            ]
            too_many = self._spares.pop_to(self._limit_bytes - used - needed)
            for name, (_, size) in zip(names, wanted, strict=True):
                self._bytes[name] = pages(size)
            self._names.update(names)
            self._used_again.update(spare.name for spare in spares.values())
        self._unlink(too_many)
        try:
            for i, (name, (_, size)) in enumerate(zip(names, wanted, strict=True)):
                if i not in spares:
                    self._when_room(partial(_make, self._root / name, size))
                elif spares[i].size != size:
                    self._when_room(partial(self._resize, name, spares[i].size, size))
        except OSError as error:
            self.let_go(names)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise self._no_room(needed, used, "its file system") from error
        return names

    def _new_name(self, kind: str) -> str:
        return f"{kind}/{self._new_id()}.{'npy' if kind == OBJECTS else 'seg'}"

    def _make_room(self, needed_bytes: int) -> None:
        """Has things freed until there is room.

        Raises:
            NoRoomError: There is none, and nothing is left that could be freed.
        """
        while self.used_bytes + needed_bytes > self._limit_bytes:
            if needed_bytes > self._limit_bytes or self.pressure is None or not self.pressure.relieve():
                holders = self.pressure.holders() if self.pressure is not None else ()
                raise self._no_room(needed_bytes, self.used_bytes, "the limit", holders)

    def is_used_again(self, name: str) -> bool:
        """Returns whether a file may hold what an earlier use of it left."""
        return name in self._used_again

    def bytes_of(self, names: Iterable[str]) -> int:
        """Returns what the files ``names`` take together, each once."""
        with self._lock:
            return sum(self._bytes.get(name, 0) for name in set(names))

    def lingering(self) -> set[int]:
        """Returns the inodes of files that are dropped, and that other processes still have."""
        with self._lock:
            self._used()
            return {os.fstat(fd).st_ino for _, fd in self._lingering}

    def free_spares(self, idle_s: float = 0.0) -> bool:
        """Unlinks what nothing has come for in ``idle_s``; returns whether there was anything."""
        until_s = self._clock() - idle_s
        with self._lock:
            idle = self._spares.pop_since(until_s)
        self._unlink(idle)
        return bool(idle)

    def _when_room(self, make: Callable[[], None]) -> None:
        """Makes a file, without any that are spare where the file system is full."""
        try:
            make()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self.free_spares():
                raise
            make()

    def _resize(self, name: str, before: int, size: int) -> None:
        """Cuts or grows a file that was spare, or makes another one if somebody has found it meanwhile."""
        path = self._root / name
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if not is_alone(fd):
                path.unlink()
                _make(path, size)
            elif size < before:
                os.ftruncate(fd, size)
            else:
                os.posix_fallocate(fd, 0, size)
        finally:
            os.close(fd)

    def _unlink(self, spares: Iterable[Spare]) -> None:
        for spare in spares:
            (self._root / spare.name).unlink(missing_ok=True)

    def hold(self, names: Iterable[str]) -> None:
        """Names each of ``names`` once more.

        Raises:
            StaleError: One is gone; none was named.
        """
        names = list(names)
        with self._lock:
            for name in names:
                if name not in self._bytes:
                    raise StaleError(f"store {self._root}: {name} was dropped")
            self._names.update(names)

    def let_go(self, names: Iterable[str], *, recycle: bool = False) -> None:
        """Takes back one naming of each of ``names``; what nothing names any more is unlinked.

        Args:
            names: Files.
            recycle: What nobody has open or mapped is kept as it is, for `allocate` to use again.
        """
        dead: dict[str, int] = {}
        with self._lock:
            for name in names:
                self._names[name] -= 1
                if self._names[name] <= 0:
                    del self._names[name]
                    dead[name] = self._bytes.pop(name)
                    self._used_again.discard(name)
            self._dying_bytes += sum(dead.values())
        ends = {name: self._end(name, recycle=recycle) for name in dead}  # freeing gigabytes takes its time
        with self._lock:
            self._dying_bytes -= sum(dead.values())
            for name, size in dead.items():
                maps = self._writers.pop(name, [])
                if (reader := self._maps.pop(name, None)) is not None:
                    maps.append(weakref.ref(reader))
                spare, fd = ends[name]
                if spare is not None:
                    self._spares.add(spare)
                elif fd is not None:
                    self._lingering.append((size, fd))
                else:
                    self._unlinked.append((size, maps))

    def _end(self, name: str, *, recycle: bool) -> tuple[Spare | None, int | None]:
        """Unlinks a file, unless it can be used again.

        Returns:
            What can, under a name that nobody knows, and a descriptor of what another process still has.
        """
        path = f"{self._root}/{name}"
        with self._lock:
            own = name in self._maps or any(ref() is not None for ref in self._writers.get(name, ()))
        recycle = recycle and not own
        spare = self._new_name(name.partition("/")[0]) if recycle else name
        try:
            if recycle:
                os.rename(path, path := f"{self._root}/{spare}")  # noqa: PTH104
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None, None
        try:
            alone = not own and is_alone(fd)
            if alone and recycle:
                os.fchmod(fd, 0o600)
                return Spare(spare, os.fstat(fd).st_size, self._clock()), None
            with suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108
            if not alone and not own:
                fd, kept = -1, fd
                return None, kept
        finally:
            if fd >= 0:
                os.close(fd)
        return None, None

    def open(self, name: str) -> int:
        """Returns a descriptor of a file that is held, for reading."""
        return os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC)

    def map(self, name: str) -> mmap.mmap:
        """Returns the read-only map of a file that is held, one and the same while anything refers to it.

        Cost: One descriptor, for as long as the map lives.
        """
        with self._lock:
            mapped = self._maps.get(name)
            if mapped is None:
                self._maps[name] = mapped = self._map(name, os.O_RDONLY, mmap.ACCESS_READ)
            return mapped

    def map_writable(self, name: str) -> mmap.mmap:
        """Returns a new shared map of a file that is held and not yet sealed."""
        with self._lock:
            mapped = self._map(name, os.O_RDWR, mmap.ACCESS_WRITE)
            self._writers.setdefault(name, []).append(weakref.ref(mapped))
            return mapped

    def _map(self, name: str, flags: int, access: int) -> mmap.mmap:
        fd = os.open(self._root / name, flags | os.O_CLOEXEC)
        try:
            return mmap.mmap(fd, 0, access=access)
        finally:
            os.close(fd)

    def _used(self) -> int:
        self._unlinked = [
            (size, maps) for size, maps in self._unlinked if any(ref() is not None for ref in maps)
        ]
        held, self._lingering = self._lingering, []
        for size, fd in held:
            if is_alone(fd):
                os.close(fd)
            else:
                self._lingering.append((size, fd))
        gone = sum(size for size, _ in self._unlinked) + sum(size for size, _ in self._lingering)
        return sum(self._bytes.values()) + self._dying_bytes + gone

    def _no_room(self, needed: int, used: int, what: str, holders: Sequence[str] = ()) -> NoRoomError:
        held = f"; what is past is held by process {', '.join(holders)}" if holders else ""
        return NoRoomError(
            f"store {self._root}: {needed} bytes needed, {used} used, limit {self._limit_bytes}: "
            f"{what} does not allow it{held}; drop snapshots or raise the limit",
            **({"holders": list(holders)} if holders else {}),
            needed_bytes=needed,
            used_bytes=used,
            limit_bytes=self._limit_bytes,
        )


def _make(path: Path, size: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)
