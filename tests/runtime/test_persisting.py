"""Persisted steps as nodes of one process write, prune and read them."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing

from tenplexfs.core.build import build_ptc
from tenplexfs.errors import UnavailableError
from tenplexfs.formats.checkpoint import MANIFEST
from tenplexfs.formats.keep_settings import persist_of
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.runtime.going_back import PastSteps, Rollback
from tenplexfs.runtime.ladder import Ladder
from tenplexfs.runtime.persisting import Persister, Shares
from tenplexfs.runtime.restoring import PersistedPeers, own_steps
from tests.cluster.daemons import until
from tests.runtime.cluster import JOB, Calls, Cluster, inline, layout_json
from tests.runtime.test_ladder import SPREAD, as_steps, go_on, lose
from tests.runtime.test_past import save, states

safe = pytest.importorskip("safetensors")


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path, 4)
    yield made
    made.close()


class Desk:
    """`PersistCalls` to the nodes of one process."""

    def __init__(self, calls: Calls, shares: dict[str, Shares]) -> None:
        self.calls, self.shares = calls, shares

    async def persist(self, node, job, txid, url, report):
        self.calls._node(node, "persist")
        return await self.shares[node].persist(job, txid, url, report)

    async def persisted(self, node, job, step):
        await trio.lowlevel.checkpoint()
        self.shares[node].newest[job] = step


@asynccontextmanager
async def persisting(cluster: Cluster, place: Path, **persist: int) -> AsyncIterator[list[Persister]]:
    settings = {"persist": {"to": str(place), "every": 1, "keep": 2, **persist}}
    text = json.dumps(settings, sort_keys=True).encode()
    await cluster.nodes[0].coordinator.create(JOB, layout_json(nodes=SPREAD), text)
    shares = {node.name: Shares(node.member, inline) for node in cluster.nodes}
    made = []
    async with trio.open_nursery() as nursery:
        for node in cluster.nodes:
            node.member.persisted = lambda url: PersistedPeers(url, cluster.peers, inline)
            node.member.relieve_also(shares[node.name].relieve)
            node.coordinator.recovery.beyond = Ladder(
                cluster.calls, inline, lambda: list(cluster.calls.nodes)
            )
            leader = Persister(
                member=node.member,
                table=node.table,
                shares=shares[node.name],
                calls=Desk(cluster.calls, shares),
                index_file=Path,
                clock_ns=lambda: 7,
            )
            made.append(leader)
            nursery.start_soon(leader.run)
        yield made
        nursery.cancel_scope.cancel()


async def until_persisted(cluster: Cluster, leaders: list[Persister], step: int) -> None:
    with trio.fail_after(20):
        for node, leader in zip(cluster.nodes, leaders, strict=True):
            while leader.status(JOB)["last_step"] != step:
                changed = cluster.nodes[0].table.changed
                node.table.touch()
                with trio.move_on_after(0.05):
                    await changed.wait()


async def until_there(place: Path, steps: list[int]) -> None:
    def found() -> bool:
        there = (place / JOB).glob(f"*/{MANIFEST}")
        return sorted(int(each.parent.name.split(".")[0]) for each in there) == steps

    await trio.to_thread.run_sync(until, found)


def test_each_distinct_array_stands_once_and_goes_where_it_is_asked(cluster, tmp_path):
    place = tmp_path / "there"

    async def main():
        async with persisting(cluster, place) as leaders:
            await save(cluster, 5)
            await until_persisted(cluster, leaders, 5)
            (directory,) = (place / JOB).glob("*/model")
            ptc = build_ptc(parse_layout(layout_json(nodes=SPREAD)))
            wanted = {}
            for path in ptc.names:
                for holder in ptc.holders(path):
                    rank, shown = min(holder.keys)
                    wanted[rank, shown.replace("/", ".")] = holder.shard.local_shape
            found = {}
            for file in directory.iterdir():
                header = json.loads(file.read_bytes()[8:][: int.from_bytes(file.read_bytes()[:8], "little")])
                header.pop("__metadata__")
                rank = int(file.name.split("-")[0])
                found |= {(rank, name): tuple(each["shape"]) for name, each in header.items()}
            assert found == wanted
            # nodes 1 and 2 are lost, and nobody has copies
            await save(cluster, 6)
            await until_persisted(cluster, leaders, 6)
            with as_steps(cluster):
                await save(cluster, 7)
            lose(cluster, 1, 2)
            leaders[0]._states[JOB].next_s = np.inf  # and 7 is never persisted
            message = await go_on(cluster, [0, 3], by=0)
            assert "back at step" in message and str(place) in message
            step = cluster.nodes[0].shown().id.step
            assert step in (6, 7)
            await cluster.check(states(step))

    trio.run(main)


def test_a_torn_manifest_is_passed_over(cluster, tmp_path):
    place = tmp_path / "there"

    async def main():
        async with persisting(cluster, place) as leaders:
            await save(cluster, 5)
            await until_persisted(cluster, leaders, 5)
            with as_steps(cluster):
                await save(cluster, 6)
            await until_persisted(cluster, leaders, 6)
            (manifest,) = (place / JOB).glob(f"*6.*/{MANIFEST}")
            manifest.write_bytes(manifest.read_bytes()[:-9])
            leaders[0]._states[JOB].next_s = np.inf
            lose(cluster, 1, 2)
            assert "back at step 5, persisted at" in await go_on(cluster, [0, 3], by=0)
            await cluster.check(states(5))

    trio.run(main)


def test_the_newest_stay_and_those_that_a_job_left_behind_go_first(cluster, tmp_path):
    place = tmp_path / "there"

    async def main():
        async with persisting(cluster, place, every=2, keep=2) as leaders:
            await save(cluster, 2)
            await until_persisted(cluster, leaders, 2)
            with as_steps(cluster):
                for step in (3, 4, 6):
                    await save(cluster, step)
                    if step != 3:
                        await until_persisted(cluster, leaders, step)
            await until_there(place, [4, 6])

            async def persisted(job, settings_json):
                return await trio.to_thread.run_sync(own_steps, persist_of(settings_json), job, settings_json)

            back = PastSteps(
                cluster.calls,
                inline,
                endpoints=lambda: dict.fromkeys(cluster.calls.nodes, ""),
                persisted=persisted,
            )

            async def stop(head):
                await trio.lowlevel.checkpoint()

            head = cluster.nodes[0].member.shown()[JOB].head
            await back.roll_back(
                Rollback(JOB, 4), cluster.nodes[0].coordinator, lambda _: None, head=head, stop=stop
            )
            await cluster.check(states(4))
            with as_steps(cluster):
                await save(cluster, 8)
            await until_persisted(cluster, leaders, 8)
            await until_there(place, [4, 8])  # 6 is no past of the job any more

    trio.run(main)


def test_a_share_is_given_up_when_a_save_needs_its_room(cluster, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and never answers
        where = {"AWS_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", "AWS_ALLOW_HTTP": "true"}
        keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "k", "AWS_REGION": "us-east-1"}
        for name, value in {**where, **keys}.items():
            monkeypatch.setenv(name, value)

        async def main():
            async with persisting(cluster, tmp_path / "there") as leaders:
                await save(cluster, 1)
                await until_persisted(cluster, leaders, 1)
            node = cluster.nodes[0]
            shares, txid = Shares(node.member, inline), node.shown().id.txid
            failures = []

            async def persist():
                try:
                    await shares.persist(JOB, txid, "s3://bucket/runs", lambda done, total: None)
                except UnavailableError as error:
                    failures.append(error)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(persist)
                await trio.testing.wait_all_tasks_blocked()
                assert not await shares.relieve()  # what others hold too frees nothing
                with as_steps(cluster):
                    for step in (2, 3, 4):
                        await save(cluster, step)
                assert await shares.relieve()
            assert "a save needs the room" in failures[0].message
            assert not await shares.relieve()
            assert txid not in {each.id.txid for each in node.store.snapshots()}

        trio.run(main)
