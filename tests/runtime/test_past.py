"""Steps that are kept: what the root shows of them, and that their bytes stay and go."""

from __future__ import annotations

import json

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tenplexfs.core.build import build_ptc
from tenplexfs.core.snapshot import SnapshotId, TxId
from tenplexfs.core.transaction import kept_steps
from tenplexfs.errors import NoRoomError, StaleError
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.runtime.coordinator import Change
from tenplexfs.runtime.namespace import ROOT_INO
from tenplexfs.runtime.planning import Target
from tests.runtime.cluster import JOB, Cluster, Node, layout_json, tensors_of

PTC = build_ptc(parse_layout(layout_json()))


def states(step: int) -> dict:
    """Other tensors at each step."""
    return {path: array + array.dtype.type(step) for path, array in tensors_of(PTC).items()}


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path, 2)
    yield made
    made.close()


async def start(cluster: Cluster, settings: bytes = b"{}") -> None:
    await cluster.nodes[0].coordinator.create(JOB, layout_json(), settings)


async def save(cluster: Cluster, step: int) -> None:
    await cluster.load(states(step), step=step)
    for node in cluster.nodes:
        await node.member.sweep()


def listed(node: Node) -> list[str]:
    return sorted(name.decode() for name, _, _ in node.tree.readdir(ROOT_INO, 0))[1:]


def walk(node: Node, path: str) -> int | None:
    ino = ROOT_INO
    for name in path.split("/"):
        entry = node.tree.lookup(ino, name.encode())
        if entry is None:
            return None
        ino = entry.ino
    return ino


async def read(node: Node, path: str) -> bytes:
    ino = walk(node, path)
    assert ino is not None, path
    fh = node.tree.open(ino)
    content = node.tree.content(fh)
    data = content.read(0, content.size)
    data = bytes(await content.read_wait(0, content.size) if data is None else data)
    node.tree.release(fh)
    return data


async def check(cluster: Cluster, name: str, step: int) -> None:
    wanted = states(step)
    for node in cluster.nodes:
        assert json.loads(await read(node, f"{name}/job.json"))["step"] == step
        for path, tensor in PTC.tensors.items():
            data = await read(node, f"{name}/full/{path}.npy")
            assert data[-tensor.nbytes or len(data) :] == wanted[tensor.path].tobytes(), (name, path)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_newest_steps_are_kept_and_never_switch(cluster, count):
    async def main():
        await start(cluster, b'{"keep_steps": %d}' % count if count != 2 else b"{}")
        for step in range(0, 60, 10):
            await save(cluster, step)
            older = list(range(0, step, 10))[-(count - 1) :] if count > 1 else []
            for node in cluster.nodes:
                assert listed(node) == ["gpt", *(f"gpt@{at}" for at in older)]
                assert len(node.store.snapshots()) == 1 + len(older)
                assert [held.snapshot.step for held in node.member.past() if held.kept] == older
                assert walk(node, f"gpt@{step + 10}") is None
            for at in older:
                await check(cluster, f"gpt@{at}", at)
            # The newest can be walked to by its step: who works under it is not switched.
            await check(cluster, f"gpt@{step}", step)

    trio.run(main)


def test_a_step_in_use_is_the_same_before_and_after_it_is_the_newest(cluster):
    async def main():
        await start(cluster)
        await save(cluster, 1)
        node = cluster.nodes[0]
        before = walk(node, "gpt@1/full")
        await save(cluster, 2)
        assert walk(node, "gpt@1/full") == before
        assert walk(node, "gpt/full") != before
        node.tree.opendir(before)
        await save(cluster, 3)
        assert walk(node, "gpt@1") is None
        assert node.tree.getattr(before).is_dir, "an open directory keeps it"
        assert [held.kept for held in node.member.past()] == [False, True]
        node.tree.releasedir(before)
        await node.member.sweep()
        assert [held.snapshot.step for held in node.member.past()] == [2]
        assert len(node.store.snapshots()) == 2

    trio.run(main)


def test_a_reconfiguration_keeps_older_steps_and_not_its_own(cluster):
    async def main():
        await start(cluster)
        await save(cluster, 1)
        await save(cluster, 2)
        await cluster.nodes[0].coordinator.reconfigure(
            Change(JOB, Target(mesh={"pp": 1, "tp": 4})), lambda progress: None
        )
        for node in cluster.nodes:
            await node.member.sweep()
            assert listed(node) == ["gpt", "gpt@1"]
            assert len(node.store.snapshots()) == 2
            assert json.loads(await read(node, "gpt@2/job.json"))["generation"] == 3
            assert json.loads(await read(node, "gpt@1/job.json"))["generation"] == 1
        await check(cluster, "gpt@1", 1)
        await check(cluster, "gpt@2", 2)

    trio.run(main)


def test_a_restart_shows_the_kept_steps_again(cluster):
    async def main():
        await start(cluster)
        for step in (1, 2, 3):
            await save(cluster, step)
        for number, node in enumerate(cluster.nodes):
            async with trio.open_nursery() as nursery:
                node = cluster.restart(number)
                await nursery.start(node.table.run)
                assert listed(node) == ["gpt", "gpt@2"]
                nursery.cancel_scope.cancel()
        await check(cluster, "gpt@2", 2)
        await check(cluster, "gpt@3", 3)
        await save(cluster, 4)
        assert listed(cluster.nodes[1]) == ["gpt", "gpt@3"]
        assert {len(node.store.snapshots()) for node in cluster.nodes} == {2}

    trio.run(main)


def test_removing_a_job_removes_its_steps(cluster):
    async def main():
        await start(cluster)
        await save(cluster, 1)
        await save(cluster, 2)
        await cluster.nodes[1].coordinator.remove(JOB)
        for node in cluster.nodes:
            await node.member.sweep()
            assert listed(node) == []
            assert walk(node, "gpt@1") is None and walk(node, "gpt@2") is None
            assert node.store.snapshots() == () and node.store.used_bytes == 0

    trio.run(main)


async def store_limit(node: Node, copies: float) -> None:
    """Lets the store hold so many copies of the state that it has."""
    (stored,) = [each for each in node.store.snapshots() if each.arrays]
    size = node.store._files.bytes_of({ref.file for ref in stored.arrays.values()})
    node.store._files._limit_bytes = int(copies * size)


def test_under_pressure_the_step_that_goes_anyway_goes_early(cluster):
    async def main():
        await start(cluster)
        await save(cluster, 1)
        for node in cluster.nodes:
            await store_limit(node, 2.5)
        await save(cluster, 2)
        directories = [walk(node, "gpt@1/full") for node in cluster.nodes]
        for node, ino in zip(cluster.nodes, directories, strict=True):
            node.tree.opendir(ino)
        await save(cluster, 3)
        for node, ino in zip(cluster.nodes, directories, strict=True):
            assert listed(node) == ["gpt", "gpt@2"]
            with pytest.raises(StaleError):
                node.tree.getattr(ino)
            node.tree.releasedir(ino)
        await check(cluster, "gpt@2", 2)
        await check(cluster, "gpt", 3)

    trio.run(main)


def test_an_open_file_keeps_its_bytes_and_what_has_no_room_is_refused(cluster):
    async def main():
        await start(cluster)
        await save(cluster, 1)
        node = cluster.nodes[0]
        await store_limit(node, 2.5)
        await save(cluster, 2)
        path = next(iter(PTC.tensors))
        fh = node.tree.open(walk(node, f"gpt@1/full/{path}.npy"))
        with pytest.raises(NoRoomError, match=r"bytes needed, \d+ used, limit \d+"):
            await save(cluster, 3)
        assert listed(node) == ["gpt", "gpt@1"]
        content = node.tree.content(fh)
        assert content.read(0, content.size) is not None or await content.read_wait(0, content.size)
        await check(cluster, "gpt@1", 1)
        await check(cluster, "gpt", 2)
        node.tree.release(fh)
        await save(cluster, 3)
        await check(cluster, "gpt", 3)

    trio.run(main)


def test_the_last_kept_step_and_the_newest_are_never_taken(cluster):
    async def main():
        await start(cluster)
        await save(cluster, 1)
        for node in cluster.nodes:
            await store_limit(node, 1.5)
        with pytest.raises(NoRoomError):
            await save(cluster, 2)
        for node in cluster.nodes:
            assert len(node.store.snapshots()) == 1
        await check(cluster, "gpt", 1)

    trio.run(main)


def test_a_job_has_its_own_limit(cluster):
    async def main():
        await start(cluster, b'{"memory": 1000}')
        with pytest.raises(
            NoRoomError, match=r"job gpt: \d+ bytes needed on node node\d, 0 used, its memory is 1000"
        ):
            await save(cluster, 1)
        assert all(node.store.used_bytes == 0 for node in cluster.nodes)
        await cluster.nodes[0].coordinator.remove(JOB)
        await start(cluster, b'{"memory": 100000000}')
        await save(cluster, 1)
        await check(cluster, "gpt", 1)

    trio.run(main)


IDS = st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(0, 5)), max_size=12).map(
    lambda pairs: [SnapshotId(g, s, TxId(f"{n:016x}")) for n, (g, s) in enumerate(pairs)]
)


@given(st.none() | st.integers(0, 6), IDS, st.integers(1, 4))
def test_kept_are_the_newest_steps_before_the_head_each_once(step, past, count):
    kept = kept_steps(SnapshotId(5, step, TxId("f" * 16)), past, count=count)
    steps = sorted(each.step for each in past if each.txid in kept)
    older = {each.step for each in past if each.step is not None and step is not None and each.step < step}
    assert steps == sorted(older)[max(len(older) - count + 1, 0) :]
    for each in past:
        if each.txid in kept:
            assert each.generation == max(other.generation for other in past if other.step == each.step)
