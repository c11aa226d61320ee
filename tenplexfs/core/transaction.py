"""The order of snapshots, without I/O: which comes next, which is older, which are kept.

The head in the registry is the one truth. A coordinator moves it by compare-and-set (`core.coordination`); a
node compares what it stores with it (`core.membership`).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from tenplexfs.core.snapshot import Head, SnapshotId, TxId
from tenplexfs.errors import ConflictError

__all__ = [
    "Outcome",
    "after_lost_reply",
    "age",
    "check_expected",
    "is_older",
    "kept_steps",
    "next_snapshot",
]


class Outcome(Enum):
    """What became of a compare-and-set whose reply was lost."""

    COMMITTED = "committed"
    NOT_MOVED = "not moved"
    LOST = "lost"


def next_snapshot(head: Head | None, txid: TxId, *, step: int | None) -> SnapshotId:
    """Returns the snapshot that a switch other than a save makes of ``head``.

    The generation rises, except where there was no state to replace: the first state is of generation 1.
    """
    if head is None:
        return SnapshotId(1, step, txid)
    first_state = head.snapshot.step is None and step is not None
    generation = head.snapshot.generation + (not first_state)
    return SnapshotId(generation, step, txid)


def check_expected(head: Head, expected_generation: int | None) -> None:
    """Refuses a request that was made for another generation; None is any.

    Raises:
        ConflictError: Both generations are in the message.
    """
    generation = head.snapshot.generation
    if expected_generation is not None and generation != expected_generation:
        raise ConflictError(
            f"generation: expected {expected_generation}, the job is at {generation}; plan again",
            expected=expected_generation,
            generation=generation,
        )


def after_lost_reply(expected: Head | None, wanted: Head | None, current: Head | None) -> Outcome:
    """Returns what became of moving the head from ``expected`` to ``wanted``: it reads ``current`` now."""
    if current == wanted:
        return Outcome.COMMITTED
    return Outcome.NOT_MOVED if current == expected else Outcome.LOST


def age(snapshot: SnapshotId) -> tuple[int, int]:
    """Returns where a snapshot comes in the life of its job: generation and step, -1 for none."""
    return snapshot.generation, -1 if snapshot.step is None else snapshot.step


def is_older(snapshot: SnapshotId, other: SnapshotId) -> bool:
    """Returns whether a job that is at ``other`` was, or could only have been, at ``snapshot`` before."""
    return age(snapshot) < age(other)


def kept_steps(head: SnapshotId, past: Iterable[SnapshotId], *, count: int) -> frozenset[TxId]:
    """Returns the past snapshots that are kept as steps: the newest ones before the head's, of each the last.

    A step that the head has too, or that is beyond it since a rollback, is not kept.

    Args:
        head: Of the job; it counts as one of the steps.
        past: Snapshots that were heads.
        count: Of steps, at least 1.
    """
    last: dict[int, SnapshotId] = {}
    for each in past:
        if each.step is None or head.step is None or each.step >= head.step:
            continue
        if each.step not in last or last[each.step].generation < each.generation:
            last[each.step] = each
    return frozenset(last[step].txid for step in sorted(last, reverse=True)[: count - 1])
