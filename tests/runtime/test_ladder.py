"""Copies on other nodes, and what is left when nodes are lost: real stores, one process, numpy's tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import trio
import trio.testing

from tenplexfs.core.snapshot import NodeName
from tenplexfs.errors import UnavailableError
from tenplexfs.rpc.ranges import Scatter
from tenplexfs.runtime.coordinator import Change
from tenplexfs.runtime.copying import owners_of
from tenplexfs.runtime.ladder import Ladder
from tenplexfs.runtime.planning import Target
from tenplexfs.runtime.replicas import Replicas
from tests.runtime.cluster import JOB, Cluster, inline, layout_json
from tests.runtime.test_past import save, states

SPREAD = {"node0": [0], "node1": [1], "node2": [2], "node3": [3]}


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path, 4)
    yield made
    made.close()


async def start(
    cluster: Cluster, *, nodes: object = SPREAD, mesh: object = None, **settings: object
) -> list[Replicas]:
    layout = layout_json(nodes=nodes, **({"mesh": mesh} if mesh else {}))
    await cluster.nodes[0].coordinator.create(JOB, layout, json.dumps(settings, sort_keys=True).encode())
    kept = []
    for node in cluster.nodes:
        node.coordinator.recovery.beyond = Ladder(cluster.calls, inline, lambda: list(cluster.calls.nodes))
        keeper = Replicas(
            member=node.member,
            table=node.table,
            calls=cluster.calls,
            compute=inline,
            peers=cluster.peers,
            scatter=Scatter,
            living=lambda: list(cluster.calls.nodes),
            clock_ns=lambda: 7,
        )
        node.member.relieve_also(keeper.relieve)
        kept.append(keeper)
    return kept


async def settle(cluster: Cluster, kept: Sequence[Replicas], losses: int) -> None:
    """Lets the nodes work until each says that the job survives so many losses."""
    async with trio.open_nursery() as nursery:
        for keeper in kept:
            nursery.start_soon(keeper.run)
        with trio.fail_after(20):
            for node, keeper in zip(cluster.nodes, kept, strict=True):
                while True:
                    changed = node.table.changed
                    said = keeper.status(JOB)
                    if keeper.survives(JOB) == losses and said is not None and said["is_complete"]:
                        break
                    await changed.wait()
        nursery.cancel_scope.cancel()


@contextmanager
def as_steps(cluster: Cluster) -> Iterator[None]:
    """Has what is imported count as the next step of the job, as if it was saved."""
    coordinator = cluster.nodes[0].coordinator
    plain = coordinator.replace_state

    async def replace_state(job, request, load, report, **how):
        async def load_step(known):
            return replace(await load(known), settings_json=known.settings_json, past=known.snapshot)

        return await plain(job, request, load_step, report, **how)

    coordinator.replace_state = replace_state
    yield
    del coordinator.replace_state


def lose(cluster: Cluster, *numbers: int) -> None:
    """Nodes that do not answer any more, and have nothing."""
    for number in numbers:
        name = NodeName(f"node{number}")
        del cluster.calls.nodes[name], cluster.peers.open_arrays[name]
        shutil.rmtree(cluster.path / name)


async def go_on(cluster: Cluster, left: Sequence[int], by: int) -> str:
    said = []
    nodes = {NodeName(f"node{number}"): 4 // len(left) for number in left}
    asked = next(node for node in cluster.nodes if node.name == f"node{by}")
    await asked.coordinator.reconfigure(
        Change(JOB, Target(mesh={"pp": 1, "tp": 4}, nodes=nodes)), said.append
    )
    cluster.nodes = [node for node in cluster.nodes if node.name in nodes]
    return next(each.message for each in reversed(said) if each.plan)


def test_copies_go_round(cluster):
    async def main():
        kept = await start(cluster, replicas=2)
        await save(cluster, 1)
        await settle(cluster, kept, 2)
        assert kept[1].status(JOB)["of"] == ["node0", "node3"]
        before = [node.store.used_bytes for node in cluster.nodes]
        for step in (2, 3):
            await save(cluster, step)
            await settle(cluster, kept, 2)
        for node in cluster.nodes:
            await node.member.sweep()
            copies = node.store.snapshots("gpt@copies")
            assert [(each.id.step, each.committed) for each in copies] == [(3, True)]
            assert {rank for rank, _ in copies[0].arrays} == {
                int(owner[-1]) for owner in (node.name, *owners_of(list(SPREAD), node.name, 2))
            }
            assert list(node.store.verify()) == []
        assert max(node.store.used_bytes for node in cluster.nodes) < 2 * max(before)
        await cluster.nodes[2].coordinator.remove(JOB)
        for node in cluster.nodes:
            await node.member.sweep()
            assert node.store.snapshots() == ()

    trio.run(main)


def test_a_job_without_copies_survives_less_when_a_node_is_missed(cluster):
    async def main():
        spread = {"node0": [0, 1, 2, 3], "node1": [4, 5, 6, 7]}
        kept = await start(cluster, mesh={"dp": 2, "pp": 2, "tp": 2}, nodes=spread)
        await save(cluster, 1)
        node, keeper = cluster.nodes[0], kept[0]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run)
            await trio.testing.wait_all_tasks_blocked()
            assert (keeper.survives(JOB), node.member.shown()[JOB].survives_node_losses) == (None, 1)
            lose(cluster, 1)
            with trio.fail_after(20):
                changed = node.table.changed
                node.table.touch()
                while keeper.survives(JOB) != 0:
                    changed = node.table.changed
                    await changed.wait()
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_copies_are_refused_where_there_is_no_room_and_give_way_to_saves(cluster):
    async def main():
        kept = await start(cluster, replicas=1, keep_steps=1)
        await save(cluster, 1)
        await settle(cluster, kept, 1)
        for node in cluster.nodes:
            assert len(node.store.snapshots("gpt@copies")) == 1
            # room for two states of its own and nothing else
            size = node.store.used_bytes * 11 // 10
            node.store.limit_bytes = node.store._files._limit_bytes = size
        await save(cluster, 2)
        for node in cluster.nodes:
            assert node.store.snapshots("gpt@copies") == ()
            node.store.limit_bytes = node.store._files._limit_bytes = node.store.used_bytes
        await cluster.check(states(2))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kept[0].run)
            with trio.fail_after(20):
                while "bytes needed on node node0" not in (kept[0].status(JOB)["failure"] or ""):
                    await cluster.nodes[0].table.changed.wait()
            nursery.cancel_scope.cancel()
        assert kept[0].survives(JOB) == 0
        assert not kept[0].status(JOB)["is_complete"]
        await cluster.check(states(2))

    trio.run(main)


@pytest.mark.parametrize("gone", [(0,), (1, 2), (3, 0)])
def test_what_two_nodes_had_is_taken_from_copies(cluster, gone):
    async def main():
        kept = await start(cluster, replicas=2)
        for step in (1, 2):
            await save(cluster, step)
        await settle(cluster, kept, 2)
        left = [number for number in range(4) if number not in gone]
        lose(cluster, *gone)
        message = await go_on(cluster, left[:2], by=left[-1])
        assert "from copies on" in message
        for number in left[:2]:
            assert cluster.nodes[left[:2].index(number)].shown().id.step == 2
        await cluster.check(states(2))

    trio.run(main)


def test_an_older_step_that_is_whole_comes_before_nothing(cluster):
    async def main():
        kept = await start(cluster, replicas=1)
        await save(cluster, 1)
        await settle(cluster, kept, 1)
        with as_steps(cluster):
            await save(cluster, 2)  # and no copies of it
        lose(cluster, 1)
        message = await go_on(cluster, [0, 2], by=0)
        assert message == "without node1: from copies on node2, back at step 1"
        await cluster.check(states(1))
        lose(cluster, 0)
        with pytest.raises(UnavailableError, match="without node0 no replicas and no copies have all of it"):
            await go_on(cluster, [2], by=2)

    trio.run(main)


def test_a_step_whose_nodes_stop_answering_is_not_passed_over(cluster):
    """They have told of it a moment before: an older one, which is whole too, is for lost bytes alone."""

    async def main():
        kept = await start(cluster, nodes={"node0": [0, 1], "node1": [2, 3]}, replicas=1, keep_steps=3)
        for step in (1, 2):
            await save(cluster, step)
            await settle(cluster, kept, 1)
        with as_steps(cluster):
            await save(cluster, 3)  # and no copies of it
        newest = cluster.nodes[0].member.views(JOB)[1].id
        assert newest.step == 2
        lose(cluster, 1)
        describe = cluster.calls.describe

        async def silent(node, job, txid, **how):
            if txid == newest.txid:
                raise UnavailableError(f"node {node}: does not answer")
            return await describe(node, job, txid, **how)

        cluster.calls.describe = silent
        with pytest.raises(UnavailableError, match=r"step 2 .* is kept, and node0 stopped answering"):
            await go_on(cluster, [0, 2], by=0)
        assert cluster.nodes[0].shown().id.step == 3
        cluster.calls.describe = describe
        cluster.calls.broken.add(("node2", "inventory"))
        with pytest.raises(UnavailableError, match="node2, which may have copies, does not answer"):
            await go_on(cluster, [0, 2], by=0)
        cluster.calls.broken.clear()
        assert (await go_on(cluster, [0, 2], by=0)).endswith("back at step 2")

    trio.run(main)
