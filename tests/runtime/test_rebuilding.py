"""A registry that was lost is made again of what the nodes store, and of nothing less."""

from __future__ import annotations

import pytest
import trio

from tenplexfs.errors import PreconditionError
from tenplexfs.runtime.coordinator import Change
from tenplexfs.runtime.heads import HeadMover
from tenplexfs.runtime.planning import Target
from tenplexfs.runtime.rebuilding import Rebuilder
from tenplexfs.runtime.recovery import Recovery
from tests.runtime.cluster import JOB, Cluster, inline, layout_json
from tests.runtime.moving import WHOLE


def rebuilder(cluster: Cluster) -> Rebuilder:
    calls = cluster.calls
    return Rebuilder(
        node="node0",
        heads=HeadMover(cluster.registry),
        calls=calls,
        compute=inline,
        recovery=Recovery(calls=calls, compute=inline, living=lambda: calls.nodes),
        nodes=lambda: ["node0", "node1", "node2"],
    )


async def ready(cluster: Cluster) -> None:
    await cluster.nodes[0].coordinator.create(JOB, layout_json(), b"{}")
    await cluster.load(WHOLE, step=5)
    await move(cluster)


async def move(cluster: Cluster) -> None:
    change = Change(JOB, Target(mesh={"pp": 4, "tp": 1}, nodes={"node1": 2, "node2": 2}))
    await cluster.nodes[0].coordinator.reconfigure(change, lambda progress: None)


def lose(cluster: Cluster) -> None:
    cluster.registry.current.clear()
    cluster.registry.events.clear()


def test_the_newest_whole_snapshot_of_each_job_is_its_head_again(cluster):
    async def main():
        await ready(cluster)
        before = cluster.registry.current[JOB]
        with pytest.raises(PreconditionError, match="it knows gpt, and the nodes have nothing newer"):
            await rebuilder(cluster).survey()
        lose(cluster)
        survey = await rebuilder(cluster).survey()
        assert [each.head for each in survey.jobs] == [before]
        assert (survey.silent, survey.missing) == ((), ())
        assert cluster.registry.current == {}, "it is only shown"
        await rebuilder(cluster).write(survey, force=False)
        assert cluster.registry.current == {JOB: before}
        assert cluster.registry.locks == {}
        for number in range(3):
            cluster.restart(number)
        async with trio.open_nursery() as nursery:
            for node in cluster.nodes:
                await nursery.start(node.table.run)
            await cluster.check(WHOLE)
            nursery.cancel_scope.cancel()
        with pytest.raises(PreconditionError, match=r"job gpt is at generation 2 .* by now"):
            await rebuilder(cluster).write(survey, force=True)

    trio.run(main)


def test_a_commit_that_one_node_alone_has_heard_of_counts(cluster):
    async def main():
        await cluster.nodes[0].coordinator.create(JOB, layout_json(), b"{}")
        await cluster.load(WHOLE, step=5)
        cluster.calls.broken |= {("node0", "switch"), ("node2", "switch")}
        await move(cluster)
        after = cluster.registry.current[JOB]
        lose(cluster)
        survey = await rebuilder(cluster).survey()
        assert [each.head for each in survey.jobs] == [after]

    trio.run(main)


def test_nodes_that_are_missing_may_have_something_newer(cluster):
    async def main():
        await cluster.nodes[0].coordinator.create(JOB, layout_json(), b"{}")
        await cluster.load(WHOLE, step=5)
        old = cluster.registry.current[JOB]
        cluster.calls.broken |= {("node0", "switch"), ("node0", "drop")}  # it keeps the old one
        await move(cluster)
        lose(cluster)
        cluster.calls.broken |= {("node2", call) for call in ("jobs", "describe")}
        survey = await rebuilder(cluster).survey()
        (found,) = survey.jobs
        assert found.head == old
        assert [each.generation for each in found.newer] == [2]
        assert survey.missing == survey.silent == ("node2",)
        with pytest.raises(PreconditionError, match="node2 may have parts of newer or of these"):
            await rebuilder(cluster).write(survey, force=False)
        assert cluster.registry.current == {}
        await rebuilder(cluster).write(survey, force=True)
        assert cluster.registry.current == {JOB: old}

    trio.run(main)


def test_what_is_not_whole_is_no_head(cluster):
    async def main():
        await ready(cluster)
        lose(cluster)
        cluster.kill(2)
        survey = await rebuilder(cluster).survey()
        (found,) = survey.jobs
        assert found.head is None
        assert found.missing == ("node2",)
        await rebuilder(cluster).write(survey, force=True)
        assert cluster.registry.current == {}

    trio.run(main)
    del cluster.nodes[2]
