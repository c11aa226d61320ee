from __future__ import annotations

import pytest

from tenplexfs.core.snapshot import Head, NodeName, SnapshotId, TxId
from tenplexfs.core.transaction import (
    Outcome,
    after_lost_reply,
    check_expected,
    is_older,
    next_snapshot,
)
from tenplexfs.errors import ConflictError


def head(generation: int, step: int | None, txid: str = "a") -> Head:
    return Head(SnapshotId(generation, step, TxId(txid)), "digest", (NodeName("node0"),))


def test_the_generation_rises_except_for_the_first_state():
    txid = TxId("b")
    assert next_snapshot(None, txid, step=None) == SnapshotId(1, None, txid)
    assert next_snapshot(head(1, None), txid, step=5) == SnapshotId(1, 5, txid)
    assert next_snapshot(head(3, None), txid, step=None) == SnapshotId(4, None, txid)
    assert next_snapshot(head(3, 7), txid, step=7) == SnapshotId(4, 7, txid)
    assert next_snapshot(head(3, 7), txid, step=2) == SnapshotId(4, 2, txid)


def test_a_request_for_another_generation_is_a_conflict():
    check_expected(head(3, 0), None)
    check_expected(head(3, 0), 3)
    with pytest.raises(ConflictError, match="expected 2, the job is at 3"):
        check_expected(head(3, 0), 2)


def test_a_lost_reply_is_told_by_the_head():
    old, new, other = head(1, 0, "a"), head(2, 0, "b"), head(2, 0, "c")
    assert after_lost_reply(old, new, new) is Outcome.COMMITTED
    assert after_lost_reply(old, new, old) is Outcome.NOT_MOVED
    assert after_lost_reply(old, new, other) is Outcome.LOST
    assert after_lost_reply(old, None, None) is Outcome.COMMITTED
    assert after_lost_reply(None, new, None) is Outcome.NOT_MOVED


def test_late_news_is_older():
    shown = SnapshotId(2, 0, TxId("x"))
    assert is_older(head(1, 9).snapshot, shown)
    assert is_older(head(2, None).snapshot, shown)
    assert not is_older(head(2, 1).snapshot, shown)
