"""A transaction as its coordinator sees it: what happened in, what to do out; no I/O, no clock.

Stage on every node, move the head, tell everybody, let go of what was. The runtime carries the actions out
and says what came of them; the simulation of the tests does the same over a network that loses, doubles and
delays.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from tenplexfs.core.snapshot import Head, NodeName, TxId
from tenplexfs.core.transaction import Outcome, after_lost_reply

__all__ = [
    "Action",
    "Commit",
    "Commitment",
    "Coordination",
    "Drop",
    "End",
    "Next",
    "Reply",
    "Stage",
    "Tell",
    "Verdict",
]


class Verdict(Enum):
    """How a transaction ended."""

    DONE = "done"
    FAILED = "failed"
    SOURCES_LOST = "sources lost"  # nothing changed; it can be planned again, without them


@dataclass(frozen=True, slots=True)
class Stage:
    """Let each node make its part of the new snapshot."""

    nodes: tuple[NodeName, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Move the head, as a `Commitment` does."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell each node of the new head, and wait for it."""

    nodes: tuple[NodeName, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Let each node let go of a snapshot; whether it answers changes nothing."""

    txid: TxId
    nodes: tuple[NodeName, ...]


@dataclass(frozen=True, slots=True)
class End:
    """It is over.

    Attributes:
        lost: Sources to plan without; only with ``SOURCES_LOST``.
        late: Nodes that did not say that they show the new head; only with ``DONE``.
    """

    verdict: Verdict
    lost: frozenset[NodeName] = frozenset()
    late: tuple[NodeName, ...] = ()


Action = Stage | Commit | Tell | Drop | End
_NOTHING: tuple[Action, ...] = ()


class Coordination:
    """One attempt to switch a job, under its lock. Every method takes what happened and returns what to do.

    Args:
        coordinator: The node that runs it.
        head: What the job is now, None when it is not there yet.
        new: What it is to be.
        lost: Nodes of ``head`` that are taken for dead, so that nobody waits for them.
    """

    def __init__(
        self, coordinator: NodeName, head: Head | None, new: Head, *, lost: Collection[NodeName] = ()
    ) -> None:
        self._here = coordinator
        self._head = head
        self._new = new
        self._before = () if head is None else tuple(node for node in head.nodes if node not in lost)
        self._waiting = set(new.nodes)
        self._late: set[NodeName] = set()
        self._is_held = False
        self._is_staging = True

    def begin(self) -> tuple[Action, ...]:
        """Begins."""
        return (Stage(self._new.nodes),) if self._waiting else self._all_staged()

    def staged(self, node: NodeName) -> tuple[Action, ...]:
        """A node has its part."""
        self._waiting.discard(node)
        return self._all_staged() if self._is_staging and not self._waiting else _NOTHING

    def stage_failed(self, sources: Collection[NodeName]) -> tuple[Action, ...]:
        """A node could not make its part, as ``sources`` did not send theirs; none: for another reason."""
        return self._give_up(End(Verdict.SOURCES_LOST, frozenset(sources)) if sources else _FAILED)

    def sources_gone(self, nodes: Collection[NodeName]) -> tuple[Action, ...]:
        """Nodes that send are dead, and there is a plan without them."""
        return self._give_up(End(Verdict.SOURCES_LOST, frozenset(nodes)))

    def given_up(self) -> tuple[Action, ...]:
        """Nobody wants it any more, or the lock is lost."""
        return self._give_up(_FAILED)

    def committed(self) -> tuple[Action, ...]:
        """The head has moved: from here on the switch is a fact."""
        self._waiting = {self._here, *self._before, *self._new.nodes}
        return (Tell(tuple(sorted(self._waiting))),)

    def refused(self) -> tuple[Action, ...]:
        """The head has not moved, and will not."""
        return Drop(self._new.snapshot.txid, self._new.nodes), _FAILED

    def told(self, node: NodeName, *, acknowledged: bool) -> tuple[Action, ...]:
        """A node shows the new head, or did not say so.

        What was is let go of when every node shows the new one: who does not may read it from the others.
        That goes for guests too, living nodes that are in neither layout; of them this hears first.
        """
        if node not in self._waiting:
            self._is_held |= not acknowledged
            return _NOTHING
        self._waiting.discard(node)
        if not acknowledged:
            self._late.add(node)
        if self._waiting:
            return _NOTHING
        end = End(Verdict.DONE, late=tuple(sorted(self._late)))
        if self._head is None or self._late or self._is_held:
            return (end,)
        return Drop(self._head.snapshot.txid, self._before), end

    def _all_staged(self) -> tuple[Action, ...]:
        self._is_staging = False
        return (Commit(),)

    def _give_up(self, end: End) -> tuple[Action, ...]:
        if not self._is_staging:
            return _NOTHING
        self._is_staging = False
        return Drop(self._new.snapshot.txid, self._new.nodes), end


_FAILED = End(Verdict.FAILED)


class Reply(Enum):
    """What the registry said to a compare-and-set."""

    MOVED = "moved"
    REFUSED = "refused"
    SILENT = "silent"


class Next(Enum):
    """What to do about a head that may have moved."""

    DONE = "done"
    REFUSED = "refused"
    READ = "read the head"
    AGAIN = "send it again"


class Commitment:
    """Moving a head, once, and knowing for sure, though replies are lost.

    A compare-and-set may be sent again: it moves the head from ``expected`` alone, and no head comes back.

    Args:
        expected: The head now.
        new: The head to be; None removes the job.
    """

    def __init__(self, expected: Head | None, new: Head | None) -> None:
        self._expected = expected
        self._new = new
        self._was_refused = False

    def replied(self, reply: Reply) -> Next:
        """The registry answered, or did not.

        A refusal alone does not tell: it may be of the second of two that arrived, or of one sent again.
        """
        self._was_refused = reply is Reply.REFUSED
        return Next.DONE if reply is Reply.MOVED else Next.READ

    def read(self, current: Head | None) -> Next:
        """The head was read after that."""
        outcome = after_lost_reply(self._expected, self._new, current)
        if outcome is Outcome.COMMITTED:
            return Next.DONE
        # What refused this one, a lock or a head that is no more, refuses every one that was sent before it.
        return Next.REFUSED if self._was_refused or outcome is Outcome.LOST else Next.AGAIN
