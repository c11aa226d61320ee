"""Where exported files go: a directory, or a place in an object store.

No file is ever seen by halves, and the last one, by which the others are found, comes when they are there.
Everything here blocks.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tenplexfs.errors import CorruptError, ExistsError, InvalidError, NoRoomError, TenplexError
from tenplexfs.formats.text import bytes_text
from tenplexfs.storage.places import Place

__all__ = ["Bucket", "Directory", "NewFile", "Target"]

_NEW = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class NewFile:
    """A file to write.

    Attributes:
        name: Without directories.
        size: Bytes of it.
        parts: Makes its bytes, again for each try.
    """

    name: str
    size: int
    parts: Callable[[], Iterator[bytes | memoryview]]


class Target(Protocol):
    """Takes files. For one thread."""

    def path(self, name: str) -> str:
        """Returns what a person calls the file ``name``."""
        ...

    def read(self, name: str) -> bytes | None:
        """Returns a whole file, or None where there is none."""
        ...

    def has(self, name: str) -> bool:
        """Returns whether there is such a file."""
        ...

    def write(self, files: Sequence[NewFile], gone: Sequence[str]) -> None:
        """Writes ``files``, the last one last, over what has their names; first removes ``gone``, in order.

        Raises:
            NoRoomError: They do not fit; nothing changed.
            TenplexError: They could not be written.
        """
        ...


class Directory:
    """A directory, made when something is written. Implements `Target`.

    Files are written aside, hidden, and renamed when all of them are on the disk. What a killed writer left
    aside is written over by the next one.
    """

    def __init__(self, path: Path) -> None:
        self._root = path

    def path(self, name: str) -> str:
        """Returns the path of the file ``name``."""
        return str(self._root / name)

    def read(self, name: str) -> bytes | None:
        """Returns a whole file, or None where there is none."""
        if not self.has(name):
            return None
        with self._telling(name):
            return (self._root / name).read_bytes()

    def has(self, name: str) -> bool:
        """Returns whether there is such a file."""
        return os.path.lexists(self._root / name)

    def write(self, files: Sequence[NewFile], gone: Sequence[str]) -> None:
        """Writes ``files`` aside, removes ``gone``, and gives the files their names."""
        with self._telling(""):
            self._root.mkdir(parents=True, exist_ok=True)
            room = os.statvfs(self._root)
        needed, free = sum(file.size for file in files), room.f_bavail * room.f_frsize
        if needed > free:
            raise NoRoomError(
                f"{self._root}: {bytes_text(needed)} needed, {bytes_text(free)} free",
                needed=needed,
                free=free,
            )
        *others, last = files
        with self._telling(last.name):
            lock = self._open_locked(last.name)  # for as long as any of them is written
        try:
            for file in others:
                with self._telling(file.name):
                    fd = os.open(self._aside(file.name), _NEW | os.O_TRUNC, 0o666)
                try:
                    self._fill(fd, file)
                finally:
                    os.close(fd)
            self._fill(lock, last)
            for name in gone:
                with self._telling(name):
                    (self._root / name).unlink(missing_ok=True)
            for file in files:
                with self._telling(file.name):
                    self._aside(file.name).rename(self._root / file.name)
            with self._telling(""):
                _sync(self._root)
        except BaseException:
            for file in files:
                with suppress(OSError):
                    self._aside(file.name).unlink()
            raise
        finally:
            os.close(lock)

    def _aside(self, name: str) -> Path:
        return self._root / f".{name}.partial"

    def _open_locked(self, name: str) -> int:
        """Returns the descriptor of an empty file that nobody else writes."""
        aside = self._aside(name)
        while True:
            fd = os.open(aside, _NEW, 0o666)
            try:
                with _where_locks_are():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Who had it before may have given it its name meanwhile.
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(fd), os.lstat(aside)):
                        os.ftruncate(fd, 0)
                        return fd
            except BlockingIOError:
                os.close(fd)
                raise ExistsError(f"{self._root / name}: somebody else is writing it") from None
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _fill(self, fd: int, file: NewFile) -> None:
        done = 0
        for part in file.parts():
            with self._telling(file.name):
                data = memoryview(part)
                while data:
                    count = os.write(fd, data)
                    data = data[count:]
                    done += count
        if done != file.size:
            raise CorruptError(f"{self._root / file.name}: {done} bytes came of {file.size}")
        with self._telling(file.name):
            os.fsync(fd)

    @contextmanager
    def _telling(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _refusal(self._root / name, error) from error


class Bucket:
    """A place in an object store. Implements `Target`: an object is there whole or not at all."""

    def __init__(self, url: str) -> None:
        self._place = Place(url)

    def path(self, name: str) -> str:
        """Returns the address of the object ``name``."""
        return f"{self._place.url}/{name}"

    def read(self, name: str) -> bytes | None:
        """Returns a whole object, or None where there is none."""
        return self._place.get(name) if self.has(name) else None

    def has(self, name: str) -> bool:
        """Returns whether there is such an object."""
        return self._place.size(name) is not None

    def write(self, files: Sequence[NewFile], gone: Sequence[str]) -> None:
        """Removes ``gone``, then writes ``files``."""
        for name in gone:
            self._place.remove(name)
        for file in files:
            self._place.put(file.name, file.parts, size=file.size)


def _refusal(path: Path, error: OSError) -> TenplexError:
    text = f"{path}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return NoRoomError(text)
    return InvalidError(text)


@contextmanager
def _where_locks_are() -> Iterator[None]:
    """Lets it pass that a file system knows no locks."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
