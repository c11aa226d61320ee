"""Nodes lost before and while a job is moved: the others have the bytes, or it is said what is gone."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tenplexfs.core.build import build_ptc
from tenplexfs.core.snapshot import NodeName
from tenplexfs.errors import CorruptError, NotFoundError, UnavailableError
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.runtime.coordinator import Change
from tenplexfs.runtime.planning import Resolved, Target
from tenplexfs.runtime.recovery import Recovery, Wish
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


class Frozen:
    """A node that takes calls, and answers none until it is thawed; time passes when a test says so."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.name = f"node{number}"
        self.asked, self.thawed = trio.Event(), trio.Event()
        self.clock = trio.lowlevel.current_clock()
        inventory, describe = cluster.calls.inventory, cluster.calls.describe

        async def slow_inventory(node, job, **how):
            await self.wait(node)
            return await inventory(node, job, **how)

        async def slow_describe(node, job, txid, **how):
            await self.wait(node)
            return await describe(node, job, txid, **how)

        cluster.calls.inventory, cluster.calls.describe = slow_inventory, slow_describe

    async def wait(self, node: str) -> None:
        if node == self.name:
            self.asked.set()
            await self.thawed.wait()

    async def pass_time(self, seconds: float) -> None:
        """Lets time pass once it is being waited for."""
        await self.asked.wait()
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(2):
            self.clock.jump(seconds / 2)
            await trio.testing.wait_all_tasks_blocked()


def run_in_virtual_time(work) -> None:
    trio.run(work, clock=trio.testing.MockClock())


def test_a_node_that_is_dead_for_the_registry_is_not_waited_for(cluster):
    async def main():
        await ready(cluster)
        frozen = Frozen(cluster, 1)
        cluster.calls.living = {"node0", "node2", "node3"}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(move, cluster, on("node0", "node2", tp=1))
            await frozen.pass_time(1.1)
        await check(cluster, 0, 2, 3, 4)

    run_in_virtual_time(main)


def test_a_node_that_can_be_done_without_is_not_waited_for(cluster):
    """Its lease goes on: it may only be slow."""

    async def main():
        await ready(cluster)
        frozen = Frozen(cluster, 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(move, cluster, on("node0", "node2", tp=1))
            await frozen.pass_time(1.8)
            assert cluster.nodes[0].shown().id.generation == 1
            await frozen.pass_time(0.4)
        await check(cluster, 0, 2, 3, 4)
        assert "node1" not in cluster.peers.asked

    run_in_virtual_time(main)


def test_a_slow_node_of_the_new_layout_is_waited_for(cluster):
    async def main():
        await ready(cluster)
        frozen = Frozen(cluster, 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(move, cluster, on("node0", "node1", tp=1))
            await frozen.pass_time(9.0)
            assert cluster.nodes[0].shown().id.generation == 1
            frozen.thawed.set()
        assert cluster.nodes[1].shown().id.generation == 2
        await cluster.check(WHOLE)

    run_in_virtual_time(main)


class OlderStepError(UnavailableError):
    """The job would go back to an older step."""


class OnlyOlder:
    """There are no copies."""

    async def copies(self, wish):
        return None

    async def older(self, wish):
        raise OlderStepError("an older step")


async def alone(cluster: Cluster) -> None:
    """Each node has what no other has."""
    nodes = {"node0": [0], "node1": [1], "node2": [2], "node3": [3]}
    await cluster.nodes[0].coordinator.create(JOB, layout_json(nodes=nodes), b"{}")
    await cluster.load(tensors_of(build_ptc(parse_layout(layout_json(nodes=nodes)))))
    cluster.nodes[0].coordinator.recovery.beyond = OnlyOlder()


def test_a_slow_node_that_alone_has_its_bytes_is_waited_for(cluster):
    async def main():
        await alone(cluster)
        frozen = Frozen(cluster, 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(move, cluster, on("node0", "node2"))
            await frozen.pass_time(9.0)
            assert cluster.nodes[0].shown().id.generation == 1
            frozen.thawed.set()
        assert cluster.nodes[0].shown().id.generation == 2
        await cluster.check(tensors_of(build_ptc(parse_layout(layout_json()))))

    run_in_virtual_time(main)


def test_once_such_a_node_is_missed_the_job_goes_back(cluster):
    async def main():
        await alone(cluster)
        frozen = Frozen(cluster, 1)
        async with trio.open_nursery() as nursery:

            async def go_back():
                with pytest.raises(OlderStepError):
                    await move(cluster, on("node0", "node2"))

            nursery.start_soon(go_back)
            await frozen.pass_time(9.0)
            cluster.calls.living = {"node0", "node2", "node3"}
            await frozen.pass_time(1.1)

    run_in_virtual_time(main)


@pytest.mark.parametrize("is_gone", [True, False])
def test_ranks_are_not_stopped_when_some_are_gone(cluster, is_gone):
    async def main():
        await ready(cluster)
        stopped = []

        async def stop(head):
            stopped.append(head)

        if is_gone:
            cluster.kill(1)
        coordinator = cluster.nodes[0].coordinator
        change = Change(JOB, on("node0", "node2", tp=1))
        await coordinator.reconfigure(change, lambda progress: None, stop=stop)
        assert len(stopped) == (not is_gone)

    run(main)


class NoFurther:
    """Looks nowhere else: it must not be asked."""

    async def copies(self, wish):
        raise AssertionError

    older = copies


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
                await ask(Wish(JOB, head, known, wanted, lost))

    run(main)
