"""Nodes lost before and while a job is moved: the others have the bytes, or it is said what is gone."""

from __future__ import annotations

import pytest
import trio

from tenplexfs.core.build import build_ptc
from tenplexfs.core.snapshot import NodeName
from tenplexfs.errors import CorruptError, NotFoundError, UnavailableError
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.runtime.coordinator import Change
from tenplexfs.runtime.planning import Resolved, Target
from tenplexfs.runtime.recovery import Recovery
from tests.runtime.cluster import JOB, LAYOUT, Cluster, layout_json, tensors_of

TWICE = {
    "mesh": {"dp": 2, "tp": 2},
    "nodes": {"node0": [0], "node1": [1], "node2": [2], "node3": [3]},
    "tensors": {
        path: {key: value for key, value in entry.items() if key != "on"}
        for path, entry in LAYOUT["tensors"].items()
        if path != "head"
    },
}
WHOLE = tensors_of(build_ptc(parse_layout(layout_json(**TWICE))))


def on(*nodes: str, **mesh: int) -> Target:
    return Target(mesh=mesh, nodes=dict.fromkeys(nodes, 0))


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path, 5)
    yield made
    made.close()


def run(work) -> None:
    trio.run(work)


async def ready(cluster: Cluster) -> None:
    await cluster.nodes[0].coordinator.create(JOB, layout_json(**TWICE), b"{}")
    await cluster.load(WHOLE)


async def move(cluster: Cluster, target: Target, by: int = 0):
    seen = []
    await cluster.nodes[by].coordinator.reconfigure(Change(JOB, target), seen.append)
    return seen


async def check(cluster: Cluster, *numbers: int) -> None:
    cluster.nodes = [cluster.nodes[number] for number in numbers]
    await cluster.check(WHOLE)


def test_a_node_that_was_lost_before_is_planned_without(cluster):
    async def main():
        await ready(cluster)
        cluster.kill(1)
        seen = await move(cluster, on("node0", "node2", tp=1))
        assert "without node1: from replicas" in [each.message for each in seen]
        plan = seen[-1].plan
        assert "node1" not in plan["matrix"]
        assert plan["bytes"]["moved"] == plan["bytes"]["moved_lower_bound"]
        await check(cluster, 0, 2, 3, 4)

    run(main)


def test_what_is_nowhere_any_more_is_named_and_nothing_changes(cluster):
    async def main():
        await ready(cluster)
        before = cluster.nodes[0].shown().id
        cluster.kill(1)
        cluster.kill(3)  # the other one of the same tp rank
        with pytest.raises(UnavailableError, match=r"no node that is left holds .*emb \[") as caught:
            await move(cluster, on("node0", "node2", tp=1))
        assert caught.value.details["lost"] == ["node1", "node3"]
        assert "\n" not in caught.value.message
        assert cluster.nodes[0].shown().id == before
        assert cluster.registry.locks == {}

    run(main)


def test_a_source_that_dies_while_others_take_from_it_is_replaced(cluster):
    """Its replica has the same bytes; what was staged with the old plan is gone."""

    async def main():
        await ready(cluster)
        died = []
        fetch = cluster.peers.fetch

        async def dying(node, job, txid, ranges, write, *, deadline_s, **more):
            if not died and node in ("node1", "node3"):
                died.append(node)
                cluster.kill(int(node[-1]))
            await fetch(node, job, txid, ranges, write, deadline_s=deadline_s, **more)

        cluster.peers.fetch = dying
        seen = await move(cluster, on("node0", "node2", "node4", dp=3, tp=1))
        assert f"without {died[0]}: from replicas" in [each.message for each in seen]
        assert any(f"its source {died[0]}" in each.message for each in seen)
        left = [number for number in range(5) if f"node{number}" != died[0]]
        await check(cluster, *left)
        assert [len(node.store.snapshots()) for node in cluster.nodes if node.name in ("node0", "node2")] == [
            1,
            1,
        ]

    run(main)


@pytest.mark.parametrize("error", [CorruptError, NotFoundError])
def test_a_source_that_sends_no_good_bytes_is_replaced(cluster, error):
    async def main():
        await ready(cluster)
        fetch = cluster.peers.fetch

        async def failing(node, job, txid, ranges, write, *, deadline_s, **more):
            if node == "node1":
                raise error("w: sum 1, should be 2")
            await fetch(node, job, txid, ranges, write, deadline_s=deadline_s, **more)

        cluster.peers.fetch = failing
        await move(cluster, on("node0", "node2", "node4", dp=3, tp=1))
        await check(cluster, 0, 2, 3, 4)

    run(main)


def test_a_source_that_hangs_and_is_dead_is_replaced_when_its_lease_ends(cluster):
    async def main():
        await ready(cluster)
        fetch = cluster.peers.fetch

        async def hanging(node, job, txid, ranges, write, *, deadline_s, **more):
            if node == "node3":
                cluster.calls.living = {"node0", "node1", "node2", "node4"}
                await trio.sleep_forever()
            await fetch(node, job, txid, ranges, write, deadline_s=deadline_s, **more)

        cluster.peers.fetch = hanging
        seen = await move(cluster, on("node0", "node1", "node2", dp=3, tp=1))
        if not any("node3 died" in each.message for each in seen):
            assert "node3" not in cluster.peers.asked
        await check(cluster, 0, 1, 2, 4)

    run(main)


def test_a_new_member_that_does_not_answer_is_named(cluster):
    async def main():
        await ready(cluster)
        before = cluster.nodes[0].shown().id
        cluster.calls.broken.add(("node4", "stage"))
        with pytest.raises(
            UnavailableError, match="node node4 of the new layout: node node4: does not answer"
        ):
            await move(cluster, on("node0", "node4", tp=1))
        assert cluster.nodes[0].shown().id == before
        await check(cluster, 0, 1, 2, 3, 4)

    run(main)


def test_a_node_that_came_back_empty_is_filled_by_asking_for_the_same_layout(cluster):
    async def main():
        await ready(cluster)
        await move(cluster, Target(mesh={}))
        assert cluster.nodes[0].shown().id.generation == 1
        cluster.kill(1)
        cluster.nodes[1] = cluster.start("node1")
        await move(cluster, Target(mesh={}))
        assert cluster.nodes[0].shown().id.generation == 2
        await cluster.check(WHOLE)
        await move(cluster, Target(mesh={}))
        assert cluster.nodes[0].shown().id.generation == 2

    run(main)


def test_a_node_that_is_dead_for_the_registry_is_not_waited_for(cluster):
    async def main():
        await ready(cluster)
        describe = cluster.calls.describe

        async def waiting(node, job, txid):
            if node == "node1":
                await trio.sleep_forever()
            return await describe(node, job, txid)

        cluster.calls.describe = waiting
        cluster.calls.living = {"node0", "node2", "node3"}
        with trio.fail_after(10):
            await move(cluster, on("node0", "node2", tp=1))

    run(main)


class NoFurther:
    """Looks nowhere else: it must not be asked."""

    async def find(self, *wish):
        raise AssertionError

    has_copies = find


def test_a_planner_that_dies_sends_no_job_back_to_an_older_step(cluster):
    async def dies(function, *args, **kwargs):
        raise UnavailableError("the worker process that plans died twice")

    async def main():
        await ready(cluster)
        node = cluster.nodes[0]
        head = node.member.shown()[JOB].head
        known = await node.coordinator.describe(JOB, head)
        wanted = Resolved(known.layout_json, head.layout_digest, head.nodes)
        recovery = Recovery(calls=cluster.calls, compute=dies, living=tuple)
        recovery.beyond = NoFurther()
        lost = frozenset({NodeName("node1")})
        for ask in (recovery.base_for, recovery.has_replicas):
            with pytest.raises(UnavailableError, match="died twice"):
                await ask(JOB, head, known, wanted, lost)

    run(main)
