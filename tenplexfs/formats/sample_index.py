"""Which bytes of which file a sample is: the index of a dataset, as it lies in a file and is mapped from it.

Ranges are 64-bit: 16 bytes a sample, or none where the samples of a file have one size (rows, records,
sequences). Layout of the file: magic, uint64 length of a JSON header, the header, then the arrays it names,
each at a multiple of 64 bytes; little-endian.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tenplexfs.errors import CorruptError, InvalidError
from tenplexfs.formats.npy_header import descr_text, dtype_of_descr

__all__ = ["RUN", "Packing", "SampleIndex", "Spans", "index_parts", "names_of", "parse_index"]

RUN = np.dtype(
    [(name, "<i8") for name in ("begin", "stride", "size", "columns", "column_stride", "fortran_order")]
)
"""Samples of one file, all of one size.

Sample i is ``columns`` ranges of ``size`` bytes, the first at begin + i * stride, each ``column_stride``
after the one before: one, but where a file is in Fortran order. Then a column is an element of the sample,
and ``fortran_order`` tells whether they lie in that order or in C order.
"""

_MAGIC = b"TPXSAMPLES\x00\x01"
_HEADER_BYTES_MAX = 1 << 20
_ALIGNMENT = 64
_SECTIONS = {"first": "<i8", "names_at": "<i8", "names": "|u1", "table": "<i8", "runs": None, "ends": "<i8"}

_Ints = npt.NDArray[np.int64]


class Packing(StrEnum):
    """How a sample lies in its range. MEMBER: a zip member that is a ``.npy`` file."""

    NONE = "none"
    MEMBER = "member"


@dataclass(frozen=True, slots=True)
class Spans:
    """Ranges to read for some samples, sample by sample.

    Attributes:
        file: int64 (n,), number of each sample's file.
        begin: int64 (n, columns).
        end: int64 (n, columns), exclusive.
    """

    file: _Ints
    begin: _Ints
    end: _Ints


@dataclass(frozen=True, slots=True)
class SampleIndex:
    """The samples of a dataset, numbered file after file.

    Attributes:
        kind: What it was built from, for people.
        packing: Of every sample.
        dtype: Of the elements, or None: any bytes.
        shape: Of every sample, or None: they differ, or are no arrays.
        base: What the names of all files begin with.
        first: int64 (files + 1,), the first sample of each file, and the count.
        names_at: int64 (files + 1,), where each name begins in ``names``, and its end.
        names: uint8, UTF-8.
        table: int64 (count, 2), begin and end of each sample (`Packing.MEMBER`: begin and unpacked bytes).
        runs: `RUN` (files,), one number of columns for all: instead of a table.
        ends: int64 (files,), where the last member of each file ends (`Packing.MEMBER`); or None.
    """

    kind: str
    packing: Packing
    dtype: np.dtype[np.generic] | None
    shape: tuple[int, ...] | None
    base: str
    first: _Ints
    names_at: _Ints
    names: npt.NDArray[np.uint8]
    table: _Ints | None
    runs: npt.NDArray[np.void] | None
    ends: _Ints | None

    def __post_init__(self) -> None:
        files = len(self.first) - 1
        sound = (
            files >= 0
            and len(self.names_at) == files + 1
            and (self.table is None) != (self.runs is None)
            and (self.table is None or self.table.shape == (self.count, 2))
            and (self.runs is None or (self.runs.shape == (files,) and _all_the_same(self.runs["columns"])))
            and (self.ends is None) == (self.packing is Packing.NONE)
            and (self.ends is None or (self.ends.shape == (files,) and self.table is not None))
            and (self.shape is None or self.dtype is not None)
        )
        rising = sound and all(
            array[0] == 0 and array[-1] == last and (np.diff(array) >= 0).all()
            for array, last in ((self.first, self.count), (self.names_at, len(self.names)))
        )
        if not rising:
            raise CorruptError(f"sample index of {files} files: its parts do not fit together")

    @property
    def count(self) -> int:
        """Samples."""
        return int(self.first[-1])

    @property
    def file_count(self) -> int:
        """Files."""
        return len(self.first) - 1

    def name(self, file: int) -> str:
        """Returns the path or URL of a file."""
        encoded = self.names[int(self.names_at[file]) : int(self.names_at[file + 1])].tobytes()
        return self.base + encoded.decode("utf-8", "surrogateescape")

    def sizes(self, ids: _Ints) -> _Ints:
        """Returns the bytes of samples as they are delivered, int64 (n,)."""
        if self.shape is not None and self.dtype is not None:
            return np.full(ids.shape, math.prod(self.shape) * self.dtype.itemsize, np.int64)
        if self.packing is Packing.MEMBER and self.table is not None:
            return np.array(self.table[ids, 1], np.int64)
        if self.table is not None:
            ranges = self.table.take(ids, axis=0)  # one place of memory for each sample
            return np.asarray(ranges[:, 1] - ranges[:, 0], np.int64)
        spans = self.spans(ids)
        return np.asarray((spans.end - spans.begin).sum(axis=1), np.int64)

    def spans(self, ids: _Ints) -> Spans:
        """Returns the ranges to read for samples ``ids``, int64 (n,), each 0 <= id < count."""
        file = np.searchsorted(self.first, ids, "right") - 1
        if self.runs is not None:
            run = self.runs[file] if len(self.runs) != 1 else self.runs  # which is broadcast
            begin = (run["begin"] + (ids - self.first[file]) * run["stride"]).astype(np.int64)[:, None]
            columns = int(self.runs["columns"][0]) if len(self.runs) else 1
            if columns > 1:
                plain = np.arange(columns, dtype=np.int64)
                fortran = plain.reshape(self.shape or (-1,), order="F").reshape(-1)
                lies_at = np.where(run["fortran_order"][:, None], fortran, plain)
                begin = begin + lies_at * run["column_stride"][:, None]
            return Spans(file, begin, begin + run["size"][:, None])
        table = self.table if self.table is not None else np.empty((0, 2), np.int64)
        begin = table[ids, 0].astype(np.int64)
        if self.ends is None:
            return Spans(file, begin[:, None], table[ids, 1].astype(np.int64)[:, None])
        following = table[np.minimum(ids + 1, self.count - 1), 0]
        end = np.where(ids + 1 == self.first[file + 1], self.ends[file], following)
        return Spans(file, begin[:, None], end.astype(np.int64)[:, None])


def index_parts(index: SampleIndex) -> Iterator[bytes | memoryview]:
    """Yields the bytes of the file of ``index``."""
    arrays = {name: getattr(index, name) for name in _SECTIONS if getattr(index, name) is not None}
    header = {
        "kind": index.kind,
        "packing": index.packing,
        "descr": None if index.dtype is None else descr_text(index.dtype),
        "shape": index.shape,
        "base": index.base,
        "sections": {name: list(array.shape) for name, array in arrays.items()},
    }
    text = json.dumps(header).encode()
    yield from (_MAGIC, len(text).to_bytes(8, "little"), text)
    at = len(_MAGIC) + 8 + len(text)
    for name, array in arrays.items():
        yield bytes(-at % _ALIGNMENT)
        at += -at % _ALIGNMENT + array.nbytes
        if array.nbytes:
            yield np.ascontiguousarray(array, _SECTIONS[name] or RUN).reshape(-1).view(np.uint8).data


def parse_index(data: bytes | memoryview) -> SampleIndex:
    """Returns the index whose file is ``data``; its arrays are views of it.

    Raises:
        InvalidError: It is no index of samples, or of another version.
        CorruptError: It is cut short or contradicts itself.
    """
    view = memoryview(data)
    at = len(_MAGIC) + 8
    if len(view) < at or bytes(view[: len(_MAGIC)]) != _MAGIC:
        raise InvalidError(f"no index of samples (version 1): begins with {bytes(view[:12])!r}")
    size = int.from_bytes(view[at - 8 : at], "little")
    if size > min(_HEADER_BYTES_MAX, len(view) - at):
        raise CorruptError(f"index of samples: header of {size} bytes in a file of {len(view)}")
    try:
        header = json.loads(bytes(view[at : at + size]))
        shape = None if header["shape"] is None else tuple(int(extent) for extent in header["shape"])
        dtype = None if header["descr"] is None else dtype_of_descr(header["descr"])
        packing, sections = Packing(header["packing"]), dict(header["sections"])
        kind, base = str(header["kind"]), str(header["base"])
        arrays: dict[str, npt.NDArray[np.generic] | None] = dict.fromkeys(_SECTIONS)
        at += size
        for name, extents in sections.items():
            at += -at % _ALIGNMENT
            code = np.dtype(_SECTIONS[name] or RUN)
            count = math.prod(extents)
            arrays[name] = np.frombuffer(view, code, count, at if count else 0).reshape(extents)
            at += count * code.itemsize
        return SampleIndex(kind, packing, dtype, shape, base, **arrays)  # type: ignore[arg-type]
    except (ValueError, TypeError, AttributeError, RecursionError, LookupError, OverflowError) as error:
        raise CorruptError(f"index of samples: damaged or cut short: {error}") from error


def _all_the_same(values: npt.NDArray[np.generic]) -> bool:
    return bool((values[1:] == values[:-1]).all())


def names_of(files: Sequence[str]) -> tuple[str, _Ints, npt.NDArray[np.uint8]]:
    """Returns base, names_at and names of ``files``."""
    base = files[0] if files else ""
    for name in files:
        while not name.startswith(base):
            base = base[: base.rstrip("/").rfind("/") + 1]
    encoded = [name[len(base) :].encode("utf-8", "surrogateescape") for name in files]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return base, ends, np.frombuffer(b"".join(encoded), np.uint8)
