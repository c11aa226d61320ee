"""Saves on one node, where orders of a coordinator cross each other."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing

from tenplexfs.core.build import build_ptc
from tenplexfs.core.membership import Mandate
from tenplexfs.core.snapshot import Head, SnapshotId, TxId
from tenplexfs.errors import ConflictError, NotFoundError, PreconditionError
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.formats.requests import with_birth
from tenplexfs.formats.values import Values
from tenplexfs.runtime.attempts import Base, SavePart, SaveRequest, save_txid
from tenplexfs.runtime.orders import Progress, StageOrder
from tenplexfs.runtime.save_leader import SaveLeader
from tenplexfs.runtime.save_parts import Tensors
from tenplexfs.runtime.saving import Saves
from tenplexfs.storage.store import Store

LAYOUT = (
    b'{"format": "tenplexfs-layout", "version": 1, "mesh": {"dp": 1}, "nodes": {"n": [0]},'
    b'"tensors": {"w": {"shape": [524288], "dtype": "float32"}}}'
)
BASE = Base(
    Head(SnapshotId(1, None, "0" * 16), "digest", ("n",)), build_ptc(parse_layout(LAYOUT)), LAYOUT, b"{}"
)
TENSORS = Tensors(["w"], [("float32", (524288,))], [0], {})


@pytest.fixture
def store(tmp_path: Path):
    made = Store.open(tmp_path / "store", node="n", limit_bytes=32 << 20)
    yield made
    made.close()


async def never(attempt):
    await trio.sleep_forever()


def saves_of(store, nursery):
    return Saves(
        node="n",
        store=store,
        base=lambda job: BASE,
        lead=never,
        nursery=nursery,
        clock_ns=lambda: 1,
    )


BY = Mandate("n:1", 7)


def order_of(attempt, by=BY):
    attempt.leader = attempt.leader or "p"  # it was collected
    return StageOrder(
        job="j",
        by=by,
        snapshot=attempt.snapshot,
        base_txid=None,
        old_layout_json=b"",
        new_layout_json=LAYOUT,
        settings_json=b"{}",
        coordinator="n",
        drop=(),
        endpoints={},
        created_ns=1,
        leader="p",
    )


async def saved(saves: Saves, fill: int, process: str = "p"):
    """Saves the one rank; returns it."""
    rank = await saves.begin(SaveRequest("j", 0, 1, None, process, "run", TENSORS, b"", None))
    (slot,) = rank.plan.arrangement.slots
    (fd,) = rank.attempt.ingest.hand_out(rank.files, [0])
    os.pwrite(fd, slot.header + bytes([fill]) * slot.nbytes, 0)
    os.close(fd)
    await saves.seal(rank)
    return rank


def test_a_save_that_is_given_up_while_it_is_staged_leaves_nothing(store):
    sealing, go_on = trio.Event(), threading.Event()

    async def main():
        async with trio.open_nursery() as nursery:
            saves = saves_of(store, nursery)
            attempt = (await saved(saves, 1)).attempt
            publish = attempt.ingest._publish

            def slowly(*args):
                trio.from_thread.run_sync(sealing.set)
                go_on.wait(10)
                publish(*args)

            attempt.ingest._publish = slowly
            async with trio.open_nursery() as both:
                both.start_soon(saves.stage, order_of(attempt))
                await sealing.wait()
                both.start_soon(saves.give_up, "j", attempt.snapshot.txid, BY, "gone")
                await trio.testing.wait_all_tasks_blocked(0.05)
                go_on.set()
            store.drop("j", attempt.snapshot.txid)
            with pytest.raises(ConflictError, match="gone"):
                attempt.check()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert store.snapshots() == ()
    assert store.used_bytes == 0


def test_what_is_sealed_is_sealed_once(store):
    async def main():
        async with trio.open_nursery() as nursery:
            rank = await saved(saves := saves_of(store, nursery), 1)
            with pytest.raises(PreconditionError, match="rank 0 is sealed already"):
                await saves.seal(rank, {0: 5})
            await saves.stage(order_of(rank.attempt))
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert list(store.verify()) == []


def test_a_job_that_is_made_again_has_no_transaction_of_the_one_before():
    born = [with_birth(b"{}", TxId(txid)) for txid in ("a" * 16, "b" * 16)]
    names = [save_txid("j", settings, 1, 2, "run") for settings in (*born, born[0])]
    assert names[0] == names[2] != names[1]


@pytest.mark.parametrize("is_committed", [False, True])
def test_what_was_staged_before_a_restart_stays_until_its_step_is_staged_again(store, is_committed):
    async def main():
        async with trio.open_nursery() as nursery:
            first = (await saved(before := saves_of(store, nursery), 1)).attempt
            await before.stage(order_of(first))
            rank = await saved(saves := saves_of(store, nursery), 2)
            txid = first.snapshot.txid
            assert rank.attempt.snapshot.txid == txid
            if is_committed:  # what the coordinator did meanwhile
                store.commit("j", txid)
                saves.settle("j", Head(first.snapshot, "digest", ("n",)))
                await saves.leave(rank)
            else:
                await saves.stage(order_of(rank.attempt))
            (stored,) = store.snapshots()
            with store.arrays(stored) as arrays:
                assert set(arrays.array(0, "w").view(np.uint8)) == {1 if is_committed else 2}
            store.drop("j", txid)
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert store.snapshots() == ()
    assert store.used_bytes == 0


def test_what_was_promised_to_another_coordinator_is_not_for_this_one_to_give_up(store):
    async def main():
        async with trio.open_nursery() as nursery:
            saves = saves_of(store, nursery)
            attempt = (await saved(saves, 1)).attempt
            txid = attempt.snapshot.txid
            await saves.stage(order_of(attempt))
            for other in (None, replace(BY, token=8), replace(BY, owner="m:1")):
                await saves.give_up("j", txid, other, "gone")
            attempt.check()
            with pytest.raises(ConflictError, match="is being committed"):
                await saves.stage(order_of(attempt, replace(BY, token=8)))
            await saves.stage(order_of(attempt))
            await saves.give_up("j", txid, BY, "gone")
            with pytest.raises(ConflictError, match="gone"):
                attempt.check()
            assert not saves.is_promised("j", txid)
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert len(store.snapshots()) == 1, "whether it is the head finds out who has the lock"


def test_only_what_was_collected_is_staged(store):
    async def main():
        async with trio.open_nursery() as nursery:
            saves = saves_of(store, nursery)
            first = await saved(saves, 1)
            order = order_of(first.attempt)
            await saves.leave(first)
            again = (await saved(saves, 2, "q")).attempt  # after it was collected
            assert again.snapshot == first.attempt.snapshot
            with pytest.raises(NotFoundError, match="was saved anew since it was collected"):
                await saves.stage(order)
            assert store.snapshots() == ()
            nursery.cancel_scope.cancel()

    trio.run(main)


@pytest.mark.parametrize("phase", ["staging", "committing"])
def test_a_leader_that_does_not_know_whether_the_head_moved_has_nothing_dropped(store, phase):
    asked = []

    class Calls:
        async def collect(self, node, job, snapshot, leader):
            return SavePart(Values({0: b""}, None), {})

        async def drop(self, node, job, txid, by, reason=""):
            assert by is None
            asked.append((node, txid, reason))

    class LosesItsLock:
        async def commit_save(self, saved, report):
            report(Progress(phase))
            raise ConflictError("the lock is lost")

    async def main():
        async with trio.open_nursery() as nursery:
            attempt = (await saved(saves_of(store, nursery), 1)).attempt
            attempt.base = replace(BASE, head=replace(BASE.head, nodes=("n", "other")))
            leader = SaveLeader(LosesItsLock(), Calls(), node="n", patience_s=5)
            with pytest.raises(ConflictError, match="lock is lost"):
                await leader(attempt)
            nursery.cancel_scope.cancel()
        told = [("other", attempt.snapshot.txid, "the lock is lost")]
        assert asked == ([] if phase == "committing" else told)

    trio.run(main)
