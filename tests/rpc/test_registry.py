"""One contract for both registries: the one in this daemon and the one served by another."""

from __future__ import annotations

from contextlib import aclosing, asynccontextmanager

import pytest
import trio
import trio.testing

from tenplexfs.core.snapshot import Head, SnapshotId
from tenplexfs.errors import ConflictError, InvalidError, UnavailableError
from tenplexfs.rpc.connection import Connection
from tenplexfs.rpc.registry_client import LocalRegistry, RemoteRegistry
from tenplexfs.storage.registry_sqlite import SqliteRegistry
from tests.rpc.fakes import running


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def head(generation, step=None, txid=None):
    return Head(
        SnapshotId(generation, step, txid or f"{generation:016x}"), f"digest{generation}", ("n0", "n1")
    )


@asynccontextmanager
async def open_registry(kind, path, clock):
    core = SqliteRegistry(path / "registry.sqlite", clock=clock)
    local = LocalRegistry(core)
    try:
        if kind == "local":
            yield local
            return
        async with running(registry=local) as (address, _, _):
            connection = Connection(address)
            yield RemoteRegistry(connection, deadline_s=5)
            connection.close()
    finally:
        core.close()


@pytest.fixture(params=["local", "remote"])
def opened(request, tmp_path):
    clock = Clock()
    return clock, lambda: open_registry(request.param, tmp_path, clock)


async def commit(registry, job, expected, new, owner="n0"):
    lock = await registry.lock(job, owner, ttl_s=10)
    await registry.compare_and_set(lock, expected, new)
    await registry.unlock(lock)


async def test_heads_move_by_compare_and_set(opened):
    _, open_one = opened
    async with open_one() as registry:
        assert await registry.heads() == (0, {})
        await commit(registry, "gpt", None, head(1))
        await commit(registry, "bert", None, head(1, 0))
        await commit(registry, "gpt", head(1), head(2, 7))
        assert await registry.heads() == (3, {"gpt": head(2, 7), "bert": head(1, 0)})
        await commit(registry, "gpt", head(2, 7), None)
        assert await registry.heads() == (4, {"bert": head(1, 0)})


async def test_a_head_that_moved_is_a_conflict(opened):
    _, open_one = opened
    async with open_one() as registry:
        await commit(registry, "gpt", None, head(1))
        lock = await registry.lock("gpt", "n0", ttl_s=10)
        for expected in (None, head(2), head(1, 0), head(1, txid="f" * 16)):
            with pytest.raises(
                ConflictError, match=r"job gpt: head is generation 1 step - .*nothing changed"
            ):
                await registry.compare_and_set(lock, expected, head(3))
        assert await registry.heads() == (1, {"gpt": head(1)})


async def test_one_owner_at_a_time(opened):
    clock, open_one = opened
    async with open_one() as registry:
        mine = await registry.lock("gpt", "n0", ttl_s=10)
        with pytest.raises(ConflictError, match=r"job gpt: locked by n0 for 10\.0 s more"):
            await registry.lock("gpt", "n1", ttl_s=10)
        await registry.lock("bert", "n1", ttl_s=10)
        clock.now += 9
        assert await registry.lock("gpt", "n0", ttl_s=10) == mine, "a renewal keeps the token"
        clock.now += 9
        await registry.compare_and_set(mine, None, head(1))
        await registry.unlock(mine)
        theirs = await registry.lock("gpt", "n1", ttl_s=10)
        assert theirs.token > mine.token
        await registry.unlock(mine)
        with pytest.raises(ConflictError, match="locked by n1"):
            await registry.lock("gpt", "n0", ttl_s=10)


async def test_a_lost_lock_commits_nothing(opened):
    clock, open_one = opened
    async with open_one() as registry:
        stale = await registry.lock("gpt", "n0", ttl_s=10)
        clock.now += 10
        with pytest.raises(ConflictError, match="its time is over"):
            await registry.compare_and_set(stale, None, head(1))
        await registry.lock("gpt", "n1", ttl_s=10)
        with pytest.raises(ConflictError, match="n1 has it"):
            await registry.compare_and_set(stale, None, head(1))
        await registry.unlock(await registry.lock("gpt", "n1", ttl_s=10))
        with pytest.raises(ConflictError, match="the lock is lost"):
            await registry.compare_and_set(stale, None, head(1))
        assert await registry.heads() == (0, {})


async def test_of_many_at_once_one_commits(opened):
    _, open_one = opened
    outcomes = []

    async def attempt(registry, owner):
        try:
            lock = await registry.lock("gpt", owner, ttl_s=10)
            await registry.compare_and_set(lock, None, head(1, txid=owner))
            outcomes.append(owner)
        except ConflictError:
            outcomes.append(None)

    async with open_one() as registry:
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(attempt, registry, f"n{number}")
        (winner,) = filter(None, outcomes)
        assert await registry.heads() == (1, {"gpt": head(1, txid=winner)})


async def test_a_watch_sees_each_change_in_order(opened):
    _, open_one = opened
    seen = []

    async def watch(registry):
        async with aclosing(registry.watch(1)) as events:
            async for event in events:
                seen.append((event.revision, event.job, event.head))
                if event.head is None:
                    return

    async with open_one() as registry:
        await commit(registry, "old", None, head(1))
        await commit(registry, "gpt", None, head(1))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, registry)
            for generation in range(1, 20):
                await commit(registry, "gpt", head(generation), head(generation + 1))
            await commit(registry, "gpt", head(20), None)
        assert seen == [(2 + g, "gpt", head(g + 1) if g < 20 else None) for g in range(21)]


async def test_it_survives_a_restart(opened):
    clock, open_one = opened
    async with open_one() as registry:
        await commit(registry, "gpt", None, head(1))
        lock = await registry.lock("gpt", "n0", ttl_s=10)
    clock.now = 1.0  # the machine was started again
    async with open_one() as registry:
        assert await registry.heads() == (1, {"gpt": head(1)})
        with pytest.raises(ConflictError):
            await registry.lock("gpt", "n1", ttl_s=10)
        await registry.compare_and_set(lock, head(1), head(2))
        clock.now += 10
        assert (await registry.lock("gpt", "n1", ttl_s=10)).token > lock.token


async def test_bad_requests(tmp_path):
    async with open_registry("remote", tmp_path, Clock()) as registry:
        with pytest.raises(InvalidError, match=r"job name '\.\./x'"):
            await registry.lock("../x", "n0", ttl_s=10)
        with pytest.raises(InvalidError, match="ttl_s"):
            await registry.lock("gpt", "n0", ttl_s=0)


async def test_a_watch_reconnects(tmp_path):
    seen = []
    core = SqliteRegistry(tmp_path / "registry.sqlite")
    local = LocalRegistry(core)

    async def watch(registry):
        async with aclosing(registry.watch(0)) as events:
            async for event in events:
                seen.append(event.revision)
                if event.revision == 2:
                    return

    await commit(local, "gpt", None, head(1))
    async with trio.open_nursery() as nursery:
        async with running(registry=local) as (address, _, _):
            connection = Connection(address)
            nursery.start_soon(watch, RemoteRegistry(connection))
            while not seen:
                await trio.testing.wait_all_tasks_blocked(0.01)
        with pytest.raises(UnavailableError):
            await RemoteRegistry(connection, deadline_s=0.2).heads()
        await commit(local, "gpt", head(1), head(2))
        async with running(registry=local, listen=address):
            while len(seen) < 2:
                await trio.testing.wait_all_tasks_blocked(0.01)
    assert seen == [1, 2]
    connection.close()
    core.close()


async def test_a_reply_that_does_not_come_is_unavailable(tmp_path):
    """The contract knows one error for "no answer", by which the coordinator goes to look at the head."""

    class Slow(LocalRegistry):
        async def compare_and_set(self, lock, expected, new):
            await trio.sleep_forever()

    core = SqliteRegistry(tmp_path / "registry.sqlite")
    async with running(registry=Slow(core)) as (address, _, _):
        connection = Connection(address)
        registry = RemoteRegistry(connection, deadline_s=0.3)
        with pytest.raises(UnavailableError, match="CompareAndSet: no answer before the deadline"):
            await commit(registry, "gpt", None, head(1))
        connection.close()
    core.close()
