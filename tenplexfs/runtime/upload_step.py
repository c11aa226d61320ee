"""Which files of several ranks belong together, when nobody says who uploads them.

Times are seconds of one clock. A rank that asked for the listing of its directory before it uploads is *own*:
it says by itself when it is done, after its last file. Nobody says which rank that was; what is known is that
it was one whose last file had come before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import trio

from tenplexfs.runtime.upload import Upload

__all__ = ["RESTART_S", "SKEW_S", "UploadStep"]

log = logging.getLogger(__name__)

RESTART_S = 5.0
"""A process that starts anew takes longer than that until it asks for anything."""

SKEW_S = 60.0
"""Ranks of one run begin to upload a step within that."""


@dataclass(eq=False)
class UploadStep:
    """What the ranks of a job bring to this node, of one step.

    Attributes:
        uploads: By rank.
        own: Ranks that say by themselves when they are done.
        said_s: When one said so.
        number: Of the step, once one said so.
    """

    uploads: dict[int, Upload] = field(default_factory=dict)
    own: set[int] = field(default_factory=set)
    said_s: list[float] = field(default_factory=list)
    number: int | None = None
    lock: trio.Lock = field(default_factory=trio.Lock)

    def unsaid_count(self) -> int:
        """Returns how many ranks more have to say that they are done: each own one, else anybody."""
        if not self.own:
            return 0 if self.said_s else 1
        last_s = sorted((each.touched_s for each in self._good_own()), reverse=True)
        said_s = sorted(self.said_s)
        matched = 0
        for touched_s in last_s:
            if said_s and said_s[-1] >= touched_s:
                said_s.pop()
                matched += 1
        return len(self.own) - matched

    def left_over(self) -> list[Upload]:
        """Returns what own ranks brought so long before another one began that it is of another run."""
        good = self._good_own()
        newest_s = max((each.begun_s for each in good), default=0.0)
        return [each for each in good if each.touched_s < newest_s - SKEW_S and not each.users_count]

    def idle(self, now_s: float, *, but: int | None = None) -> list[Upload]:
        """Returns what own ranks, without ``but``, brought before a run could that starts just now."""
        return [
            each
            for each in self._good_own()
            if each.rank != but and each.touched_s < now_s - RESTART_S and not each.users_count
        ]

    async def give_up(self, uploads: Iterable[Upload], why: str) -> None:
        """Gives up what some ranks brought, and that they said they are done with it."""
        for each in list(uploads):
            self.unsay(each)
            log.warning("job %s, rank %d: what was uploaded is given up: %s", each.job, each.rank, why)
            await each.give_up(f"{why}; delete it, and upload it again")

    def unsay(self, upload: Upload) -> None:
        """Forgets that a rank said that it is done, if it has: some time after its last file."""
        if upload.rank in self.own and upload.failure is None:
            said_s = min((each for each in self.said_s if each >= upload.touched_s), default=None)
            if said_s is not None:
                self.said_s.remove(said_s)
        if not self.said_s:
            self.number = None

    def _good_own(self) -> list[Upload]:
        return [each for rank, each in self.uploads.items() if rank in self.own and each.failure is None]
