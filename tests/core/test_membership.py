"""What a node does about what it hears, early, late, or from those who have nothing to say any more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tenplexfs.core.membership import Mandate, Membership, Part, Settlement, Staging, Standing
from tenplexfs.core.snapshot import Head, SnapshotId
from tenplexfs.errors import ConflictError, PreconditionError

A, B, C, D = (SnapshotId(generation, 5, txid) for generation, txid in enumerate("abcd", 1))


def head(snapshot: SnapshotId) -> Head:
    return Head(snapshot, "digest", ("n0",))


BY, OTHER = Mandate("n0:1", 7), Mandate("n1:2", 8)


def stored(*committed: SnapshotId, **staged: tuple[SnapshotId, Mandate]) -> dict[str, Part]:
    return {each.txid: Part(each, True) for each in committed} | {
        each.txid: Part(each, False, by.fence) for each, by in staged.values()
    }


def at(snapshot: SnapshotId | None, by: Mandate = BY) -> Standing:
    """What the registry says while ``by`` has the lock."""
    return Standing(None if snapshot is None else head(snapshot), by.owner, by.token)


def test_news_are_shown_and_what_is_past_is_dropped():
    node = Membership(shown=A, stored=stored(A, b=(B, BY)))
    assert node.show(head(B)) == Settlement("b", True, ("a",))
    assert node.show(head(C)) == Settlement(None, False, ("a", "b"))


def test_old_news_are_none():
    node = Membership(shown=B, stored=stored(B))
    assert node.show(head(B)) is None
    assert node.show(head(A)) is None
    assert Membership(shown=SnapshotId(2, 7, "x")).show(head(B)) is None


def test_a_stage_beyond_the_head_may_be_of_the_next_transaction():
    """Its coordinator read the head that this node only hears of now."""
    node = Membership(shown=A, stored=stored(A, b=(B, BY), c=(C, OTHER)))
    assert node.show(head(B)) == Settlement("b", True, ("a",))
    assert node.show(head(D)) == Settlement(None, False, ("a", "b", "c"))


def test_a_stage_that_another_one_has_passed_is_dropped():
    node = Membership(shown=A, stored=stored(x=(SnapshotId(2, 5, "x"), BY)))
    assert node.show(head(B)) == Settlement(None, False, ("x",))


def test_what_is_in_use_is_kept():
    node = Membership(shown=A, stored=stored(A, x=(SnapshotId(1, 6, "x"), BY)), in_use=frozenset("ax"))
    assert node.show(head(C)) == Settlement(None, False, ())
    assert node.stage(B, BY, at(A)) == Staging((), False)
    assert not node.has_idle_stages()


def test_who_has_the_lock_drops_what_was_abandoned():
    node = Membership(shown=A, stored=stored(A, x=(SnapshotId(2, 5, "x"), BY), b=(B, BY)))
    assert node.stage(C, OTHER, at(B, OTHER)) == Staging(("x",), False), "but for the head, staged only"
    assert node.stage(B, BY, at(A)) == Staging(("x",), True)


@pytest.mark.parametrize(
    ("now", "who"),
    [
        (at(A, OTHER), "n1:2 has the job's lock"),
        (Standing(head(A)), "nobody has the job's lock"),
        (at(A, Mandate("n0:1", 6)), "n0:1 has the job's lock"),  # the same owner, another life of it
        (at(A, Mandate("n9:1", 7)), "n9:1 has the job's lock"),  # another registry, where 7 is another lock
    ],
)
def test_who_has_not_the_lock_gives_no_orders(now, who):
    node = Membership(shown=A, stored=stored(A, b=(B, BY)))
    for order in (
        lambda: node.stage(C, BY, now),
        lambda: node.check_drop("b", BY, now),
        lambda: node.abandoned(BY, now),
    ):
        with pytest.raises(ConflictError, match=f"under a lock of n0:1, and by this node's registry {who}"):
            order()


def test_an_order_without_a_lock_is_none():
    with pytest.raises(ConflictError, match="a lock of nobody"):
        Membership().stage(B, Mandate("", 0), Standing(head(A)))


def test_tokens_of_other_locks_are_not_compared():
    """Those of a registry that is another one, or was made of a backup, may begin anywhere."""
    high = Mandate("n1:2", 900, 5)
    node = Membership(shown=A, stored=stored(A, x=(SnapshotId(2, 5, "x"), high)), fence=high.fence)
    assert node.stage(B, BY, at(A)) == Staging(("x",), False)
    node.check_drop("x", BY, at(A))


@pytest.mark.parametrize(
    "node",
    [
        Membership(fence=replace(BY, attempt=2).fence),
        Membership(stored=stored(x=(B, replace(BY, attempt=2)))),
    ],
)
def test_an_attempt_that_was_given_up_gives_no_orders(node):
    """The fence of what is staged counts too: the daemon may have been restarted since."""
    for attempt in (0, 1):
        with pytest.raises(ConflictError, match=f"of attempt {attempt}, and there has been another"):
            node.stage(C, replace(BY, attempt=attempt), at(A))
        with pytest.raises(ConflictError, match=f"of attempt {attempt}, and there has been another"):
            node.check_drop("x", replace(BY, attempt=attempt), at(A))
    assert node.stage(C, replace(BY, attempt=2), at(A)).is_there is False


@pytest.mark.parametrize("now", [None, A])
@pytest.mark.parametrize("node", [Membership(shown=C), Membership(stored=stored(C, b=(B, BY)))])
def test_nothing_is_built_on_a_registry_that_knows_less_than_was_committed(node, now):
    """It was lost, or made anew of an old backup: what comes next would be built on something old."""
    assert node.beyond(at(now).head) == C
    with pytest.raises(ConflictError, match="generation 3 step 5 txid c was committed, and the registry"):
        node.stage(D, BY, at(now))
    assert node.beyond(head(C)) is node.beyond(head(D)) is None
    assert node.stage(D, BY, at(C)).is_there is False


def test_what_is_shown_or_the_head_is_not_dropped():
    with pytest.raises(PreconditionError, match="is what it shows"):
        Membership(shown=A).check_drop("a", BY, at(B))
    with pytest.raises(PreconditionError, match="b is the head"):
        Membership(shown=A, stored=stored(A, b=(B, BY))).check_drop("b", BY, at(B))
    Membership(shown=A).check_drop("b", BY, at(A))


def test_what_is_staged_for_nobody_is_known_under_the_lock():
    node = Membership(stored=stored(A, b=(B, BY), c=(C, OTHER), d=(D, BY)), in_use=frozenset("d"))
    assert node.has_idle_stages()
    assert node.abandoned(BY, at(B)) == ("c",), "the head may be staged only"
    assert node.abandoned(BY, at(A)) == ("b", "c")
