"""The samples of one rank, read from the mount: random access and batches, in numpy.

Works with any framework; a loader process that was forked, or got it by pickle, opens the files for itself.
Files are read, not mapped: where the source of a sample fails, that is an OSError, not a dead process.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from tenplexfs.core.partition import DegreeError
from tenplexfs.errors import InvalidError, NotFoundError

__all__ = ["Dataset"]

_HEAD_BYTES = 1 << 16


@dataclass(frozen=True)
class _Files:
    """What is open in one process."""

    pid: int
    data: int
    data_at: int
    index: npt.NDArray[np.int64] | None


class Dataset:
    """The samples that a rank has left, from the one that comes next after the snapshot's step.

    Item i is the i-th to consume: an array of the sample's shape and dtype or, where samples are no arrays of
    one shape, its bytes. It has what grain's ``RandomAccessDataSource`` and torch's map-style datasets need;
    batches of torch's loader are read at once.

    Args:
        path: ``<mount>/<job>/dataset/<name>`` with ``rank``, or the directory of a rank below it.
        rank: Coordinate on the data-parallel axis.
        epoch: None: the one where training is.
        part: Coordinate on the context-parallel axis; None: whole samples.
        remaining: False: from row 0 on, where the generation began.

    Attributes:
        path: Of the rank's directory.
        epoch: The one that is read.
        local_batch: Samples of this rank in a step.
        meta: What ``meta.json`` of the rank says.
        first: The row of item 0.

    Raises:
        NotFoundError: There is no such dataset or epoch.
        DegreeError: There is no such rank; it is a ValueError too.

    >>> train = Dataset("/mnt/tenplexfs/gpt/dataset/train", rank=0)  # doctest: +SKIP
    >>> for batch in train.batches():  # doctest: +SKIP
    ...     step(batch)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int | None = None,
        epoch: int | None = None,
        part: int | None = None,
        remaining: bool = True,
    ) -> None:
        self.path = _rank_directory(Path(path), rank, epoch, part)
        try:
            self.meta: Mapping[str, object] = json.loads((self.path / "meta.json").read_text())
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFoundError(f"{self.path}: no directory of a rank's samples") from error
        if self.meta.get("format") != "tenplexfs-dataset-rank":
            raise InvalidError(f"{self.path}: no directory of a rank's samples; give rank=")
        self.epoch = _int(self.meta["epoch"])
        self.local_batch = _int(self.meta["local_batch"])
        self.first = _int(self.meta["next"]) if remaining else 0
        self._rows = _int(self.meta["samples"])
        shape, dtype = self.meta["shape"], self.meta["dtype"]
        self.shape = None if not isinstance(shape, list) else tuple(_int(extent) for extent in shape)
        self.dtype = None if self.shape is None else _dtype(str(dtype))
        self._width = 0 if self.dtype is None else _width(self.shape, self.dtype)
        self._files: _Files | None = None

    def __len__(self) -> int:
        return self._rows - self.first

    def __repr__(self) -> str:
        kind = "bytes" if self.dtype is None else f"{self.dtype} {self.shape}"
        return f"Dataset({str(self.path)!r}, {len(self)} samples of {kind})"

    @overload
    def __getitem__(self, item: SupportsIndex) -> npt.NDArray[np.generic] | bytes: ...
    @overload
    def __getitem__(self, item: slice) -> npt.NDArray[np.generic] | list[bytes]: ...
    def __getitem__(self, item: SupportsIndex | slice) -> npt.NDArray[np.generic] | bytes | list[bytes]:
        """Returns a sample, or those of a slice: one array of them, or a list of bytes.

        Raises:
            IndexError: There is no such sample.
            OSError: It could not be had; the daemon's log says why.
        """
        if isinstance(item, slice):
            begin, end, step = item.indices(len(self))
            if step != 1:
                raise IndexError(f"slice with step {step}: need 1")
            return self._span(begin, max(begin, end))
        at = item.__index__()
        at += len(self) if at < 0 else 0
        if not 0 <= at < len(self):
            raise IndexError(f"sample {item}: the rank has {len(self)} left")
        return self._span(at, at + 1)[0]

    def __getitems__(self, items: Sequence[int]) -> list[npt.NDArray[np.generic] | bytes]:
        """Returns several samples; runs of them are read at once. For torch's loader."""
        found: list[npt.NDArray[np.generic] | bytes] = []
        at = 0
        while at < len(items):
            end = at + 1
            while end < len(items) and items[end] == items[end - 1] + 1:
                end += 1
            if not 0 <= items[at] <= items[end - 1] < len(self):
                raise IndexError(f"samples {items[at]} to {items[end - 1]}: the rank has {len(self)} left")
            found.extend(self._span(items[at], items[end - 1] + 1))
            at = end
        return found

    def __iter__(self) -> Iterator[npt.NDArray[np.generic] | bytes]:
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[npt.NDArray[np.generic] | list[bytes]]:
        """Yields this rank's part of each step's batch to the end of the epoch; the last may be shorter."""
        for begin in range(0, len(self), max(self.local_batch, 1)):
            yield self[begin : begin + self.local_batch]

    def ids(self) -> npt.NDArray[np.int64]:
        """Returns the ids of the samples, int64, in the order of the items."""
        ids: npt.NDArray[np.int64] = np.load(self.path / "order.npy")[self.first :]
        return ids

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_files": None}

    def __del__(self) -> None:
        if os is not None:  # as modules are when the interpreter ends
            self._close()

    def _span(self, begin: int, end: int) -> npt.NDArray[np.generic] | list[bytes]:
        files = self._opened()
        first, last = begin + self.first, end + self.first
        if self.dtype is not None and self.shape is not None:
            out = np.empty((last - first, *self.shape), self.dtype)
            _read(files.data, out.reshape(-1).view(np.uint8).data, files.data_at + first * self._width)
            return out
        assert files.index is not None  # without a dtype
        if first == last:
            return []
        edges = files.index[first:last].tolist()
        low = edges[0][0]
        data = bytearray(edges[-1][1] - low)
        _read(files.data, memoryview(data), low)
        return [bytes(data[a - low : b - low]) for a, b in edges]

    def _opened(self) -> _Files:
        files = self._files
        if files is not None and files.pid == os.getpid():
            return files
        # Not the parent's descriptors: a fork shares them with whoever closes them first.
        name = "data.npy" if self.dtype is not None else "data.bin"
        data = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC)
        index = None if self.dtype is not None else np.load(self.path / "index.npy", mmap_mode="r")
        data_at = os.fstat(data).st_size - self._rows * self._width if self.dtype is not None else 0
        self._files = _Files(os.getpid(), data, data_at, index)
        return self._files

    def _close(self) -> None:
        files = self.__dict__.get("_files")
        if files is not None and files.pid == os.getpid():
            os.close(files.data)
            self._files = None


def _rank_directory(path: Path, rank: int | None, epoch: int | None, part: int | None) -> Path:
    if rank is not None:
        if epoch is None:
            try:
                meta = json.loads((path / "meta.json").read_text())
            except (FileNotFoundError, NotADirectoryError) as error:
                raise NotFoundError(f"{path}: no dataset") from error
            if meta.get("format") != "tenplexfs-dataset":
                raise InvalidError(f"{path}: no dataset, but rank= is given")
            if not 0 <= rank < meta["degree"]:
                raise DegreeError(f"rank {rank}: need 0 <= rank < {meta['degree']}, the degree")
            epoch = int(meta["cursor"]["epoch"])
        path = path / str(epoch) / str(rank)
    return path if part is None else path / "cp" / str(part)


def _read(fd: int, out: memoryview, at: int) -> None:
    while out:
        count = os.preadv(fd, [out], at)
        if count == 0:
            raise OSError(f"file of samples: ends at {at}, {len(out)} bytes before it should")
        out, at = out[count:], at + count


def _dtype(text: str) -> np.dtype[np.generic]:
    dtype: np.dtype[np.generic] = np.dtype(ast.literal_eval(text) if text.startswith("[") else text)
    return dtype


def _width(shape: tuple[int, ...] | None, dtype: np.dtype[np.generic]) -> int:
    return int(np.prod(shape or (), dtype=np.int64)) * dtype.itemsize


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise InvalidError(f"meta.json: {value!r}: need a number")
    return value
