"""Blocking calls from trio. Apart from `connection`, so that the command line starts without trio."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio
from outcome import capture

from tenplexfs.rpc.connection import Cancel

__all__ = ["in_thread"]

T = TypeVar("T")


async def in_thread(call: Callable[[Cancel], T], *, limiter: trio.CapacityLimiter | None = None) -> T:
    """Returns what ``call`` returns, made in a worker thread; ends it when the task is cancelled.

    ``call`` hands the gRPC call that it waits for to `Cancel.watch`.
    """
    cancel = Cancel()
    has_returned = False

    async def cancel_with_task() -> None:
        try:
            await trio.sleep_forever()
        finally:
            if not has_returned:
                cancel.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel_with_task)
        result = await trio.to_thread.run_sync(capture, call, cancel, limiter=limiter)
        has_returned = True
        nursery.cancel_scope.cancel()
    await trio.lowlevel.checkpoint_if_cancelled()
    return result.unwrap()
