"""Mounts whose daemon does not answer: whether one hangs, and how to free those who wait in it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tenplexfs.errors import NotFoundError, PreconditionError, TenplexError
from tenplexfs.fuse.mountpoint import FSTYPE, find_mount, lazy_unmount

__all__ = ["abort", "hangs"]

_CONNECTIONS = Path("/sys/fs/fuse/connections")
_LIST = "import os, sys; os.listdir(os.path.join(sys.argv[1], '.tenplexfs'))"


def hangs(path: str, *, patience_s: float = 5.0) -> bool:
    """Returns whether listing ``path`` takes more than ``patience_s``. Blocks so long.

    A child lists, for whoever waits for a mount that hangs can only be killed.
    """
    command = [sys.executable, "-I", "-S", "-c", _LIST, path]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            child.wait(patience_s)
        except subprocess.TimeoutExpired:
            child.kill()
            return True
    return False


def abort(path: str) -> None:
    """Fails every call that waits in the mount of ours at ``path``, and takes it away. Blocks.

    Source: Documentation/filesystems/fuse.rst of the kernel, "Aborting a filesystem connection".

    Raises:
        NotFoundError: No mount of ours is there.
        PreconditionError: This user may not.
    """
    mount = find_mount(path)
    if mount is None or mount.fstype != FSTYPE:
        raise NotFoundError(f"{path}: no tenplexfs is mounted there")
    connection = mount.device.partition(":")[2]
    try:
        if (_CONNECTIONS / connection).exists():
            (_CONNECTIONS / connection / "abort").write_text("1")
        else:
            _abort_aside(connection)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PreconditionError(
            f"{path}: cannot abort connection {connection}: {error}; be root, or the user of the mount"
        ) from error
    with suppress(TenplexError):  # the daemon, when it is not frozen, takes it away itself
        lazy_unmount(path)


def _abort_aside(connection: str) -> None:
    """Does it where fusectl is not mounted, as in containers."""
    with tempfile.TemporaryDirectory() as aside:
        subprocess.run(["mount", "-t", "fusectl", "fusectl", aside], check=True, capture_output=True)
        try:
            Path(aside, connection, "abort").write_text("1")
        finally:
            subprocess.run(["umount", "-l", aside], check=True, capture_output=True)
