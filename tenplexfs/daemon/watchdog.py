"""Whether the mount answers: asked before the daemon says that it is ready, and as long as it lives.

Source: systemd's sd_watchdog_enabled(3): who misses ``WATCHDOG_USEC`` once is restarted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import trio

from tenplexfs.daemon.notify import sd_notify
from tenplexfs.errors import TimedOutError

__all__ = ["check_mount", "interval_s", "watch"]

log = logging.getLogger(__name__)

_PROBE = Path(".tenplexfs") / "version"
_FIRST_READ_S = 10.0


def interval_s(environ: Mapping[str, str], pid: int) -> float | None:
    """Returns how often the service manager wants to hear of the process ``pid``, or None where it does not.

    >>> interval_s({"WATCHDOG_USEC": "30000000"}, 7)
    15.0
    """
    usec, owner = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or not int(usec) or (owner and owner != str(pid)):
        return None
    return int(usec) / 2e6


async def check_mount(mount: Path) -> None:
    """Reads a small file through the mount, as anybody would.

    Raises:
        TimedOutError: It does not come.
    """
    with trio.move_on_after(_FIRST_READ_S):
        await trio.to_thread.run_sync((mount / _PROBE).read_bytes, abandon_on_cancel=True)
        return
    raise TimedOutError(f"mount {mount}: a read of {_PROBE} did not come within {_FIRST_READ_S:g} s")


async def watch(mount: Path | None) -> None:
    """Tells the service manager again and again that reads come, until cancelled; nothing where none asks."""
    wait_s = interval_s(os.environ, os.getpid())
    if wait_s is None:
        return
    while True:
        try:
            if mount is not None:
                await check_mount(mount)
            sd_notify("WATCHDOG=1")
        except (OSError, TimedOutError) as error:
            log.warning("watchdog: %s", error)
        await trio.sleep(wait_s)
