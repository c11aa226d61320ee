"""A directory before it is mounted on: whose mount is there, is it dead, may we take the place.

After a daemon was killed its mount point still answers ``stat``, from the kernel's cache; only listing it
tells.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tenplexfs.errors import ExistsError, InvalidError, PreconditionError, UnavailableError

__all__ = ["FSNAME", "FSTYPE", "Mounted", "claim", "find_mount", "lazy_unmount", "parse_mountinfo"]

FSNAME = "tenplexfs"
FSTYPE = f"fuse.{FSNAME}"
_MOUNTINFO = Path("/proc/self/mountinfo")
_DEVICE = Path("/dev/fuse")


@dataclass(frozen=True, slots=True)
class Mounted:
    """A mount, as the kernel lists it.

    Attributes:
        device: ``major:minor``.
        path: Where it is mounted.
        fstype: Type with subtype.
        source: The fsname of FUSE mounts.
    """

    device: str
    path: str
    fstype: str
    source: str


def parse_mountinfo(text: str) -> list[Mounted]:
    r"""Returns the mounts of ``/proc/<pid>/mountinfo``, in its order: the last at a path is the one seen.

    Source: proc_pid_mountinfo(5).

    >>> parse_mountinfo("36 35 98:0 / /mnt/a\\040b rw,noatime shared:1 - fuse.tenplexfs tenplexfs ro")
    [Mounted(device='98:0', path='/mnt/a b', fstype='fuse.tenplexfs', source='tenplexfs')]
    """
    mounts = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, (fstype, source, *_) = left.split(" "), right.split(" ")
        mounts.append(Mounted(fields[2], _unescape(fields[4]), fstype, _unescape(source)))
    return mounts


def find_mount(path: str) -> Mounted | None:
    """Returns the mount seen at ``path``, an absolute path without links."""
    mounts = parse_mountinfo(_MOUNTINFO.read_text("utf-8", "surrogateescape"))
    return next((mount for mount in reversed(mounts) if mount.path == path), None)


def claim(path: Path) -> str:
    """Makes ``path`` ready to be mounted on, and returns it absolute and without links.

    Makes the directory if it is missing, and clears mounts of ours whose daemon died. Blocks, so it is for a
    worker thread.

    Raises:
        PreconditionError: There is no FUSE here.
        ExistsError: Another daemon serves it, somebody else's dead mount is there, or it is not empty.
        InvalidError: It is no directory.
    """
    if not _DEVICE.exists():
        raise PreconditionError(f"{_DEVICE} is missing: load the module fuse, or serve with --no-mount")
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        raise PreconditionError(
            f"{_DEVICE}: this user may not open it; give it mode 0666, or serve with --no-mount"
        )
    # Not Path.resolve(): it raises where the last component is a dead mount.
    real = os.path.realpath(path)
    while (mount := find_mount(real)) is not None and _is_dead(real):
        if (mount.fstype, mount.source) != (FSTYPE, FSNAME):
            raise ExistsError(
                f"mount {real}: a dead mount of {mount.fstype} ({mount.source}) is there; "
                f"unmount it first: fusermount3 -u {real}"
            )
        lazy_unmount(real)
    if mount is not None and mount.fstype == FSTYPE:
        raise ExistsError(
            f"mount {real}: another tenplexfs serves it; stop that one or choose another directory"
        )
    try:
        Path(real).mkdir(parents=True, exist_ok=True)
        first = next(Path(real).iterdir(), None)
    except (FileExistsError, NotADirectoryError) as error:
        raise InvalidError(f"mount {real}: not a directory") from error
    except OSError as error:
        raise PreconditionError(f"mount {real}: {error.strerror}") from error
    if first is not None:
        raise ExistsError(f"mount {real}: not empty ({first.name!r} is there); choose an empty directory")
    return real


def lazy_unmount(path: str) -> None:
    """Takes the mount at ``path`` out of the tree; what is open in it goes on. Blocks.

    Raises:
        UnavailableError: fusermount3 is missing or refuses.
    """
    try:
        subprocess.run(["fusermount3", "-u", "-z", "--", path], check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UnavailableError("fusermount3 is missing: install fuse3") from error
    except subprocess.CalledProcessError as error:
        raise UnavailableError(f"unmount {path}: {error.stderr.strip() or error}") from error


def _is_dead(path: str) -> bool:
    try:
        next(Path(path).iterdir(), None)
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
