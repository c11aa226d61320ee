"""What is asked for under a lease stays mapped, and no longer than the lease lasts."""

import weakref

import numpy as np
import trio
import trio.testing

from tenplexfs.daemon.kept_arrays import KeptArrays
from tenplexfs.runtime.board import Board
from tenplexfs.runtime.leases import LeaseTable


class Fresh:
    """Gives a new array each time."""

    def __init__(self):
        self.given = []

    def array(self, rank, path):
        if path == "gone":
            return None
        array = np.zeros(4)
        self.given.append(weakref.ref(array))
        return array


def test_arrays_live_as_long_as_the_lease():
    async def main():
        async with trio.open_nursery() as nursery:
            leases, source = LeaseTable(), Fresh()
            kept = KeptArrays(leases, nursery)
            assert kept.of("a", source) is source, "nobody holds a lease"
            lease = leases.lease("job", "a", "", 60)
            kept.keep("a")
            kept.keep("a")
            assert kept.of("a", source).array(0, "w") is not None
            assert kept.of("a", source).array(0, "gone") is None
            assert kept.of("b", source) is source
            board = Board()
            assert kept.of("a", board) is board, "what is being filled says so"
            await trio.sleep(5)
            assert source.given[0]() is not None
            leases.release(lease)
            await trio.sleep(5)
            assert source.given[0]() is None
            assert kept.of("a", source) is source

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
