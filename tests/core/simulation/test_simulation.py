"""Thousands of histories in which everything goes wrong at the worst time, each from one seed.

Up to seven nodes coordinate against each other while messages are lost, late and doubled, the network is cut,
and nodes and registry die and come back. What must hold is asserted on the way and at the end: one history of
heads; no node shows a mix or goes back; nothing committed is lost while a disk has it; all comes to an end
once registry and sources can be reached. ``TENPLEXFS_SEEDS=100000`` runs more.
"""

from __future__ import annotations

import os

import pytest

from tenplexfs.core.coordination import Coordination, Drop
from tenplexfs.core.membership import Membership, Settlement

from .cluster import Cluster, run

SEEDS = int(os.environ.get("TENPLEXFS_SEEDS", "2000"))
BATCHES = 20


@pytest.mark.parametrize("batch", range(BATCHES))
def test_whatever_happens_every_history_holds(batch: int) -> None:
    done_count = 0
    for seed in range(SEEDS * batch // BATCHES, SEEDS * (batch + 1) // BATCHES):
        try:
            done_count += run(seed).done_count
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert done_count > SEEDS // BATCHES, "they do something"


class EarlyCoordination(Coordination):
    def committed(self):
        return Drop(self._head.snapshot.txid, self._before), *super().committed()


class DropsTooEarly(Cluster):
    """A coordinator that lets go of what was before everybody shows what is."""

    coordination = EarlyCoordination


class CommitsWithoutLock(Cluster):
    """A registry that does not look at the lock."""

    def __init__(self, seed):
        super().__init__(seed)
        self.registry.core.checks_lock = False


class UnfencedMembership(Membership):
    def stage(self, snapshot, head, fence):
        return super().stage(snapshot, head, 0)


class TakesAnyOrder(Cluster):
    """Nodes that take orders of coordinators that have lost their lock."""

    membership = UnfencedMembership


class DeafMembership(Membership):
    def stage(self, snapshot, head, fence):
        return super().stage(snapshot, None, fence)


class ForgetsTheHead(Cluster):
    """Nodes that drop as abandoned what is the head, when they have not heard of it."""

    membership = DeafMembership


class RashMembership(Membership):
    def show(self, head, *, is_hearsay):
        found = super().show(head, is_hearsay=is_hearsay)
        if found is None:
            return None
        others = self.stored.keys() - {head.snapshot.txid} - self.in_use
        return Settlement(found.show, found.commit, tuple(sorted(others)))


class DropsWhatMayCome(Cluster):
    """Nodes that drop, with each head, all that is not it, also what is staged for the next one."""

    membership = RashMembership


class GullibleMembership(Membership):
    def show(self, head, *, is_hearsay):
        return Membership(None, self.stored, self.in_use).show(head, is_hearsay=False)


class ShowsOldNews(Cluster):
    """Nodes that show whatever head they hear of last."""

    membership = GullibleMembership


@pytest.mark.parametrize(
    ("broken", "first"),
    [
        (DropsTooEarly, 24),
        (CommitsWithoutLock, 23),
        (TakesAnyOrder, 385),
        (ForgetsTheHead, 263),
        (DropsWhatMayCome, 88),
        (ShowsOldNews, 0),
    ],
)
def test_a_broken_rule_is_found(broken: type[Cluster], first: int) -> None:
    """Histories from ``first`` on, where it was found; when the world changes it may be another one."""
    with pytest.raises(AssertionError):
        for seed in range(first, first + 3000):
            run(seed, broken)
