from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tenplexfs.core.snapshot import JobName, NodeName, TxId
from tenplexfs.errors import NotFoundError, UnavailableError
from tenplexfs.runtime.leases import LeaseKeeper, LeaseTable

JOB, TXID, NODE = JobName("gpt"), TxId("a"), NodeName("node1")


class Node:
    """Gives leases, and remembers what it was asked."""

    def __init__(self) -> None:
        self.table = LeaseTable()
        self.calls: list[str] = []
        self.away = False

    async def lease(self, node: NodeName, job: JobName, txid: TxId, lease_id: str, ttl_s: float) -> str:
        await trio.lowlevel.checkpoint()
        self.calls.append("renew" if lease_id else "take")
        if self.away:
            raise UnavailableError("away")
        return self.table.lease(job, txid, lease_id, ttl_s)

    async def release(self, node: NodeName, lease_id: str) -> None:
        await trio.lowlevel.checkpoint()
        self.calls.append("release")
        self.table.release(lease_id)


def run(main) -> None:
    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_lease_ends_by_itself():
    async def main():
        table = LeaseTable()
        lease = table.lease(JOB, TXID, "", 10)
        assert table.count(TXID) == 1
        await trio.sleep(6)
        assert table.lease(JOB, TXID, lease, 10) == lease
        await trio.sleep(6)
        assert table.count(TXID) == 1
        await trio.sleep(6)
        assert table.count(TXID) == 0
        with pytest.raises(NotFoundError):
            table.lease(JOB, TXID, lease, 10)
        table.release(lease)

    run(main)


def test_open_handles_take_keep_and_give_back_one_lease():
    async def main():
        node = Node()
        keeper = LeaseKeeper(node, ttl_s=30)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run)
            keeper.hold(NODE, JOB, TXID)
            keeper.hold(NODE, JOB, TXID)
            await trio.sleep(1)
            assert node.table.count(TXID) == 1
            await trio.sleep(100)
            assert node.table.count(TXID) == 1
            assert node.calls[0] == "take"
            assert set(node.calls[1:]) == {"renew"}
            keeper.drop(NODE, JOB, TXID)
            await trio.sleep(1)
            assert node.table.count(TXID) == 1
            keeper.drop(NODE, JOB, TXID)
            await trio.sleep(1)
            assert node.table.count(TXID) == 0
            assert node.calls[-1] == "release"
            nursery.cancel_scope.cancel()

    run(main)


def test_a_node_that_comes_back_gives_a_new_lease():
    async def main():
        node = Node()
        node.away = True
        keeper = LeaseKeeper(node, ttl_s=30)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run)
            keeper.hold(NODE, JOB, TXID)
            await trio.sleep(1)
            node.away = False
            await trio.sleep(15)
            assert node.table.count(TXID) == 1
            node.table = LeaseTable()
            await trio.sleep(25)
            assert node.table.count(TXID) == 1
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    run(main)
