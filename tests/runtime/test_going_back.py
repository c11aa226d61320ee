"""Rollback to steps that are kept, in one process, against whole tensors."""

from __future__ import annotations

import pytest
import trio

from tenplexfs.errors import InvalidError, NotFoundError
from tenplexfs.runtime.coordinator import Change
from tenplexfs.runtime.going_back import PastSteps, Rollback
from tenplexfs.runtime.planning import Target
from tests.runtime.cluster import JOB, Cluster, inline, layout_json
from tests.runtime.test_past import listed, save, states


async def start(cluster: Cluster, keep: int) -> None:
    await cluster.nodes[0].coordinator.create(JOB, layout_json(), b'{"keep_steps": %d}' % keep)


async def back(cluster: Cluster, step: int, *, by: int = 0, **asked: object) -> None:
    node, stopped = cluster.nodes[by], []

    async def stop(head):
        stopped.append(head)

    async def persisted(job, settings_json):
        return {}

    steps = PastSteps(
        cluster.calls,
        inline,
        endpoints=lambda: dict.fromkeys(cluster.calls.nodes, ""),
        persisted=persisted,
    )
    head = node.member.shown()[JOB].head
    made = await steps.roll_back(
        Rollback(JOB, step, **asked), node.coordinator, lambda progress: None, head=head, stop=stop
    )
    assert stopped == [head]
    for each in cluster.nodes:
        assert each.member.shown()[JOB].head == made
        await each.member.sweep()


def test_back_to_a_kept_step_under_the_layout_of_now_and_on_from_there(cluster):
    async def main():
        await start(cluster, 3)
        for step in (1, 2):
            await save(cluster, step)
        await cluster.nodes[1].coordinator.reconfigure(
            Change(JOB, Target(mesh={"pp": 1, "tp": 4}, nodes={"node1": 2, "node2": 2})),
            lambda progress: None,
        )
        await save(cluster, 3)
        await back(cluster, 1, by=2)
        for node in cluster.nodes:
            assert (node.shown().id.generation, node.shown().id.step) == (5, 1)
            assert node.shown().ptc.layout.mesh.axes == (("pp", 1), ("tp", 4))
            assert listed(node) == ["gpt"]
        await cluster.check(states(1))
        with pytest.raises(NotFoundError, match=r"job gpt: step 2 is not kept; kept steps: 1$"):
            await back(cluster, 2)
        await save(cluster, 2)
        await cluster.check(states(2))
        await back(cluster, 2)  # where it is: a new generation all the same
        assert cluster.nodes[0].shown().id.generation == 7
        await back(cluster, 1)
        await cluster.check(states(1))

    trio.run(main)


def test_a_step_that_a_node_lost_is_not_offered(cluster):
    async def main():
        await start(cluster, 2)
        for step in (1, 2):
            await save(cluster, step)
        gone = cluster.calls.nodes.pop("node1")
        with pytest.raises(NotFoundError, match="kept steps: none"):
            await back(cluster, 1)
        cluster.calls.nodes["node1"] = gone
        with pytest.raises(InvalidError, match="skip 4 samples: it has no dataset"):
            await back(cluster, 1, skip_samples=4)
        await back(cluster, 1)
        await cluster.check(states(1))

    trio.run(main)
