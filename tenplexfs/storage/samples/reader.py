"""Reads ranges of files: the seam between samples and where their bytes are, and local files behind it."""

from __future__ import annotations

import glob
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tenplexfs.errors import CorruptError, InvalidError, NotFoundError, TenplexError
from tenplexfs.storage.samples.gather import Gather

__all__ = ["Failure", "FileRanges", "LocalReader", "RangeReader", "read_ranges"]

_GATHERED_MIN = 8  # ranges
_GATHERED_BYTES_MAX = 64 << 10  # of one of them, on average

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FileRanges:
    """Ranges of one file, and where their bytes go.

    Attributes:
        file: Path or URL.
        begin: int64 (n,).
        end: int64 (n,), exclusive.
        at: int64 (n,), offset of each range's first byte in the buffer that is read into.
    """

    file: str
    begin: _Ints
    end: _Ints
    at: _Ints


@dataclass(frozen=True, slots=True)
class Failure:
    """A range that could not be read.

    Attributes:
        batch: Which `FileRanges` of the call.
        number: Which range of it.
        error: Names file and range.
    """

    batch: int
    number: int
    error: TenplexError


class RangeReader(Protocol):
    """Where files are. Calls block, from any threads at once; those to remote stores have a deadline."""

    def read(self, wanted: Sequence[FileRanges], out: memoryview) -> list[Failure]:
        """Fills ``out`` with the wanted ranges, whole; what is there of a failed one is not to be used.

        One range that fails does not hinder the others.
        """
        ...

    def sizes(self, files: Sequence[str]) -> list[int]:
        """Returns the bytes of each file.

        Raises:
            NotFoundError: A file is not there.
            TenplexError: It cannot be asked.
        """
        ...

    def find(self, pattern: str) -> list[str]:
        """Returns the files that ``pattern`` means, sorted: one, all below a directory, or a glob (``**``).

        Raises:
            NotFoundError: There is none.
        """
        ...

    def close(self) -> None:
        """Gives back threads and files."""
        ...


def read_ranges(reader: RangeReader, file: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
    """Returns the bytes [begin, end) of ``file`` for each of ``ranges``.

    Raises:
        TenplexError: One of them could not be read.
    """
    begin, end = np.asarray(ranges, np.int64).reshape(-1, 2).T
    edges = np.concatenate([[0], np.cumsum(end - begin)])
    out = memoryview(bytearray(int(edges[-1])))
    for failure in reader.read([FileRanges(file, begin, end, edges[:-1])], out):
        raise failure.error
    return [out[start:stop] for start, stop in pairwise(edges.tolist())]


class LocalReader:
    """Files of this machine. A file that is being read stays open; one that is replaced is not noticed.

    Args:
        open_files_max: How many files are kept open.
        mapped_bytes_max: Of files that are mapped: the kernel's tables for them take up to a 500th of it.
    """

    def __init__(self, *, open_files_max: int = 256, mapped_bytes_max: int = 128 << 30) -> None:
        self._open_files_max = open_files_max
        self._mapped_bytes_left = mapped_bytes_max
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, wanted: Sequence[FileRanges], out: memoryview) -> list[Failure]:
        """Reads in the order given; ranges that follow each other in file and buffer are one.

        Many small ones are one system call.
        """
        failures: list[Failure] = []
        for batch, ranges in enumerate(wanted):
            try:
                file = self._open(ranges.file)
            except TenplexError as error:
                failures += [Failure(batch, number, error) for number in range(len(ranges.begin))]
                continue
            begin, end, at, heads = _joined(ranges)
            gather = self._gather(file) if _is_worth_it(begin, end) else None
            if gather is not None and gather.read(begin, end - begin, at, out):
                continue
            tails = np.append(heads, len(ranges.begin))[1:].tolist()
            for start, stop, offset, head, tail in zip(
                begin.tolist(), end.tolist(), at.tolist(), heads.tolist(), tails, strict=True
            ):
                if file.read_into(out[offset : offset + stop - start], start):
                    failures += _one_by_one(file, ranges, range(head, tail), batch, out)
        return failures

    def sizes(self, files: Sequence[str]) -> list[int]:
        """Returns the bytes of each file."""
        return [self._open(file).size() for file in files]

    def find(self, pattern: str) -> list[str]:
        """Returns files by path, directory (without hidden files) or glob."""
        path = Path(pattern)
        if path.is_file():
            return [pattern]
        wanted = str(Path(glob.escape(pattern)) / "**") if path.is_dir() else pattern
        names = glob.glob(wanted, recursive=True)  # noqa: PTH207 - Path.glob knows no absolute patterns
        found = sorted(name for name in names if Path(name).is_file())
        if not found:
            raise NotFoundError(f"{pattern}: no such file, or no file in it")
        return found

    def close(self) -> None:
        """Closes the files, those being read when they have been."""
        with self._lock:
            self._files.clear()

    def _open(self, name: str) -> _File:
        with self._lock:
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = _File(name)
            self._files.move_to_end(name)
            if len(self._files) > self._open_files_max:
                _, oldest = self._files.popitem(last=False)
                self._mapped_bytes_left += oldest.mapped_bytes or 0
            return file

    def _gather(self, file: _File) -> Gather | None:
        with self._lock:
            if file.mapped_bytes is None and self._files.get(file.name) is file:
                file.map(self._mapped_bytes_left)
                self._mapped_bytes_left -= file.mapped_bytes or 0
        return file.gather


class _File:
    """An open file; closed when nobody refers to it, so that no thread reads from a number given anew."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gather: Gather | None = None
        self.mapped_bytes: int | None = None  # not tried yet
        self._fd = -1
        try:
            self._fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFoundError(f"{name}: no such file") from error
        except (OSError, ValueError) as error:
            raise InvalidError(f"{name}: {getattr(error, 'strerror', None) or error}") from error

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def map(self, bytes_max: int) -> None:
        size = self.size()
        self.mapped_bytes = 0
        if 0 < size <= bytes_max:
            with suppress(OSError):  # not every file system can
                self.gather = Gather(self._fd, size)
                self.mapped_bytes = size

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read_into(self, out: memoryview, begin: int) -> str | None:
        """Fills ``out`` from ``begin`` on; returns why it could not."""
        try:
            while out:
                count = os.preadv(self._fd, [out], begin)
                if count == 0:
                    return f"the file has {self.size()} bytes, fewer than its index says"
                out, begin = out[count:], begin + count
        except OSError as error:
            return error.strerror or str(error)
        return None


def _is_worth_it(begin: _Ints, end: _Ints) -> bool:
    count = len(begin)
    return count >= _GATHERED_MIN and int((end - begin).sum()) <= count * _GATHERED_BYTES_MAX


def _joined(ranges: FileRanges) -> tuple[_Ints, _Ints, _Ints, _Ints]:
    """Joins ranges that follow each other in file and buffer; the last array tells the first one in each."""
    begin, end, at = ranges.begin, ranges.end, ranges.at
    starts = np.ones(len(begin), bool)
    starts[1:] = (begin[1:] != end[:-1]) | (at[1:] - at[:-1] != end[:-1] - begin[:-1])
    heads = np.flatnonzero(starts)
    if len(heads) == len(begin):
        return begin, end, at, heads
    return begin[heads], end[np.append(heads[1:], len(begin)) - 1], at[heads], heads


def _one_by_one(
    file: _File, ranges: FileRanges, numbers: range, batch: int, out: memoryview
) -> list[Failure]:
    failures = []
    for number in numbers:
        begin, end, at = int(ranges.begin[number]), int(ranges.end[number]), int(ranges.at[number])
        if why := file.read_into(out[at : at + end - begin], begin):
            error = CorruptError(f"{file.name}: bytes [{begin}, {end}): {why}")
            failures.append(Failure(batch, number, error))
    return failures
