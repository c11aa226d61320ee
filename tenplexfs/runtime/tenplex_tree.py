"""``<job>/tenplex``: the first split dataset as Tenplex lays it out, so that its loader reads it.

``job/<job>/head.txt`` names a progress file, which names a directory for each data-parallel rank, whose
``list.txt`` names files of 8192 samples with a text index beside each. Progress is samples since the first
epoch began. Directories of every progress of the generation can be opened, so a loader that began before a
save goes on; listed are those where the generation began and where training is.

Source: mlfs ``ds/trds`` and ``tenplex/dataset.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tenplexfs.errors import StaleError
from tenplexfs.runtime.dataset_files import RowsFile
from tenplexfs.runtime.dataset_view import DatasetView, RankView
from tenplexfs.runtime.protocols import FileContent
from tenplexfs.runtime.tree import Attributes, BytesContent

__all__ = ["TenplexTree"]

_SHARD_ROWS = 8192
_TENS = 10 ** np.arange(1, 19, dtype=np.int64)
_Ints = npt.NDArray[np.int64]
_ROOT, _JOBS, _JOB, _HEAD, _PROGRESS = range(5)
_PROGRESS_AT = 16
# Numbers of a progress: its file, its directory, what is in it; then ranks.
_FILE, _DIR, _CLUSTER, _BATCH, _FIRST_RANK = range(5)
# Numbers of a rank; then three for each shard.
_RANK, _LIST, _SIZES, _DROPPED, _DROPPED_IDS, _FIRST_SHARD = range(6)
_DATA, _META, _INDEX = range(3)


class _Begin(NamedTuple):
    """Where the files of a progress begin: in which epoch, and after how many batches of it."""

    epoch: int
    batches: int


class _Node(NamedTuple):
    name: str
    number: int
    content: Callable[[], FileContent] | None  # None: a directory


class TenplexTree:
    """Implements `runtime.tree.Tree` for one section of a snapshot's inodes."""

    def __init__(self, base: int, job: str, view: DatasetView, mtime_ns: int) -> None:
        self._base = base
        self._job = job
        self._view = view
        self._mtime_ns = mtime_ns
        first = view.partition(view.state.start.epoch)
        self._batches_an_epoch = -(-view.state.count // view.state.start.global_batch) + 1
        self._shards = -(-first.order.count // _SHARD_ROWS) + 1
        self._rank_numbers = _FIRST_SHARD + 3 * self._shards
        self._numbers = _FIRST_RANK + view.spread.degree * self._rank_numbers
        start, cursor = view.state.start, view.cursor
        self._now = self._at(cursor.epoch, cursor.consumed) or _Begin(start.epoch, 0)
        self._listed = sorted({_Begin(start.epoch, 0), self._now})
        self._children = lru_cache(maxsize=64)(self._make_children)

    # Progresses.

    def _at(self, epoch: int, consumed: int) -> _Begin | None:
        start = self._view.state.start
        if epoch < start.epoch:
            return None
        partition = self._view.partition(epoch)
        batches, rest = divmod(consumed - partition.start.consumed, start.global_batch)
        return _Begin(epoch, batches) if not rest and 0 <= batches <= partition.batches else None

    def _progress(self, begin: _Begin) -> int:
        partition = self._view.partition(begin.epoch)
        consumed = partition.start.consumed + begin.batches * partition.start.global_batch
        return begin.epoch * self._view.state.count + consumed

    def _begin_of(self, text: str) -> _Begin | None:
        count = self._view.state.count
        if not (text.isascii() and text.isdecimal()) or len(text) > 18 or str(int(text)) != text or not count:
            return None
        return self._at(*divmod(int(text), count))

    def _number_of(self, begin: _Begin) -> int:
        epochs = begin.epoch - self._view.state.start.epoch
        return _PROGRESS_AT + (epochs * self._batches_an_epoch + begin.batches) * self._numbers

    def _split(self, number: int) -> tuple[_Begin, int]:
        which, what = divmod(number - _PROGRESS_AT, self._numbers)
        epochs, batches = divmod(which, self._batches_an_epoch)
        return _Begin(self._view.state.start.epoch + epochs, batches), what

    @property
    def _cluster(self) -> str:
        return f"cluster-of-{self._view.spread.degree}"

    def _directory_path(self, begin: _Begin) -> str:
        return f"/job/{self._job}/progress/{self._progress(begin)}/{self._cluster}"

    # Nodes.

    def _make_children(self, number: int) -> tuple[_Node, ...]:
        """Returns the entries of a directory, those that are listed."""
        job = f"/job/{self._job}"
        if number == _ROOT:
            return (_Node("job", _JOBS, None),)
        if number == _JOBS:
            return (_Node(self._job, _JOB, None),)
        if number == _JOB:
            head = f"{job}/progress-{self._progress(self._now)}-{self._cluster}.txt\n"
            return (
                _Node("head.txt", _HEAD, partial(_text, head)),
                _Node("progress", _PROGRESS, None),
                *(self._progress_file(begin) for begin in self._listed),
            )
        if number == _PROGRESS:
            return tuple(self._progress_dir(begin) for begin in self._listed)
        begin, what = self._split(number)
        base = number - what
        if what == _DIR:
            return (_Node(self._cluster, base + _CLUSTER, None),)
        if what == _CLUSTER:
            batch = f"{self._view.state.start.global_batch}\n"
            ranks = [
                _Node(f"rank-{rank:03}", base + _FIRST_RANK + rank * self._rank_numbers, None)
                for rank in range(self._view.spread.degree)
            ]
            return (_Node("global-batch-size.txt", base + _BATCH, partial(_text, batch)), *ranks)
        rank, inside = divmod(what - _FIRST_RANK, self._rank_numbers)
        if what < _FIRST_RANK or inside != _RANK:
            raise StaleError(f"inode {number}: a file, not a directory")
        return tuple(self._rank_nodes(begin, rank, number))

    def _progress_file(self, begin: _Begin) -> _Node:
        where = self._directory_path(begin)
        ranks = "".join(f"{where}/rank-{rank:03}\n" for rank in range(self._view.spread.degree))
        name = f"progress-{self._progress(begin)}-{self._cluster}.txt"
        return _Node(name, self._number_of(begin) + _FILE, partial(_text, ranks))

    def _progress_dir(self, begin: _Begin) -> _Node:
        return _Node(str(self._progress(begin)), self._number_of(begin) + _DIR, None)

    def _rank_nodes(self, begin: _Begin, rank: int, base: int) -> Iterator[_Node]:
        view = self._view.view(begin.epoch, rank)
        partition = view.rows.partition
        first = view.rows.end_of(begin.batches)
        starts = range(first, view.count, _SHARD_ROWS)
        where = f"{self._directory_path(begin)}/rank-{rank:03}"
        names = [f"{number:04}.tf_record" for number in range(len(starts))]
        full, tail = divmod(partition.samples, partition.start.global_batch)
        left = full - begin.batches
        sizes = f"{view.rows.local_batch} {left}\n" if left > 0 else ""
        if tail and begin.batches <= full:
            sizes += f"{view.count - view.rows.end_of(full)} 1\n"
        dropped = partition.dropped.tolist()
        texts = {
            _LIST: ("list.txt", "".join(f"{where}/{name}\n" for name in names)),
            _SIZES: ("batch-sizes.txt", sizes),
            _DROPPED: ("dropped.txt", f"{len(dropped)}\n"),
            _DROPPED_IDS: ("dropped-ids.txt", "".join(f"{sample}\n" for sample in dropped)),
        }
        for number, (name, text) in texts.items():
            yield _Node(name, base + number, partial(_text, text))
        for number, (name, start) in enumerate(zip(names, starts, strict=True)):
            end = min(start + _SHARD_ROWS, view.count)
            at = base + _FIRST_SHARD + 3 * number
            yield _Node(name, at + _DATA, partial(_shard, view, start, end))
            yield _Node(f"{name}.meta", at + _META, partial(_ids, view, start, end))
            yield _Node(f"{name}.idx", at + _INDEX, partial(_index, view, name, start, end))

    def _find(self, number: int) -> _Node:
        """Returns the file of a number that was given out."""
        if number < _PROGRESS_AT:
            parent = _JOB
        else:
            begin, what = self._split(number)
            if what == _FILE:
                return self._progress_file(begin)
            rank = (what - _FIRST_RANK) // self._rank_numbers
            parent = number - what
            parent += _CLUSTER if what == _BATCH else _FIRST_RANK + rank * self._rank_numbers
        found = next((node for node in self._children(parent) if node.number == number), None)
        if found is None or found.content is None:
            raise StaleError(f"inode {number}: a directory, not a file")
        return found

    def _is_dir(self, number: int) -> bool:
        if number < _PROGRESS_AT:
            return number != _HEAD
        what = self._split(number)[1]
        in_rank = (what - _FIRST_RANK) % self._rank_numbers if what >= _FIRST_RANK else -1
        return what in (_DIR, _CLUSTER) or in_rank == _RANK

    # The tree.

    def lookup(self, parent: int, name: bytes) -> Attributes | None:
        """Returns the entry ``name`` of the directory ``parent``, or None."""
        number, text = parent - self._base, name.decode(errors="replace")
        found = next((node for node in self._children(number) if node.name == text), None)
        begin: _Begin | None = None
        if found is None and number == _PROGRESS and (begin := self._begin_of(text)) is not None:
            found = self._progress_dir(begin)
        middle = text.removeprefix("progress-").removesuffix(f"-{self._cluster}.txt")
        if found is None and number == _JOB and (begin := self._begin_of(middle)) is not None:
            found = self._progress_file(begin)
            found = found if found.name == text else None
        return None if found is None else self._attributes(found)

    def attributes(self, ino: int) -> Attributes:
        """Returns the attributes of ``ino``."""
        number = ino - self._base
        node = _Node("", number, None) if self._is_dir(number) else self._find(number)
        return self._attributes(node)

    def _attributes(self, node: _Node) -> Attributes:
        if node.content is not None:
            return Attributes(self._base + node.number, False, node.content().size, 1, self._mtime_ns)
        subdirs = sum(child.content is None for child in self._children(node.number))
        return Attributes(self._base + node.number, True, 0, 2 + subdirs, self._mtime_ns)

    def entries(self, ino: int, start: int) -> Iterator[tuple[bytes, Attributes, int]]:
        """Yields the entries of a directory after the position ``start``: name, attributes, own position."""
        for at, node in enumerate(self._children(ino - self._base)[start:], start):
            yield node.name.encode(), self._attributes(node), at + 1

    def xattrs(self, ino: int) -> Mapping[bytes, bytes]:
        """Returns nothing."""
        return {}

    def open(self, ino: int) -> FileContent:
        """Opens the file ``ino``."""
        content = self._find(ino - self._base).content
        assert content is not None  # `_find` gives files
        return content()


def _text(text: str) -> FileContent:
    return BytesContent(text.encode())


def _shard(view: RankView, begin: int, end: int) -> FileContent:
    low, high = view.edges(begin, end)[[0, -1]].tolist()
    return RowsFile(view, b"", low, high - low)


class _Numbers:
    """A text of numbers, made when it is read; its size is known before.

    Args:
        head: What comes before the numbers.
        rows: int64 (n, columns), a line each.
    """

    def __init__(self, head: str, rows: _Ints) -> None:
        self._head = head.encode()
        self._rows = rows
        self._text: bytes | None = None
        digits = 1 + (rows[..., None] >= _TENS).sum(axis=-1)
        self.size = len(self._head) + int(digits.sum()) + rows.size

    def read(self, offset: int, size: int) -> memoryview:
        """Returns the bytes."""
        if self._text is None:
            lines = (" ".join(map(str, row)) for row in self._rows.tolist())
            self._text = self._head + "".join(f"{line}\n" for line in lines).encode()
        return memoryview(self._text)[offset : offset + size]

    async def read_wait(self, offset: int, size: int) -> memoryview:
        """Returns the same as `read`."""
        return self.read(offset, size)

    def close(self) -> None:
        """Holds nothing."""


def _ids(view: RankView, begin: int, end: int) -> FileContent:
    return _Numbers("", view.rows.span(begin, end)[:, None])


def _index(view: RankView, name: str, begin: int, end: int) -> FileContent:
    edges = view.edges(begin, end)
    edges = edges - edges[0]
    return _Numbers(f"1\n./{name} {end - begin}\n", np.stack([edges[:-1], edges[1:]], axis=1))
