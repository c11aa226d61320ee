"""A stop whose ranks end without saving: the wait for their save ends with them, under a virtual clock."""

from __future__ import annotations

import subprocess
import sys

import pytest
import trio
from trio.testing import MockClock

from tenplexfs.core.snapshot import Head, JobName, NodeName, SnapshotId
from tenplexfs.errors import UnavailableError
from tenplexfs.runtime.stopping import Stopper, Stops

GPT, NODES = JobName("gpt"), (NodeName("node0"), NodeName("node1"))


class Cluster:
    """The desks of two nodes; each has a rank, which asks, and is told to stop."""

    def __init__(self) -> None:
        self.stops = {node: Stops() for node in NODES}
        self.step = 4
        self.away: set[NodeName] = set()
        self.said: list[str] = []
        self.published = trio.Event()
        self.changed = trio.Event()
        self.living: tuple[NodeName, ...] = ()
        self.stopper = Stopper(self, lambda _: (self.head(), 2), lambda: self.changed, lambda: self.living)

    def head(self) -> Head:
        return Head(SnapshotId(1, self.step, "0" * 16), "digest", NODES)

    async def stop_at(self, node, job, generation, token, action, step):
        await trio.lowlevel.checkpoint()
        if node in self.away:
            raise UnavailableError(f"node {node}: away")
        return self.stops[node].act(job, generation, token, action, step)

    def ask(self, rank: int, step: int, pid: int) -> bool | None:
        return self.stops[NODES[rank]].ask(GPT, 1, 1, rank, f"p{rank}", step, for_all=False, pid=pid)

    def say(self, text: str) -> None:
        self.said.append(text)
        self.published.set()

    async def wait_for_stop(self, then) -> tuple[int | None, float]:
        """Returns what `stop` does, and for how long; ``then`` is called once the stop is published."""
        begin = trio.current_time()
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                await self.published.wait()
                assert [self.ask(rank, 6, 0) for rank in (0, 1)] == [True, True]
                then()

            nursery.start_soon(watch)
            found = await self.stopper.stop(GPT, 60.0, self.say)
        return found, trio.current_time() - begin


def run(test):
    trio.run(test, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("is_seen", [True, False])
def test_processes_that_are_gone_end_the_wait_whether_or_not_they_can_be_seen(is_seen):
    processes = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in NODES]

    async def main():
        cluster = Cluster()
        for rank, process in enumerate(processes):
            assert cluster.ask(rank, 5, process.pid if is_seen else 0) is False

        def end() -> None:
            for rank, process in enumerate(processes):
                process.kill()
                process.wait()
                cluster.stops[NODES[rank]].leave(GPT, 1, rank, f"p{rank}")

        found, took_s = await cluster.wait_for_stop(end)
        assert found is None
        assert 5 <= took_s < 8
        assert cluster.said == ["the ranks stop at step 6", "the ranks ended without saving step 6"]
        for process in processes:
            process.stdin.close()

    run(main)


def test_one_that_lives_or_a_node_that_cannot_be_asked_is_waited_for():
    async def main():
        cluster = Cluster()
        assert [cluster.ask(rank, 5, 0) for rank in (0, 1)] == [False, False]

        def end_one() -> None:
            cluster.stops[NODES[0]].leave(GPT, 1, 0, "p0")
            cluster.stops[NODES[1]].leave(GPT, 1, 1, "another process")

        found, took_s = await cluster.wait_for_stop(end_one)
        assert (found, took_s) == (None, 60)
        cluster = Cluster()
        assert [cluster.ask(rank, 5, 0) for rank in (0, 1)] == [False, False]

        def lose() -> None:
            cluster.stops[NODES[0]].leave(GPT, 1, 0, "p0")
            cluster.away.add(NODES[1])

        assert await cluster.wait_for_stop(lose) == (None, 60)

    run(main)


def test_a_save_that_is_sealed_has_time_to_be_committed_after_its_processes_ended():
    async def main():
        cluster = Cluster()
        assert [cluster.ask(rank, 5, 0) for rank in (0, 1)] == [False, False]

        def end_and_commit_later() -> None:
            for rank, node in enumerate(NODES):
                cluster.stops[node].leave(GPT, 1, rank, f"p{rank}")
            nursery.start_soon(commit)

        async def commit() -> None:
            await trio.sleep(3)
            cluster.step = 6
            cluster.changed.set()

        async with trio.open_nursery() as nursery:
            found, took_s = await cluster.wait_for_stop(end_and_commit_later)
        assert found == 6
        assert took_s < 4

    run(main)


def test_nobody_waits_for_the_ranks_of_a_node_that_is_missed():
    async def main():
        cluster = Cluster()
        assert cluster.ask(0, 5, 0) is False
        cluster.living = NODES[:1]
        begin = trio.current_time()
        assert await cluster.stopper.stop(GPT, 60.0, cluster.say) is None
        assert trio.current_time() == begin
        assert cluster.said == []
        assert cluster.ask(0, 6, 0) is False  # and nothing is held

    run(main)
