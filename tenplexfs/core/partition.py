"""Who reads which samples: batch b is the same for any number of ranks, each takes its contiguous part of it.

Nothing is stored: a row of a rank is a position of the epoch by arithmetic, and a position is a sample by the
order. A partition of a billion samples is made as fast as one of ten.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tenplexfs.core.cursor import Cursor, Extent
from tenplexfs.core.order import Order
from tenplexfs.errors import InvalidError

__all__ = ["DegreeError", "Partition", "RankRows"]

_Ids = npt.NDArray[np.int64]
_BLOCK = 1 << 14
"""Rows worked on at a time, so that they stay in the cache."""


class DegreeError(InvalidError, ValueError):
    """A rank, a degree or a batch that do not go together."""


@dataclass(frozen=True, slots=True)
class Partition:
    """The samples of one epoch from a cursor on, over the ranks of the data-parallel axis.

    Attributes:
        order: Of the epoch.
        start: Row 0 of every rank; of the order's seed and epoch.
        extent: Of the dataset; its count is the order's.
        degree: Number of data-parallel ranks.
        uneven: Split batches that the degree does not divide as evenly as can be, the larger parts first.
    """

    order: Order
    start: Cursor
    extent: Extent
    degree: int
    uneven: bool = False

    def __post_init__(self) -> None:
        start, order = self.start, self.order
        if (order.count, order.seed, order.epoch) != (self.extent.count, start.seed, start.epoch):
            raise InvalidError(f"{order} is not the order of {start} over {self.extent.count} samples")
        if start.consumed > order.count:
            raise InvalidError(f"consumed {start.consumed}: epoch {start.epoch} has {order.count} samples")
        _check_degree(start.global_batch, self.degree, uneven=self.uneven)

    @classmethod
    def of(
        cls, start: Cursor, extent: Extent, *, degree: int, shuffle: bool = True, uneven: bool = False
    ) -> Partition:
        """Returns the partition of the cursor's epoch.

        Raises:
            DegreeError: The degree is not positive, or does not divide the batch and ``uneven`` is False; the
                message lists the degrees that do.
        """
        order = Order(extent.count, start.seed, start.epoch, shuffle)
        return cls(order, start, extent, degree, uneven)

    @property
    def batches(self) -> int:
        """Steps to the end of the epoch."""
        return self.start.batches_left(self.extent)

    @property
    def samples(self) -> int:
        """Samples of those steps, over all ranks."""
        return self.start.dropped(self.extent)[0] - self.start.consumed

    @property
    def dropped(self) -> _Ids:
        """The ids at the end of the epoch that no step takes."""
        return self.order.span(*self.start.dropped(self.extent))

    def batch(self, number: int) -> _Ids:
        """Returns the ids of a global batch, counted from the cursor.

        Raises:
            InvalidError: There is no such batch.
        """
        if not 0 <= number < self.batches:
            raise InvalidError(f"batch {number}: need 0 <= batch < {self.batches}")
        begin = number * self.start.global_batch
        end = min(begin + self.start.global_batch, self.samples)
        return self.order.span(self.start.consumed + begin, self.start.consumed + end)

    def rank(self, rank: int) -> RankRows:
        """Returns what ``rank`` of the data-parallel axis reads.

        Raises:
            DegreeError: There is no such rank.
        """
        return RankRows(self, rank)

    def locate(self, ids: npt.ArrayLike) -> tuple[_Ids, _Ids]:
        """Returns the rank and the row at which each of ``ids`` is read; -1 and -1: by nobody (any more)."""
        offsets = self.order.positions(ids) - self.start.consumed
        number, place = np.divmod(offsets, self.start.global_batch)
        full, tail = divmod(self.samples, self.start.global_batch)
        ranks, rows = np.full_like(offsets, -1), np.full_like(offsets, -1)
        for size, chosen in (
            (self.start.global_batch, (number >= 0) & (number < full)),
            (tail, (number == full) & (place < tail)),
        ):
            base, more = divmod(size, self.degree)
            cut = more * (base + 1)
            here = place[chosen]
            rank = np.where(here < cut, here // (base + 1), more + (here - cut) // max(base, 1))
            ranks[chosen] = rank
            begin = rank * base + np.minimum(rank, more)
            local_base, local_more = divmod(self.start.global_batch, self.degree)
            rows[chosen] = number[chosen] * (local_base + (rank < local_more)) + here - begin
        return ranks, rows


@dataclass(frozen=True, slots=True)
class RankRows:
    """What one rank of the data-parallel axis reads in an epoch, in the order of consumption: its rows.

    Attributes:
        partition: Of the epoch.
        rank: Coordinate on the data-parallel axis.
    """

    partition: Partition
    rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.partition.degree:
            raise DegreeError(f"rank {self.rank}: need 0 <= rank < {self.partition.degree}, the degree")

    @property
    def local_batch(self) -> int:
        """Rows of a whole batch."""
        begin, end = self._part(self.partition.start.global_batch)
        return end - begin

    @property
    def count(self) -> int:
        """Rows to the end of the epoch."""
        return self.end_of(self.partition.batches)

    def end_of(self, batches: int) -> int:
        """Returns the rows of the first ``batches`` batches: where the next one begins.

        Raises:
            InvalidError: The epoch has fewer batches.
        """
        if not 0 <= batches <= self.partition.batches:
            raise InvalidError(f"batches: need 0 <= batches <= {self.partition.batches}, got {batches}")
        full, tail = divmod(self.partition.samples, self.partition.start.global_batch)
        begin, end = self._part(tail)
        return min(batches, full) * self.local_batch + (end - begin if batches > full else 0)

    def positions(self, rows: npt.ArrayLike) -> _Ids:
        """Returns the positions in the epoch of ``rows`` (any shape), int64.

        Raises:
            InvalidError: A row is not of this rank.
        """
        given = np.asarray(rows)
        if given.size and given.dtype.kind not in "iu":
            raise InvalidError(f"rows: need integers, got {given.dtype}")
        if given.size and not 0 <= int(given.min()) <= int(given.max()) < self.count:
            low, high = int(given.min()), int(given.max())
            raise InvalidError(f"row {low if low < 0 else high}: rank {self.rank} has {self.count} rows")
        return self._positions(given.astype(np.int64))

    def ids(self, rows: npt.ArrayLike) -> _Ids:
        """Returns the ids of the samples at ``rows`` (any shape), int64.

        Raises:
            InvalidError: A row is not of this rank.
        """
        return self.partition.order.ids(self.positions(rows))

    def span(self, begin: int, end: int) -> _Ids:
        """Returns the ids of the samples at rows [begin, end), int64.

        Raises:
            InvalidError: The rows are not of this rank.

        Cost: about 15 ns a row, and the memory of the result.
        """
        if not 0 <= begin <= end <= self.count:
            raise InvalidError(f"rows [{begin}, {end}): rank {self.rank} has {self.count} rows")
        ids = np.empty(end - begin, np.int64)
        for start in range(begin, end, _BLOCK):
            stop = min(start + _BLOCK, end)
            rows = np.arange(start, stop, dtype=np.int64)
            ids[start - begin : stop - begin] = self.partition.order.ids(self._positions(rows))
        return ids

    def _positions(self, rows: _Ids) -> _Ids:
        start = self.partition.start
        full, tail = divmod(self.partition.samples, start.global_batch)
        begin, end = self._part(start.global_batch)
        if self.partition.degree == 1:
            return rows + start.consumed
        number = rows // max(end - begin, 1)
        places = number * (start.global_batch - (end - begin)) + rows + (start.consumed + begin)
        if tail and rows.size and int(number.max()) >= full:
            shift = start.consumed + full * start.global_batch + self._part(tail)[0] - full * (end - begin)
            places = np.where(number < full, places, rows + shift)
        return places

    def _part(self, batch: int) -> tuple[int, int]:
        """Returns this rank's [begin, end) of a batch of that size."""
        base, more = divmod(batch, self.partition.degree)
        begin = self.rank * base + min(self.rank, more)
        return begin, begin + base + (self.rank < more)


def _check_degree(global_batch: int, degree: int, *, uneven: bool) -> None:
    if degree < 1:
        raise DegreeError(f"data-parallel degree: need >= 1, got {degree}")
    if degree > global_batch and uneven:
        raise DegreeError(f"global batch {global_batch}: has no sample for some of {degree} ranks")
    if global_batch % degree and not uneven:
        small = [d for d in range(1, int(global_batch**0.5) + 1) if global_batch % d == 0]
        divisors = sorted({*small, *(global_batch // d for d in small)})
        raise DegreeError(
            f"global batch {global_batch}: {degree} ranks do not divide it; degrees that divide "
            f"{global_batch} are {', '.join(map(str, divisors))}"
        )
