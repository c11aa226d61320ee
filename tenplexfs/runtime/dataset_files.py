"""Open files of a dataset, made on read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tenplexfs.errors import TenplexError
from tenplexfs.formats.npy_header import header_of
from tenplexfs.runtime.dataset_view import RankView

__all__ = ["IndexFile", "OrderFile", "RowsFile", "order_header"]

_Ints = npt.NDArray[np.int64]
_INT64 = np.dtype("<i8")


def order_header(rows: int, columns: int = 0) -> bytes:
    """Returns the header of ``order.npy``, or of an ``index.npy`` with ``columns``."""
    return header_of((rows, columns) if columns else (rows,), _INT64)


class RowsFile:
    """A header, and then bytes of the samples of a rank.

    Args:
        view: Whose samples.
        header: Comes first.
        data_at: Where in its samples, one after another, the file begins.
        data_bytes: How many of their bytes it has.

    Attributes:
        size: Of the file.
        is_near: Reads do not wait for other machines.
    """

    def __init__(self, view: RankView, header: bytes, data_at: int, data_bytes: int) -> None:
        self.size = len(header) + data_bytes
        self.is_near = view.dataset.reader.is_near
        self._view = view
        self._header = header
        self._data_at = data_at

    def read(self, offset: int, size: int) -> bytes | None:
        """Returns bytes of the header; the samples have to be waited for."""
        end = min(offset + size, self.size)
        return self._header[offset:end] if end <= len(self._header) else None

    async def read_wait(self, offset: int, size: int) -> bytes | memoryview:
        """Returns the bytes, once they are here."""
        start = len(self._header)
        begin, end = max(offset - start, 0), min(offset + size, self.size) - start
        try:
            data = await self._view.read(self._data_at + begin, self._data_at + end)
        except TenplexError as error:
            state, rows = self._view.dataset.state, self._view.rows
            where = f"dataset {state.name}: epoch {rows.partition.start.epoch}, rank {self._view.rank}"
            raise type(error)(f"{where}: {error.message}", **error.details) from error
        return data if offset >= start else self._header[offset:] + bytes(data)

    def close(self) -> None:
        """Holds nothing."""


class _Computed:
    """A header, and then numbers that are computed where they are read."""

    is_near = True

    def __init__(
        self, view: RankView, header: bytes, row_bytes: int, make: Callable[[int, int], _Ints]
    ) -> None:
        self.size = len(header) + view.count * row_bytes
        self._view = view
        self._header = header
        self._row_bytes = row_bytes
        self._make = make

    def read(self, offset: int, size: int) -> bytes | memoryview | None:
        """Returns the bytes, or None when something has to be computed before."""
        return self._read(offset, size) if self._view.is_computed else None

    def _read(self, offset: int, size: int) -> bytes | memoryview:
        start, width = len(self._header), self._row_bytes
        begin, end = max(offset - start, 0), min(offset + size, self.size) - start
        head = self._header[offset : offset + size]
        if begin >= end:
            return head
        first = begin // width
        rows = np.ascontiguousarray(self._make(first, -(-end // width)), "<i8").reshape(-1).view(np.uint8)
        data = rows.data[begin - first * width : end - first * width]
        return head + bytes(data) if head else data

    async def read_wait(self, offset: int, size: int) -> bytes | memoryview:
        """Returns the bytes."""
        await self._view.compute()
        return self._read(offset, size)

    def close(self) -> None:
        """Holds nothing."""


class OrderFile(_Computed):
    """``order.npy``: the ids of the rows."""

    def __init__(self, view: RankView) -> None:
        super().__init__(view, order_header(view.count), 8, view.rows.span)


class IndexFile(_Computed):
    """``index.npy``: where each row begins and ends in ``data.bin``."""

    def __init__(self, view: RankView) -> None:
        def make(first: int, last: int) -> _Ints:
            edges = view.edges(first, last)
            return np.stack([edges[:-1], edges[1:]], axis=1)

        super().__init__(view, order_header(view.count, 2), 16, make)
