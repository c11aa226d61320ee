"""Open files of the past, moved from memory to a disk: their readers go on, and the memory is back.

Only what is open is copied. The copy has no name, so that it goes with its last reader, however that ends.
"""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

import trio

from tenplexfs.runtime.protocols import FileContent
from tenplexfs.runtime.reading import LocalFile

__all__ = ["spilled"]

log = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20


async def spilled(content: FileContent, directory: Path) -> FileContent | None:
    """Returns the same bytes from a file without a name in ``directory``, or None where that cannot be.

    Some of them may be on other nodes, or the disk may be full.
    """
    if not content.size:
        return LocalFile(memoryview(b""))
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        log.warning("spill %s: %s", directory, error.strerror)
        return None
    try:
        for offset in range(0, content.size, _CHUNK_BYTES):
            data = content.read(offset, min(_CHUNK_BYTES, content.size - offset))
            if data is None:
                return None
            await trio.to_thread.run_sync(_write, fd, data, offset)
        return LocalFile(memoryview(mmap.mmap(fd, content.size, access=mmap.ACCESS_READ)))
    except OSError as error:
        log.warning("spill %s: %s", directory, error.strerror)
        return None
    finally:
        os.close(fd)


def _write(fd: int, data: bytes | memoryview, offset: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
