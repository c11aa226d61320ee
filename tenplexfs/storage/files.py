"""The data files of a store: allocated whole before use, counted, mapped, unlinked when nothing names them.

A file is never truncated, punched or used again: what is mapped keeps its bytes for as long as it is mapped.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tenplexfs.errors import CorruptError, NoRoomError, StaleError
from tenplexfs.storage.directory import OBJECTS, SEGMENTS

__all__ = ["FileTable"]

_PAGE = mmap.PAGESIZE


class FileTable:
    """Which files there are, by name relative to the store, and how often each is named. Thread-safe.

    Args:
        root: Directory of the store.
        limit_bytes: What the files may take together, in whole pages.
        new_id: Gives a name that was never given before.
    """

    def __init__(self, root: Path, *, limit_bytes: int, new_id: Callable[[], str]) -> None:
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

    def allocate(self, wanted: Sequence[tuple[str, int]]) -> list[str]:
        """Makes a file for each (kind, size): all or none. They are zeros, and named once.

        Raises:
            NoRoomError: They would pass the limit, or the file system is full.
        """
        suffix = {OBJECTS: "npy", SEGMENTS: "seg"}
        names = [f"{kind}/{self._new_id()}.{suffix[kind]}" for kind, _ in wanted]
        needed = sum(_pages(size) for _, size in wanted)
        with self._lock:
            used = self._used()
            if used + needed > self._limit_bytes:
                raise self._no_room(needed, used, "the limit")
            for name, (_, size) in zip(names, wanted, strict=True):
                self._bytes[name] = _pages(size)
            self._names.update(names)
        try:
            for name, (_, size) in zip(names, wanted, strict=True):
                _make(self._root / name, size)
        except OSError as error:
            self.let_go(names)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise self._no_room(needed, used, "its file system") from error
        return names

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

    def let_go(self, names: Iterable[str]) -> None:
        """Takes back one naming of each of ``names``; what nothing names any more is unlinked."""
        dead: dict[str, int] = {}
        with self._lock:
            for name in names:
                self._names[name] -= 1
                if self._names[name] <= 0:
                    del self._names[name]
                    dead[name] = self._bytes.pop(name)
            self._dying_bytes += sum(dead.values())
        for name in dead:  # without the lock: freeing gigabytes takes its time
            (self._root / name).unlink(missing_ok=True)
        with self._lock:
            self._dying_bytes -= sum(dead.values())
            for name, size in dead.items():
                maps = self._writers.pop(name, [])
                if (reader := self._maps.pop(name, None)) is not None:
                    maps.append(weakref.ref(reader))
                self._unlinked.append((size, maps))

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
        return sum(self._bytes.values()) + self._dying_bytes + sum(size for size, _ in self._unlinked)

    def _no_room(self, needed: int, used: int, what: str) -> NoRoomError:
        return NoRoomError(
            f"store {self._root}: {needed} bytes needed, {used} used, limit {self._limit_bytes}: "
            f"{what} does not allow it; drop snapshots or raise the limit",
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
