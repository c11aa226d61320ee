"""Parts of the window over samples: a piece of a rank's rows, the rank's stream of them, what is missing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import trio

from tenplexfs.core.order import Order
from tenplexfs.core.partition import RankRows
from tenplexfs.errors import CorruptError, TenplexError, TimedOutError, UnavailableError

__all__ = ["Chunk", "Left", "Stream", "following"]

_Ints = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]


@dataclass(eq=False)
class Chunk:
    """Rows [begin, end) of a stream.

    Attributes:
        epoch: Of the rows.
        ids: int64, the samples.
        edges: int64, where each begins in the data, and the end of the last.
        data: None while they come.
        failed: By row, what could not be had.
        error: Why nothing of it is here.
        ended: Set when it came, or failed.
        delivered: By row, whether it was read.
    """

    epoch: int
    begin: int
    end: int
    ids: _Ints
    edges: _Ints
    data: _Bytes | None = None
    failed: dict[int, TenplexError] = field(default_factory=dict)  # by row
    error: TenplexError | None = None  # of all of them
    ended: trio.Event = field(default_factory=trio.Event)
    delivered: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))

    def __post_init__(self) -> None:
        self.delivered = np.zeros(len(self.ids), bool)
        self.order = np.argsort(self.ids, kind="stable")
        self.sorted = self.ids[self.order]

    @property
    def nbytes(self) -> int:
        """Bytes of its samples."""
        return int(self.edges[-1])

    def is_spoilt(self, begin: int, end: int) -> bool:
        """Returns whether rows of [begin, end) failed in a way that may pass."""
        failed = [error for row, error in self.failed.items() if begin <= row < end]
        errors = failed if self.error is None else [self.error]
        return any(isinstance(error, UnavailableError | TimedOutError) for error in errors)

    def find(self, ids: _Ints) -> tuple[_Ints, _Ints]:
        """Returns which of ``ids``, by position, are here, and at which row of the chunk."""
        if self.data is None or not len(self.sorted):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        at = np.minimum(np.searchsorted(self.sorted, ids), len(self.sorted) - 1)
        which = np.flatnonzero(self.sorted[at] == ids)
        rows = self.order[at[which]]
        if self.failed:
            good = np.array([self.begin + row not in self.failed for row in rows.tolist()], bool)
            which, rows = which[good], rows[good]
        return which, rows


class Stream:
    """What a rank reads in an epoch; ``chunks`` by number, each of ``chunk_rows`` rows."""

    def __init__(self, rows: RankRows, chunk_rows: int) -> None:
        self.rows = rows
        self.chunk_rows = chunk_rows
        self.chunks: dict[int, Chunk] = {}
        self.position = 0  # what comes before was read, or will be fetched when it is asked for
        self.last_end = 0  # of the last read
        self.wanted = trio.Event()  # the reader went on, or there is room

    @property
    def ahead_bytes(self) -> int:
        """Bytes of its chunks, those on their way too."""
        return sum(chunk.nbytes for chunk in self.chunks.values())


class Left:
    """What of a chunk is not here yet.

    Attributes:
        places: int64, positions in the chunk, rising.
    """

    def __init__(self, chunk: Chunk, out: _Bytes) -> None:
        self.chunk = chunk
        self.places = np.arange(len(chunk.ids), dtype=np.int64)
        self._out = out

    def take(self, places: _Ints, data: memoryview) -> int:
        """Puts samples at their places, which have them one after another in ``data``; returns the bytes.

        Raises:
            CorruptError: ``data`` has not the bytes of these samples.
        """
        edges = self.chunk.edges
        if len(data) != int((edges[places + 1] - edges[places]).sum()):
            raise CorruptError(f"{len(places)} samples in {len(data)} bytes: they have others")
        begin, source = 0, np.frombuffer(data, np.uint8)
        for low, high in zip(edges[places].tolist(), edges[places + 1].tolist(), strict=True):
            self._out[low:high] = source[begin : begin + high - low]
            begin += high - low
        self.places = np.setdiff1d(self.places, places)
        return begin


def following(rows: RankRows) -> RankRows:
    """Returns what the same rank reads in the next epoch."""
    part = rows.partition
    start = part.start.start_of(part.start.epoch + 1)
    order = Order(part.order.count, start.seed, start.epoch, part.order.shuffle)
    return replace(part, order=order, start=start).rank(rows.rank)
