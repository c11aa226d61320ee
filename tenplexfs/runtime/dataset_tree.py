"""The directory ``dataset`` of a snapshot: names, inode numbers and attributes, computed.

An epoch is numbered when it is first looked at and takes a run of inode numbers, one for everything that can
be below it; so memory grows with the epochs that were opened, never with samples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tenplexfs.errors import CorruptError, InvalidError, StaleError
from tenplexfs.formats.sample_index import Packing
from tenplexfs.runtime.dataset_files import IndexFile, OrderFile, RowsFile
from tenplexfs.runtime.dataset_view import DatasetView, RankView, document
from tenplexfs.runtime.protocols import FileContent
from tenplexfs.runtime.tree import Attributes, BytesContent

__all__ = ["DatasetTree"]

SAMPLES_A_BLOCK = 10_000
_EPOCHS_AT = 1 << 12  # numbers below are `dataset` itself, and two for each dataset
_LIMIT = 1 << 37
# Numbers in a view; blocks and then samples follow.
_DIR, _META, _ORDER, _DATA, _INDEX, _SAMPLES, _PARTS, _FIRST_BLOCK = range(8)
_LISTED_AT_ONCE = 256


class _Epoch(NamedTuple):
    """One epoch of one dataset. ``stride`` numbers belong to each view: whole ranks, and their parts."""

    view: DatasetView
    number: int  # of the dataset
    epoch: int
    at: int
    blocks: int
    rows: int

    @property
    def stride(self) -> int:
        return _FIRST_BLOCK + self.blocks + self.rows

    @property
    def a_rank(self) -> int:
        """Views of a rank: the whole, and the parts."""
        return 1 + self.view.context_degree

    @property
    def size(self) -> int:
        return 1 + self.view.spread.degree * self.a_rank * self.stride


class _Place(NamedTuple):
    """Something in a view. ``number`` counts what is not fixed: blocks, then rows."""

    epoch: _Epoch
    base: int
    view: RankView
    what: int


class DatasetTree:
    """Implements `runtime.tree.Tree` for one section of a snapshot's inodes.

    Args:
        base: The inode of the directory ``dataset``.
        views: The datasets.
        mtime_ns: Of everything.
    """

    def __init__(self, base: int, views: Sequence[DatasetView], mtime_ns: int) -> None:
        self._base = base
        self._views = views
        self._mtime_ns = mtime_ns
        self._numbers = {view.state.name: number for number, view in enumerate(views)}
        self._epochs: list[_Epoch] = []
        self._starts: list[int] = []
        self._known: dict[tuple[int, int], _Epoch] = {}
        self._next = _EPOCHS_AT
        if 2 * len(views) + 1 > _EPOCHS_AT:
            raise InvalidError(f"datasets: {len(views)}, need at most {(_EPOCHS_AT - 1) // 2}")

    @property
    def names(self) -> list[str]:
        """The datasets, by name."""
        return sorted(self._numbers)

    # What the tree shows.

    def lookup(self, parent: int, name: bytes) -> Attributes | None:
        """Returns the entry ``name`` of the directory ``parent``, or None."""
        number = parent - self._base
        text = name.decode(errors="replace")
        if number == 0:
            found = self._numbers.get(text)
            return None if found is None else self._dataset(found)
        if number < _EPOCHS_AT:
            dataset = (number - 1) // 2
            if text == "meta.json":
                return self._file(number + 1, len(self._meta(self._views[dataset])))
            epoch = self._epoch(dataset, text)
            return None if epoch is None else self._epoch_dir(epoch)
        return self._lookup_below(number, text)

    def _lookup_below(self, number: int, text: str) -> Attributes | None:
        epoch = self._epochs[bisect_right(self._starts, number) - 1]
        if number == epoch.at:
            rank = _number(text, epoch.view.spread.degree)
            return None if rank is None else self._inode(epoch.at + 1 + rank * epoch.a_rank * epoch.stride)
        place = self._place(number)
        if place.what == _DIR:
            fixed = next((what for name, what in self._fixed(place) if name == text), None)
            return None if fixed is None else self._inode(place.base + fixed)
        if place.what == _PARTS:
            part = _number(text, place.epoch.view.context_degree)
            return None if part is None else self._inode(place.base + (1 + part) * epoch.stride)
        if place.what == _SAMPLES:
            block = _number(text, self._blocks(place.view))
            return None if block is None else self._inode(place.base + _FIRST_BLOCK + block)
        first = (place.what - _FIRST_BLOCK) * SAMPLES_A_BLOCK
        row = _number(text.partition(".")[0], place.view.count)
        if row is None or not first <= row < first + SAMPLES_A_BLOCK or self._sample_name(place, row) != text:
            return None
        return self._inode(place.base + _FIRST_BLOCK + epoch.blocks + row)

    def attributes(self, ino: int) -> Attributes:
        """Returns the attributes of ``ino``."""
        return self._inode(ino - self._base)

    def entries(self, ino: int, start: int) -> Iterator[tuple[bytes, Attributes, int]]:
        """Yields the entries of a directory after the position ``start``: name, attributes, own position."""
        number = ino - self._base
        if number == 0:
            for at, name in enumerate(self.names[start:], start):
                yield name.encode(), self._dataset(self._numbers[name]), at + 1
        elif number < _EPOCHS_AT:
            dataset = (number - 1) // 2
            names = [str(epoch) for epoch in self._views[dataset].epochs]
            for at, name in enumerate(["meta.json", *names][start:], start):
                found = self.lookup(ino, name.encode())
                if found is not None:
                    yield name.encode(), found, at + 1
        else:
            yield from self._entries_below(number, start)

    def _entries_below(self, number: int, start: int) -> Iterator[tuple[bytes, Attributes, int]]:
        epoch = self._epochs[bisect_right(self._starts, number) - 1]
        if number == epoch.at:
            for rank in range(start, epoch.view.spread.degree):
                entry = self._inode(epoch.at + 1 + rank * epoch.a_rank * epoch.stride)
                yield b"%d" % rank, entry, rank + 1
            return
        place = self._place(number)
        if place.what == _DIR:
            for at, (name, what) in enumerate(self._fixed(place)[start:], start):
                yield name.encode(), self._inode(place.base + what), at + 1
        elif place.what == _PARTS:
            for part in range(start, epoch.view.context_degree):
                yield b"%d" % part, self._inode(place.base + (1 + part) * epoch.stride), part + 1
        elif place.what == _SAMPLES:
            for block in range(start, self._blocks(place.view)):
                yield b"%d" % block, self._inode(place.base + _FIRST_BLOCK + block), block + 1
        else:
            yield from self._samples(place, start)

    def _samples(self, place: _Place, start: int) -> Iterator[tuple[bytes, Attributes, int]]:
        view, head = place.view, len(place.view.sample_header)
        first = (place.what - _FIRST_BLOCK) * SAMPLES_A_BLOCK
        end = min(first + SAMPLES_A_BLOCK, view.count)
        base = place.base + _FIRST_BLOCK + place.epoch.blocks
        for begin in range(first + start, end, _LISTED_AT_ONCE):
            sizes = view.sizes(begin, min(begin + _LISTED_AT_ONCE, end)).tolist()
            for row, size in enumerate(sizes, begin):
                name = self._sample_name(place, row).encode()
                yield name, self._file(base + row, head + size), row - first + 1

    def xattrs(self, ino: int) -> Mapping[bytes, bytes]:
        """Returns nothing."""
        return {}

    def open(self, ino: int) -> FileContent:
        """Opens the file ``ino``.

        Raises:
            StaleError: It is a directory.
        """
        content = self._content(ino - self._base)
        if content.size != self.attributes(ino).size:
            raise CorruptError(f"dataset: {content.size} bytes, stat says {self.attributes(ino).size}")
        return content

    def _content(self, number: int) -> FileContent:
        if 0 < number < _EPOCHS_AT and number % 2 == 0:
            return BytesContent(self._meta(self._views[number // 2 - 1]))
        if number < _EPOCHS_AT or number in self._starts:
            raise StaleError(f"inode {number}: a directory, not a file")
        epoch, _, view, what = self._place(number)
        row = what - _FIRST_BLOCK - epoch.blocks
        if row >= 0:
            begin, end = view.edges(row, row + 1).tolist()
            return RowsFile(view, view.sample_header, begin, end - begin)
        makers: dict[int, Callable[[], FileContent]] = {
            _META: lambda: BytesContent(document("dataset-rank", view.meta())),
            _ORDER: lambda: OrderFile(view),
            _DATA: lambda: RowsFile(view, view.data_header, 0, view.data_bytes),
            _INDEX: lambda: IndexFile(view),
        }
        make = makers.get(what)
        if make is None:
            raise StaleError(f"inode {number}: a directory, not a file")
        return make()

    # Numbers.

    def _epoch(self, dataset: int, text: str) -> _Epoch | None:
        view = self._views[dataset]
        epoch = _number(text, 1 << 32)
        if epoch is None or epoch < view.state.start.epoch:
            return None
        known = self._known.get((dataset, epoch))
        if known is None:
            rows = view.partition(epoch).rank(0).count
            new = _Epoch(view, dataset, epoch, self._next, -(-rows // SAMPLES_A_BLOCK), rows)
            if new.at + new.size > _LIMIT:
                return None
            self._next += new.size
            self._epochs.append(new)
            self._starts.append(new.at)
            known = self._known[dataset, epoch] = new
        return known

    def _place(self, number: int) -> _Place:
        epoch = self._epochs[bisect_right(self._starts, number) - 1]
        view, what = divmod(number - epoch.at - 1, epoch.stride)
        rank, part = divmod(view, epoch.a_rank)
        found = epoch.view.view(epoch.epoch, rank, part - 1 if part else None)
        return _Place(epoch, number - what, found, what)

    def _blocks(self, view: RankView) -> int:
        return -(-view.count // SAMPLES_A_BLOCK)

    def _fixed(self, place: _Place) -> list[tuple[str, int]]:
        names = [("meta.json", _META), ("order.npy", _ORDER)]
        if place.view.sample_bytes is not None:
            names.append(("data.npy", _DATA))
        else:
            names += [("data.bin", _DATA), ("index.npy", _INDEX)]
        names.append(("samples", _SAMPLES))
        if place.view.part is None and place.epoch.view.context_degree:
            names.append(("cp", _PARTS))
        return names

    def _sample_name(self, place: _Place, row: int) -> str:
        index = place.view.dataset.index
        if place.view.sample_bytes is not None or index.packing is Packing.MEMBER:
            return f"{row}.npy"
        end = "bin"
        if index.kind == "files":
            sample = int(place.view.rows.span(row, row + 1)[0])
            end = index.name(sample).rpartition("/")[2].rpartition(".")[2] or end
            end = end if end.isalnum() and end.isascii() and len(end) <= 16 else "bin"
        return f"{row}.{end}"

    # Attributes.

    def _inode(self, number: int) -> Attributes:
        if number == 0:
            return self._directory(0, len(self._views))
        if number < _EPOCHS_AT:
            dataset = (number - 1) // 2
            if number % 2:
                return self._dataset(dataset)
            return self._file(number, len(self._meta(self._views[dataset])))
        epoch = self._epochs[bisect_right(self._starts, number) - 1]
        if number == epoch.at:
            return self._epoch_dir(epoch)
        place = self._place(number)
        view, what = place.view, place.what
        if what >= _FIRST_BLOCK + epoch.blocks:
            row = what - _FIRST_BLOCK - epoch.blocks
            return self._file(number, len(view.sample_header) + int(view.sizes(row, row + 1)[0]))
        if what >= _FIRST_BLOCK:
            return self._directory(number, 0)
        if what in (_DIR, _SAMPLES, _PARTS):
            parts = epoch.view.context_degree
            has_parts = view.part is None and parts > 0
            return self._directory(number, {_DIR: 1 + has_parts, _PARTS: parts}.get(what, self._blocks(view)))
        return self._file(number, self._content(number).size)

    def _dataset(self, dataset: int) -> Attributes:
        return self._directory(1 + 2 * dataset, len(self._views[dataset].epochs))

    def _epoch_dir(self, epoch: _Epoch) -> Attributes:
        return self._directory(epoch.at, epoch.view.spread.degree)

    def _directory(self, number: int, subdirs: int) -> Attributes:
        return Attributes(self._base + number, True, 0, 2 + subdirs, self._mtime_ns)

    def _file(self, number: int, size: int) -> Attributes:
        return Attributes(self._base + number, False, size, 1, self._mtime_ns)

    def _meta(self, view: DatasetView) -> bytes:
        return document("dataset", view.meta())


def _number(text: str, limit: int) -> int | None:
    """Returns the number that ``text`` is as it would be listed, if it is below ``limit``."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 19 or str(int(text)) != text:
        return None
    return int(text) if int(text) < limit else None
