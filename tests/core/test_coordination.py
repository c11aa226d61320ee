"""What a coordinator does about each thing that can happen to its switch."""

from __future__ import annotations

import pytest

from tenplexfs.core.coordination import (
    Commit,
    Commitment,
    Coordination,
    Drop,
    End,
    Next,
    Reply,
    Stage,
    Tell,
    Verdict,
)
from tenplexfs.core.snapshot import Head, SnapshotId

OLD = Head(SnapshotId(1, 5, "a"), "digest", ("n0", "n1", "n2"))
NEW = Head(SnapshotId(2, 5, "b"), "digest", ("n0", "n3"))
FAILED = End(Verdict.FAILED)


def staging(**more) -> Coordination:
    machine = Coordination("n9", OLD, NEW, **more)
    assert machine.begin() == (Stage(("n0", "n3")),)
    return machine


def telling(**more) -> Coordination:
    machine = staging(**more)
    assert machine.staged("n3") == ()
    assert machine.staged("n3") == ()
    assert machine.staged("n0") == (Commit(),)
    assert machine.given_up() == (), "the head may move: nobody drops what it names"
    return machine


def test_all_goes_well():
    machine = telling()
    assert machine.committed() == (Tell(("n0", "n1", "n2", "n3", "n9")),)
    for node in ("n0", "n1", "n1", "n2", "n3"):
        assert machine.told(node, acknowledged=True) == ()
    assert machine.told("n9", acknowledged=True) == (Drop("a", ("n0", "n1", "n2")), End(Verdict.DONE))


def test_the_old_snapshot_stays_while_somebody_may_show_it():
    machine = telling()
    machine.committed()
    for node in ("n0", "n1", "n3", "n9"):
        assert machine.told(node, acknowledged=node != "n1") == ()
    assert machine.told("n2", acknowledged=True) == (End(Verdict.DONE, late=("n1",)),)


def test_the_old_snapshot_stays_while_a_guest_may_show_it():
    machine = telling()
    machine.committed()
    assert machine.told("guest", acknowledged=True) == ()
    assert machine.told("other guest", acknowledged=False) == ()
    for node in ("n0", "n1", "n2", "n3"):
        assert machine.told(node, acknowledged=True) == ()
    assert machine.told("n9", acknowledged=True) == (End(Verdict.DONE),)


def test_the_dead_are_not_waited_for():
    machine = telling(lost={"n1"})
    assert machine.committed() == (Tell(("n0", "n2", "n3", "n9")),)


@pytest.mark.parametrize(
    ("happens", "end"),
    [
        (lambda m: m.stage_failed(()), FAILED),
        (lambda m: m.given_up(), FAILED),
        (lambda m: m.stage_failed({"n1"}), End(Verdict.SOURCES_LOST, frozenset({"n1"}))),
        (lambda m: m.sources_gone({"n1", "n2"}), End(Verdict.SOURCES_LOST, frozenset({"n1", "n2"}))),
    ],
)
def test_what_fails_before_the_commit_drops_what_was_staged(happens, end):
    machine = staging()
    machine.staged("n0")
    assert happens(machine) == (Drop("b", ("n0", "n3")), end)
    assert machine.staged("n3") == machine.given_up() == (), "once"


def test_a_commit_that_was_refused_drops_what_was_staged():
    assert telling().refused() == (Drop("b", ("n0", "n3")), FAILED)


def test_a_first_snapshot_has_nothing_to_let_go_of():
    machine = Coordination("n0", None, NEW)
    machine.staged("n0")
    machine.staged("n3")
    assert machine.committed() == (Tell(("n0", "n3")),)
    machine.told("n0", acknowledged=True)
    assert machine.told("n3", acknowledged=True) == (End(Verdict.DONE),)


OTHER = Head(SnapshotId(2, 5, "c"), "digest", ("n0",))


@pytest.mark.parametrize(
    ("replies", "following"),
    [
        ([Reply.MOVED], Next.DONE),
        ([Reply.REFUSED], Next.READ),
        ([Reply.REFUSED, OLD], Next.REFUSED),
        ([Reply.REFUSED, OTHER], Next.REFUSED),
        ([Reply.REFUSED, NEW], Next.DONE),
        ([Reply.SILENT, NEW], Next.DONE),
        ([Reply.SILENT, OTHER], Next.REFUSED),
        ([Reply.SILENT, OLD], Next.AGAIN),
        ([Reply.SILENT, OLD, Reply.MOVED], Next.DONE),
        ([Reply.SILENT, OLD, Reply.REFUSED, NEW], Next.DONE),
        ([Reply.SILENT, OLD, Reply.REFUSED, OLD], Next.REFUSED),
        ([Reply.SILENT, Reply.REFUSED, OTHER], Next.REFUSED),
        ([Reply.SILENT, OLD, Reply.SILENT, OLD], Next.AGAIN),
        ([Reply.SILENT, OLD, Reply.REFUSED, Reply.SILENT, OLD], Next.AGAIN),
        ([Reply.SILENT, None], Next.REFUSED),
    ],
)
def test_a_head_has_moved_or_not(replies, following):
    machine = Commitment(OLD, NEW)
    last = None
    for reply in replies:
        last = machine.replied(reply) if isinstance(reply, Reply) else machine.read(reply)
    assert last is following
