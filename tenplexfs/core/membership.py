"""A job as a node sees it: what to make, show, keep and drop, given what it has; no I/O.

A node learns of heads late, twice, or in the wrong order, and gets orders of coordinators that have lost
their lock without knowing. It must not drop what may still be committed, nor show what is past.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tenplexfs.core.snapshot import Head, SnapshotId, TxId
from tenplexfs.core.transaction import is_older
from tenplexfs.errors import ConflictError, PreconditionError

__all__ = ["Membership", "Part", "Settlement", "Staging"]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a snapshot that a node stores.

    Attributes:
        fence: Of the attempt that staged it; 0 where nobody knows.
    """

    id: SnapshotId
    committed: bool
    fence: int = 0


@dataclass(frozen=True, slots=True)
class Staging:
    """What a node does about an order.

    Attributes:
        drop: Stages that were abandoned.
        is_there: Whether it has done so already.
    """

    drop: tuple[TxId, ...]
    is_there: bool


@dataclass(frozen=True, slots=True)
class Settlement:
    """What a node does about a head.

    Attributes:
        show: The stored snapshot that is the head, or None when this node stores none of it.
        commit: Whether ``show`` is only staged, so that the manifest has to say it is committed.
        drop: Stored snapshots that no head names any more, and none will.
    """

    show: TxId | None
    commit: bool
    drop: tuple[TxId, ...]


@dataclass(frozen=True, slots=True)
class Membership:
    """What a node has of a job.

    Attributes:
        shown: What its mount shows.
        stored: What its store has.
        in_use: Snapshots that are not dropped by the way: of the past and still read, being made, promised.
        fence: Of the newest attempt that it took an order of, since it was started.
    """

    shown: SnapshotId | None = None
    stored: Mapping[TxId, Part] = field(default_factory=dict)
    in_use: frozenset[TxId] = frozenset()
    fence: int = 0

    def stage(self, snapshot: SnapshotId, head: TxId | None, fence: int) -> Staging:
        """A coordinator orders a part of ``snapshot``, which is to come after ``head``.

        It has the lock, or had it: who has it drops what others staged before, whose head can never move now.
        What is staged may be the head, of which this node has not heard.

        Raises:
            ConflictError: It had it: somebody else has given orders since, or its snapshot is past.
        """
        staged = [(txid, part) for txid, part in self.stored.items() if not part.committed]
        newest = max([self.fence, *(part.fence for _, part in staged)])
        if 0 < fence < newest:
            raise ConflictError(f"{snapshot}: another coordinator, or attempt, has given orders since")
        if self.shown is not None and is_older(snapshot, self.shown):
            raise ConflictError(f"{snapshot}: comes too late, {self.shown} is shown")
        keep = {head, snapshot.txid, *self.in_use}
        return Staging(tuple(sorted(t for t, _ in staged if t not in keep)), snapshot.txid in self.stored)

    def show(self, head: Head, *, is_hearsay: bool) -> Settlement | None:
        """The job's head is, or was, ``head``; returns None when that is no news.

        Args:
            head: What somebody says.
            is_hearsay: A coordinator says it, perhaps long ago; else the registry does, since this daemon was
                started. What the store has as committed was a head before.
        """
        now = head.snapshot
        if self.shown is not None and (self.shown.txid == now.txid or is_older(now, self.shown)):
            return None
        if is_hearsay and any(is_older(now, each.id) for each in self.stored.values() if each.committed):
            return None
        mine = self.stored.get(now.txid)
        return Settlement(
            show=now.txid if mine is not None else None,
            commit=mine is not None and not mine.committed,
            drop=tuple(sorted(self._past(now))),
        )

    def abandoned(self, head: TxId | None, fence: int) -> tuple[TxId, ...]:
        """Returns what is staged for nobody, given the head under a lock with attempts from ``fence`` on."""
        keep = {head, *self.in_use}
        return tuple(
            sorted(
                txid
                for txid, part in self.stored.items()
                if not part.committed and part.fence < fence and txid not in keep
            )
        )

    def check_drop(self, txid: TxId) -> None:
        """A coordinator lets go of a snapshot.

        Raises:
            PreconditionError: The job shows it.
        """
        if self.shown is not None and self.shown.txid == txid:
            raise PreconditionError(f"{txid} is what it shows")

    def _past(self, now: SnapshotId) -> Iterator[TxId]:
        """Yields what is stored, not in use, and can be no head after ``now``."""
        for txid, part in self.stored.items():
            # A stage beyond this head may be of the next transaction: its coordinator knew of the head first.
            may_come = not part.committed and is_older(now, part.id)
            if txid not in (now.txid, *self.in_use) and not may_come:
                yield txid
