"""The data files of a store: allocated whole before use, counted, mapped, unlinked when nothing names them.

A file is never truncated or punched, and used again only when the kernel says that nobody has it open or
mapped: what is mapped keeps its bytes for as long as it is mapped.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tenplexfs.errors import CorruptError, NoRoomError, StaleError
from tenplexfs.storage.directory import OBJECTS, SEGMENTS
from tenplexfs.storage.holders import is_alone

__all__ = ["FileTable", "Pressure"]

_PAGE = mmap.PAGESIZE


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

    Attributes:
        pressure: Asked when there is no room; None is as if it could do nothing.
    """

    def __init__(self, root: Path, *, limit_bytes: int, new_id: Callable[[], str]) -> None:
        self.pressure: Pressure | None = None
        self._root = root
        self._limit_bytes = limit_bytes
        self._new_id = new_id
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}
        self._names: Counter[str] = Counter()
        self._maps: weakref.WeakValueDictionary[str, mmap.mmap] = weakref.WeakValueDictionary()
        self._writers: dict[str, list[weakref.ref[mmap.mmap]]] = {}
        self._dying_bytes = 0
        self._unlinked: list[tuple[int, list[weakref.ref[mmap.mmap]]]] = []
        self._lingering: list[tuple[int, int]] = []  # unlinked, and held by other processes: size, descriptor
        self._spares: dict[tuple[str, int], list[str]] = {}  # nobody's: kind and exact size -> names
        self._spare_bytes = 0

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
        self._bytes = {name: _pages(present[name]) for name in wanted}

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, with those that are unlinked and still mapped here."""
        with self._lock:
            return self._used()

    def allocate(self, wanted: Sequence[tuple[str, int]], *, recycle: bool = False) -> list[str]:
        """Makes a file for each (kind, size): all or none. They are zeros, and named once.

        Args:
            wanted: Of each, "objects" or "segments", and its bytes.
            recycle: Files may hold what spare ones held, and cost no new pages.

        Raises:
            NoRoomError: They would pass the limit, or the file system is full.
        """
        needed = sum(_pages(size) for _, size in wanted)
        self._make_room(needed)
        with self._lock:
            used = self._used()
            if used + needed > self._limit_bytes:
                raise self._no_room(needed, used, "the limit")
            spares = self._take_spares(wanted) if recycle else {}
            names = [spares.get(i) or self._new_name(kind) for i, (kind, _) in enumerate(wanted)]
            self._free_spares(used + needed + self._spare_bytes - self._limit_bytes)
            for name, (_, size) in zip(names, wanted, strict=True):
                self._bytes[name] = _pages(size)
            self._names.update(names)
        try:
            for i, (name, (_, size)) in enumerate(zip(names, wanted, strict=True)):
                if i in spares:
                    os.chmod(f"{self._root}/{name}", 0o600)  # noqa: PTH101 - a tenth of the time
                else:
                    self._make(self._root / name, size)
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

    def bytes_of(self, names: Iterable[str]) -> int:
        """Returns what the files ``names`` take together, each once."""
        with self._lock:
            return sum(self._bytes.get(name, 0) for name in set(names))

    def lingering(self) -> set[int]:
        """Returns the inodes of files that are dropped, and that other processes still have."""
        with self._lock:
            self._used()
            return {os.fstat(fd).st_ino for _, fd in self._lingering}

    def free_spares(self) -> None:
        """Unlinks the files that are kept for the next save."""
        with self._lock:
            self._free_spares(self._spare_bytes)

    def _make(self, path: Path, size: int) -> None:
        try:
            _make(path, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._spare_bytes:
                raise
            path.unlink(missing_ok=True)
            self.free_spares()
            _make(path, size)

    def _take_spares(self, wanted: Sequence[tuple[str, int]]) -> dict[int, str]:
        """Returns which of ``wanted`` get which spare file."""
        taken: dict[int, str] = {}
        for i, (kind, size) in enumerate(wanted):
            spares = self._spares.get((kind, size))
            if spares:
                taken[i] = spares.pop()
                self._spare_bytes -= _pages(size)
        return taken

    def _free_spares(self, at_least_bytes: int) -> None:
        """Unlinks spare files of so many bytes, the biggest first."""
        for key in sorted(self._spares, key=lambda key: -key[1]):
            names = self._spares[key]
            while names and at_least_bytes > 0:
                (self._root / names.pop()).unlink(missing_ok=True)
                self._spare_bytes -= _pages(key[1])
                at_least_bytes -= _pages(key[1])
            if not names:
                del self._spares[key]

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
            recycle: What nobody has open or mapped is kept, for `allocate` to use again.
        """
        dead: dict[str, int] = {}
        with self._lock:
            for name in names:
                self._names[name] -= 1
                if self._names[name] <= 0:
                    del self._names[name]
                    dead[name] = self._bytes.pop(name)
            self._dying_bytes += sum(dead.values())
        ends = {name: self._end(name, recycle=recycle) for name in dead}  # freeing gigabytes takes its time
        with self._lock:
            self._dying_bytes -= sum(dead.values())
            for name, size in dead.items():
                maps = self._writers.pop(name, [])
                if (reader := self._maps.pop(name, None)) is not None:
                    maps.append(weakref.ref(reader))
                spare_bytes, fd = ends[name]
                if spare_bytes is not None:
                    kind = name.partition("/")[0]
                    self._spares.setdefault((kind, spare_bytes), []).append(name)
                    self._spare_bytes += size
                elif fd is not None:
                    self._lingering.append((size, fd))
                else:
                    self._unlinked.append((size, maps))

    def _end(self, name: str, *, recycle: bool) -> tuple[int | None, int | None]:
        """Unlinks a file, unless it can be used again.

        Returns:
            The size of what can, and a descriptor of what another process still has.
        """
        path = f"{self._root}/{name}"
        with self._lock:
            own = name in self._maps or any(ref() is not None for ref in self._writers.get(name, ()))
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None, None
        try:
            alone = not own and is_alone(fd)
            if alone and recycle:
                return os.fstat(fd).st_size, None
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
    finally:
        os.close(fd)


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
