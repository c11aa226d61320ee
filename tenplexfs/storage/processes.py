"""Which processes have files open or mapped, as ``fuser`` finds them: by reading ``/proc``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "find_processes"]

_PROC = Path("/proc")


@dataclass(frozen=True, order=True)
class Process:
    """A process of this machine.

    Attributes:
        pid: As this process sees it.
        name: Of its program, short.
    """

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.pid} ({self.name})"


def find_processes(is_wanted: Callable[[str, int], bool]) -> list[Process]:
    """Returns the processes, other than this one, that have a wanted file open or mapped, by pid.

    Nothing is opened or asked of any file system but ``/proc``, so that it cannot hang where a mount does.
    Processes that this user may not look into are left out.

    Args:
        is_wanted: Told the device (``major:minor``) and inode of each file.

    Cost: Reads the tables of every process of the machine; milliseconds to tenths of seconds.
    """
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if any(is_wanted(*file) for file in _files(entry)):
                found.append(Process(int(entry.name), (entry / "comm").read_text().strip()))
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return sorted(found)


def _files(process: Path) -> Iterator[tuple[str, int]]:
    devices = {}
    for line in (process / "mountinfo").read_text(errors="replace").splitlines():
        mount, _, device, *_ = line.split(" ", 3)
        devices[mount] = device
    for entry in (process / "fdinfo").iterdir():
        fields = dict(line.split(":", 1) for line in entry.read_text().splitlines() if ":" in line)
        mount = fields.get("mnt_id", "").strip()
        if mount in devices and "ino" in fields:
            yield devices[mount], int(fields["ino"])
    for line in (process / "maps").read_text(errors="replace").splitlines():
        _, _, _, device, inode, *_ = line.split(None, 5)
        if inode != "0":
            major, _, minor = device.partition(":")
            yield f"{int(major, 16)}:{int(minor, 16)}", int(inode)
