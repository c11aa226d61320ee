"""Another registry in the place of one, or beside it, and late orders: no node takes anybody's word."""

from __future__ import annotations

from itertools import count

import pytest
import trio
import trio.testing

from tenplexfs.core.build import build_ptc
from tenplexfs.core.membership import Mandate
from tenplexfs.errors import ConflictError, PreconditionError, UnavailableError
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.runtime.coordinator import Change
from tenplexfs.runtime.planning import Target
from tests.runtime.cluster import JOB, Cluster, MemoryRegistry, Node, layout_json, tensors_of
from tests.runtime.moving import WHOLE, ready
from tests.runtime.test_rebuilding import rebuilder

MESHES = [{"pp": 1, "tp": 4}, {"pp": 4, "tp": 1}, {"pp": 2, "tp": 2}]
OTHER = tensors_of(build_ptc(parse_layout(layout_json())), seed=1)
ALL = dict.fromkeys(("node0", "node1", "node2"), 0)


async def move(cluster: Cluster, number: int, *, by: int = 0, nodes: object = None) -> None:
    target = Target(mesh=MESHES[number % len(MESHES)], nodes=nodes)
    await cluster.nodes[by].coordinator.reconfigure(Change(JOB, target), lambda progress: None)


def keep_orders(cluster: Cluster) -> list:
    """Returns a list that every order to stage goes into."""
    orders, stage = [], cluster.calls.stage

    async def kept(node, order, report):
        orders.append((node, order))
        await stage(node, order, report)

    cluster.calls.stage = kept
    return orders


def begin_anew(cluster: Cluster) -> None:
    """Has a registry that counts from 1 in the place of the old one, with the same heads."""
    cluster.registry.tokens = count(1)
    cluster.registry.locks.clear()


def generations(cluster: Cluster) -> list[int]:
    return [node.shown().id.generation for node in cluster.nodes]


def test_another_registry_takes_over_without_a_restart(cluster):
    async def main():
        await ready(cluster)
        for number in range(2):
            await move(cluster, number)
        cluster.calls.broken |= {("node0", "drop"), ("node1", "drop")}
        cluster.registry.refuse = True  # something stays staged
        with pytest.raises(ConflictError):
            await move(cluster, 2)
        cluster.registry.refuse = False
        cluster.calls.broken.clear()
        begin_anew(cluster)
        await move(cluster, 2)
        assert generations(cluster) == [4, 4, 4]
        await cluster.check(WHOLE)

    trio.run(main)


def test_a_registry_whose_revisions_begin_anew_is_followed(cluster):
    async def main():
        await ready(cluster)
        await move(cluster, 0)
        node = cluster.nodes[1]
        async with trio.open_nursery() as nursery:
            await nursery.start(node.table.run)
            begin_anew(cluster)
            cluster.registry.events.clear()
            cluster.calls.broken.add(("node1", "switch"))
            for number in (1, 2):  # by a look at all heads, and by the watch that begins anew with it
                await move(cluster, number)
                while node.shown().id.generation < 2 + number:
                    await node.table.changed.wait()
            await cluster.check(WHOLE)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.02))


def test_late_orders_undo_nothing_under_whatever_registry(cluster):
    async def main():
        orders = keep_orders(cluster)
        await ready(cluster)
        await move(cluster, 0, nodes=ALL)
        late = [each for each in orders if each[1].snapshot.generation == 2]
        for renews in (False, True):
            if renews:
                begin_anew(cluster)
            await move(cluster, 1, nodes=ALL)
            cluster.registry.refuse = True
            cluster.calls.broken |= {(node, "drop") for node in ALL}
            with pytest.raises(ConflictError):
                await move(cluster, 0, nodes=ALL)  # staged, and may be committed yet
            cluster.registry.refuse = False
            cluster.calls.broken.clear()
            stored = [node.store.snapshots() for node in cluster.nodes]
            staged = [[each.id.txid for each in every if not each.committed] for every in stored]
            assert all(staged)
            for node, order in late:
                member = cluster.calls.nodes[node].member
                with pytest.raises(
                    ConflictError, match=f"node {node}: job gpt: .* nobody has the job's lock"
                ):
                    await member.stage(order, lambda done, total: None)
                for txid in staged[int(node[-1])]:
                    with pytest.raises(ConflictError, match="the order is late, or comes of another"):
                        await member.drop(JOB, txid, order.by)
                    await member.drop(JOB, txid, None)
            assert [node.store.snapshots() for node in cluster.nodes] == stored
            await cluster.check(WHOLE)

    trio.run(main)


def test_what_may_be_the_head_is_dropped_on_nobodys_order(cluster):
    """All daemons were restarted between the commit and the news of it."""

    async def main():
        orders = keep_orders(cluster)
        await ready(cluster)
        cluster.calls.broken |= {(node, "switch") for node in ALL}
        await move(cluster, 0, nodes=ALL)
        cluster.calls.broken.clear()
        txid = cluster.registry.current[JOB].snapshot.txid
        for number in range(3):
            cluster.restart(number)
        lock = await cluster.registry.lock(JOB, "another", ttl_s=10)
        for by in (orders[-1][1].by, Mandate(lock.owner, lock.token)):
            for node in cluster.nodes:
                with pytest.raises((ConflictError, PreconditionError), match=f"{txid}: ordered|is the head"):
                    await node.member.drop(JOB, txid, by)
        await cluster.registry.unlock(lock)
        async with trio.open_nursery() as nursery:
            for node in cluster.nodes:
                await nursery.start(node.table.run)
            assert [node.shown().id.txid for node in cluster.nodes] == [txid] * 3
            await cluster.check(WHOLE)
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_what_was_is_not_let_go_of_by_a_late_order(cluster):
    """That of an attempt to save what was committed after all, and that some node may show still."""

    async def main():
        orders = keep_orders(cluster)
        await ready(cluster)
        cluster.calls.broken.add(("node1", "switch"))
        await move(cluster, 0, nodes=ALL)
        member, old = cluster.nodes[0].member, orders[-4][1].snapshot
        assert [each.snapshot for each in member.past()] == [old]
        with pytest.raises(ConflictError, match="the order is late"):
            await member.drop(JOB, old.txid, orders[-4][1].by)
        await member.drop(JOB, old.txid, None)
        await member.sweep()
        assert [each.snapshot for each in member.past()] == [old]

    trio.run(main)


def test_without_the_registry_no_order_counts(cluster):
    async def main():
        orders = keep_orders(cluster)
        await ready(cluster)
        cluster.registry.away = True
        (node, order), *_ = orders
        with pytest.raises(UnavailableError, match=f"node {node}: job gpt: registry: does not answer"):
            await cluster.calls.nodes[node].member.stage(order, lambda done, total: None)
        with pytest.raises(UnavailableError, match="does not answer"):
            await cluster.calls.nodes[node].member.drop(JOB, "ab", order.by)

    trio.run(main)


def test_nodes_with_different_registries_refuse_each_others_coordinators(cluster):
    async def main():
        await ready(cluster)
        await move(cluster, 0, nodes=ALL)
        other = MemoryRegistry(current=dict(cluster.registry.current), tokens=count(1))
        cluster.nodes[2].close()
        node = cluster.nodes[2] = Node("node2", cluster.path / "node2", other, cluster.peers, cluster.calls)
        async with trio.open_nursery() as nursery:
            await nursery.start(node.table.run)
            for by in (0, 2):
                with pytest.raises(ConflictError, match="late, or comes of another registry"):
                    await move(cluster, 1, by=by, nodes=ALL)
                assert generations(cluster) == [2, 2, 2]
            await move(cluster, 1, nodes={"node0": 0, "node1": 0})  # without the one that is elsewhere
            assert generations(cluster) == [3, 3, 2], "it shows what its own says"
            told = cluster.registry.current[JOB]
            with pytest.raises(ConflictError, match=r"told of generation 3 .* it is another one"):
                await node.table.switch(JOB, told)
            assert len(node.store.snapshots(JOB)) == 1
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_an_old_backup_of_the_registry_costs_no_bytes_and_is_moved_on(cluster):
    async def main():
        await ready(cluster)
        old = cluster.registry.current[JOB]
        await move(cluster, 0, nodes=ALL)
        now = cluster.registry.current[JOB]
        for node in cluster.nodes:
            await node.member.sweep()
        cluster.registry.current[JOB] = old
        for number in (1, 2):
            cluster.restart(number)
        with pytest.raises(UnavailableError, match="none of its nodes node0, node1 answers"):
            await move(cluster, 1)
        async with trio.open_nursery() as nursery:
            for node in cluster.nodes[1:]:
                await nursery.start(node.table.run)
                assert "`registry rebuild` moves it on" in node.table.failure(JOB)
                assert len(node.store.snapshots(JOB)) == 1
            survey = await rebuilder(cluster).survey()
            assert [(each.now, each.head) for each in survey.jobs] == [(old, now)]
            await rebuilder(cluster).write(survey, force=False)
            while cluster.nodes[1].table.failure(JOB) or cluster.nodes[2].table.failure(JOB):
                await cluster.nodes[1].table.changed.wait()
            await cluster.check(WHOLE)
            await move(cluster, 1, nodes=ALL)
            assert generations(cluster) == [3, 3, 3]
            await cluster.check(WHOLE)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.02))


def test_a_step_that_the_registry_has_forgotten_is_not_gone_back_on(cluster):
    """The old head is a step that is kept, so that its bytes are there."""

    async def main():
        await ready(cluster)
        old = cluster.registry.current[JOB]
        await cluster.load(OTHER, step=5)
        cluster.registry.current[JOB] = old
        with pytest.raises(ConflictError, match=r"generation 2 step 5 .* was committed, and the reg"):
            await move(cluster, 0)
        await cluster.check(OTHER)
        node = cluster.restart(1)
        async with trio.open_nursery() as nursery:
            await nursery.start(node.table.run)
            assert "was committed since: it was made of an old backup" in node.table.failure(JOB)
            await cluster.check(OTHER)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.02))


def test_nothing_is_made_where_the_registry_was_lost_and_nodes_have_the_job(cluster):
    async def main():
        await ready(cluster)
        cluster.registry.current.clear()
        with pytest.raises(ConflictError, match="knows no such job: `registry rebuild` moves it on, "):
            await cluster.nodes[0].coordinator.create(JOB, layout_json(), b"{}")
        await cluster.check(WHOLE)

    trio.run(main)


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_job_that_was_made_anew_while_a_node_was_away_is_shown_there(cluster, is_shown):
    async def main():
        await ready(cluster)
        await move(cluster, 0, nodes=ALL)
        away = cluster.calls.nodes.pop("node2")
        await cluster.nodes[0].coordinator.remove(JOB)
        await cluster.nodes[0].coordinator.create(JOB, layout_json(), b"{}")
        await cluster.load(OTHER)
        cluster.calls.nodes["node2"] = away
        survey_error = pytest.raises(PreconditionError, match="the nodes have nothing newer")
        with survey_error:
            await rebuilder(cluster).survey()
        node = away if is_shown else cluster.restart(2)
        async with trio.open_nursery() as nursery:
            await nursery.start(node.table.run)
            assert node.shown().id == cluster.nodes[0].shown().id
            await node.member.sweep()
            assert node.store.snapshots(JOB) == ()
            await cluster.check(OTHER)
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_what_was_stays_while_a_living_guest_may_still_open_it(cluster):
    async def main():
        await ready(cluster)
        cluster.calls.broken.add(("node2", "switch"))
        old = cluster.nodes[2].shown()
        await move(cluster, 0, nodes={"node0": 0, "node1": 0})
        for node in cluster.nodes:
            await node.member.sweep()
        assert old.id.generation == 1
        for rank, path in ((0, "layers/0/w"), (3, "layers/3/w")):
            assert await cluster.read(old.open_shard(rank, path)), "opened on the guest, read from the others"
        cluster.calls.living = {"node0", "node1"}
        await move(cluster, 1, nodes={"node0": 0, "node1": 0})
        for node in cluster.nodes[:2]:
            await node.member.sweep()
            assert 2 not in [each.id.generation for each in node.store.snapshots()], "the dead hold nothing"

    trio.run(main)
