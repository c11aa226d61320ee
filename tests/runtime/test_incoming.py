"""Which uploads become a step, and which never do: ranks, runs that end in the middle, and a clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing

from tenplexfs.core.build import build_ptc
from tenplexfs.core.snapshot import Head, SnapshotId
from tenplexfs.errors import ConflictError, NotFoundError, PreconditionError
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.runtime.attempts import Attempt, Base
from tenplexfs.runtime.incoming import Incoming
from tenplexfs.runtime.saving import Saves
from tenplexfs.runtime.upload_step import RESTART_S, SKEW_S
from tenplexfs.storage.store import Store

LAYOUT = (
    b'{"format": "tenplexfs-layout", "version": 1, "mesh": {"tp": 3}, "nodes": {"n": [0, 1], "m": [2]},'
    b'"tensors": {"w": {"shape": [3, 4], "dtype": "int64", "shard": [{"axis": "tp", "dim": 0}]}}}'
)
JOB = "j"


class Node:
    """One of two nodes; what is sealed is committed where the test says so."""

    def __init__(self, store: Store, nursery: trio.Nursery, clock: trio.testing.MockClock) -> None:
        self.clock = clock
        self.head = Head(SnapshotId(1, None, "0" * 16), "digest", ("m", "n"))
        self.ptc = build_ptc(parse_layout(LAYOUT))
        self.sealed: list[Attempt] = []
        self.saves = Saves(
            node="n", store=store, base=self.base, lead=self.lead, nursery=nursery, clock_ns=lambda: 1
        )
        tokens = iter(range(10**6))
        self.incoming = Incoming(
            node="n",
            store=store,
            saves=self.saves,
            base=self.base,
            nursery=nursery,
            clock_ns=lambda: 1,
            new_token=lambda: f"{next(tokens):016x}",
            patience_s=0.0,
        )

    def base(self, job: str) -> Base | None:
        return Base(self.head, self.ptc, LAYOUT, b"{}") if job == JOB else None

    async def lead(self, attempt: Attempt) -> Head:
        self.sealed.append(attempt)
        await trio.sleep_forever()
        raise AssertionError

    def commit(self) -> dict[int, bytes]:
        """Commits what was sealed last; returns the structure of each rank."""
        attempt = self.sealed[-1]
        attempt.check()
        self.head = replace(self.head, snapshot=attempt.snapshot)
        documents = {rank: each.request.document for rank, each in attempt.ranks.items()}
        self.saves.settle(JOB, self.head)
        return documents

    # What a rank does.

    async def begin(self, rank: int) -> None:
        """Lists, and deletes what is listed."""
        was_there = bool(rank in self.incoming.found(JOB) and self.incoming.found(JOB)[rank].files)
        await self.incoming.listed(JOB, rank)
        if was_there:
            await self.incoming.delete(JOB, rank, "")

    async def bring(self, rank: int, word: str, *, values: int = 2) -> None:
        """Uploads the tensor, then some values."""
        async with (
            self.incoming.upload(JOB, rank) as upload,
            upload.tensor("w.numpy.ndarray", replace=False) as writer,
        ):
            writer.write(np.full(4, ord(word[0]), np.int64).tobytes())
        for number in range(values):
            async with self.incoming.upload(JOB, rank) as upload:
                upload.put(f"{number}.str", word.encode(), replace=False)

    async def save(self, rank: int, word: str, step: int = 1) -> str:
        await self.begin(rank)
        await self.bring(rank, word)
        return await self.incoming.done(JOB, step)


def run(tmp_path: Path, test) -> None:
    async def main() -> None:
        store = Store.open(tmp_path / "store", node="n", limit_bytes=32 << 20)
        try:
            async with trio.open_nursery() as nursery:
                await test(Node(store, nursery, clock))
                nursery.cancel_scope.cancel()
            for snapshot in store.snapshots():
                store.drop(snapshot.job, snapshot.id.txid)
        finally:
            store.close()

    clock = trio.testing.MockClock()
    trio.run(main, clock=clock)


def words(documents: dict[int, bytes]) -> list[set[str]]:
    return [
        {word for word in ("old", "new") if word.encode() in documents[rank]} for rank in sorted(documents)
    ]


def test_each_rank_says_that_it_is_done(tmp_path):
    async def test(node: Node) -> None:
        assert "rank 1: nothing" in await node.save(0, "new")
        await node.begin(1)
        await node.bring(1, "new", values=1)
        async with node.incoming.upload(JOB, 1) as upload:
            assert "still coming" in await upload.lacks()
            upload.put("1.str", b"new", replace=False)
        assert not node.sealed
        assert "waits for other nodes" in await node.incoming.done(JOB, 1)
        await trio.testing.wait_all_tasks_blocked()
        assert words(node.commit()) == [{"new"}, {"new"}]
        assert await node.incoming.done(JOB, 1) == "step 1: is the newest"
        with pytest.raises(PreconditionError, match="rank 0: nothing"):
            await node.incoming.done(JOB, 2)

    run(tmp_path, test)


def test_one_says_it_for_all_that_did_not_ask(tmp_path):
    async def test(node: Node) -> None:
        for rank in (0, 1):
            await node.bring(rank, "new")
            node.clock.jump(10 * SKEW_S)  # a person at a keyboard
        assert "waits for other nodes" in await node.incoming.done(JOB, 1)
        assert await node.incoming.done(JOB, 1) == "step 1: is being saved"

    run(tmp_path, test)


@pytest.mark.parametrize("rank_that_lives", [0, 1])
@pytest.mark.parametrize("said_so", [False, True])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("loads", [False, True])
def test_nothing_of_a_run_that_ended_becomes_part_of_the_next(
    tmp_path, rank_that_lives, said_so, first, loads
):
    """One rank of the old run was complete, the other one had not begun, or was in the middle."""

    async def test(node: Node) -> None:
        other = 1 - rank_that_lives
        await node.begin(rank_that_lives)
        await node.bring(rank_that_lives, "old", values=2 if said_so else 1)
        if said_so:
            await node.incoming.done(JOB, 1)
        else:
            await node.begin(other)
            await node.bring(other, "old", values=1)
        node.clock.jump(SKEW_S + 1)
        if loads:
            await node.incoming.started(JOB)
        line = await node.save(first, "new")
        assert "waits: " in line and not node.sealed
        assert "waits for other nodes" in await node.save(1 - first, "new")
        await trio.testing.wait_all_tasks_blocked()
        assert words(node.commit()) == [{"new"}, {"new"}]

    run(tmp_path, test)


@pytest.mark.parametrize("loads", [False, True])
def test_what_waits_for_other_nodes_ends_when_its_ranks_begin_again(tmp_path, loads):
    async def test(node: Node) -> None:
        await node.save(0, "old")
        assert "waits for other nodes" in await node.save(1, "old")
        await trio.testing.wait_all_tasks_blocked()
        (old,) = node.sealed
        node.clock.jump(RESTART_S + 1)
        if loads:
            await node.incoming.started(JOB)
        else:
            await node.begin(1)
        with pytest.raises(ConflictError, match="began again"):
            old.check()
        # whoever collects waits for the new one
        assert await node.saves.collect(JOB, old.snapshot, "leader", 0.0) is None
        for rank in (1, 0):
            await node.save(rank, "new")
        await trio.testing.wait_all_tasks_blocked()
        assert words(node.commit()) == [{"new"}, {"new"}]

    run(tmp_path, test)


def test_ranks_that_are_slow_are_waited_for(tmp_path):
    async def test(node: Node) -> None:
        await node.save(0, "new")
        await node.begin(1)
        node.clock.jump(SKEW_S / 2)
        await node.bring(1, "new", values=0)
        node.clock.jump(10 * SKEW_S)
        assert "waits for other nodes" in await node.incoming.done(JOB, 1)

    run(tmp_path, test)


def test_a_rank_that_tries_again_at_once_disturbs_nobody(tmp_path):
    async def test(node: Node) -> None:
        await node.begin(0)
        await node.begin(1)
        await node.bring(0, "old", values=1)
        await node.bring(1, "new")
        await node.begin(0)
        await node.bring(0, "new")
        assert "1 more of its ranks" in await node.incoming.done(JOB, 1)
        assert "waits for other nodes" in await node.incoming.done(JOB, 1)
        await trio.testing.wait_all_tasks_blocked()
        assert words(node.commit()) == [{"new"}, {"new"}]

    run(tmp_path, test)


def test_what_is_of_another_layout_or_job_is_given_up(tmp_path):
    async def test(node: Node) -> None:
        await node.bring(0, "old")
        node.ptc = build_ptc(parse_layout(LAYOUT))  # the job was removed, and made again
        with pytest.raises(ConflictError, match="the job was changed"):
            await node.bring(0, "new")
        with pytest.raises(NotFoundError, match="no rank 3"):
            await node.bring(3, "new")
        with pytest.raises(PreconditionError, match="rank 2 is on node m"):
            await node.bring(2, "new")
        with pytest.raises(PreconditionError, match=r"rank 0: .*the job was changed"):
            await node.incoming.done(JOB, 1)
        assert await node.incoming.delete(JOB, 0, "") == (3, 1)
        await node.bring(0, "new")

    run(tmp_path, test)
