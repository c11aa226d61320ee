"""How pyfuse3 waits for the kernel's next request: briefly in place before it goes through trio.

pyfuse3 takes what it needs of trio from one name, so that `pyfuse3.asyncio` can put something else there;
this puts trio there, but for two things. A request that follows the last one closely, as those of one reader
do, is awaited in `select` for some microseconds: through trio it costs the registration with epoll, a pass of
the scheduler and a task switch, more than most handlers. And the lock of the readers lets its last holder go
on first, so that one task handles a whole burst while another stands by.

Other tasks wait for a burst of at most a millisecond; threads go on, for `select` gives them the interpreter.
"""

from __future__ import annotations

import select
import time
from types import SimpleNamespace, TracebackType

import pyfuse3
import trio

__all__ = ["MIN_TASKS", "install"]

MIN_TASKS = 2
"""For `pyfuse3.main`: one task that reads, and one that stands by."""

_IN_PLACE_S = 100e-6
_BURST_S = 1e-3
_SELECT_FDS = 1024


class _ReadLock:
    """A lock that its holder can take again at once; of those who wait one is woken, to look when it runs."""

    def __init__(self) -> None:
        self._is_held = False
        self._is_woken = False
        self._lot = trio.lowlevel.ParkingLot()

    async def __aenter__(self) -> None:
        while self._is_held:
            try:
                await self._lot.park()
            finally:
                self._is_woken = False
        self._is_held = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_held = False
        if not self._is_woken and self._lot:
            self._is_woken = True
            self._lot.unpark()


class _Waiter:
    def __init__(self) -> None:
        self._until_s = 0.0

    async def wait_readable(self, fd: int) -> None:
        """Returns when ``fd`` can be read; gives other tasks a turn at least once a burst."""
        in_place = fd < _SELECT_FDS and time.perf_counter() < self._until_s
        if in_place and select.select([fd], [], [], _IN_PLACE_S)[0]:
            return
        await trio.lowlevel.wait_readable(fd)
        self._until_s = time.perf_counter() + _BURST_S


def install() -> None:
    """Lets pyfuse3 wait so; for before its `main`, in the process that has the mount."""
    # By the module's dict: its stub does not tell of the name.
    vars(pyfuse3)["trio"] = SimpleNamespace(
        Lock=_ReadLock,
        ClosedResourceError=trio.ClosedResourceError,
        open_nursery=trio.open_nursery,
        lowlevel=SimpleNamespace(
            current_task=trio.lowlevel.current_task,
            current_trio_token=trio.lowlevel.current_trio_token,
            notify_closing=trio.lowlevel.notify_closing,
            wait_readable=_Waiter().wait_readable,
        ),
    )
