"""What a node does about what it hears, early, late, or from those who have nothing to say any more."""

from __future__ import annotations

import pytest

from tenplexfs.core.membership import Membership, Part, Settlement, Staging
from tenplexfs.core.snapshot import Head, SnapshotId
from tenplexfs.errors import ConflictError, PreconditionError

A, B, C, D = (SnapshotId(generation, 5, txid) for generation, txid in enumerate("abcd", 1))


def head(snapshot: SnapshotId) -> Head:
    return Head(snapshot, "digest", ("n0",))


def stored(*committed: SnapshotId, **staged: tuple[SnapshotId, int]) -> dict[str, Part]:
    return {each.txid: Part(each, True) for each in committed} | {
        each.txid: Part(each, False, fence) for each, fence in staged.values()
    }


def test_news_are_shown_and_what_is_past_is_dropped():
    node = Membership(shown=A, stored=stored(A, b=(B, 3)))
    assert node.show(head(B), is_hearsay=False) == Settlement("b", True, ("a",))
    assert node.show(head(C), is_hearsay=False) == Settlement(None, False, ("a", "b"))


def test_old_news_are_none():
    node = Membership(shown=B, stored=stored(B))
    assert node.show(head(B), is_hearsay=False) is None
    assert node.show(head(A), is_hearsay=False) is None
    assert Membership(shown=SnapshotId(2, 7, "x")).show(head(B), is_hearsay=False) is None


def test_what_was_committed_here_is_not_undone_by_late_hearsay():
    """The daemon was restarted, and shows nothing yet."""
    node = Membership(stored=stored(C))
    assert node.show(head(B), is_hearsay=True) is None
    assert node.show(head(C), is_hearsay=True) == Settlement("c", False, ())
    assert node.show(head(D), is_hearsay=True) == Settlement(None, False, ("c",))
    assert node.show(head(B), is_hearsay=False) == Settlement(None, False, ("c",)), "the registry knows"


def test_a_stage_beyond_the_head_may_be_of_the_next_transaction():
    """Its coordinator read the head that this node only hears of now."""
    node = Membership(shown=A, stored=stored(A, b=(B, 3), c=(C, 4)))
    assert node.show(head(B), is_hearsay=False) == Settlement("b", True, ("a",))
    assert node.show(head(D), is_hearsay=False) == Settlement(None, False, ("a", "b", "c"))


def test_a_stage_that_another_one_has_passed_is_dropped():
    rival = SnapshotId(2, 5, "x")
    assert Membership(shown=A, stored=stored(x=(rival, 2))).show(head(B), is_hearsay=False) == Settlement(
        None, False, ("x",)
    )


def test_what_is_in_use_is_kept():
    node = Membership(shown=A, stored=stored(A, x=(SnapshotId(1, 6, "x"), 1)), in_use=frozenset("ax"))
    assert node.show(head(C), is_hearsay=False) == Settlement(None, False, ())
    assert node.stage(B, "a", 9) == Staging((), False)


def test_who_has_the_lock_drops_what_was_abandoned():
    node = Membership(shown=A, stored=stored(A, x=(SnapshotId(2, 5, "x"), 3), b=(B, 4)))
    assert node.stage(C, "b", 5) == Staging(("x",), False), "but for the head, of which it has not heard yet"
    assert node.stage(B, "a", 4) == Staging(("x",), True)


@pytest.mark.parametrize("node", [Membership(fence=4), Membership(stored=stored(x=(B, 4)))])
def test_who_has_lost_the_lock_gives_no_orders(node):
    """The fence of what is staged counts too: the daemon may have been restarted since."""
    with pytest.raises(ConflictError, match="another coordinator, or attempt, has given orders since"):
        node.stage(C, "a", 3)
    assert node.stage(C, "a", 4).is_there is False


def test_an_order_that_comes_too_late_is_refused():
    with pytest.raises(ConflictError, match="comes too late"):
        Membership(shown=C).stage(B, "a", 9)


def test_what_is_shown_is_not_dropped():
    with pytest.raises(PreconditionError, match="is what it shows"):
        Membership(shown=A).check_drop("a")
    Membership(shown=A).check_drop("b")
    Membership().check_drop("b")


def test_what_is_staged_for_nobody_is_known_under_the_lock():
    node = Membership(stored=stored(A, b=(B, 3), c=(C, 4), x=(D, 0)), in_use=frozenset("d"))
    assert node.abandoned("b", 5) == ("c",), "the head may be staged only"
    assert node.abandoned("a", 4) == ("b",)
    assert node.abandoned(None, 3) == ()
