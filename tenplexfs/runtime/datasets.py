"""This node's datasets: their indexes, got from where they were built, and where their samples come from."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import trio

from tenplexfs.core.datasets import DatasetState, Spread, spread_of
from tenplexfs.core.layout import Layout
from tenplexfs.core.partition import RankRows
from tenplexfs.core.snapshot import NodeName
from tenplexfs.errors import NotFoundError, TenplexError, UnavailableError
from tenplexfs.formats.dataset_settings import datasets_of
from tenplexfs.runtime.dataset_view import DatasetView, RankView, SampleReader
from tenplexfs.runtime.sample_peers import SamplePeers
from tenplexfs.runtime.streaming import Counts, Owners, Window
from tenplexfs.storage.samples.indexes import Indexes
from tenplexfs.storage.samples.reader import RangeReader
from tenplexfs.storage.samples.routes import is_url
from tenplexfs.storage.samples.source import IndexedSamples, read_samples

__all__ = ["Datasets", "NearReader"]

log = logging.getLogger(__name__)

# The memory that they copy is what they share: more take longer together.
_THREADS = 2
_KEPT = 8
_Ints = npt.NDArray[np.int64]


class NearReader:
    """Samples in files of this machine."""

    is_near = True

    def __init__(self, source: IndexedSamples) -> None:
        self._source = source
        self._limiter = trio.CapacityLimiter(_THREADS)

    async def read(self, rows: RankRows, begin: int, end: int, skip: int, size: int) -> memoryview:
        """Returns the bytes; the disk is read in a worker thread."""
        return await trio.to_thread.run_sync(self._read, rows, begin, end, skip, size, limiter=self._limiter)

    def _read(self, rows: RankRows, begin: int, end: int, skip: int, size: int) -> memoryview:
        out = np.empty(size, np.uint8).data
        self._source.read_part(rows.span(begin, end), skip, out)
        return out


class Datasets:
    """Makes the datasets of snapshots. For the trio thread, but for `source` and `index_file`.

    Args:
        path: Where the indexes are.
        reader: Reads paths and URLs.
        peers: The other nodes.
        here: This node.
        nursery: Where samples are fetched ahead.
        window_bytes: Memory for the samples of a dataset that are fetched.
        timeout_s: How long a read waits for samples that come from afar.
    """

    def __init__(
        self,
        path: Path,
        reader: RangeReader,
        peers: SamplePeers,
        *,
        here: NodeName,
        nursery: trio.Nursery,
        window_bytes: int,
        timeout_s: float,
    ) -> None:
        self.indexes = Indexes(path)
        self._reader = reader
        self._peers = peers
        self._here = here
        self._nursery = nursery
        self._window_bytes = window_bytes
        self._timeout_s = timeout_s
        self._readers: dict[str, SampleReader] = {}
        self._coming: dict[str, trio.Lock] = {}
        self._building = 0
        self._needed: Sequence[bytes] | None = None
        # What a stage made, for the switch that follows.
        self._made: dict[tuple[tuple[DatasetState, ...], Spread, int | None], tuple[DatasetView, ...]] = {}

    def source(self, digest: str) -> IndexedSamples:
        """Returns the samples of an index that is here, from where its files are. Any thread."""
        return IndexedSamples(self.indexes.index(digest), self._reader)

    def index_file(self, digest: str) -> Path:
        """Returns the file of an index. Any thread."""
        return self.indexes.path / digest

    async def prepare(self, settings_json: bytes) -> None:
        """Returns once every index of a snapshot is here.

        Raises:
            UnavailableError: No node that answers has one of them.
        """
        for state in datasets_of(settings_json).values():
            async with self._coming.setdefault(state.digest, trio.Lock()):
                if not self.indexes.has(state.digest):
                    await self._get(state)

    async def views(self, settings_json: bytes, layout: Layout, step: int | None) -> tuple[DatasetView, ...]:
        """Returns the datasets of a snapshot, in the order in which they were added.

        Raises:
            TenplexError: An index cannot be had or does not fit.
        """
        await self.prepare(settings_json)
        states = tuple(datasets_of(settings_json).values())
        if not states:
            return ()
        spread = await trio.to_thread.run_sync(spread_of, layout)
        key = (states, spread, step)
        made = self._made.get(key)
        if made is None:
            made = await trio.to_thread.run_sync(self._views, states, spread, step, list(self._made.values()))
            self._made[key] = made
            while len(self._made) > _KEPT:
                del self._made[next(iter(self._made))]
        return made

    def _views(
        self,
        states: Sequence[DatasetState],
        spread: Spread,
        step: int | None,
        made: Sequence[tuple[DatasetView, ...]],
    ) -> tuple[DatasetView, ...]:
        known, views = [view for each in made for view in each], []
        for state in states:
            index = self.indexes.index(state.digest)
            view = DatasetView(state, spread, index, self._reader_of(state), step)
            like = next((other for other in reversed(known) if view.has_rows_of(other)), None)
            views.append(view if like is None else view.sharing(like))
        return tuple(views)

    def _reader_of(self, state: DatasetState) -> SampleReader:
        reader = self._readers.get(state.digest)
        if reader is None:
            source, names = self.source(state.digest), self.indexes.index(state.digest)
            is_remote = names.file_count > 0 and is_url(names.name(0))
            if is_remote or not self.is_near(state.digest):
                first = NodeName(state.added_by)
                others = sorted(self._peers.nodes(), key=lambda node: node != first)
                reader = Window(
                    source,
                    state.digest,
                    self._peers,
                    here=self._here,
                    nursery=self._nursery,
                    budget_bytes=self._window_bytes,
                    timeout_s=self._timeout_s,
                    disk_nodes=() if is_remote else others,
                )
            else:
                reader = NearReader(source)
            self._readers[state.digest] = reader
        return reader

    def show(self, views: Sequence[DatasetView], rank_nodes: Mapping[int, NodeName]) -> None:
        """Takes note that a snapshot is shown: what ranks of this node read is computed and fetched ahead."""
        for view in views:
            ranks = view.spread.ranks
            nodes = tuple(tuple(sorted({rank_nodes[rank] for rank in each})) for each in ranks)
            here = [rank for rank, where in enumerate(nodes) if self._here in where]
            self._nursery.start_soon(_compute, [view.view(epoch, r) for epoch in view.epochs for r in here])
            if not isinstance(view.reader, Window):
                continue
            epoch = view.cursor.epoch
            owned = nodes if not view.state.unsplit else (tuple(sorted(set().union(*nodes))),)
            mine = {}
            for rank in here:
                seen = view.view(epoch, rank)
                mine[seen.rows] = seen.next if seen.next < seen.count else 0
            owners = [Owners(view.partition(each), owned) for each in view.epochs]
            view.reader.expect(owners, mine)

    def counts(self) -> Mapping[str, Counts]:
        """Returns where the samples of each dataset that is fetched came from, by digest of its index."""
        return {d: reader.counts for d, reader in self._readers.items() if isinstance(reader, Window)}

    async def _get(self, state: DatasetState) -> None:
        first = NodeName(state.added_by)
        others = self._peers.nodes()
        failure: TenplexError | None = None
        for node in sorted(others, key=lambda node: node != first):
            try:
                await self._get_from(node, state)
            except TenplexError as error:
                failure = error
            else:
                return
        raise UnavailableError(
            f"dataset {state.name}: its index was built by {first}, and no node gives it: {failure}"
        )

    async def _get_from(self, node: NodeName, state: DatasetState) -> None:
        aside = self.indexes.path / f".get-{state.digest}"
        fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            await self._peers.index(node, state.digest, lambda data: _write(fd, data))
            await trio.to_thread.run_sync(self.indexes.take, state.digest, aside)
        finally:
            os.close(fd)
            aside.unlink(missing_ok=True)

    async def held(self, digest: str, ids: _Ints, *, read: bool) -> tuple[_Ints, memoryview]:
        """Returns which of ``ids``, by position, this node has in memory or, with ``read``, on its disk.

        Raises:
            NotFoundError: The index is not here.
        """
        if not self.indexes.has(digest):
            raise NotFoundError(f"index {digest}: not on this node")
        if read and self.is_near(digest):
            parts = await trio.to_thread.run_sync(read_samples, self.source(digest), ids)
            return np.arange(len(ids), dtype=np.int64), memoryview(b"".join(parts))
        reader = self._readers.get(digest)
        if isinstance(reader, Window):
            return reader.held(ids)
        return np.empty(0, np.int64), memoryview(b"")

    def is_near(self, digest: str) -> bool:
        """Returns whether the files of a dataset are on this machine. Any thread."""
        index = self.indexes.index(digest)
        if not index.file_count:
            return True
        name = index.name(0)
        return not is_url(name) and Path(name).exists()

    def close(self) -> None:
        """Ends the reader's threads."""
        self._reader.close()

    @contextmanager
    def building(self) -> Iterator[None]:
        """No index is removed meanwhile: no snapshot names yet what is being built."""
        self._building += 1
        try:
            yield
        finally:
            self._building -= 1
            self._needed = None

    def keep(self, settings: Sequence[bytes]) -> None:
        """Removes the indexes that none of the snapshots with these settings needs; open files read on."""
        if self._building or settings == self._needed:
            return
        named = {state.digest for text in settings for state in datasets_of(text).values()}
        self.indexes.keep(named)
        for digest in self._readers.keys() - named:
            reader = self._readers.pop(digest)
            if isinstance(reader, Window):
                reader.expect((), {})
        for key in [key for key in self._made if not {state.digest for state in key[0]} <= named]:
            del self._made[key]
        self._needed = settings


async def _compute(views: Sequence[RankView]) -> None:
    try:
        for view in views:
            await view.compute()
    except TenplexError as error:  # whoever reads it hears it
        log.warning("dataset: %s", error.message)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
