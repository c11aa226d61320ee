"""One contract for all registries: in this daemon, served by another, in etcd, and in the simulation."""

from __future__ import annotations

from contextlib import aclosing
from itertools import pairwise

import pytest
import trio
import trio.testing

from tenplexfs.core.membership import Standing
from tenplexfs.core.snapshot import NodeInfo
from tenplexfs.errors import ConflictError, InvalidError, UnavailableError
from tenplexfs.rpc.connection import Connection
from tenplexfs.rpc.registry_client import LocalRegistry, RemoteRegistry
from tenplexfs.storage.registry_sqlite import SqliteRegistry
from tests.etcd import EtcdServer
from tests.rpc.fakes import running
from tests.rpc.registries import Clock, Embedded, InEtcd, Simulated, head, open_registry


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(params=["local", "remote", "etcd", "simulated"])
def registries(request, tmp_path):
    if request.param == "simulated":
        return Simulated()
    if request.param == "etcd":
        return InEtcd(request.getfixturevalue("etcd"), tmp_path.name)
    return Embedded(request.param, tmp_path)


@pytest.fixture(params=["local", "remote"])
def embedded(request, tmp_path):
    return Embedded(request.param, tmp_path)


async def commit(registry, job, expected, new, owner="n0"):
    lock = await registry.lock(job, owner, ttl_s=10)
    await registry.compare_and_set(lock, expected, new)
    await registry.unlock(lock)


async def test_heads_move_by_compare_and_set(registries):
    async with registries.open() as registry:
        revision, heads = await registry.heads()
        assert heads == {}
        await commit(registry, "gpt", None, head(1))
        await commit(registry, "bert", None, head(1, 0))
        await commit(registry, "gpt", head(1), head(2, 7))
        later, heads = await registry.heads()
        assert later > revision
        assert heads == {"gpt": head(2, 7), "bert": head(1, 0)}
        await commit(registry, "gpt", head(2, 7), None)
        assert (await registry.heads())[1] == {"bert": head(1, 0)}
        await commit(registry, "gpt", None, head(1))
        assert (await registry.heads())[1] == {"bert": head(1, 0), "gpt": head(1)}


async def test_the_first_name_stays(registries):
    async with registries.open() as registry:
        assert await registry.name("a" * 16) == "a" * 16
        async with registries.another(registry) as other:
            assert await other.name("b" * 16) == "a" * 16
    registries.restart()
    async with registries.open() as registry:
        assert await registry.name("c" * 16) == "a" * 16
        assert (await registry.heads())[1] == {}


async def test_a_head_that_moved_is_a_conflict(registries):
    async with registries.open() as registry:
        await commit(registry, "gpt", None, head(1))
        lock = await registry.lock("gpt", "n0", ttl_s=10)
        for expected in (None, head(2), head(1, 0), head(1, txid="f" * 16)):
            with pytest.raises(
                ConflictError, match=r"job gpt: head is generation 1 step - .*nothing changed"
            ):
                await registry.compare_and_set(lock, expected, head(3))
        assert (await registry.heads())[1] == {"gpt": head(1)}


async def test_one_owner_at_a_time(registries):
    async with registries.open() as registry:
        mine = await registry.lock("gpt", "n0", ttl_s=10)
        with pytest.raises(ConflictError, match=r"job gpt: locked by n0 for \d+\.\d s more"):
            await registry.lock("gpt", "n1", ttl_s=10)
        await registry.lock("bert", "n1", ttl_s=10)
        await registry.renew(mine, ttl_s=10)
        await registry.compare_and_set(mine, None, head(1))
        await registry.unlock(mine)
        theirs = await registry.lock("gpt", "n1", ttl_s=10)
        assert theirs.token > mine.token
        await registry.unlock(mine)
        with pytest.raises(ConflictError, match="locked by n1"):
            await registry.lock("gpt", "n0", ttl_s=10)


async def test_who_takes_its_own_lock_loses_the_one_before(registries):
    """A coordinator that was started again: what its last life ordered counts no more."""
    async with registries.open() as registry:
        dead = await registry.lock("gpt", "n0", ttl_s=10)
        mine = await registry.lock("gpt", "n0", ttl_s=10)
        assert mine.token > dead.token
        with pytest.raises(ConflictError, match="the lock is lost"):
            await registry.renew(dead, ttl_s=10)
        with pytest.raises(ConflictError, match="the lock is lost"):
            await registry.compare_and_set(dead, None, head(1))
        await registry.unlock(dead)
        await registry.compare_and_set(mine, None, head(1))


async def test_a_look_tells_head_and_lock(registries):
    async with registries.open() as registry, registries.another(registry) as other:
        assert await other.look("gpt") == Standing(None)
        lock = await registry.lock("gpt", "n0", ttl_s=10)
        assert await other.look("gpt") == Standing(None, "n0", lock.token)
        await registry.compare_and_set(lock, None, head(1))
        await registry.renew(lock, ttl_s=10)
        assert await other.look("gpt") == Standing(head(1), "n0", lock.token)
        await registries.expire("gpt")
        assert await other.look("gpt") == Standing(head(1))
        with pytest.raises(ConflictError, match="the lock is lost"):
            await registry.renew(lock, ttl_s=10)
        assert await other.look("gpt") == Standing(head(1)), "a renewal takes nothing"
        await commit(registry, "gpt", head(1), None)
        assert await other.look("gpt") == Standing(None)


async def test_a_renewal_counts_from_then(embedded):
    async with embedded.open() as registry:
        mine = await registry.lock("gpt", "n0", ttl_s=10)
        embedded.clock.now += 9
        await registry.renew(mine, ttl_s=10)
        embedded.clock.now += 9
        await registry.compare_and_set(mine, None, head(1))


async def test_a_lost_lock_commits_nothing(registries):
    async with registries.open() as registry:
        stale = await registry.lock("gpt", "n0", ttl_s=10)
        await registries.expire("gpt")
        with pytest.raises(ConflictError, match="its time is over"):
            await registry.compare_and_set(stale, None, head(1))
        await registry.lock("gpt", "n1", ttl_s=10)
        with pytest.raises(ConflictError, match="n1 has it"):
            await registry.compare_and_set(stale, None, head(1))
        await registry.unlock(await registry.lock("gpt", "n1", ttl_s=10))
        with pytest.raises(ConflictError, match="the lock is lost"):
            await registry.compare_and_set(stale, None, head(1))
        again = await registry.lock("gpt", "n0", ttl_s=10)
        assert again.token > stale.token, "an owner that lost it gets another"
        with pytest.raises(ConflictError, match="n0 has it"):
            await registry.compare_and_set(stale, None, head(1))
        assert (await registry.heads())[1] == {}


async def test_of_many_at_once_one_commits(registries):
    outcomes = []

    async def attempt(registry, owner):
        try:
            lock = await registry.lock("gpt", owner, ttl_s=10)
            await registry.compare_and_set(lock, None, head(1, txid=owner))
            outcomes.append(owner)
        except ConflictError:
            outcomes.append(None)

    async with registries.open() as registry:
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(attempt, registry, f"n{number}")
        (winner,) = filter(None, outcomes)
        assert (await registry.heads())[1] == {"gpt": head(1, txid=winner)}


async def test_a_watch_sees_each_change_in_order(registries):
    seen = []

    async def watch(registry, revision):
        async with aclosing(registry.watch(revision)) as events:
            async for event in events:
                seen.append(event)
                if event.head is None:
                    return

    async with registries.open() as registry:
        await commit(registry, "old", None, head(1))
        revision, _ = await registry.heads()
        await commit(registry, "gpt", None, head(1))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, registry, revision)
            for generation in range(1, 20):
                await commit(registry, "gpt", head(generation), head(generation + 1))
            await commit(registry, "gpt", head(20), None)
        assert [event.head for event in seen] == [*(head(g + 1) for g in range(20)), None]
        assert {event.job for event in seen} == {"gpt"}
        revisions = [revision, *(event.revision for event in seen)]
        assert revisions == sorted(set(revisions))
        assert revisions[-1] <= (await registry.heads())[0]


async def test_it_survives_a_restart(registries):
    async with registries.open() as registry:
        await commit(registry, "gpt", None, head(1))
        lock = await registry.lock("gpt", "n0", ttl_s=10)
    registries.restart()
    async with registries.open() as registry:
        assert (await registry.heads())[1] == {"gpt": head(1)}
        with pytest.raises(ConflictError):
            await registry.lock("gpt", "n1", ttl_s=10)
        await registry.compare_and_set(lock, head(1), head(2))
        await registries.expire("gpt")
        assert (await registry.lock("gpt", "n1", ttl_s=10)).token > lock.token


def node(name, incarnation="a", endpoint="host:7070"):
    return NodeInfo(name, endpoint, incarnation, "0.1")


async def test_nodes_live_while_they_say_so(registries):
    async with registries.open() as registry:
        assert await registry.nodes() == {}
        for info in (node("n1"), node("n0"), node("n1")):
            await registry.announce(info, ttl_s=10)
        assert await registry.nodes() == {"n0": node("n0"), "n1": node("n1")}
        assert list(await registry.nodes()) == ["n0", "n1"]
        await registries.expire_node("n1")
        await registry.announce(node("n0"), ttl_s=10)
        assert await registry.nodes() == {"n0": node("n0")}
        await registry.announce(node("n1"), ttl_s=10)
        await registry.withdraw(node("n0"))
        await registry.withdraw(node("n0"))
        assert await registry.nodes() == {"n1": node("n1")}


async def test_the_last_word_about_a_node_counts(registries):
    async with registries.open() as registry, registries.another(registry) as other:
        old, new = node("n0"), node("n0", "b", "host:7071")
        await registry.announce(old, ttl_s=10)
        await other.announce(new, ttl_s=10)
        assert await registry.nodes() == {"n0": new}
        await registry.withdraw(old)
        assert await registry.nodes() == {"n0": new}, "that was the one before"
        await registry.announce(old, ttl_s=10)
        assert await other.nodes() == {"n0": old}


async def test_a_watch_tells_who_lives(registries):
    seen = []

    async def watch(registry):
        async with aclosing(registry.watch_nodes()) as changes:
            async for living in changes:
                seen.append(dict(living))

    async def sees(*nodes):
        while not seen or seen[-1] != {info.node: info for info in nodes}:
            await trio.testing.wait_all_tasks_blocked(0.01)

    async with registries.open() as registry, trio.open_nursery() as nursery:
        await registry.announce(node("n0"), ttl_s=10)
        nursery.start_soon(watch, registry)
        await sees(node("n0"))
        await registry.announce(node("n1"), ttl_s=10)
        await sees(node("n0"), node("n1"))
        await registry.announce(node("n1", "b"), ttl_s=10)
        await sees(node("n0"), node("n1", "b"))
        await registry.withdraw(node("n0"))
        await sees(node("n1", "b"))
        await registries.expire_node("n1")
        await sees()
        assert all(before != after for before, after in pairwise(seen))
        nursery.cancel_scope.cancel()


async def test_nobody_is_dead_because_the_registry_was(registries):
    async with registries.open() as registry:
        await registry.announce(node("n0"), ttl_s=10)
    registries.restart()
    async with registries.open() as registry:
        assert await registry.nodes() == {"n0": node("n0")}
        await registry.announce(node("n0"), ttl_s=10)
        assert await registry.nodes() == {"n0": node("n0")}
        await registries.expire_node("n0")
        assert await registry.nodes() == {}


async def test_bad_requests(tmp_path):
    async with open_registry("remote", tmp_path, Clock()) as registry:
        with pytest.raises(InvalidError, match=r"job name '\.\./x'"):
            await registry.lock("../x", "n0", ttl_s=10)
        with pytest.raises(InvalidError, match="ttl_s"):
            await registry.lock("gpt", "n0", ttl_s=0)
        with pytest.raises(InvalidError, match=r"node n0: need 0 < ttl_s"):
            await registry.announce(node("n0"), ttl_s=0)
        with pytest.raises(InvalidError, match=r"node name 'n/0'"):
            await registry.announce(node("n/0"), ttl_s=1)
        with pytest.raises(InvalidError, match=r"node 'n0': endpoint has more than 300 letters"):
            await registry.announce(node("n0", endpoint="x" * 301), ttl_s=1)


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


async def test_a_daemon_that_serves_the_registry_no_more_is_unavailable():
    """It was given another registry; those that ask it still must outlive that."""
    async with running() as (address, _, _):
        connection = Connection(address)
        registry = RemoteRegistry(connection, deadline_s=0.3)
        with pytest.raises(UnavailableError, match="Heads: not served there"):
            await registry.heads()
        with trio.move_on_after(0.5):
            async with aclosing(registry.watch_nodes()) as changes:
                async for _ in changes:
                    raise AssertionError("nobody is told")
        connection.close()
