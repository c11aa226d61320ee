"""Members and coordinators together: real stores, one process, no sockets."""

from __future__ import annotations

import json

import pytest
import trio

from tenplexfs.core.build import build_ptc
from tenplexfs.core.snapshot import NodeName
from tenplexfs.errors import (
    ConflictError,
    ExistsError,
    InvalidError,
    NoRoomError,
    NotFoundError,
    UnavailableError,
)
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.runtime.coordinator import Change
from tenplexfs.runtime.planning import Target
from tests.runtime.cluster import JOB, Cluster, layout_json, tensors_of
from tests.runtime.moving import MESHES, WHOLE, move, ready, used


def test_create_shows_a_job_without_state_everywhere(cluster):
    async def main():
        head = await cluster.nodes[1].coordinator.create(JOB, layout_json(), b'{"keep_steps": 2}')
        assert head.snapshot.generation == 1
        assert head.snapshot.step is None
        again = await cluster.nodes[0].coordinator.create(JOB, layout_json(), b'{"keep_steps": 2}')
        assert again == head
        for node in cluster.nodes:
            assert node.shown().id == head.snapshot
            settings = json.loads(node.member.shown()[JOB].settings_json)
            assert settings == {"birth": head.snapshot.txid, "keep_steps": 2}
        with pytest.raises(ExistsError, match="another layout"):
            await cluster.nodes[0].coordinator.create(JOB, layout_json(nodes={"node0": [0, 1, 2, 3]}), b"{}")

    trio.run(main)


def test_import_and_every_reconfiguration_keep_every_byte(cluster):
    async def main():
        await ready(cluster)
        await cluster.check(WHOLE)
        assert cluster.nodes[0].shown().id.generation == 1
        for number, mesh in enumerate(MESHES):
            nodes = {NodeName(f"node{n}"): None for n in ((0, 1, 2), (1, 2), (2,), (0, 1))[number]}
            seen = await move(cluster, by=number % 3, mesh=mesh, nodes=dict.fromkeys(nodes, 0))
            assert seen[-1].phase == "committing"
            assert seen[-1].bytes_done == seen[-1].bytes_total
            plan = seen[-1].plan["bytes"]
            assert plan["moved"] == plan["moved_lower_bound"]
            await cluster.check(WHOLE)
            assert cluster.nodes[0].shown().id.generation == number + 2

    trio.run(main)


def test_old_snapshots_are_dropped_and_nothing_is_copied_that_stays(cluster):
    async def main():
        await ready(cluster)
        before = [node.store.used_bytes for node in cluster.nodes]
        await move(cluster, target=Target(layout_json(nodes={"node0": [0, 1], "node2": [2, 3]})))
        for node in cluster.nodes:
            await node.member.sweep()
        assert used(cluster) == [1, 0, 1]
        after = [node.store.used_bytes for node in cluster.nodes]
        assert after[0] == before[0]
        assert after[2] > 0
        await cluster.check(WHOLE)

    trio.run(main)


def test_a_layout_that_gives_devices_keeps_ranks_where_their_bytes_are(cluster):
    async def main():
        await ready(cluster, nodes={"node0": [2, 3], "node1": [0, 1]})
        await move(cluster, target=Target(layout_json(nodes={"node0": 2, "node1": 2})))
        assert dict(cluster.nodes[0].shown().ptc.nodes) == {"node0": (2, 3), "node1": (0, 1)}
        listed = await cluster.nodes[1].coordinator.plan(
            Change(JOB, Target(mesh={"pp": 1, "tp": 4})), operations=True
        )
        assert listed["bytes"]["moved"] == listed["bytes"]["moved_lower_bound"] > 0
        assert any(transfer["wire"] for transfer in listed["transfers"])
        await cluster.check(WHOLE)

    trio.run(main)


def test_a_job_without_state_takes_another_layout(cluster):
    async def main():
        await cluster.nodes[0].coordinator.create(JOB, layout_json(), b"{}")
        await move(cluster, mesh={"pp": 1, "tp": 4})
        assert cluster.nodes[2].shown().id.generation == 2
        assert cluster.nodes[2].shown().id.step is None
        await cluster.load(WHOLE, step=5)
        assert (cluster.nodes[2].shown().id.generation, cluster.nodes[2].shown().id.step) == (2, 5)
        await cluster.check(WHOLE)

    trio.run(main)


def test_import_over_a_state_raises_the_generation(cluster):
    async def main():
        await ready(cluster)
        other = tensors_of(build_ptc(parse_layout(layout_json())), seed=1)
        await cluster.load(other, step=9, by=1)
        assert (cluster.nodes[0].shown().id.generation, cluster.nodes[0].shown().id.step) == (2, 9)
        await cluster.check(other)

    trio.run(main)


def test_import_names_everything_that_does_not_fit(cluster):
    async def main():
        await cluster.nodes[0].coordinator.create(JOB, layout_json(), b"{}")
        wrong = dict(WHOLE)
        del wrong["layers/1/w"]
        wrong["norm"] = WHOLE["layers/0/w"]
        wrong["extra/bias"] = WHOLE["none"]
        with pytest.raises(InvalidError) as caught:
            await cluster.load(wrong)
        for part in (
            "3 tensors",
            "layers/1/w is not in the file",
            "norm is bfloat16 [7, 8]",
            "extra/bias is not in",
        ):
            assert part in caught.value.message
        assert "\n" not in caught.value.message
        assert used(cluster) == [1, 1, 0]
        wrong = {**WHOLE, "extra/bias": WHOLE["none"]}
        await cluster.load(wrong, ignore=("extra.*",))
        await cluster.check(WHOLE)

    trio.run(main)


def test_import_refuses_ties_that_differ(cluster):
    async def main():
        await cluster.nodes[0].coordinator.create(JOB, layout_json(), b"{}")
        with pytest.raises(InvalidError, match="emb and head are tied"):
            await cluster.load({**WHOLE, "head": WHOLE["emb"] * 0})
        await cluster.load({**WHOLE, "head": WHOLE["emb"]})

    trio.run(main)


def test_what_is_so_already_succeeds_and_a_request_runs_once(cluster):
    async def main():
        await ready(cluster)
        await move(cluster, mesh={"pp": 2, "tp": 2}, expected_generation=7)
        await move(cluster, mesh={"pp": 1, "tp": 4}, request_id="r1")
        await move(cluster, by=1, mesh={"pp": 4, "tp": 1}, request_id="r1")
        assert cluster.nodes[0].shown().id.generation == 2
        first = cluster.nodes[0].shown().id.txid
        await move(cluster, mesh={"pp": 2, "tp": 2}, request_id="r2")
        await move(cluster, mesh={"pp": 1, "tp": 4}, request_id="r1")  # long done, whatever came after
        assert cluster.nodes[1].shown().id.generation == 3
        await move(cluster, mesh={"pp": 1, "tp": 4}, request_id="r3")
        assert cluster.nodes[0].shown().id.txid != first
        await cluster.check(WHOLE)
        with pytest.raises(ConflictError, match="expected 1, the job is at 4"):
            await move(cluster, mesh={"pp": 4, "tp": 1}, expected_generation=1)

    trio.run(main)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"target": Target(layout_json(nodes={"node0": [0, 1], "node9": [2, 3]}))}, "node9"),
        ({"mesh": {"pp": 2, "tp": 3}}, "4 devices"),
        ({"mesh": {"pp": 2, "tp": 3}, "nodes": {"node0": 0}}, "8 does not divide by 3"),
        ({"mesh": {"zz": 2}}, "zz"),
        ({"target": Target(b"{")}, "JSON"),
        ({"target": Target(layout_json(tensors={}))}, "lacks it"),
    ],
)
def test_bad_layouts_change_nothing(cluster, change, match):
    async def main():
        await ready(cluster)
        before = cluster.nodes[0].shown().id
        with pytest.raises(InvalidError, match=match) as caught:
            await move(cluster, **change)
        assert "\n" not in caught.value.message
        assert cluster.nodes[0].shown().id == before
        assert used(cluster) == [1, 1, 0]
        assert cluster.registry.locks == {}
        await cluster.check(WHOLE)

    trio.run(main)


def test_a_node_that_fails_to_stage_leaves_nothing_behind(cluster):
    async def main():
        await ready(cluster)
        cluster.calls.broken.add(("node1", "stage"))
        with pytest.raises(UnavailableError, match="node node1"):
            await move(cluster, mesh={"pp": 1, "tp": 4})
        assert used(cluster) == [1, 1, 0]
        await cluster.check(WHOLE)

    trio.run(main)


def test_no_room_is_refused_before_anything_moves(tmp_path):
    cluster = Cluster(tmp_path, 2)
    cluster.restart(1, limit_bytes=1 << 14)

    async def main():
        await cluster.nodes[0].coordinator.create(JOB, layout_json(), b"{}")
        with pytest.raises(NoRoomError, match="node1"):
            big = layout_json(tensors={"w": {"shape": [1 << 16], "dtype": "int8", "on": {"pp": 1}}})
            await cluster.nodes[0].coordinator.remove(JOB)
            await cluster.nodes[0].coordinator.create(JOB, big, b"{}")
            await cluster.load(tensors_of(build_ptc(parse_layout(big))))
        assert cluster.nodes[0].shown().id.step is None

    trio.run(main)
    cluster.close()


def test_a_conflict_at_the_commit_drops_the_stage(cluster):
    async def main():
        await ready(cluster)
        cluster.registry.refuse = True
        with pytest.raises(ConflictError):
            await move(cluster, mesh={"pp": 1, "tp": 4})
        assert used(cluster) == [1, 1, 0]
        cluster.registry.refuse = False
        await move(cluster, mesh={"pp": 1, "tp": 4})
        await cluster.check(WHOLE)

    trio.run(main)


def test_a_lost_reply_of_the_commit_is_resolved_by_the_head(cluster):
    async def main():
        await ready(cluster)
        cluster.registry.lose_reply = True
        await move(cluster, mesh={"pp": 1, "tp": 4})
        assert cluster.nodes[1].shown().id.generation == 2
        await cluster.check(WHOLE)

    trio.run(main)


def test_unknown_jobs_are_refused(cluster):
    async def main():
        with pytest.raises(NotFoundError, match="job gpt: no such job"):
            await move(cluster, mesh={"pp": 1})
        with pytest.raises(NotFoundError, match="job gpt: no such job"):
            await cluster.load(WHOLE)

    trio.run(main)
