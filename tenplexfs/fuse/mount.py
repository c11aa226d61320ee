"""The mount's life: claim the directory, serve, switch, leave without hanging anybody.

pyfuse3 keeps its session in module globals, so a process has one mount at a time.
"""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from types import TracebackType

import pyfuse3
import trio

from tenplexfs.errors import PreconditionError, TenplexError, TimedOutError
from tenplexfs.fuse.mountpoint import FSNAME, claim, find_mount, lazy_unmount
from tenplexfs.fuse.operations import Operations
from tenplexfs.fuse.waiting import MIN_TASKS, install
from tenplexfs.runtime.namespace import ROOT_INO, Namespace

__all__ = ["Mount"]

log = logging.getLogger(__name__)

_INIT_TIMEOUT_S = 10.0
_MAX_TASKS = 4096
# A read that waits is a task of pyfuse3; some must be left for open and lookup.
_WAITING_RAISED = _MAX_TASKS - 96
# The kernel's max_background is 12 unless raised.
_WAITING_DEFAULT = 8
_READ_AHEAD_KIB = 4096


class Mount:
    """Shows ``namespace`` at ``path`` while entered; leaving unmounts within ``grace_s`` and a second.

    Args:
        namespace: What is shown; its `notify` is ours while mounted.
        path: A directory, empty or not yet there. A dead mount of ours on it is cleared.
        allow_other: Let other users read; who is not root needs ``user_allow_other`` in ``/etc/fuse.conf``.
        grace_s: How long files that are open when we leave are still served.

    Attributes:
        path: Absolute, without links; once entered.
        ended: Set when the mount is gone, also when somebody else unmounted it.

    Raises (on entering):
        ExistsError, InvalidError, PreconditionError: The directory cannot be had; see `mountpoint.claim`.
        PreconditionError, TimedOutError: The kernel refused, or did not answer.
    """

    def __init__(
        self, namespace: Namespace, path: Path, *, allow_other: bool = False, grace_s: float = 2.0
    ) -> None:
        self.path = path
        self.ended = trio.Event()
        self._namespace = namespace
        self._allow_other = allow_other
        self._grace_s = grace_s
        self._notify_lock = threading.Lock()
        self._main_scope = trio.CancelScope(shield=True)
        self._device = ""
        self._session: AbstractAsyncContextManager[None] = self._serve()

    async def __aenter__(self) -> Mount:
        await self._session.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._session.__aexit__(kind, error, trace)

    @asynccontextmanager
    async def _serve(self) -> AsyncIterator[None]:
        real = await self._claim()
        self.path = Path(real)
        operations = Operations(self._namespace, waiting_limit=_WAITING_DEFAULT)
        options = {"ro", "default_permissions", f"fsname={FSNAME}", f"subtype={FSNAME}"}
        if self._allow_other:
            options.add("allow_other")
        install()
        try:
            pyfuse3.init(operations, real, options)
        except RuntimeError as error:
            raise PreconditionError(
                f"mount {real}: {error}; is fusermount3 there, and may this user open /dev/fuse?"
            ) from error
        mounted = find_mount(real)
        self._device = "" if mounted is None else mounted.device
        self._namespace.device = self._device or None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._main)
                try:
                    await self._greet(operations)
                    yield
                finally:
                    with trio.CancelScope(shield=True):
                        await self._leave()
        except BaseExceptionGroup as group:
            # Whoever entered knows nothing of our nursery.
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from None
            raise
        finally:
            pyfuse3.close(unmount=self._is_mounted())
            self._namespace.release_all()

    async def _claim(self) -> str:
        with trio.move_on_after(_INIT_TIMEOUT_S):
            return await trio.to_thread.run_sync(claim, self.path, abandon_on_cancel=True)
        raise TimedOutError(f"mount {self.path}: listing it hangs; is a stuck file system there?")

    async def _main(self) -> None:
        # Shielded: who leaves because of a cancellation still has to be served until the mount is gone.
        try:
            with self._main_scope:
                await pyfuse3.main(min_tasks=MIN_TASKS, max_tasks=_MAX_TASKS)
        finally:
            self.ended.set()

    async def _greet(self, operations: Operations) -> None:
        with trio.move_on_after(_INIT_TIMEOUT_S):
            await operations.ready.wait()
        if not operations.ready.is_set():
            raise TimedOutError(f"mount {self.path}: the kernel did not greet in {_INIT_TIMEOUT_S:g} s")
        self._namespace.notify = self._notify
        if os.geteuid() == 0 and self._device:
            _raise_read_ahead(self._device)
            if await trio.to_thread.run_sync(_raise_max_background, self._device.partition(":")[2]):
                operations.waiting_limit = _WAITING_RAISED

    def _notify(self, name: bytes) -> None:
        """Makes the kernel forget ``name`` in the root, and the root's attributes. For worker threads."""
        with self._notify_lock:
            if self._namespace.notify is None:
                return
            with _notification():
                pyfuse3.invalidate_entry(ROOT_INO, name)
            with _notification():
                pyfuse3.invalidate_inode(ROOT_INO, attr_only=True)

    async def _leave(self) -> None:
        """Takes the mount out of the tree, serves what is open for a while, then ends the session."""
        self._namespace.notify = None
        if self.ended.is_set():
            return
        # A notification that is under way needs the handlers; after it there are none.
        await trio.to_thread.run_sync(self._notify_lock.acquire)
        self._notify_lock.release()
        if self._is_mounted():
            try:
                await trio.to_thread.run_sync(lazy_unmount, str(self.path))
            except TenplexError as error:
                log.warning("%s", error.message)
        with trio.move_on_after(self._grace_s):
            await self.ended.wait()
        if not self.ended.is_set():
            log.warning(
                "mount %s: files are still open after %g s; their readers get ENOTCONN",
                self.path,
                self._grace_s,
            )
            self._main_scope.cancel()

    def _is_mounted(self) -> bool:
        mounted = find_mount(str(self.path))
        return mounted is not None and mounted.device == self._device


@contextmanager
def _notification() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # What the kernel does not know it need not forget; and the mount may just have gone.
        if error.errno not in (errno.ENOENT, errno.ENOTCONN, errno.ENODEV):
            log.warning("notification: %s", error)


def _raise_read_ahead(device: str) -> None:
    try:
        Path(f"/sys/class/bdi/{device}/read_ahead_kb").write_text(str(_READ_AHEAD_KIB))
    except OSError as error:
        log.info("read-ahead stays as it is: %s", error)


def _raise_max_background(connection: str) -> bool:
    """Lets more reads of one mount be under way; fusectl is mounted aside where it is not. Blocks."""
    setting = Path("/sys/fs/fuse/connections", connection, "max_background")
    try:
        if setting.exists():
            setting.write_text(str(_MAX_TASKS))
            return True
        with tempfile.TemporaryDirectory() as aside:
            subprocess.run(["mount", "-t", "fusectl", "fusectl", aside], check=True, capture_output=True)
            try:
                Path(aside, connection, "max_background").write_text(str(_MAX_TASKS))
            finally:
                subprocess.run(["umount", "-l", aside], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        log.info(
            "max_background stays 12, so at most %d reads wait for other nodes: %s", _WAITING_DEFAULT, error
        )
        return False
    return True
