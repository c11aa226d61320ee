"""Builds the index of a dataset from its files, and checks it: ends, overlaps, sizes."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from tenplexfs.errors import InvalidError, TenplexError
from tenplexfs.formats.megatron import MegatronIndex, parse_idx
from tenplexfs.formats.npy_header import PREFIX_BYTES, NpyHeader, descr_text, header_bytes, parse_npy
from tenplexfs.formats.sample_index import RUN, Packing, SampleIndex, index_parts, names_of, parse_index
from tenplexfs.formats.tenplex_index import parse_tenplex_index
from tenplexfs.formats.zip_directory import END_BYTES, Member, find_directory, parse_directory, unpack_member
from tenplexfs.storage.samples.reader import FileRanges, RangeReader, read_ranges

__all__ = ["Built", "IndexBuilder", "map_index", "write_index"]

_HEAD_BYTES = 4096
_AT_ONCE = 256
_Ints = npt.NDArray[np.int64]
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Built:
    """An index, and what is odd about it.

    Attributes:
        index: Of the dataset.
        short: Files that are shorter than the ranges in them say; those samples will fail.
        overlapping_count: Samples that begin before another one of their file ends.
        empty_count: Samples of zero bytes.
    """

    index: SampleIndex
    short: tuple[str, ...] = ()
    overlapping_count: int = 0
    empty_count: int = 0


@dataclass(frozen=True, slots=True)
class IndexBuilder:
    """Makes indexes; every method lists files in the order of their samples.

    Attributes:
        reader: Where the files are.
        progress: Called with files done and files in all.

    Every method raises NotFoundError for a file that is not there, and InvalidError or CorruptError, with its
    name, for one that is not what it should be.
    """

    reader: RangeReader
    progress: Callable[[int, int], None] = field(default=lambda done, total: None)

    def npy(self, files: Sequence[str]) -> Built:
        """Returns the index of the rows (first dim) of ``.npy`` files of one row shape and dtype."""
        headers: list[NpyHeader] = []
        for chunk in self._chunks(files):
            sizes = self.reader.sizes(chunk)
            for file, size, head in zip(chunk, sizes, self._heads(chunk, sizes), strict=True):
                header = _named(file, self._npy_header, file, size, head)
                if not header.shape:
                    raise InvalidError(f"{file}: an array without dims has no rows")
                first = headers[0] if headers else header
                if (header.shape[1:], header.dtype) != (first.shape[1:], first.dtype):
                    raise InvalidError(
                        f"{file}: rows of {header.shape[1:]} {header.dtype}, those of {files[0]} are of "
                        f"{first.shape[1:]} {first.dtype}: make a dataset of each"
                    )
                if header.data_at + header.data_bytes > size:
                    need = header.data_at + header.data_bytes
                    raise InvalidError(f"{file}: has {size} bytes, its header says {need}")
                headers.append(header)
        if not headers:
            raise InvalidError("no .npy files: need one at least, it gives the shape")
        shape, dtype = headers[0].shape[1:], headers[0].dtype
        cut = any(header.fortran_order for header in headers)
        runs = np.array([_npy_run(header, cut=cut) for header in headers], RUN)
        return self._uniform("npy", files, [header.shape[0] for header in headers], runs, dtype, shape)

    def records(
        self,
        files: Sequence[str],
        *,
        record_bytes: int,
        skip_bytes: int = 0,
        dtype: np.dtype[np.generic] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Built:
        """Returns the index of records of one size, after ``skip_bytes`` in each file.

        Args:
            files: In order.
            record_bytes: Of each record.
            skip_bytes: Before the first one.
            dtype: Of the elements; with it, without ``shape``, a record is a vector of them.
            shape: Of a record.
        """
        dtype = np.dtype(np.uint8) if dtype is None else dtype
        if record_bytes < 1 or skip_bytes < 0 or dtype.hasobject or record_bytes % dtype.itemsize:
            raise InvalidError(
                f"records of {record_bytes} bytes after {skip_bytes}, elements of {dtype}: no such"
            )
        shape = (record_bytes // dtype.itemsize,) if shape is None else shape
        if math.prod(shape) * dtype.itemsize != record_bytes:
            raise InvalidError(f"records of {record_bytes} bytes: not of {shape} {dtype}")
        counts = []
        for file, size in self._sized(files):
            count, rest = divmod(size - skip_bytes, record_bytes)
            if count < 0 or rest:
                raise InvalidError(
                    f"{file}: {size} bytes are not {skip_bytes} and whole records of {record_bytes}"
                )
            counts.append(count)
        runs = np.array([(skip_bytes, record_bytes, record_bytes, 1, 0, 0)] * len(files), RUN)
        return self._uniform("records", files, counts, runs, dtype, shape)

    def files(self, files: Sequence[str]) -> Built:
        """Returns the index in which each file is a sample: ``.npz``, images, anything."""
        sizes = [size for _, size in self._sized(files)]
        table = np.stack([np.zeros(len(sizes), np.int64), np.array(sizes, np.int64)], axis=1)
        return self._table("files", files, [1] * len(files), table, None, sizes)

    def members(self, files: Sequence[str]) -> Built:
        """Returns the index of the arrays in ``.npz`` archives, in the order in which they lie.

        If all have one shape and dtype a sample is such an array, else it is the member, a ``.npy`` file.
        """
        found: list[tuple[Member, ...]] = []
        ends: list[int] = []
        heads: dict[tuple[tuple[int, ...], str], NpyHeader] = {}
        for file, size in self._sized(files):
            members, end = _named(file, self._directory, file, size)
            heads |= {
                (head.shape, descr_text(head.dtype)): head for head in self._member_heads(file, members)
            }
            found.append(members)
            ends.append(end)
        table = np.array([(member.begin, member.size) for part in found for member in part], np.int64)
        alike = next(iter(heads.values())) if len(heads) == 1 else None
        shape, dtype = (alike.shape, alike.dtype) if alike else (None, None)
        base, names_at, names = names_of(files)
        first = np.cumsum([0, *map(len, found)], dtype=np.int64)
        packing, last = Packing.MEMBER, np.array(ends, np.int64)
        table = table.reshape(-1, 2)
        return Built(
            SampleIndex("members", packing, dtype, shape, base, first, names_at, names, table, None, last)
        )

    def megatron(self, prefixes: Sequence[str], *, sequence_length: int | None = None) -> Built:
        """Returns the index of Megatron's datasets ``<prefix>.bin`` and ``<prefix>.idx``.

        Args:
            prefixes: Paths or URLs without the suffix.
            sequence_length: None: a document is a sample. Else samples of that many tokens and the next one,
                by Megatron's rule over the documents of each prefix in their order.
        """
        files = [f"{prefix}.bin" for prefix in prefixes]
        parsed: list[MegatronIndex] = []
        for prefix, size in self._sized([f"{prefix}.idx" for prefix in prefixes]):
            (data,) = read_ranges(self.reader, prefix, [(0, size)])
            parsed.append(_named(prefix, parse_idx, data))
            if parsed[-1].dtype != parsed[0].dtype:
                raise InvalidError(
                    f"{prefix}: tokens of {parsed[-1].dtype}, before they were {parsed[0].dtype}"
                )
        if not parsed:
            raise InvalidError("no Megatron datasets: need one at least, it gives the dtype")
        dtype, sizes = parsed[0].dtype, self.reader.sizes(files)
        if sequence_length is None:
            table = np.concatenate([index.documents for index in parsed])
            return self._table(
                "megatron", files, [len(index.documents) for index in parsed], table, dtype, sizes
            )
        for file, index, size in zip(files, parsed, sizes, strict=True):
            if index.begin + index.tokens * dtype.itemsize > size:
                raise InvalidError(
                    f"{file}: has {size} bytes, its index says {index.tokens} tokens of {dtype}"
                )
        counts = [index.sequences(sequence_length) for index in parsed]
        stride, sample_bytes = sequence_length * dtype.itemsize, (sequence_length + 1) * dtype.itemsize
        runs = np.array([(index.begin, stride, sample_bytes, 1, 0, 0) for index in parsed], RUN)
        return self._uniform("megatron-sequences", files, counts, runs, dtype, (sequence_length + 1,))

    def tenplex(self, index_file: str) -> Built:
        """Returns the index that a Tenplex index file describes; relative paths are beside that file."""
        (size,) = self.reader.sizes([index_file])
        (data,) = read_ranges(self.reader, index_file, [(0, size)])
        parsed = _named(index_file, parse_tenplex_index, bytes(data))
        beside = index_file[: index_file.rfind("/") + 1]
        files = [
            name if name.startswith("/") or "://" in name else beside + name.removeprefix("./")
            for name, _ in parsed
        ]
        table = np.concatenate([ranges for _, ranges in parsed] or [np.empty((0, 2), np.int64)])
        sizes = [size for _, size in self._sized(files)]
        return self._table("tenplex", files, [len(ranges) for _, ranges in parsed], table, None, sizes)

    def _chunks(self, files: Sequence[str]) -> Iterator[Sequence[str]]:
        for start in range(0, len(files), _AT_ONCE):
            yield files[start : start + _AT_ONCE]
            self.progress(min(start + _AT_ONCE, len(files)), len(files))

    def _sized(self, files: Sequence[str]) -> Iterator[tuple[str, int]]:
        for chunk in self._chunks(files):
            yield from zip(chunk, self.reader.sizes(chunk), strict=True)

    def _heads(self, files: Sequence[str], sizes: Sequence[int]) -> list[memoryview]:
        """Returns the first bytes of each file, those of all files asked for at once."""
        wanted, out, at = [], memoryview(bytearray(_HEAD_BYTES * len(files))), 0
        heads = []
        for file, size in zip(files, sizes, strict=True):
            count = min(size, _HEAD_BYTES)
            zero = np.zeros(1, np.int64)
            wanted.append(FileRanges(file, zero, zero + count, zero + at))
            heads.append(out[at : at + count])
            at += count
        for failure in self.reader.read(wanted, out):
            raise failure.error
        return heads

    def _npy_header(self, file: str, size: int, head: memoryview) -> NpyHeader:
        need = header_bytes(head)
        if need > len(head):
            (head,) = read_ranges(self.reader, file, [(0, min(need, size))])
        return parse_npy(head)

    def _directory(self, file: str, size: int) -> tuple[tuple[Member, ...], int]:
        (tail,) = read_ranges(self.reader, file, [(max(0, size - END_BYTES), size)])
        where = find_directory(bytes(tail), size)
        (directory,) = read_ranges(self.reader, file, [(where.begin, where.end)])
        return parse_directory(bytes(directory), where), where.begin

    def _member_heads(self, file: str, members: Sequence[Member]) -> list[NpyHeader]:
        ranges = [(member.begin, min(member.begin + _HEAD_BYTES, member.end)) for member in members]
        found = []
        for member, head in zip(members, read_ranges(self.reader, file, ranges), strict=True):
            where = f"{file}: member {member.name!r}"
            start = _named(where, unpack_member, head, None)
            if len(start) < PREFIX_BYTES or len(start) < _named(where, header_bytes, start):
                (whole,) = read_ranges(self.reader, file, [(member.begin, member.end)])
                start = _named(where, unpack_member, whole, member.size)
            found.append(_named(where, parse_npy, start))
        return found

    def _uniform(
        self,
        kind: str,
        files: Sequence[str],
        counts: Sequence[int],
        runs: npt.NDArray[np.void],
        dtype: np.dtype[np.generic],
        shape: tuple[int, ...],
    ) -> Built:
        base, names_at, names = names_of(files)
        first = np.cumsum([0, *counts], dtype=np.int64)
        index = SampleIndex(kind, Packing.NONE, dtype, shape, base, first, names_at, names, None, runs, None)
        return Built(index, empty_count=0 if math.prod(shape) else index.count)

    def _table(
        self,
        kind: str,
        files: Sequence[str],
        counts: Sequence[int],
        table: _Ints,
        dtype: np.dtype[np.generic] | None,
        sizes: Sequence[int],
    ) -> Built:
        """Checks the ranges of each file against its size and each other."""
        first = np.cumsum([0, *counts], dtype=np.int64)
        short: list[str] = []
        overlapping = 0
        for number, (file, size) in enumerate(zip(files, sizes, strict=True)):
            begin, end = table[int(first[number]) : int(first[number + 1])].T
            wrong = np.flatnonzero((begin < 0) | (begin > end))
            if wrong.size:
                at = int(wrong[0])
                raise InvalidError(
                    f"{file}: sample {at}: need 0 <= begin <= end, got [{begin[at]}, {end[at]})"
                )
            if begin.size and int(end.max()) > size:
                short.append(file)
            begin, end = begin[begin < end], end[begin < end]
            by_begin = np.argsort(begin, kind="stable")
            furthest = np.maximum.accumulate(end[by_begin])[:-1]
            overlapping += int((begin[by_begin][1:] < furthest).sum())
        base, names_at, names = names_of(files)
        index = SampleIndex(
            kind, Packing.NONE, dtype, None, base, first, names_at, names, table.reshape(-1, 2), None, None
        )
        return Built(index, tuple(short), overlapping, int((table[:, 0] == table[:, 1]).sum()))


def write_index(index: SampleIndex, path: Path) -> None:
    """Writes the file of ``index``, whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        aside = Path(file.name)
        try:
            for part in index_parts(index):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            aside.rename(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


def map_index(path: Path) -> SampleIndex:
    """Returns the index in a file, mapped: it takes the memory of what is looked at.

    Raises:
        OSError: It cannot be read.
        InvalidError, CorruptError: It is no valid index.
    """
    if path.stat().st_size == 0:
        raise InvalidError(f"{path}: no index of samples: 0 bytes")
    return _named(str(path), parse_index, np.memmap(path, np.uint8, "r").data)


def _npy_run(header: NpyHeader, *, cut: bool) -> tuple[int, ...]:
    """Returns the `RUN` of rows; ``cut``: element by element, as Fortran order lays them."""
    rows, elements, itemsize = header.shape[0], math.prod(header.shape[1:]), header.dtype.itemsize
    if not cut or not elements:
        return header.data_at, elements * itemsize, elements * itemsize, 1, 0, 0
    if header.fortran_order:
        return header.data_at, itemsize, itemsize, elements, rows * itemsize, 1
    return header.data_at, elements * itemsize, itemsize, elements, itemsize, 0


def _named(where: str, call: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs) -> _T:
    """Returns what ``call`` gives; an error of it begins with ``where``."""
    try:
        return call(*arguments, **named)
    except TenplexError as error:
        raise type(error)(f"{where}: {error.message}", **error.details) from error
