"""A dataset of one snapshot as this node shows it: which rows a rank has, their sizes, and their bytes."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import trio

from tenplexfs.core.context import context_parts, context_runs
from tenplexfs.core.cursor import Cursor
from tenplexfs.core.datasets import DatasetState, Spread
from tenplexfs.core.partition import DegreeError, Partition, RankRows
from tenplexfs.errors import InvalidError
from tenplexfs.formats.npy_header import descr_text, header_of
from tenplexfs.formats.sample_index import SampleIndex
from tenplexfs.runtime.protocols import UncomputedError

__all__ = ["DatasetView", "RankView", "SampleReader", "document"]

_OFFSETS_EVERY = 512
_BLOCK = 1 << 14
_AT_ONCE = 1 << 15
"""Rows whose sizes are summed up where they are asked for, about a ms; more are for a worker thread."""
_Ints = npt.NDArray[np.int64]


class SampleReader(Protocol):
    """Where the bytes of a dataset's samples come from. For the trio thread.

    Attributes:
        is_near: They are on this machine: reads do not wait for others.
    """

    is_near: bool

    async def read(self, rows: RankRows, begin: int, end: int, skip: int, size: int) -> memoryview:
        """Returns bytes [skip, skip + size) of the samples of rows [begin, end), one after another.

        Raises:
            TenplexError: They could not be had; names file and range.
        """
        ...


class _Offsets:
    """Where rows of different sizes begin: 8 bytes for every 512 of them, the rest is summed up when asked.

    Cost: One pass over the sizes of all rows, 20 to 40 ns a row.
    """

    def __init__(self, index: SampleIndex, rows: RankRows) -> None:
        self._index = index
        self._rows = rows
        sums = [np.zeros(1, np.int64)]
        for begin in range(0, rows.count, _BLOCK):
            sizes = index.sizes(rows.span(begin, min(begin + _BLOCK, rows.count)))
            sums.append(np.add.reduceat(sizes, np.arange(0, len(sizes), _OFFSETS_EVERY)))
        self._every = np.cumsum(np.concatenate(sums))
        self.total = int(self._every[-1])

    def edges(self, begin: int, end: int) -> _Ints:
        """Returns where rows [begin, end) begin, and where the last of them ends."""
        block = begin // _OFFSETS_EVERY
        first = block * _OFFSETS_EVERY
        sizes = self._index.sizes(self._rows.span(first, end))
        sums = np.concatenate([[0], np.cumsum(sizes)]) + self._every[block]
        return np.asarray(sums[begin - first :], np.int64)

    def rows_of(self, begin: int, end: int) -> tuple[int, int, int]:
        """Returns the rows [first, last) that have bytes [begin, end), and where the first of them begins."""
        low = max(int(np.searchsorted(self._every, begin, "right")) - 1, 0) * _OFFSETS_EVERY
        high = int(np.searchsorted(self._every, end, "left")) * _OFFSETS_EVERY
        edges = self.edges(low, min(high, self._rows.count))
        first = int(np.searchsorted(edges, begin, "right")) - 1
        last = max(int(np.searchsorted(edges, end, "left")), first + 1)
        return low + first, low + last, int(edges[first])


@dataclass(frozen=True)
class RankView:
    """What one rank, or one part of its context-parallel axis, reads in an epoch.

    Attributes:
        dataset: Whose samples.
        rank: Coordinate on the data-parallel axis.
        rows: Its rows; those of rank 0 of 1 in a dataset that is unsplit.
        part: Coordinate on the context-parallel axis, or None: whole samples.
    """

    dataset: DatasetView
    rank: int
    rows: RankRows
    part: int | None = None

    @property
    def count(self) -> int:
        """Rows."""
        return self.rows.count

    @cached_property
    def _shape_and_runs(self) -> tuple[tuple[int, ...] | None, _Ints | None]:
        index, context = self.dataset.index, self.dataset.spread.context
        if self.part is None or context is None or index.shape is None or index.dtype is None:
            return index.shape, None
        length = index.shape[context.dim]
        parts = context_parts(length, degree=context.degree, rank=self.part, order=context.order)
        runs = context_runs(index.shape, index.dtype.itemsize, dim=context.dim, parts=parts)
        shape = list(index.shape)
        shape[context.dim] = sum(end - begin for begin, end in parts)
        return tuple(shape), runs

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of every sample as it is shown, or None."""
        return self._shape_and_runs[0]

    @cached_property
    def sample_bytes(self) -> int | None:
        """Of every sample as it is shown, or None where they differ."""
        dtype = self.dataset.index.dtype
        return None if self.shape is None or dtype is None else math.prod(self.shape) * dtype.itemsize

    @property
    def offsets(self) -> _Offsets:
        """Where rows begin, where their sizes differ.

        Raises:
            UncomputedError: They are many, and it is the first time.
        """
        return self.dataset.offsets(self.rows)

    @property
    def is_computed(self) -> bool:
        """Whether nothing of it raises `UncomputedError`."""
        return self.sample_bytes is not None or self.dataset.has_offsets(self.rows)

    async def compute(self) -> None:
        """Computes what is not computed, in a worker thread."""
        if not self.is_computed:
            await trio.to_thread.run_sync(self.dataset.compute, self.rows)

    @cached_property
    def data_header(self) -> bytes:
        """What stands before the samples: of ``data.npy`` its header, of ``data.bin`` nothing."""
        return self._header((self.count,))

    @cached_property
    def sample_header(self) -> bytes:
        """What stands before a sample in a file of its own."""
        return self._header(())

    def _header(self, first: tuple[int, ...]) -> bytes:
        dtype = self.dataset.index.dtype
        return b"" if self.shape is None or dtype is None else header_of((*first, *self.shape), dtype)

    @cached_property
    def data_bytes(self) -> int:
        """Size of the samples together."""
        if self.sample_bytes is not None:
            return self.count * self.sample_bytes
        return self.offsets.total

    def sizes(self, begin: int, end: int) -> _Ints:
        """Returns the bytes of rows [begin, end) as they are shown."""
        if self.sample_bytes is not None:
            return np.full(end - begin, self.sample_bytes, np.int64)
        return self.dataset.index.sizes(self.rows.span(begin, end))

    def edges(self, begin: int, end: int) -> _Ints:
        """Returns where rows [begin, end) begin in ``data``, and where the last of them ends."""
        if self.sample_bytes is not None:
            return np.arange(begin, end + 1, dtype=np.int64) * self.sample_bytes
        return self.offsets.edges(begin, end)

    async def read(self, begin: int, end: int) -> memoryview:
        """Returns bytes [begin, end) of the samples, one after another."""
        if begin >= end:
            return memoryview(b"")
        await self.compute()
        if self.sample_bytes is None:
            first, last, at = self.offsets.rows_of(begin, end)
        else:
            first, last = begin // self.sample_bytes, -(-end // self.sample_bytes)
            at = first * self.sample_bytes
        return await self.read_rows(first, last, begin - at, end - begin)

    async def read_rows(self, first: int, last: int, skip: int, size: int) -> memoryview:
        """Returns bytes [skip, skip + size) of rows [first, last) as they are shown."""
        runs = self._shape_and_runs[1]
        if runs is None:
            return await self.dataset.reader.read(self.rows, first, last, skip, size)
        dataset = self.dataset
        assert dataset.index.dtype is not None  # there are no runs without
        whole_bytes = math.prod(dataset.index.shape or ()) * dataset.index.dtype.itemsize
        whole = await dataset.reader.read(self.rows, first, last, 0, (last - first) * whole_bytes)
        samples = np.frombuffer(whole, np.uint8).reshape(last - first, whole_bytes)
        cut = np.concatenate([samples[:, a:b] for a, b in runs.tolist()], axis=1)
        return cut.reshape(-1).data[skip : skip + size]

    def meta(self) -> dict[str, object]:
        """Returns what ``meta.json`` of the rank says."""
        start = self.rows.partition.start
        dtype = self.dataset.index.dtype
        said = {
            "name": self.dataset.state.name,
            "epoch": start.epoch,
            "rank": self.rank,
            "degree": self.dataset.spread.degree,
            "local_batch": self.rows.local_batch,
            "global_batch": start.global_batch,
            "batches": self.rows.partition.batches,
            "samples": self.count,
            "next": self.next,
            "first_position": start.consumed,
            "seed": start.seed,
            "shape": None if self.shape is None else list(self.shape),
            "dtype": None if dtype is None else descr_text(dtype).strip("'"),
        }
        context = self.dataset.spread.context
        if self.part is not None and context is not None:
            said["cp"] = {
                "rank": self.part,
                "degree": context.degree,
                "dim": context.dim,
                "order": context.order,
            }
        return said

    @property
    def next(self) -> int:
        """The row that comes next after the snapshot's step."""
        start, cursor = self.rows.partition.start, self.dataset.cursor
        if self.dataset.state.unsplit or start.epoch > cursor.epoch:
            return 0
        if start.epoch < cursor.epoch:
            return self.count
        done = (cursor.consumed - start.consumed) // start.global_batch
        return self.rows.end_of(min(max(done, 0), self.rows.partition.batches))


class DatasetView:
    """A dataset of a snapshot.

    Attributes:
        state: As the snapshot has it.
        cursor: After the snapshot's step.
    """

    def __init__(
        self, state: DatasetState, spread: Spread, index: SampleIndex, reader: SampleReader, step: int | None
    ) -> None:
        self.state = state
        self.spread = spread
        self.index = index
        self.reader = reader
        self.cursor: Cursor = state.cursor_at(step)
        self._partitions: dict[int, Partition] = {}
        self._views: dict[tuple[int, int, int | None], RankView] = {}
        self._offsets: dict[tuple[int, int], _Offsets] = {}
        self._computing = threading.Lock()
        if spread.context is not None and index.shape is not None and self.context_degree:
            context = spread.context
            if not -len(index.shape) <= context.dim < len(index.shape):
                raise InvalidError(
                    f"dataset {state.name}: context: dim {context.dim}, samples have shape {index.shape}"
                )
            context_parts(index.shape[context.dim], degree=context.degree, rank=0, order=context.order)

    def has_rows_of(self, other: DatasetView) -> bool:
        """Returns whether both show the same rows: they are of one generation."""
        mine, others = (replace(view.state, given=None) for view in (self, other))
        return mine == others and self.spread == other.spread

    def sharing(self, other: DatasetView) -> DatasetView:
        """Returns itself, with what ``other``, which has the same rows, has computed or will compute."""
        self._partitions, self._offsets = other._partitions, other._offsets
        self._computing = other._computing
        return self

    @property
    def context_degree(self) -> int:
        """Ranks of the context-parallel axis, 0 where samples are not cut."""
        context = self.spread.context
        return context.degree if context is not None and self.index.shape is not None else 0

    @property
    def epochs(self) -> tuple[int, int]:
        """The epochs that are listed: the snapshot's and the next."""
        return self.cursor.epoch, self.cursor.epoch + 1

    def partition(self, epoch: int) -> Partition:
        """Returns who reads what in an epoch, from row 0 on.

        Raises:
            InvalidError: It was over when the generation began.
        """
        if epoch not in self._partitions:
            self._partitions[epoch] = self.state.partition(epoch, self.spread)
        return self._partitions[epoch]

    def view(self, epoch: int, rank: int, part: int | None = None) -> RankView:
        """Returns what a rank reads in an epoch.

        Raises:
            DegreeError: There is no such rank.
        """
        key = (epoch, rank, part)
        if key not in self._views:
            if not 0 <= rank < self.spread.degree:
                raise DegreeError(f"rank {rank}: need 0 <= rank < {self.spread.degree}, the degree")
            rows = self.partition(epoch).rank(0 if self.state.unsplit else rank)
            self._views[key] = RankView(self, rank, rows, part)
        return self._views[key]

    def offsets(self, rows: RankRows) -> _Offsets:
        """Returns where ``rows`` begin; computed once.

        Raises:
            UncomputedError: They are many, and it is the first time.
        """
        if not self.has_offsets(rows):
            if rows.count > _AT_ONCE:
                raise UncomputedError(partial(self.compute, rows))
            self.compute(rows)
        return self._offsets[_key(rows)]

    def has_offsets(self, rows: RankRows) -> bool:
        """Returns whether it was computed where ``rows`` begin."""
        return _key(rows) in self._offsets

    def compute(self, rows: RankRows) -> None:
        """Computes where ``rows`` begin, if nobody has. Any thread; one waits for the other."""
        with self._computing:
            if not self.has_offsets(rows):
                self._offsets[_key(rows)] = _Offsets(self.index, rows)

    def meta(self) -> dict[str, object]:
        """Returns what ``meta.json`` of the dataset says."""
        state = self.state
        partition = self.partition(max(self.cursor.epoch, state.start.epoch))
        dropped: Sequence[int] = partition.dropped.tolist()
        dtype = self.index.dtype
        return {
            "name": state.name,
            "cursor": self.cursor.to_json(),
            "global_batch": state.start.global_batch,
            "seed": state.start.seed,
            "shuffle": state.shuffle,
            "tail": state.tail,
            "unsplit": state.unsplit,
            "samples": state.count,
            "dropped": dropped,
            "epochs": list(self.epochs),
            "degree": self.spread.degree,
            "row_0": state.start.to_json(),
            "row_0_step": state.start_step,
            "kind": state.kind,
            "shape": None if self.index.shape is None else list(self.index.shape),
            "dtype": None if dtype is None else descr_text(dtype).strip("'"),
            "source": list(state.sources),
            "files": self.index.file_count,
            "index": state.digest,
        }


def _key(rows: RankRows) -> tuple[int, int]:
    return rows.partition.start.epoch, rows.rank


def document(kind: str, content: dict[str, Any]) -> bytes:
    """Returns a JSON document as the mount shows them."""
    said = {"format": f"tenplexfs-{kind}", "version": 1, **content}
    return json.dumps(said, ensure_ascii=False, indent=1).encode(errors="backslashreplace") + b"\n"
