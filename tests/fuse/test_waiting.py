import os

import pyfuse3
import pytest
import trio
import trio.testing

from tenplexfs.fuse import waiting


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setitem(vars(pyfuse3), "trio", pyfuse3.trio)
    waiting.install()
    return pyfuse3.trio


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_it_returns_when_there_is_something_to_read(installed, pipe):
    async def main():
        with trio.move_on_after(0.05) as nothing:
            await installed.lowlevel.wait_readable(pipe[0])
        assert nothing.cancelled_caught
        os.write(pipe[1], b"x")
        with trio.fail_after(5):
            for _ in range(1000):
                await installed.lowlevel.wait_readable(pipe[0])

    trio.run(main)


def test_a_burst_lets_other_tasks_run(installed, pipe):
    os.write(pipe[1], b"x")
    turns = 0

    async def other():
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async def main():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            end = trio.current_time() + 0.05
            while trio.current_time() < end:
                await installed.lowlevel.wait_readable(pipe[0])
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert turns >= 5


def test_closing_ends_the_wait(installed, pipe):
    async def main():
        async with trio.open_nursery() as nursery:

            async def wait():
                with pytest.raises(installed.ClosedResourceError):
                    await installed.lowlevel.wait_readable(pipe[0])

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            installed.lowlevel.notify_closing(pipe[0])

    trio.run(main)


def test_the_lock_lets_its_holder_go_on_and_loses_nobody(installed):
    lock = installed.Lock()
    seen: list[str] = []

    async def hold(name: str, times: int):
        for _ in range(times):
            async with lock:
                seen.append(name)
        await trio.lowlevel.checkpoint()

    async def stand_by():
        with trio.CancelScope() as scope:
            async with lock:
                scope.cancel()
                await trio.sleep_forever()

    async def main():
        async with trio.open_nursery() as nursery:
            await lock.__aenter__()
            for name in "ab":
                nursery.start_soon(hold, name, 2)
            await trio.testing.wait_all_tasks_blocked()
            await lock.__aexit__(None, None, None)
            seen.append("first")
            await lock.__aenter__()
            await trio.testing.wait_all_tasks_blocked()
            assert seen == ["first"]
            await lock.__aexit__(None, None, None)
        assert sorted(seen) == ["a", "a", "b", "b", "first"]
        assert seen[1] == seen[2]
        # Who is cancelled while it waits takes no turn with it.
        async with trio.open_nursery() as nursery:
            await lock.__aenter__()
            with trio.CancelScope() as scope:
                nursery.start_soon(stand_by)
                nursery.start_soon(hold, "c", 1)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
            await lock.__aexit__(None, None, None)
        assert seen[-1] == "c"

    trio.run(main)
