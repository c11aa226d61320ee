"""pyfuse3's handlers: decode, ask the namespace, encode. Only `read` may wait for others.

All run as tasks of one trio thread, so a handler without an ``await`` is atomic. What takes long to compute a
worker thread does, and the namespace is asked again.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, ReaddirToken, RequestContext, StatvfsData

from tenplexfs.errors import CorruptError, UnavailableError
from tenplexfs.fuse.boundary import boundary
from tenplexfs.runtime.namespace import ROOT_INO, Namespace
from tenplexfs.runtime.protocols import FileContent, UncomputedError
from tenplexfs.runtime.tree import SLOT_SHIFT, Attributes

__all__ = ["Operations"]

# Nothing in a snapshot ever changes: only `<job>` itself is invalidated, and everything below goes with it.
_SNAPSHOT_TIMEOUT_S = 300.0
_FIRST_SNAPSHOT_INO = 1 << SLOT_SHIFT
_BLOCK_BYTES = 4096
_NAME_BYTES = 255
_DIR_MODE = stat.S_IFDIR | 0o555
_FILE_MODE = stat.S_IFREG | 0o444
_XATTR_NAMESPACE = b"user."

R = TypeVar("R")


class Operations(pyfuse3.Operations):
    """The file system over ``namespace``. What is not here pyfuse3 answers with ENOSYS, `flush` for one.

    Args:
        namespace: What is shown.
        waiting_limit: Reads that may wait for other nodes at a time; more fail at once, because waiting reads
            fill the kernel's queue and would stall the local ones.

    Attributes:
        ready: Set when the kernel has greeted.
        waiting_limit: As given; whoever raises the kernel's limit raises this.
    """

    supports_dot_lookup = False

    def __init__(self, namespace: Namespace, *, waiting_limit: int) -> None:
        super().__init__()
        self.ready = trio.Event()
        self.waiting_limit = waiting_limit
        self._namespace = namespace
        self._waiting = 0
        self._uid = os.getuid()
        self._gid = os.getgid()

    def init(self) -> None:
        """Takes note that the kernel has greeted."""
        self.ready.set()

    @boundary
    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        """Answers the entry of a name; inside a snapshot also that there is none is kept by the kernel."""
        found = await _computed(partial(self._namespace.lookup, parent_inode, name))
        if found is not None:
            return self._fill(EntryAttributes(), found)
        if len(name) > _NAME_BYTES:  # the kernel would ask for up to 1024
            raise FUSEError(errno.ENAMETOOLONG)
        if parent_inode < _FIRST_SNAPSHOT_INO:
            raise FUSEError(errno.ENOENT)
        missing = EntryAttributes()
        missing.entry_timeout = _SNAPSHOT_TIMEOUT_S
        return missing

    @boundary
    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        """Answers stat."""
        return self._fill(EntryAttributes(), await _computed(partial(self._namespace.getattr, inode)))

    @boundary
    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        """Opens a directory; its handle is the inode itself."""
        self._namespace.opendir(inode)
        return inode

    @boundary
    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        """Lists a directory with the attributes of its entries."""
        entry = EntryAttributes()
        at = start_id

        def reply() -> None:
            nonlocal at
            for name, found, position in self._namespace.readdir(fh, at):
                if not pyfuse3.readdir_reply(token, name, self._fill(entry, found), position):
                    return
                at = position

        await _computed(reply)

    @boundary
    async def releasedir(self, fh: int) -> None:
        """Closes a directory."""
        self._namespace.releasedir(fh)

    @boundary
    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        """Opens a file: live ones past the page cache, those of snapshots with it, for they never change."""
        is_live = inode < _FIRST_SNAPSHOT_INO
        fh = await _computed(partial(self._namespace.open, inode))
        return FileInfo(fh=fh, direct_io=is_live, keep_cache=not is_live)

    @boundary
    # pyfuse3 takes whatever has a contiguous buffer, though it says bytes.
    async def read(self, fh: int, off: int, size: int) -> bytes | memoryview:  # type: ignore[override]
        """Reads; a short answer would reach the reader as zeros, so it is refused."""
        content = self._namespace.content(fh)
        data = content.read(off, size)
        if data is None:
            data = await self._read_wait(content, off, size)
        wanted = min(size, max(0, content.size - off))
        if len(data) != wanted:
            raise CorruptError(f"read of {wanted} bytes at {off}: the source gave {len(data)}")
        return data

    @boundary
    async def release(self, fh: int) -> None:
        """Closes a file."""
        self._namespace.release(fh)

    @boundary
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        """Answers ``df`` with the numbers of the store."""
        numbers = self._namespace.store()
        answer = StatvfsData()
        answer.f_bsize = answer.f_frsize = _BLOCK_BYTES
        answer.f_blocks = numbers.limit_bytes // _BLOCK_BYTES
        answer.f_bfree = answer.f_bavail = max(0, numbers.limit_bytes - numbers.used_bytes) // _BLOCK_BYTES
        answer.f_namemax = _NAME_BYTES
        return answer

    @boundary
    async def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        """Answers an extended attribute; only ``user`` is supported, so that ls stops asking for others."""
        if not name.startswith(_XATTR_NAMESPACE):
            raise FUSEError(errno.EOPNOTSUPP)
        value = self._namespace.xattrs(inode).get(name)
        if value is None:
            raise FUSEError(pyfuse3.ENOATTR)
        return value

    @boundary
    async def listxattr(self, inode: int, ctx: RequestContext) -> Sequence[bytes]:
        """Lists the extended attributes."""
        return list(self._namespace.xattrs(inode))

    async def _read_wait(self, content: FileContent, offset: int, size: int) -> bytes | memoryview:
        if getattr(content, "is_near", False):  # a disk, no other node: it may wait in any number
            return await content.read_wait(offset, size)
        if self._waiting >= self.waiting_limit:
            raise UnavailableError(
                f"read: {self._waiting} reads wait for other nodes already, and the kernel's max_background "
                "could not be raised; run the daemon as root, or read less at a time"
            )
        self._waiting += 1
        try:
            return await content.read_wait(offset, size)
        finally:
            self._waiting -= 1

    def _fill(self, entry: EntryAttributes, found: Attributes) -> EntryAttributes:
        ino, is_dir, size, nlink, mtime_ns = found
        entry.st_ino = ino
        entry.st_mode = _DIR_MODE if is_dir else _FILE_MODE
        entry.st_nlink = nlink
        entry.st_size = size
        entry.st_blocks = (size + 511) >> 9
        entry.st_uid = self._uid
        entry.st_gid = self._gid
        entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = mtime_ns
        timeout = _SNAPSHOT_TIMEOUT_S if ino >= _FIRST_SNAPSHOT_INO or ino == ROOT_INO else 0.0
        entry.entry_timeout = entry.attr_timeout = timeout
        return entry


async def _computed(ask: Callable[[], R]) -> R:
    while True:
        try:
            return ask()
        except UncomputedError as missing:
            await trio.to_thread.run_sync(missing.compute)
