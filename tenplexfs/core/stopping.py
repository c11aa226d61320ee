"""At which step the ranks of a job stop: one answer for one step, whoever asks when.

Each node answers its ranks at a desk. Whoever wants a stop first makes all desks hold their answers, and
learns from each the last step for which a rank was told to run. The stop step is one past the highest of
them: for it and all later ones nobody was told anything yet. Then it is published to all desks.

A rank that asks about a step was told to run for all steps before. So a desk that knows nothing any more,
after a restart, knows it again once the rank asks. That rank may wait for others that are held: where not all
are known soon, answers go on for a moment, and it is tried again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from tenplexfs.errors import ConflictError

__all__ = ["Agreement", "Desk", "Told", "agree"]


@dataclass(frozen=True, slots=True)
class Told:
    """What a desk has told.

    Attributes:
        steps: Rank -> the last step for which it was told to run.
        for_all: One of them asks for all ranks.
        ended: A process that asked has ended: the ranks have stopped, or will never get there.
    """

    steps: Mapping[int, int]
    for_all: bool = False
    ended: bool = False


class Agreement(Enum):
    """Why there is no stop step."""

    NOBODY_ASKS = "nobody asks"
    NOT_ALL_KNOWN = "not all known"


def agree(told: Iterable[Told], ranks: int) -> int | Agreement:
    """Returns the step to stop at, given what all desks told while they hold."""
    steps: dict[int, int] = {}
    for_all = ended = False
    for each in told:
        for_all = for_all or each.for_all
        ended = ended or each.ended
        steps.update(each.steps)
    if not steps or ended:
        return Agreement.NOBODY_ASKS
    if not for_all and len(steps) < ranks:
        return Agreement.NOT_ALL_KNOWN
    return max(steps.values()) + 1


@dataclass(slots=True)
class _Asker:
    process: str
    step: int
    for_all: bool


class Desk:
    """One node's answers to the ranks of one generation of a job.

    Attributes:
        stop_at: The step that was published, until it is cleared.
    """

    def __init__(self) -> None:
        self.stop_at: int | None = None
        self._token: str | None = None
        self._askers: dict[int, _Asker] = {}
        self._stopped: dict[str, int] = {}  # processes that are bound to a stop, also after it is cleared

    def ask(self, rank: int, process: str, step: int, *, for_all: bool = False) -> bool | None:
        """Returns whether to stop, or None while answers are held: ask again.

        A new process of a rank takes the place of the one before.
        """
        if (bound := self._stopped.get(process)) is not None:
            return step >= bound
        if self.stop_at is not None:
            self._stopped[process] = self.stop_at
            return step >= self.stop_at
        if self._token is not None:
            known = self._askers.get(rank)
            if known is None or known.process != process:
                self._askers[rank] = _Asker(process, step - 1, for_all)
            return None
        self._askers[rank] = _Asker(process, step, for_all)
        return False

    @property
    def is_held(self) -> bool:
        """Whether somebody agrees on a stop now."""
        return self._token is not None

    def hold(self, token: str) -> Told:
        """Holds all answers until `publish` or `release`; again, for what became known meanwhile.

        Raises:
            ConflictError: Another one holds them.
        """
        if self._token not in (None, token):
            raise ConflictError("another stop is being agreed on")
        if self.stop_at is None:
            self._token = token
        return Told(
            {rank: asker.step for rank, asker in self._askers.items()},
            any(asker.for_all for asker in self._askers.values()),
        )

    def publish(self, token: str, step: int) -> None:
        """Answers from now on: stop from ``step`` on.

        Raises:
            ConflictError: Answers were given meanwhile, so that the step may be past.
        """
        if self.stop_at == step:
            return
        if self._token != token:
            raise ConflictError("the stop was released; agree again")
        self._token = None
        self.stop_at = step
        for asker in self._askers.values():
            self._stopped[asker.process] = step
        self._askers.clear()

    def release(self, token: str) -> None:
        """Lets answers go on: there is no stop after all."""
        if self._token == token:
            self._token = None

    def clear(self) -> None:
        """Ends a stop: who was told of it stays told, new processes run."""
        self._token = None
        self.stop_at = None
