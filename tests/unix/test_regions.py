"""What is fetched for several ranks at once, and let go when the last has it."""

import os

import trio
import trio.testing

from tenplexfs.unix.regions import SharedRegions


def test_what_somebody_waited_for_is_not_let_go_under_him(tmp_path):
    async def main():
        shared = SharedRegions()
        entry = shared.entry(b"key")
        seen = []

        async def second():
            async with entry.lock:
                await trio.lowlevel.checkpoint()
                seen.append(os.fstat(entry.fd))
            shared.settle(b"key")

        async with trio.open_nursery() as nursery:
            async with entry.lock:
                nursery.start_soon(second)
                await trio.testing.wait_all_tasks_blocked()
                entry.fd = os.open(tmp_path, os.O_RDONLY)
            shared.settle(b"key")  # the lock is the second one's by now
        assert len(seen) == 1
        assert shared.entry(b"key") is not entry

    trio.run(main)
