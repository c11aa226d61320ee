"""This node announces itself, whatever the registry does, and hears of the others."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tenplexfs.core.snapshot import NodeInfo, NodeName
from tenplexfs.errors import ExistsError, UnavailableError
from tenplexfs.runtime.living import Living


def info(name: str) -> NodeInfo:
    return NodeInfo(NodeName(name), "host:1", "a", "0.1")


class Registry:
    """A `NodeRegistry` in memory, by trio's clock."""

    def __init__(self):
        self.expires = {}
        self.away = False

    async def announce(self, node, *, ttl_s):
        await trio.lowlevel.checkpoint()
        if self.away:
            raise UnavailableError("registry: does not answer")
        self.expires[node] = trio.current_time() + ttl_s

    async def withdraw(self, node):
        await trio.lowlevel.checkpoint()
        if self.away:
            await trio.sleep_forever()
        self.expires.pop(node, None)

    async def nodes(self):
        await trio.lowlevel.checkpoint()
        return {node.node: node for node, end in self.expires.items() if end > trio.current_time()}

    async def watch_nodes(self):
        told = None
        while True:
            if not self.away and (living := await self.nodes()) != told:
                yield (told := living)
            await trio.sleep(0.1)


async def beginning(registry, nursery):
    heard = []
    living = Living(registry, info("n0"), ttl_s=10)
    living.heard = lambda: heard.append(sorted(living.nodes()))
    nursery.start_soon(living.run)
    await trio.sleep(1)
    return living, heard


def test_a_node_lives_on_while_the_registry_is_away_and_comes_back():
    async def main():
        registry = Registry()
        async with trio.open_nursery() as nursery:
            living, heard = await beginning(registry, nursery)
            await registry.announce(info("n1"), ttl_s=3)
            await trio.sleep(30)
            assert heard[-3:] == [["n0"], ["n0", "n1"], ["n0"]]
            registry.away = True
            await trio.sleep(30)
            assert sorted(living.nodes()) == ["n0"], "nobody says otherwise"
            registry.away = False
            await trio.sleep(2)
            assert await registry.nodes() == {"n0": info("n0")}
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_node_that_ends_says_so_and_does_not_wait_for_a_registry_that_is_away():
    async def main():
        registry = Registry()
        async with trio.open_nursery() as nursery:
            living, _ = await beginning(registry, nursery)
            await living.withdraw()
            await trio.sleep(20)
            assert await registry.nodes() == {}
        async with trio.open_nursery() as nursery:
            living, _ = await beginning(registry, nursery)
            registry.away = True
            before = trio.current_time()
            await living.withdraw()
            assert trio.current_time() - before <= 1

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_name_is_taken_as_long_as_another_daemon_lives_elsewhere():
    mine, elsewhere = info("n0"), NodeInfo(NodeName("n0"), "other:1", "b", "0.1")

    async def main():
        registry = Registry()
        claimed = Living(registry, mine, ttl_s=10)
        await registry.announce(NodeInfo(NodeName("n0"), "host:1", "b", "0.1"), ttl_s=100)
        await claimed.claim()  # it was here
        await registry.withdraw(NodeInfo(NodeName("n0"), "host:1", "b", "0.1"))
        await registry.announce(elsewhere, ttl_s=8)
        begin = trio.current_time()
        await claimed.claim()
        assert 7 < trio.current_time() - begin < 10
        await registry.announce(elsewhere, ttl_s=100)
        with pytest.raises(ExistsError, match="of this name lives at other:1, and this is host:1"):
            await claimed.claim()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_registry_that_says_nothing_holds_nobody_up():
    async def main():
        registry = Registry()
        registry.nodes = trio.sleep_forever
        with trio.fail_after(3):
            await Living(registry, info("n0"), ttl_s=10).claim()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
