"""The directory of a store: whose it is, its lock, and the manifest that is replaced as a whole."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

from tenplexfs.errors import (
    CorruptError,
    ExistsError,
    InvalidError,
    NoRoomError,
    PreconditionError,
    UnavailableError,
)

__all__ = ["CLUSTER", "INDEXES", "OBJECTS", "REGISTRY", "SEGMENTS", "Directory"]

OBJECTS = "objects"
SEGMENTS = "segments"
REGISTRY = "registry"
INDEXES = "indexes"
CLUSTER = "cluster"
"""Has the name of the registry that this store belongs to."""
_LOCK = "lock"
_MANIFEST = "manifest.msgpack"
_ASIDE = "manifest.next"
_OURS = {OBJECTS, SEGMENTS, REGISTRY, INDEXES, _LOCK, _MANIFEST, _ASIDE, CLUSTER, f"{CLUSTER}.next"}


class Directory:
    """A directory that this process owns until it closes it.

    Attributes:
        path: The directory, absolute.
        in_memory: Its file system keeps nothing over a crash of the machine, so nothing is synced.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock_fd = _take(self.path)
        self.in_memory = _file_system(self.path) in ("tmpfs", "ramfs")

    def read_manifest(self) -> bytes | None:
        """Returns the manifest, or None in a store that begins.

        Raises:
            CorruptError: It is missing, and there are files that it would name.
        """
        try:
            return (self.path / _MANIFEST).read_bytes()
        except FileNotFoundError:
            for name in (OBJECTS, SEGMENTS):
                if any((self.path / name).iterdir()):
                    raise CorruptError(
                        f"store {self.path}: {_MANIFEST} is missing but {name}/ is not empty; "
                        "empty the directory to begin anew"
                    ) from None
            return None

    def write_manifest(self, data: bytes) -> None:
        """Replaces the manifest; after a failure or a crash it is the old one or this one.

        The file beside it is kept allocated, so that a full store can still drop what fills it.

        Raises:
            NoRoomError: There is no room for it; nothing changed.
            UnavailableError: It cannot be written now, as without a free descriptor; nothing changed.
            PreconditionError: The directory was closed.
        """
        self.check_open()
        aside = self.path / _ASIDE
        try:
            _fill(aside, data, sync=not self.in_memory)
            aside.replace(self.path / _MANIFEST)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                message = f"store {self.path}: no room for a manifest of {len(data)} bytes"
                raise NoRoomError(message, needed_bytes=len(data)) from error
            message = f"store {self.path}: the manifest cannot be written: {error.strerror}"
            raise UnavailableError(message) from error
        if not self.in_memory:
            self.sync(".")
        try:
            with aside.open("wb") as spare:
                os.posix_fallocate(spare.fileno(), 0, len(data))
        except OSError:
            aside.unlink(missing_ok=True)

    def check_open(self) -> None:
        """Refuses to go on with a directory that may have another owner by now.

        Raises:
            PreconditionError: It was closed.
        """
        if self._lock_fd < 0:
            raise PreconditionError(f"store {self.path}: was closed")

    def sync(self, name: str) -> None:
        """Waits until the file or directory ``name`` is on the disk."""
        fd = os.open(self.path / name, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Gives the directory to the next owner."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _take(path: Path) -> int:
    """Makes the directory where it is missing, checks that it is ours and locks it; returns the lock's fd."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
        if found.st_uid != os.geteuid():
            raise PreconditionError(
                f"store {path}: belongs to uid {found.st_uid}, this process is {os.geteuid()}"
            )
        strange = sorted({entry.name for entry in path.iterdir()} - _OURS)
        if strange:
            raise InvalidError(f"store {path}: not a store, it holds {strange[0]!r}; name an empty directory")
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise PreconditionError(f"store {path}: {error.strerror}: {error.filename}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise ExistsError(
            f"store {path}: in use by process {owner or 'unknown'}; --store gives another", pid=owner
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    if stat.S_IMODE(found.st_mode) != 0o700:
        path.chmod(0o700)
    for name in (OBJECTS, SEGMENTS):
        (path / name).mkdir(mode=0o700, exist_ok=True)
    return fd


def _fill(path: Path, data: bytes, *, sync: bool) -> None:
    """Writes ``data`` into ``path`` over what it holds, so that pages it has already are used."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, len(data))
        done = 0
        while done < len(data):
            done += os.pwrite(fd, memoryview(data)[done:], done)
        os.ftruncate(fd, len(data))
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def _file_system(path: Path) -> str:
    """Returns the type of the file system that ``path`` is on, or "" where nothing says so."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return ""
