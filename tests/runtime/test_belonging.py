"""A store hears of its own cluster's registry, and of no other."""

from __future__ import annotations

from contextlib import aclosing

import pytest
import trio
import trio.testing

from tenplexfs.core.snapshot import Head, NodeInfo, NodeName, SnapshotId
from tenplexfs.errors import UnavailableError
from tenplexfs.rpc.registry_client import LocalRegistry
from tenplexfs.runtime.belonging import OwnRegistry
from tests.core.simulation.registry import RegistryCore

HEAD = Head(SnapshotId(1, None, "0" * 16), "ab", ("n0",))
NODE = NodeInfo(NodeName("n0"), "host:1", "a", "0.1")


def registry(core, file, *, has_state=True, name="own"):
    return OwnRegistry(LocalRegistry(core), file, has_state=lambda: has_state, new_name=lambda: name)


def run(main):
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def core():
    return RegistryCore(lambda: 0.0)


def test_the_first_with_state_names_it_and_the_others_take_the_name(tmp_path):
    async def main():
        shared = core()
        files = [tmp_path / name for name in ("empty", "first", "second")]
        assert await registry(shared, files[0], has_state=False).heads() == (0, {})
        assert not files[0].exists()
        await registry(shared, files[1], name="first").heads()
        await registry(shared, files[2], name="second").heads()
        assert [file.read_text() for file in files[1:]] == ["first\n"] * 2
        # a registry that was lost with its disk is named anew, as the stores say
        await registry(core(), files[2]).announce(NODE, ttl_s=5)
        assert {file.name for file in tmp_path.iterdir()} == {"first", "second"}

    run(main)


def test_another_clusters_registry_is_away(tmp_path):
    async def main():
        theirs, file = core(), tmp_path / "cluster"
        file.write_text("ours\n")
        theirs.name("theirs")
        theirs._heads["gpt"] = HEAD
        found = registry(theirs, file)
        calls = (
            found.heads(),
            found.look("gpt"),
            found.lock("gpt", "n0", ttl_s=5),
            found.announce(NODE, ttl_s=5),
            found.nodes(),
        )
        for call in calls:
            with pytest.raises(UnavailableError, match=r"of another cluster \(ours\) than the .* \(theirs\)"):
                await call
        for stream in (found.watch(0), found.watch_nodes()):
            with trio.move_on_after(100) as scope:
                async with aclosing(stream):
                    await anext(stream)
            assert scope.cancelled_caught
        assert theirs.nodes() == {} and file.read_text() == "ours\n"

    run(main)
