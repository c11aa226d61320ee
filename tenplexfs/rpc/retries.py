"""When to try a call again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tenplexfs.errors import CorruptError, TenplexError, TimedOutError, UnavailableError
from tenplexfs.rpc.connection import Cancel

__all__ = ["Retries"]

T = TypeVar("T")

_CORRUPT_COUNT = 3
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0


class Retries:
    """Counts down to a deadline, and says after a failure whether and how long to wait before trying again.

    Args:
        deadline_s: From now.
        patience_s: From the first failure after which nothing `progressed`; None: until the deadline.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        patience_s: float | None = None,
    ) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._give_up_s: float | None = None
        self._end = clock() + deadline_s
        self._wait_s = _FIRST_WAIT_S
        self._corrupt_count = 0
        self._last: TenplexError | None = None

    def run(self, call: Callable[[float], T], cancel: Cancel) -> T:
        """Returns what ``call``, given the seconds that are left, returns at last; it may be made twice.

        Raises:
            TenplexError: What failed last.
        """
        while True:
            try:
                return call(self.left_s())
            except TenplexError as error:
                self.wait(error, cancel)

    def left_s(self) -> float:
        """Returns the time that is left.

        Raises:
            TenplexError: None is: what failed last.
        """
        left = self._end - self._clock()
        if left <= 0:
            raise self._last or TimedOutError("the deadline passed before the first try")
        return left

    def progressed(self) -> None:
        """Makes the next wait short again."""
        self._wait_s, self._give_up_s = _FIRST_WAIT_S, None

    def wait(self, error: TenplexError, cancel: Cancel) -> None:
        """Waits after ``error``.

        Raises:
            TenplexError: It is no use to try again: ``error``, or the one before a deadline.
        """
        if isinstance(error, TimedOutError) and self._last is not None:
            raise self._last from error
        self._corrupt_count += isinstance(error, CorruptError)
        if not isinstance(error, UnavailableError | CorruptError) or self._corrupt_count >= _CORRUPT_COUNT:
            raise error
        self._last = error
        wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, _LONGEST_WAIT_S)
        now = self._clock()
        if self._give_up_s is None:
            self._give_up_s = self._end if self._patience_s is None else now + self._patience_s
        if now + wait_s >= min(self._end, self._give_up_s) or cancel.wait(wait_s):
            raise error
