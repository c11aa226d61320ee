"""The window over samples from afar, against a real HTTP server with ranges, and between nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import trio
import trio.testing

from tenplexfs.core.cursor import Cursor, Extent, Tail
from tenplexfs.core.partition import Partition, RankRows
from tenplexfs.core.snapshot import NodeName
from tenplexfs.errors import CorruptError, TimedOutError, UnavailableError
from tenplexfs.runtime.sample_chunks import Chunk
from tenplexfs.runtime.streaming import Owners, Window
from tenplexfs.storage.samples.build import IndexBuilder
from tenplexfs.storage.samples.objects import Limits, ObjectReader
from tenplexfs.storage.samples.source import IndexedSamples
from tests.storage.samples.conftest import RangeServer

COUNT, SIZE = 512, 4096
BODY = np.random.default_rng(3).integers(0, 256, (COUNT, SIZE), np.uint8)


@pytest.fixture
def server() -> Iterator[RangeServer]:
    running = RangeServer()
    running.files["/data.bin"] = BODY[:-1].tobytes()
    running.files["/last.bin"] = BODY[-1:].tobytes()
    yield running
    running.close()


@dataclass
class Cluster:
    """Windows of several nodes over one server; nodes answer from each other's windows."""

    server: RangeServer
    nursery: trio.Nursery
    windows: dict[NodeName, Window] = field(default_factory=dict)
    readers: list[ObjectReader] = field(default_factory=list)
    asked: list[NodeName] = field(default_factory=list)

    def nodes(self) -> Collection[NodeName]:
        return self.windows

    async def index(self, node: NodeName, digest: str, write: Callable[[bytes], None]) -> None:
        raise UnavailableError("not asked for here")

    async def samples(self, node, ids_of, ids, *, read, deadline_s):
        await trio.lowlevel.checkpoint()
        self.asked.append(node)
        if read and node == "disk":
            which = np.arange(len(ids), dtype=np.int64)
            return which, memoryview(BODY[ids].tobytes())
        if node not in self.windows:
            raise UnavailableError(f"node {node}: does not answer")
        return self.windows[node].held(ids)

    def window(
        self,
        node: str,
        *,
        budget: int = 8 << 20,
        timeout_s: float = 10,
        disk_nodes: Sequence[str] = (),
        **limits: float,
    ) -> Window:
        reader = ObjectReader(limits=Limits(**{"backoff_s": 0.01, "gap_bytes": 0, **limits}))
        self.readers.append(reader)
        built = IndexBuilder(reader).records(
            [f"{self.server.url}/data.bin", f"{self.server.url}/last.bin"], record_bytes=SIZE
        )
        self.windows[NodeName(node)] = made = Window(
            IndexedSamples(built.index, reader),
            "digest",
            self,
            here=NodeName(node),
            nursery=self.nursery,
            budget_bytes=budget,
            timeout_s=timeout_s,
            disk_nodes=[NodeName(each) for each in disk_nodes],
        )
        self.server.requests.clear()
        return made


def run(server: RangeServer, body) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            cluster = Cluster(server, nursery)
            try:
                await body(cluster)
            finally:
                server.released.set()
                nursery.cancel_scope.cancel()
                for reader in cluster.readers:
                    reader.close()

    trio.run(main)


def part(degree: int, *, batch: int = 16, consumed: int = 0) -> Partition:
    return Partition.of(Cursor(0, consumed, batch, 11), Extent(COUNT, Tail.DROP), degree=degree)


async def rows_equal(window: Window, rows: RankRows, begin: int, end: int) -> None:
    data = await window.read(rows, begin, end, 0, (end - begin) * SIZE)
    assert bytes(data) == BODY[rows.span(begin, end)].tobytes()


def chunks(window: Window) -> list[Chunk]:
    ahead = [chunk for stream in window._streams.values() for chunk in stream.chunks.values()]
    return [*ahead, *window._past]


async def settled(window: Window) -> None:
    """Returns once nothing is on its way."""
    with trio.fail_after(10):
        await trio.testing.wait_all_tasks_blocked(0.02)
        while coming := [chunk for chunk in chunks(window) if not chunk.ended.is_set()]:
            await coming[0].ended.wait()
            await trio.testing.wait_all_tasks_blocked(0.02)


def ahead_bytes(window: Window) -> int:
    return sum(stream.ahead_bytes for stream in window._streams.values())


def test_reads_in_order_and_anywhere_give_the_right_bytes(server):
    async def body(cluster: Cluster) -> None:
        window = cluster.window("a", budget=64 * SIZE)
        rows = part(1).rank(0)
        for begin in range(0, COUNT, 16):
            await rows_equal(window, rows, begin, begin + 16)
        rng = np.random.default_rng(1)
        for _ in range(40):
            begin = int(rng.integers(0, COUNT))
            end = int(rng.integers(begin, min(begin + 40, COUNT))) + 1
            await rows_equal(window, rows, begin, end)
        data = await window.read(rows, 3, 6, 100, 2 * SIZE)
        assert bytes(data) == BODY[rows.span(3, 6)].tobytes()[100 : 100 + 2 * SIZE]

    run(server, body)


def test_it_fetches_ahead_within_its_share_and_drops_what_was_read(server):
    async def body(cluster: Cluster) -> None:
        window = cluster.window("a", budget=128 * SIZE)
        rows = part(1).rank(0)
        window.expect([Owners(rows.partition, ((NodeName("a"),),))], {rows: 0})
        await settled(window)
        assert window.counts.source == ahead_bytes(window) == 64 * SIZE
        server.requests.clear()
        await rows_equal(window, rows, 0, 48)
        await settled(window)
        assert ahead_bytes(window) <= 64 * SIZE
        assert window._past_bytes <= 64 * SIZE
        read, requests = window.counts.source, len(server.requests)
        assert 64 * SIZE < read <= (48 + 64) * SIZE
        assert requests <= (read - 64 * SIZE) / SIZE  # never more than one a sample
        await rows_equal(window, rows, 0, 16)  # dropped or not, again the same

    run(server, body)


def test_a_read_beyond_the_window_waits_for_exactly_its_bytes(server):
    async def body(cluster: Cluster) -> None:
        window = cluster.window("a", budget=32 * SIZE)
        rows = part(1).rank(0)
        data = await window.read(rows, 300, 303, 0, 3 * SIZE)
        assert bytes(data) == BODY[rows.span(300, 303)].tobytes()
        await settled(window)
        wanted = {f"bytes={sample * SIZE}-{sample * SIZE + SIZE - 1}" for sample in rows.span(300, 303)}
        assert wanted <= {asked for _, asked in server.requests}
        assert window.counts.source <= (3 + 16) * SIZE  # those, and the window at its beginning

    run(server, body)


def test_with_full_peers_nothing_comes_from_the_source_after_a_resize(server):
    async def body(cluster: Cluster) -> None:
        old, new = part(2), part(4)
        names = [NodeName("a"), NodeName("b")]
        windows = [cluster.window(name, budget=256 * SIZE) for name in names]
        owners = Owners(old, ((names[0],), (names[1],)))
        for rank, window in enumerate(windows):
            window.expect([owners], {old.rank(rank): 0})
        for window in windows:
            await settled(window)
            assert ahead_bytes(window) == 128 * SIZE
        before = [window.counts.source for window in windows]
        moved = Owners(new, ((names[1],), (names[0],), (names[0],), (names[1],)))
        wanted = [{new.rank(1): 0, new.rank(2): 0}, {new.rank(0): 0, new.rank(3): 0}]
        for window, mine in zip(windows, wanted, strict=True):
            window.expect([moved], mine)
        for window in windows:
            await settled(window)
            assert ahead_bytes(window) == 128 * SIZE
        assert [window.counts.source for window in windows] == before
        for window, mine in zip(windows, wanted, strict=True):
            for rows in mine:
                await rows_equal(window, rows, 0, 32)
        assert min(window.counts.peers for window in windows) > 0

    run(server, body)


def test_a_peer_that_is_gone_costs_no_sample(server):
    async def body(cluster: Cluster) -> None:
        window = cluster.window("a")
        rows = part(2).rank(1)
        window.expect([Owners(rows.partition, ((NodeName("a"),), (NodeName("gone"),)))], {})
        await rows_equal(window, rows, 0, 40)
        assert NodeName("gone") in cluster.asked

    run(server, body)


def test_samples_on_the_disk_of_another_node_come_from_there(server):
    async def body(cluster: Cluster) -> None:
        window = cluster.window("a", disk_nodes=["gone", "disk"])
        await rows_equal(window, part(2).rank(1), 0, 40)
        assert (window.counts.source, len(server.requests)) == (0, 0)
        alone = cluster.window("b", disk_nodes=["gone"])
        with pytest.raises(UnavailableError, match="none of gone gives them"):
            await alone.read(part(1).rank(0), 0, 2, 0, 2 * SIZE)

    run(server, body)


def test_a_sample_that_fails_fails_alone_and_is_tried_again(server):
    async def body(cluster: Cluster) -> None:
        window = cluster.window("a", deadline_s=3, parallel=64)
        rows = part(1).rank(0)
        at = int(np.flatnonzero(rows.span(0, COUNT) == COUNT - 1)[0])
        bad = [True]
        server.trouble = lambda path, number: 503 if bad[0] and path == "/last.bin" else None
        await rows_equal(window, rows, at - 3, at)
        with pytest.raises((UnavailableError, TimedOutError), match=r"last\.bin: bytes"):
            await window.read(rows, at, at + 1, 0, SIZE)
        await rows_equal(window, rows, at + 1, at + 9)
        bad[0] = False
        await rows_equal(window, rows, at, at + 1)

    run(server, body)


def test_what_does_not_come_in_time_is_an_error(server):
    async def body(cluster: Cluster) -> None:
        window = cluster.window("a", timeout_s=0.2)
        server.trouble = lambda path, number: "stall"
        with pytest.raises(TimedOutError, match=r"rows \[0, 4\)"):
            await window.read(part(1).rank(0), 0, 4, 0, 4 * SIZE)

    run(server, body)


def test_an_object_that_is_shorter_than_its_index_is_corrupt_where_it_ends(server):
    async def body(cluster: Cluster) -> None:
        window = cluster.window("a")
        server.files["/last.bin"] = BODY[-1, :-1].tobytes()
        rows = part(1).rank(0)
        at = int(np.flatnonzero(rows.span(0, COUNT) == COUNT - 1)[0])
        with pytest.raises(CorruptError, match="fewer than its index says"):
            await window.read(rows, at, at + 1, 0, SIZE)
        await rows_equal(window, rows, at - 3, at)

    run(server, body)
