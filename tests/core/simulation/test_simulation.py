"""Thousands of histories in which everything goes wrong at the worst time, each from one seed.

Up to seven nodes coordinate against each other while messages are lost, late and doubled, the network is cut,
and nodes and registry die and come back. What must hold is asserted on the way and at the end: one history of
heads; no node shows a mix or goes back; nothing committed is lost while a disk has it; all comes to an end
once registry and sources can be reached. ``TENPLEXFS_SEEDS=100000`` runs more.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tenplexfs.core.coordination import Coordination, Drop
from tenplexfs.core.membership import Membership, Settlement, Standing
from tenplexfs.errors import ConflictError

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


class ObedientMembership(Membership):
    def stage(self, snapshot, by, now):
        return super().stage(snapshot, by, Standing(now.head, by.owner, by.token))


class TakesAnyOrder(Cluster):
    """Nodes that take orders of coordinators that have lost their lock."""

    membership = ObedientMembership


class ComparesTokensMembership(Membership):
    def stage(self, snapshot, by, now):
        fences = [self.fence, *(part.fence for part in self.stored.values() if not part.committed)]
        if by.fence < max(fences):
            raise ConflictError("a higher one was here")
        return super().stage(snapshot, by, Standing(now.head, by.owner, by.token))


class ComparesTokens(Cluster):
    """Nodes that take for the newest lock the one with the highest token, of whatever registry."""

    membership = ComparesTokensMembership


class ForgetfulMembership(Membership):
    def stage(self, snapshot, by, now):
        return super().stage(snapshot, replace(by, attempt=1 << 20), now)


class TakesAnyAttempt(Cluster):
    """Nodes that take orders of an attempt that was given up, as its lock is still held."""

    membership = ForgetfulMembership


class LaxMembership(Membership):
    def check_drop(self, txid, by, now):
        super().check_drop(txid, by, Standing(now.head, by.owner, by.token))


class DropsForAnybody(Cluster):
    """Nodes that drop what is not the head for coordinators that have lost their lock."""

    membership = LaxMembership


class TidiesWithoutLock(Cluster):
    """Nodes that clear away what has been staged for a while, whoever works on it elsewhere."""

    tidies_under_lock = False


class StagesAnySave(Cluster):
    """Nodes that stage what their ranks have saved anew since their part was collected and compared."""

    stages_what_was_collected = False


class HastyCoordination(Coordination):
    def told(self, node, *, acknowledged):
        return super().told(node, acknowledged=acknowledged or node not in self._waiting)


class ForgetsItsGuests(Cluster):
    """Coordinators that let go of what was while nodes outside of the layout still show it."""

    coordination = HastyCoordination


class DeafMembership(Membership):
    def stage(self, snapshot, by, now):
        return super().stage(snapshot, by, replace(now, head=None))


class ForgetsTheHead(Cluster):
    """Nodes that drop as abandoned what is the head, when they have not heard of it."""

    membership = DeafMembership


class RashMembership(Membership):
    def show(self, head):
        found = super().show(head)
        if found is None:
            return None
        others = self.stored.keys() - {head.snapshot.txid} - self.in_use
        return Settlement(found.show, found.commit, tuple(sorted(others)))


class DropsWhatMayCome(Cluster):
    """Nodes that drop, with each head, all that is not it, also what is staged for the next one."""

    membership = RashMembership


class GullibleMembership(Membership):
    def show(self, head):
        return Membership(None, self.stored, self.in_use).show(head)


class ShowsOldNews(Cluster):
    """Nodes that show whatever head they hear of last."""

    membership = GullibleMembership


@pytest.mark.parametrize(
    ("broken", "first"),
    [
        (DropsTooEarly, 72),
        (CommitsWithoutLock, 30),
        (TakesAnyOrder, 10413),
        (ComparesTokens, 5),
        (TakesAnyAttempt, 2160),
        (DropsForAnybody, 6419),
        (TidiesWithoutLock, 11),
        (StagesAnySave, 3),
        (ForgetsItsGuests, 82),
        (ForgetsTheHead, 50),
        (DropsWhatMayCome, 43),
        (ShowsOldNews, 0),
    ],
)
def test_a_broken_rule_is_found(broken: type[Cluster], first: int) -> None:
    """Histories from ``first`` on, where it was found; when the world changes it may be another one."""
    with pytest.raises(AssertionError):
        for seed in range(first, first + 3000):
            run(seed, broken)
