"""Nodes that follow the registry, whatever they missed, and let go of what is past."""

from __future__ import annotations

import pytest
import trio

from tenplexfs.errors import ConflictError, UnavailableError
from tests.runtime.cluster import JOB
from tests.runtime.moving import WHOLE, move, ready, used


def test_a_node_that_missed_the_switch_hears_of_it_from_the_registry(cluster):
    async def main():
        await ready(cluster)
        cluster.calls.broken |= {("node1", "switch"), ("node2", "switch")}
        seen = await move(cluster, mesh={"pp": 1, "tp": 4})
        assert "node1" in seen[-1].message
        assert [node.shown().id.generation for node in cluster.nodes] == [2, 1, 1]
        async with trio.open_nursery() as nursery:
            for node in cluster.nodes:
                await nursery.start(node.table.run)
            assert [node.shown().id.generation for node in cluster.nodes] == [2, 2, 2]
            await cluster.check(WHOLE)
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_restarted_node_shows_the_same_snapshot(cluster):
    async def main():
        await ready(cluster)
        await move(cluster, mesh={"pp": 1, "tp": 4})
        before = cluster.nodes[0].shown().id
        for number in range(3):
            cluster.restart(number)
        async with trio.open_nursery() as nursery:
            for node in cluster.nodes:
                await nursery.start(node.table.run)
            assert [node.shown().id for node in cluster.nodes] == [before] * 3
            await cluster.check(WHOLE)
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_stage_that_was_committed_while_a_node_was_away_is_shown_when_it_returns(cluster):
    async def main():
        await ready(cluster)
        cluster.calls.broken.add(("node1", "switch"))
        await move(cluster, mesh={"pp": 1, "tp": 4})
        node = cluster.restart(1)
        cluster.calls.broken.clear()
        async with trio.open_nursery() as nursery:
            await nursery.start(node.table.run)
            assert node.shown().id.generation == 2
            assert [stored.committed for stored in node.store.snapshots()] == [True]
            await cluster.check(WHOLE)
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_without_the_registry_the_last_committed_snapshot_is_shown(cluster):
    async def main():
        await ready(cluster)
        node = cluster.restart(0)
        cluster.registry.away = True
        async with trio.open_nursery() as nursery:
            await nursery.start(node.table.run)
            assert node.table.registry_away == "registry: does not answer"
            assert node.shown().id.step == 0
            with pytest.raises(UnavailableError):
                await move(cluster, mesh={"pp": 1, "tp": 4})
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_registry_that_lost_everything_costs_no_bytes(cluster):
    async def main():
        await ready(cluster)
        node = cluster.nodes[0]
        async with trio.open_nursery() as nursery:
            await nursery.start(node.table.run)
            cluster.registry.current.clear()
            await node.table._poll(nursery)
            assert "does not know this job" in node.table.failure(JOB)
            assert used(cluster) == [1, 1, 0]
            await cluster.check(WHOLE)
            nursery.cancel_scope.cancel()
        restarted = cluster.restart(1)
        async with trio.open_nursery() as nursery:
            await nursery.start(restarted.table.run)
            assert restarted.table.jobs() == [JOB]
            assert used(cluster) == [1, 1, 0]
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_removal_that_a_node_missed_frees_its_bytes_when_it_hears_of_it(cluster):
    async def main():
        await ready(cluster)
        node = cluster.nodes[1]
        async with trio.open_nursery() as nursery:
            await nursery.start(node.table.run)
            cluster.calls.broken.add(("node1", "switch"))
            await cluster.nodes[0].coordinator.remove(JOB)
            while node.store.snapshots():
                await trio.lowlevel.checkpoint()
            assert JOB not in node.member.shown()
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_remove_frees_everything_and_the_name(cluster):
    async def main():
        await ready(cluster)
        await cluster.nodes[2].coordinator.remove(JOB)
        assert used(cluster) == [0, 0, 0]
        assert [node.store.used_bytes for node in cluster.nodes] == [0, 0, 0]
        assert not cluster.nodes[0].member.shown()
        await ready(cluster)
        assert cluster.nodes[1].shown().id.generation == 1

    trio.run(main)


def test_open_files_and_leases_keep_their_snapshot(cluster):
    async def main():
        await ready(cluster)
        node, other = cluster.nodes[:2]
        held = node.shown().open_shard(0, "layers/0/w")
        before = bytes(held.read(0, held.size) or b"")
        old = node.shown().id.txid
        lease = other.leases.lease(JOB, old, "", 60)
        await move(cluster, mesh={"pp": 1, "tp": 4})
        await other.member.sweep()
        assert len(other.store.snapshots()) == 2
        with other.member.open_arrays(JOB, old) as arrays:
            assert arrays.array(2, "layers/3/w") is not None
        other.leases.release(lease)
        await other.member.sweep()
        assert len(other.store.snapshots()) == 1
        assert bytes(held.read(0, held.size) or b"") == before

    trio.run(main)


def test_what_a_dead_coordinator_left_staged_is_dropped_under_the_lock(cluster):
    async def main():
        await ready(cluster)
        cluster.registry.refuse = True
        cluster.calls.broken |= {("node0", "drop"), ("node1", "drop")}
        with pytest.raises(ConflictError):
            await move(cluster, mesh={"pp": 1, "tp": 4})
        assert used(cluster) == [2, 2, 0]
        table = cluster.nodes[1].table
        async with trio.open_nursery() as nursery:
            await nursery.start(table.run)
            other = await cluster.registry.lock(JOB, "another", ttl_s=10)
            table._staged_since_s[JOB] = -100.0
            await table._tidy()
            assert used(cluster) == [2, 2, 0], "somebody works on it"
            await cluster.registry.unlock(other)
            await table._tidy()
            assert used(cluster) == [2, 1, 0]
            nursery.cancel_scope.cancel()
        assert cluster.registry.locks == {}
        await cluster.check(WHOLE)

    trio.run(main)
