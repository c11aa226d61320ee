"""Samples that are not on this machine: fetched ahead in the order of consumption, within a window of memory.

The window is made of chunks, about a MiB of a rank's rows each. Half of it is for what is ahead of the
readers of this generation; the other half keeps what was read or belongs to the generation before, for peers
and for whoever reads on. A sample is taken from this node's chunks, else from the peers that hold it by the
new or the old partition, else from its source. A read that jumps out of the window waits for exactly its
bytes.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import trio

from tenplexfs.core.partition import Partition, RankRows
from tenplexfs.core.snapshot import NodeName
from tenplexfs.errors import InvalidError, TenplexError, TimedOutError, UnavailableError
from tenplexfs.runtime.sample_chunks import Chunk, Held, Left, Pace, Stream, following
from tenplexfs.runtime.sample_peers import SamplePeers
from tenplexfs.storage.samples.source import IndexedSamples, SampleFailure, SamplesError

__all__ = ["Counts", "Owners", "Window"]

log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
_PEER_S = 5.0
_MISSES_MAX = 8
_MEASURED = 1024
_Ints = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Owners:
    """Who holds what by a partition.

    Attributes:
        nodes: Of each data-parallel rank.
    """

    partition: Partition
    nodes: tuple[tuple[NodeName, ...], ...]


@dataclass
class Counts:
    """Where samples came from, in bytes."""

    here: int = 0
    peers: int = 0
    source: int = 0


class Window:
    """A `SampleReader` of one dataset. For the trio thread.

    Args:
        source: The samples where they come from; asked in worker threads.
        digest: Of the index, by which peers know it.
        peers: The other nodes.
        here: This node.
        nursery: Where what is ahead is fetched.
        budget_bytes: Of all chunks together.
        timeout_s: How long a read waits.
        disk_nodes: The nodes whose disks have the files; empty: the source is for all.

    Attributes:
        counts: Where samples came from.
    """

    is_near = False

    def __init__(
        self,
        source: IndexedSamples,
        digest: str,
        peers: SamplePeers,
        *,
        here: NodeName,
        nursery: trio.Nursery,
        budget_bytes: int,
        timeout_s: float,
        disk_nodes: Sequence[NodeName] = (),
    ) -> None:
        self.counts = Counts()
        self._source = source
        self._digest = digest
        self._peers = peers
        self._here = here
        self._nursery = nursery
        self._budget_bytes = budget_bytes
        self._timeout_s = timeout_s
        self._disk_nodes = disk_nodes
        self._streams: OrderedDict[RankRows, Stream] = OrderedDict()
        self._past: deque[Chunk] = deque()  # read, or of generations before; the oldest first
        self._past_bytes = 0
        self._held = Held()
        self._pace = Pace()
        self._owners: deque[Owners] = deque(maxlen=4)
        self._misses: dict[NodeName, int] = {}
        self._limiter = trio.CapacityLimiter(Pace.MOST)
        sample = np.linspace(0, source.count - 1, min(source.count, _MEASURED)).astype(np.int64)
        self._mean_bytes = max(int(source.sizes(sample).mean()), 1) if source.count else 1

    # What the snapshots say.

    def expect(self, owners: Sequence[Owners], mine: Mapping[RankRows, int]) -> None:
        """A generation is shown: ``mine`` is what ranks of this node read next, and from which row on.

        It is fetched ahead. Streams of generations before end; what they hold stays for those who need it.
        """
        self._owners.extend(each for each in owners if each not in self._owners)
        self._misses.clear()
        current = [each.partition for each in owners]
        for rows in list(self._streams):
            if rows not in mine and rows.partition not in current:
                self._retire(self._streams.pop(rows))
        for rows, position in mine.items():
            is_new = rows not in self._streams
            stream = self._stream(rows)
            if is_new:
                stream.position = stream.last_end = position

    # Reading.

    async def read(self, rows: RankRows, begin: int, end: int, skip: int, size: int) -> memoryview:
        """Returns bytes [skip, skip + size) of the samples of rows [begin, end), one after another."""
        if not 0 <= begin < end <= rows.count:
            raise InvalidError(f"rows [{begin}, {end}): the rank has {rows.count}")
        with trio.move_on_after(self._timeout_s) as waited:
            return await self._read(rows, begin, end, skip, size)
        assert waited.cancelled_caught  # the only way here
        raise TimedOutError(f"rows [{begin}, {end}) did not come within {self._timeout_s:g} s")

    async def _read(self, rows: RankRows, begin: int, end: int, skip: int, size: int) -> memoryview:
        stream = self._stream(rows)
        self._jump(stream, begin)
        near = abs(begin - stream.position) <= stream.chunk_rows
        parts: list[Chunk] = []
        for number in range(begin // stream.chunk_rows, -(-end // stream.chunk_rows)):
            chunk = stream.chunks.get(number)
            if chunk is not None and chunk.is_spoilt(begin, end):  # what is missing is fetched again
                self._keep(stream.chunks.pop(number))
                chunk = None
            if chunk is None and near:
                chunk = self._begin(stream, number)
            if chunk is None:  # out of the window: exactly these
                low, high = number * stream.chunk_rows, (number + 1) * stream.chunk_rows
                chunk = self._chunk(stream, max(begin, low), min(end, high), is_kept=False)
                self._nursery.start_soon(self._fill, chunk, stream)
            parts.append(chunk)
        found = []
        for chunk in parts:
            await chunk.ended.wait()
            found.append(self._part(chunk, begin, end))
        self._went_on(stream, begin, end)
        data = found[0] if len(found) == 1 else np.concatenate(found)
        return data[skip : skip + size].data

    def _jump(self, stream: Stream, begin: int) -> None:
        """Moves the window when a second read goes on where the first one ended, elsewhere."""
        goes_on = abs(begin - stream.last_end) <= stream.chunk_rows
        if not goes_on or abs(begin - stream.position) <= stream.chunk_rows:
            return
        stream.position = begin
        for number in list(stream.chunks):
            if (number + 1) * stream.chunk_rows <= begin or number * stream.chunk_rows > begin:
                self._keep(stream.chunks.pop(number))

    def _part(self, chunk: Chunk, begin: int, end: int) -> _Bytes:
        """Returns rows [begin, end) as far as they are in ``chunk``, which does not change any more."""
        low, high = max(begin, chunk.begin) - chunk.begin, min(end, chunk.end) - chunk.begin
        if chunk.error is not None:
            raise chunk.error
        bad = min((row for row in chunk.failed if low <= row - chunk.begin < high), default=None)
        if bad is not None:
            error = chunk.failed[bad]
            raise type(error)(error.message, **error.details)
        assert chunk.data is not None  # it ended without an error
        chunk.delivered[low:high] = True
        return chunk.data[int(chunk.edges[low]) : int(chunk.edges[high])]

    def _went_on(self, stream: Stream, begin: int, end: int) -> None:
        """Takes note that rows were read; what is read whole makes room."""
        if abs(begin - stream.position) <= stream.chunk_rows:
            stream.position = max(stream.position, end)
        stream.last_end = end
        # The last one may be read again at its edge: pages and samples end at different places.
        behind = [n for n in stream.chunks if (n + 2) * stream.chunk_rows <= stream.position]
        for number in behind:
            chunk = stream.chunks[number]
            if chunk.data is not None and chunk.delivered.all():
                self._keep(stream.chunks.pop(number))
        stream.wanted.set()

    # Fetching ahead.

    def _stream(self, rows: RankRows) -> Stream:
        stream = self._streams.get(rows)
        if stream is None:
            share = self._budget_bytes // 2 // (len(self._streams) + 1)
            width = min(_CHUNK_BYTES, max(share // 4, 1))
            stream = Stream(rows, max(width // self._mean_bytes, 1))
            self._streams[rows] = stream
            self._nursery.start_soon(self._run_ahead, stream)
        self._streams.move_to_end(rows)
        return stream

    async def _run_ahead(self, stream: Stream) -> None:
        """Keeps the stream's share of the window full, until it is retired."""
        count = -(-stream.rows.count // stream.chunk_rows)
        while self._streams.get(stream.rows) is stream:
            stream.wanted = trio.Event()
            share = self._budget_bytes // 2 // max(len(self._streams), 1)
            number = stream.position // stream.chunk_rows
            running = sum(not chunk.ended.is_set() for chunk in stream.chunks.values())
            while number < count and running < self._pace.at_once:
                if number not in stream.chunks:
                    if stream.ahead_bytes + self._width(stream, number) > share:
                        break
                    self._begin(stream, number)
                    running += 1
                number += 1
            if number == count and stream.rows.count:
                after = following(stream.rows)
                if after.count and after not in self._streams and stream.position:
                    self._stream(after)
            await stream.wanted.wait()

    def _width(self, stream: Stream, number: int) -> int:
        begin = number * stream.chunk_rows
        end = min(begin + stream.chunk_rows, stream.rows.count)
        shape = self._source.shape
        if shape is not None:
            return (end - begin) * self._mean_bytes
        return int(self._source.sizes(stream.rows.span(begin, end)).sum())

    def _begin(self, stream: Stream, number: int) -> Chunk:
        begin = number * stream.chunk_rows
        chunk = self._chunk(stream, begin, min(begin + stream.chunk_rows, stream.rows.count), is_kept=True)
        stream.chunks[number] = chunk
        self._nursery.start_soon(self._fill, chunk, stream)
        return chunk

    def _chunk(self, stream: Stream, begin: int, end: int, *, is_kept: bool) -> Chunk:
        ids = stream.rows.span(begin, end)
        edges = np.concatenate([[0], np.cumsum(self._source.sizes(ids))])
        return Chunk(stream.rows, stream.chunk_rows, is_kept, begin, end, ids, edges)

    async def _fill(self, chunk: Chunk, stream: Stream) -> None:
        data = np.empty(chunk.nbytes, np.uint8)
        try:
            failures = await self._get(chunk, data)
            chunk.failed = {chunk.begin + each.at: each.error for each in failures}
            chunk.data = data
            if chunk.is_kept:
                self._held.add(chunk)
        except TenplexError as error:
            chunk.error = error
        finally:
            if chunk.data is None and chunk.error is None:
                chunk.error = UnavailableError("the daemon is stopping")
            chunk.ended.set()
            stream.wanted.set()
        if chunk.failed:
            log.warning("dataset: %s", next(iter(chunk.failed.values())).message)

    def _retire(self, stream: Stream) -> None:
        stream.wanted.set()
        for chunk in stream.chunks.values():
            self._keep(chunk)

    def _keep(self, chunk: Chunk) -> None:
        self._past.append(chunk)
        self._past_bytes += chunk.nbytes
        while self._past_bytes > self._budget_bytes // 2:
            oldest = self._past.popleft()
            self._past_bytes -= oldest.nbytes
            self._held.remove(oldest)
            oldest.is_kept = False

    # Getting bytes.

    def held(self, ids: _Ints) -> tuple[_Ints, memoryview]:
        """Returns which of ``ids``, by position, are in the window, and their bytes one after another."""
        return self._held.find(ids)

    async def _get(self, chunk: Chunk, out: _Bytes) -> Sequence[SampleFailure]:
        """Fills ``out``; returns the samples that failed, each at its place in the chunk."""
        left = Left(chunk, out)
        found, data = self.held(chunk.ids)
        came = left.take(found, data)
        self.counts.here += came
        for node, asked in self._holders(chunk, left.places):
            wanted = np.intersect1d(asked, left.places)
            if wanted.size and self._misses.get(node, 0) < _MISSES_MAX:
                came = await self._ask(node, left, wanted, read=False)
                self._misses[node] = 0 if came else self._misses.get(node, 0) + 1
                self.counts.peers += came
        for node in self._disk_nodes:
            if left.places.size:
                came = await self._ask(node, left, left.places, read=True)
                self.counts.peers += came
        if not left.places.size:
            return ()
        if self._disk_nodes:
            where = ", ".join(self._disk_nodes)
            raise UnavailableError(
                f"samples {chunk.ids[left.places][:4].tolist()}: none of {where} gives them"
            )
        is_whole, begin = chunk.is_kept and len(left.places) == len(chunk.ids), trio.current_time()
        came, failures = await trio.to_thread.run_sync(self._read_source, left, limiter=self._limiter)
        if is_whole:
            self._pace.took(trio.current_time() - begin)
        self.counts.source += came
        return failures

    async def _ask(self, node: NodeName, left: Left, places: _Ints, *, read: bool) -> int:
        """Takes what ``node`` gives; returns the bytes."""
        deadline_s = self._timeout_s if read else min(_PEER_S, self._timeout_s)
        ids = left.chunk.ids[places]
        try:
            found, data = await self._peers.samples(node, self._digest, ids, read=read, deadline_s=deadline_s)
        except TenplexError as error:
            log.info("dataset: node %s gives no samples: %s", node, error.message)
            return 0
        return left.take(places[found], data) if found.size else 0

    def _read_source(self, left: Left) -> tuple[int, Sequence[SampleFailure]]:
        places = left.places
        ids, sizes = left.chunk.ids[places], np.diff(left.chunk.edges)[places]
        is_all = len(places) == len(left.chunk.ids)
        data = left.out if is_all else np.empty(int(sizes.sum()), np.uint8)
        failures: Sequence[SampleFailure] = ()
        try:
            self._source.read_into(ids, data.data)
        except SamplesError as error:
            failures = [replace(each, at=int(places[each.at])) for each in error.failures]
        if is_all:
            left.places = left.places[:0]
            return len(data), failures
        return left.take(places, data.data), failures

    def _holders(self, chunk: Chunk, places: _Ints) -> list[tuple[NodeName, _Ints]]:
        """Returns the other nodes that may hold samples, and which, by the partitions: likely ones first."""
        asked: dict[NodeName, list[_Ints]] = {}
        # What a peer had for another epoch it may have still.
        epoch = chunk.rows.partition.start.epoch
        newest = reversed(self._owners) if places.size else ()
        for owners in sorted(newest, key=lambda each: each.partition.start.epoch != epoch):
            ranks, _ = owners.partition.locate(chunk.ids[places])
            for rank in np.unique(ranks[ranks >= 0]).tolist():
                for node in owners.nodes[rank]:
                    if node != self._here:
                        asked.setdefault(node, []).append(places[ranks == rank])
        return [(node, np.unique(np.concatenate(parts))) for node, parts in asked.items()]
