"""The samples of a dataset as the mount and the window ask for them: by id, many in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tenplexfs.errors import CorruptError, InvalidError, TenplexError
from tenplexfs.formats.npy_header import parse_npy
from tenplexfs.formats.sample_index import Packing, SampleIndex, Spans
from tenplexfs.formats.zip_directory import unpack_member
from tenplexfs.storage.samples.reader import FileRanges, RangeReader

__all__ = ["IndexedSamples", "SampleFailure", "SampleSource", "SamplesError", "read_samples"]

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """A sample that could not be read.

    Attributes:
        at: Where it stands in the ids of the call.
        sample: Its id.
        error: Names file and range.
    """

    at: int
    sample: int
    error: TenplexError


class SamplesError(CorruptError):
    """Some samples of a call could not be read; all the others were."""

    def __init__(self, failures: Sequence[SampleFailure]) -> None:
        first = failures[0]
        more = f" (and {len(failures) - 1} more samples)" if len(failures) > 1 else ""
        super().__init__(f"sample {first.sample}: {first.error.message}{more}", **first.error.details)
        self.failures = tuple(failures)


class SampleSource(Protocol):
    """The samples of a dataset. Calls block; any thread may make them, several at once.

    Attributes:
        count: Samples, with ids 0 to count - 1.
        dtype: Of the elements, or None: any bytes.
        shape: Of every sample, or None: they differ, or are no arrays.
    """

    @property
    def count(self) -> int: ...  # noqa: D102

    @property
    def dtype(self) -> np.dtype[np.generic] | None: ...  # noqa: D102

    @property
    def shape(self) -> tuple[int, ...] | None: ...  # noqa: D102

    def sizes(self, ids: _Ints) -> _Ints:
        """Returns the bytes of each sample, int64 (n,), without reading any."""
        ...

    def read_into(self, ids: _Ints, out: memoryview) -> None:
        """Fills ``out`` with the samples one after another: as many bytes as their sizes sum to.

        Args:
            ids: int64 (n,), in any order, repeated ones too.
            out: Writable, contiguous bytes.

        Raises:
            SamplesError: Some could not be read; their bytes are not to be used, all others are right.
        """
        ...


def read_samples(source: SampleSource, ids: npt.ArrayLike) -> list[memoryview]:
    """Returns the bytes of each of ``ids``.

    Raises:
        SamplesError: Some could not be read.
    """
    wanted = np.asarray(ids, np.int64).reshape(-1)
    edges = np.concatenate([[0], np.cumsum(source.sizes(wanted))]).tolist()
    out = memoryview(bytearray(edges[-1]))
    source.read_into(wanted, out)
    return [out[start:stop] for start, stop in pairwise(edges)]


class IndexedSamples:
    """A `SampleSource` by an index, and a reader for the files that it names."""

    def __init__(self, index: SampleIndex, reader: RangeReader) -> None:
        self.index = index
        self._reader = reader

    @property
    def count(self) -> int:
        """Samples."""
        return self.index.count

    @property
    def dtype(self) -> np.dtype[np.generic] | None:
        """Of the elements, or None."""
        return self.index.dtype

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of every sample, or None."""
        return self.index.shape

    def sizes(self, ids: _Ints) -> _Ints:
        """Returns the bytes of each sample."""
        return self.index.sizes(self._checked(ids))

    def read_into(self, ids: _Ints, out: memoryview) -> None:
        """Fills ``out`` with the samples one after another."""
        sizes = self.index.sizes(self._checked(ids))
        edges = np.concatenate([[0], np.cumsum(sizes)])
        if len(out) != edges[-1]:
            raise InvalidError(f"buffer of {len(out)} bytes: {len(ids)} samples have {int(edges[-1])}")
        spans = self.index.spans(ids)
        if self.index.packing is Packing.MEMBER:
            failed = self._read_members(spans, ids, out, edges)
        else:
            failed = self._read(spans, edges[:-1], out)
        if failed:
            raise SamplesError([SampleFailure(at, int(ids[at]), failed[at]) for at in sorted(failed)])

    def read_part(self, ids: _Ints, skip: int, out: memoryview) -> None:
        """Fills ``out`` with the bytes from ``skip`` on of the samples one after another.

        Of samples at the edges only what is asked for is read, where they are not packed.

        Raises:
            SamplesError: Some could not be read; their bytes are not to be used.
        """
        edges = np.concatenate([[0], np.cumsum(self.index.sizes(self._checked(ids)))])
        if skip < 0 or skip + len(out) > edges[-1]:
            raise InvalidError(f"bytes [{skip}, {skip + len(out)}): {len(ids)} samples have {int(edges[-1])}")
        if skip == 0 and len(out) == edges[-1]:
            self.read_into(ids, out)
            return
        spans = self.index.spans(ids)
        if self.index.packing is Packing.MEMBER or spans.begin.shape[1] != 1:
            whole = memoryview(bytearray(int(edges[-1])))
            self.read_into(ids, whole)
            out[:] = whole[skip : skip + len(out)]
            return
        low = np.clip(edges[:-1], skip, skip + len(out))
        high = np.clip(edges[1:], skip, skip + len(out))
        begin = spans.begin + (low - edges[:-1])[:, None]
        failed = self._read(Spans(spans.file, begin, begin + (high - low)[:, None]), low - skip, out)
        if failed:
            raise SamplesError([SampleFailure(at, int(ids[at]), failed[at]) for at in sorted(failed)])

    def _checked(self, ids: _Ints) -> _Ints:
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.count:
            raise InvalidError(
                f"sample {int(ids.min())} to {int(ids.max())}: need 0 <= sample < {self.count}"
            )
        return ids

    def _read(self, spans: Spans, at: _Ints, out: memoryview) -> dict[int, TenplexError]:
        """Reads each sample's ranges to ``at``; returns what failed, by position."""
        columns = spans.begin.shape[1]
        widths = spans.end - spans.begin
        places = at[:, None] + np.cumsum(widths, axis=1) - widths
        groups = _by_file(spans.file)
        wanted = [
            FileRanges(
                self.index.name(int(spans.file[group[0]])),
                spans.begin[group].reshape(-1),
                spans.end[group].reshape(-1),
                places[group].reshape(-1),
            )
            for group in groups
        ]
        failed: dict[int, TenplexError] = {}
        for failure in self._reader.read(wanted, out):
            failed.setdefault(int(groups[failure.batch][failure.number // columns]), failure.error)
        return failed

    def _read_members(
        self, spans: Spans, ids: _Ints, out: memoryview, edges: _Ints
    ) -> dict[int, TenplexError]:
        """Reads zip members and unpacks them."""
        packed_edges = np.concatenate([[0], np.cumsum(spans.end[:, 0] - spans.begin[:, 0])])
        packed = memoryview(bytearray(int(packed_edges[-1])))
        failed = self._read(spans, packed_edges[:-1], packed)
        for at in range(len(ids)):
            if at in failed:
                continue
            member = packed[int(packed_edges[at]) : int(packed_edges[at + 1])]
            try:
                self._unpack(member, int(ids[at]), out[int(edges[at]) : int(edges[at + 1])])
            except TenplexError as error:
                begin, end = int(spans.begin[at, 0]), int(spans.end[at, 0])
                where = f"{self.index.name(int(spans.file[at]))}: bytes [{begin}, {end})"
                failed[at] = CorruptError(f"{where}: {error.message}")
        return failed

    def _unpack(self, member: memoryview, sample: int, out: memoryview) -> None:
        table = self.index.table
        if table is None:
            raise CorruptError("index of members without a table")
        file = unpack_member(member, int(table[sample, 1]))
        if self.index.shape is None:
            out[:] = file
            return
        header = parse_npy(file)
        if header.shape != self.index.shape or header.dtype != self.index.dtype:
            raise CorruptError(f"array of {header.shape} {header.dtype}: the index says {self.index.shape}")
        data = memoryview(file)[header.data_at :]
        if len(data) != header.data_bytes:
            raise CorruptError(f"array of {header.data_bytes} bytes: got {len(data)}")
        if header.fortran_order:
            array = np.ndarray(header.shape, header.dtype, data, order="F")
            out[:] = array.tobytes()
        else:
            out[:] = data


def _by_file(file: _Ints) -> list[_Ints]:
    """Returns the positions of each file, in order."""
    if file.size and int(file.min()) == int(file.max()):
        return [np.arange(len(file))]
    order = np.argsort(file, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(file[order])) + 1) if order.size else []
