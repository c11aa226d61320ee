"""How the bytes of one place of a new array are written, a part at a time."""

from __future__ import annotations

import os
from typing import Protocol

from tenplexfs.errors import InvalidError

__all__ = ["FileWriter", "MapWriter", "Writer"]


class Writer(Protocol):
    """Writes the bytes of one place."""

    def write(self, offset: int, data: memoryview) -> None:
        """Writes ``data`` from byte ``offset`` on."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


class MapWriter:
    """Writes into a map."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def write(self, offset: int, data: memoryview) -> None:
        """Writes ``data`` from byte ``offset`` on."""
        self._view[offset : offset + len(data)] = data

    def close(self) -> None:
        """Lets go of the map."""
        self._view.release()


class FileWriter:
    """Writes into a file: fresh pages need not be mapped first."""

    def __init__(self, fd: int, begin: int, nbytes: int) -> None:
        self._fd, self._begin, self._nbytes = fd, begin, nbytes

    def write(self, offset: int, data: memoryview) -> None:
        """Writes ``data`` from byte ``offset`` on."""
        if not 0 <= offset <= self._nbytes - len(data):
            raise InvalidError(f"{len(data)} bytes at byte {offset}: there is room for {self._nbytes}")
        done = os.pwrite(self._fd, data, self._begin + offset)
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], self._begin + offset + done)

    def close(self) -> None:
        """Gives the descriptor back; a second time does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
