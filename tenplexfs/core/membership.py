"""A job as a node sees it: what to make, show, keep and drop, given what it has; no I/O.

A node learns of heads late, twice, or in the wrong order, and gets orders of coordinators that have lost
their lock, or have it of another registry, without knowing. It must not drop what may still be committed, nor
show what is past. So it takes nobody's word: heads are what its own registry says, and an order counts if by
that, asked after the order came, its lock is held. No two tokens of different locks are compared, for a
registry that is another one, or was made anew of a backup, counts from anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from tenplexfs.core.snapshot import Head, SnapshotId, TxId
from tenplexfs.core.transaction import age, is_older
from tenplexfs.errors import ConflictError, PreconditionError

__all__ = ["Mandate", "Membership", "Part", "Settlement", "Staging", "Standing"]

_ATTEMPT_BITS = 10
_LOCK_BYTES = 6


@dataclass(frozen=True, slots=True)
class Mandate:
    """By what right an order is given: a lock of the job, and which attempt under it.

    Attributes:
        owner: Who took the lock.
        token: Of the lock.
        attempt: Later ones are higher.
    """

    owner: str
    token: int
    attempt: int = 0

    @property
    def fence(self) -> int:
        """Lock and attempt in one number, as it is stored with what is staged; locks have no order in it.

        >>> Mandate("n0", 3, 2).fence - Mandate("n0", 3, 1).fence
        1
        """
        lock = blake2b(f"{self.owner}\0{self.token}".encode(), digest_size=_LOCK_BYTES).digest()
        return (int.from_bytes(lock) << _ATTEMPT_BITS) + min(self.attempt, (1 << _ATTEMPT_BITS) - 1)


@dataclass(frozen=True, slots=True)
class Standing:
    """What the registry says of a job at one moment.

    Attributes:
        owner: Who has the job's lock; empty when nobody has it.
        token: Of that lock.
    """

    head: Head | None
    owner: str = ""
    token: int = 0

    @property
    def txid(self) -> TxId | None:
        """Of the head."""
        return None if self.head is None else self.head.snapshot.txid


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
        fence: Of the last order that it took, since it was started.
    """

    shown: SnapshotId | None = None
    stored: Mapping[TxId, Part] = field(default_factory=dict)
    in_use: frozenset[TxId] = frozenset()
    fence: int = 0

    def stage(self, snapshot: SnapshotId, by: Mandate, now: Standing) -> Staging:
        """A coordinator orders a part of ``snapshot``.

        Who has the lock drops what others staged before, whose head can never move now.

        Raises:
            ConflictError: It has not, or this is of an attempt that it has given up, or more was committed
                here than the registry knows.
        """
        self._check(by, now, snapshot.txid)
        if (newer := self.beyond(now.head)) is not None:
            known = "knows no such job" if now.head is None else f"says {now.head.snapshot}"
            raise ConflictError(
                f"{newer} was committed, and the registry {known}: `registry rebuild` moves it on, "
                "`job remove` frees what is here"
            )
        keep = {snapshot.txid, now.txid}
        return Staging(tuple(t for t in self._idle() if t not in keep), snapshot.txid in self.stored)

    def beyond(self, head: Head | None) -> SnapshotId | None:
        """Returns the newest that was the job's head, by what is here, if ``head`` is older: it is late news.

        Else the registry has gone back, or the job was removed and another one made. What is past says
        nothing: it is only still read, and the job may have been removed since.
        """
        known = [part.id for txid, part in self.stored.items() if part.committed and txid not in self.in_use]
        known += [] if self.shown is None else [self.shown]
        newer = [each for each in known if head is None or is_older(head.snapshot, each)]
        return max(newer, key=age, default=None)

    def show(self, head: Head) -> Settlement | None:
        """The registry says, or said, that the job is at ``head``; returns None when that is no news."""
        now = head.snapshot
        if self.shown is not None and (self.shown.txid == now.txid or is_older(now, self.shown)):
            return None
        mine = self.stored.get(now.txid)
        return Settlement(
            show=now.txid if mine is not None else None,
            commit=mine is not None and not mine.committed,
            drop=tuple(sorted(self._past(now))),
        )

    def check_drop(self, txid: TxId, by: Mandate, now: Standing) -> None:
        """A coordinator lets go of a snapshot.

        Raises:
            ConflictError: It has not the lock, or has staged it again since.
            PreconditionError: The job is at it, or shows it.
        """
        if self.shown is not None and self.shown.txid == txid:
            raise PreconditionError(f"{txid} is what it shows")
        if now.txid == txid:
            raise PreconditionError(f"{txid} is the head")
        self._check(by, now, txid)

    def abandoned(self, by: Mandate, now: Standing) -> tuple[TxId, ...]:
        """Returns what is staged for nobody, for who has taken the lock to find out.

        Raises:
            ConflictError: It has lost it.
        """
        self._check(by, now, None)
        return tuple(txid for txid in self._idle() if txid != now.txid)

    def has_idle_stages(self) -> bool:
        """Returns whether something is staged that nobody works on here."""
        return any(True for _ in self._idle())

    def _check(self, by: Mandate, now: Standing, txid: TxId | None) -> None:
        if not by.owner or (by.owner, by.token) != (now.owner, now.token):
            who = f"{now.owner} has the job's lock" if now.owner else "nobody has the job's lock"
            raise ConflictError(
                f"{txid or 'tidying'}: ordered under a lock of {by.owner or 'nobody'}, and by this node's "
                f"registry {who}; the order is late, or comes of another registry"
            )
        fences = [self.fence, *(part.fence for part in self.stored.values() if not part.committed)]
        if any(by.fence < fence for fence in fences if fence >> _ATTEMPT_BITS == by.fence >> _ATTEMPT_BITS):
            raise ConflictError(f"{txid}: of attempt {by.attempt}, and there has been another one since")

    def _idle(self) -> Iterator[TxId]:
        for txid, part in sorted(self.stored.items()):
            if not part.committed and txid not in self.in_use:
                yield txid

    def _past(self, now: SnapshotId) -> Iterator[TxId]:
        """Yields what is stored, not in use, and can be no head after ``now``."""
        for txid, part in self.stored.items():
            # A stage beyond this head may be of the next transaction: its coordinator knew of the head first.
            may_come = not part.committed and is_older(now, part.id)
            if txid not in (now.txid, *self.in_use) and not may_come:
                yield txid
