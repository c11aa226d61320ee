"""Parts of the window over samples: a piece of a rank's rows, the rank's stream of them, what is here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import trio

from tenplexfs.core.order import Order
from tenplexfs.core.partition import Partition, RankRows
from tenplexfs.errors import CorruptError, TenplexError, TimedOutError, UnavailableError

__all__ = ["Chunk", "Held", "Left", "Pace", "Stream", "following"]

_Ints = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]


@dataclass(eq=False)
class Chunk:
    """Rows [begin, end) of a stream.

    Attributes:
        rows: Of which stream.
        width: Rows of each of that stream's chunks.
        is_kept: It belongs to the window, not to one read alone.
        ids: int64, the samples.
        edges: int64, where each begins in the data, and the end of the last.
        data: None while they come.
        failed: By row, what could not be had.
        error: Why nothing of it is here.
        ended: Set when it came, or failed.
        delivered: By row, whether it was read.
    """

    rows: RankRows
    width: int
    is_kept: bool
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

    @property
    def nbytes(self) -> int:
        """Bytes of its samples."""
        return int(self.edges[-1])

    def is_spoilt(self, begin: int, end: int) -> bool:
        """Returns whether rows of [begin, end) failed in a way that may pass."""
        failed = [error for row, error in self.failed.items() if begin <= row < end]
        errors = failed if self.error is None else [self.error]
        return any(isinstance(error, UnavailableError | TimedOutError) for error in errors)


class Held:
    """The chunks of a window that have come, found by the samples in them: by arithmetic, not by looking."""

    def __init__(self) -> None:
        self._grids: dict[tuple[RankRows, int], dict[int, Chunk]] = {}

    def add(self, chunk: Chunk) -> None:
        """Takes note of a chunk that has come; it may replace one of the same rows."""
        self._grids.setdefault((chunk.rows, chunk.width), {})[chunk.begin // chunk.width] = chunk

    def remove(self, chunk: Chunk) -> None:
        """Forgets a chunk, if it is here."""
        key, number = (chunk.rows, chunk.width), chunk.begin // chunk.width
        grid = self._grids.get(key, {})
        if grid.get(number) is chunk:
            del grid[number]
            if not grid:
                del self._grids[key]

    def find(self, ids: _Ints) -> tuple[_Ints, memoryview]:
        """Returns which of ``ids``, by position, are here, and their bytes one after another."""
        found: dict[int, _Bytes] = {}
        located: dict[Partition, tuple[_Ints, _Ints]] = {}
        for (rows, width), grid in self._grids.items():
            part = rows.partition
            if part not in located:
                located[part] = part.locate(ids)
            ranks, places = located[part]
            mine = np.flatnonzero(ranks == rows.rank)
            numbers = places[mine] // width
            for number in np.unique(numbers).tolist():
                if number in grid:
                    which = mine[numbers == number]
                    _collect(grid[number], which, places[which], found)
        positions = sorted(found)
        joined = np.concatenate([found[at] for at in positions]) if positions else np.empty(0, np.uint8)
        return np.array(positions, np.int64), joined.data


def _collect(chunk: Chunk, positions: _Ints, rows: _Ints, found: dict[int, _Bytes]) -> None:
    assert chunk.data is not None  # it has come
    begins = chunk.edges[rows - chunk.begin].tolist()
    ends = chunk.edges[rows - chunk.begin + 1].tolist()
    for position, row, begin, end in zip(positions.tolist(), rows.tolist(), begins, ends, strict=True):
        if row not in chunk.failed:
            found.setdefault(position, chunk.data[begin:end])


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


class Pace:
    """How many chunks are on their way at once: as many as the link carries without a queue.

    One more each round while they take little longer than the fastest one, one less when they take much
    longer: then they wait for each other, what is needed first comes last, and connections overrun the link.
    """

    FEWEST, MOST = 4, 32
    _LITTLE, _MUCH = 2.0, 3.0  # times the fastest

    def __init__(self) -> None:
        self._window = float(self.FEWEST)
        self._fastest_s = math.inf

    @property
    def at_once(self) -> int:
        """Chunks."""
        return int(self._window)

    def took(self, seconds: float) -> None:
        """Takes note of how long a chunk took from its source."""
        self._fastest_s = min(self._fastest_s, seconds)
        if seconds < self._LITTLE * self._fastest_s:
            self._window = min(self._window + 1 / self._window, self.MOST)
        elif seconds > self._MUCH * self._fastest_s:
            self._window = max(self._window - 1, self.FEWEST)


class Left:
    """What of a chunk is not here yet.

    Attributes:
        places: int64, positions in the chunk, rising.
        out: Of the whole chunk.
    """

    def __init__(self, chunk: Chunk, out: _Bytes) -> None:
        self.chunk = chunk
        self.places = np.arange(len(chunk.ids), dtype=np.int64)
        self.out = out

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
            self.out[low:high] = source[begin : begin + high - low]
            begin += high - low
        self.places = np.setdiff1d(self.places, places)
        return begin


def following(rows: RankRows) -> RankRows:
    """Returns what the same rank reads in the next epoch."""
    part = rows.partition
    start = part.start.start_of(part.start.epoch + 1)
    order = Order(part.order.count, start.seed, start.epoch, part.order.shuffle)
    return replace(part, order=order, start=start).rank(rows.rank)
