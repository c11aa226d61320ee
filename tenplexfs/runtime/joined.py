"""A rank, or the whole model, as one safetensors file that is made on read.

Nothing of it is kept but the header: a read takes the bytes from the ``.npy`` files that it covers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial

from tenplexfs.core.ptc import PTC
from tenplexfs.errors import InvalidError, NotFoundError
from tenplexfs.formats.safetensors_file import FileLayout, lay_out
from tenplexfs.runtime.protocols import FileContent, SnapshotView
from tenplexfs.runtime.tasks import run_all

__all__ = ["JoinedFile", "JoinedFiles"]

_KEPT = 8
_MADE_AT_ONCE = 64


class JoinedFile:
    """An open safetensors file.

    Args:
        layout: Which tensor lies where.
        open_part: Opens the ``.npy`` of a path; asked for when its bytes are first read.
    """

    def __init__(self, layout: FileLayout, open_part: Callable[[str], FileContent]) -> None:
        self.size = layout.size
        self._layout = layout
        self._open_part = open_part
        self._parts: dict[int, FileContent] = {}

    def read(self, offset: int, size: int) -> bytes | memoryview | None:
        """Returns the bytes when all of them are here."""
        found: list[bytes | memoryview] = []
        for content, begin, count in self._covered(offset, size):
            data = content.read(begin, count)
            if data is None:
                return None
            found.append(data)
        return self._joined(offset, size, found)

    async def read_wait(self, offset: int, size: int) -> bytes | memoryview:
        """Returns the bytes, fetched where they are elsewhere."""
        covered = list(self._covered(offset, size))
        found: list[bytes | memoryview] = [b""] * len(covered)

        async def fetch(at: int, content: FileContent, begin: int, count: int) -> None:
            data = content.read(begin, count)
            found[at] = await content.read_wait(begin, count) if data is None else data

        await run_all(partial(fetch, at, *part) for at, part in enumerate(covered))
        return self._joined(offset, size, found)

    def close(self) -> None:
        """Closes the files that it took bytes from."""
        parts, self._parts = self._parts, {}
        for content in parts.values():
            content.close()

    def _joined(self, offset: int, size: int, found: list[bytes | memoryview]) -> bytes | memoryview:
        header = self._layout.header
        if offset < len(header):
            found.insert(0, header[offset : offset + size])
        return found[0] if len(found) == 1 else b"".join(found)

    def _covered(self, offset: int, size: int) -> Iterator[tuple[FileContent, int, int]]:
        """The parts that bytes [offset, offset + size) lie in: content, first byte of it, number of bytes."""
        ends = self._layout.ends
        last = min(offset + size, self.size)
        at = bisect_right(ends, offset)
        begin = ends[at - 1] if at else len(self._layout.header)
        while begin < last:
            end = ends[at]
            content = self._parts.get(at)
            if content is None:
                self._parts[at] = content = self._open_part(self._layout.paths[at])
            low, high = max(offset, begin), min(last, end)
            yield content, content.size - (end - low), high - low
            begin, at = end, at + 1


class JoinedFiles:
    """The safetensors files of one snapshot: one for each rank, and one of the whole model.

    Ranks whose arrays have the same shapes have the same layout, which is made once: the first of them here,
    in a worker thread, the others when they are asked for. A rank is an int, the whole model is None.

    Args:
        view: Of the snapshot.
        ptc: What each rank holds.
        like: Of another snapshot; what it knows is used again where that holds the same.
    """

    def __init__(self, view: SnapshotView, ptc: PTC, like: JoinedFiles | None = None) -> None:
        self._view = view
        self._ptc = ptc
        self._keys: dict[int, object] = {}
        self._distinct: dict[object, object] = {}
        self._known: dict[object, int | str] = {}  # size, or why there is no file
        self._layouts: dict[object, FileLayout] = {}  # those made last
        if like is not None and like._ptc is ptc:
            self._keys, self._distinct = like._keys, like._distinct
            self._known, self._layouts = dict(like._known), dict(like._layouts)
        self._size_or_reason(None)
        for rank in range(ptc.world_size):
            self._size_or_reason(rank)
            if len(self._distinct) >= _MADE_AT_ONCE:
                break

    def size(self, rank: int | None) -> int | None:
        """Returns the size of a file, or None where the format cannot hold the tensors."""
        known = self._size_or_reason(rank)
        return known if isinstance(known, int) else None

    def reason(self, rank: int | None) -> str | None:
        """Returns why there is no such file, or None."""
        known = self._size_or_reason(rank)
        return known if isinstance(known, str) else None

    def open(self, rank: int | None) -> JoinedFile:
        """Opens a file.

        Raises:
            NotFoundError: There is none.
        """
        if (reason := self.reason(rank)) is not None:
            raise NotFoundError(reason)
        key = self._key(rank)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._remember(key, self._lay_out(rank))
        view = self._view
        return JoinedFile(layout, view.open_full if rank is None else partial(view.open_shard, rank))

    def _size_or_reason(self, rank: int | None) -> int | str:
        key = self._key(rank)
        known = self._known.get(key)
        if known is None:
            try:
                known = self._remember(key, self._lay_out(rank)).size
            except InvalidError as error:
                known = error.message
            self._known[key] = known
        return known

    def _remember(self, key: object, layout: FileLayout) -> FileLayout:
        if len(self._layouts) >= _KEPT:
            del self._layouts[next(iter(self._layouts))]
        self._layouts[key] = layout
        return layout

    def _key(self, rank: int | None) -> object:
        if rank is None:
            return None
        key = self._keys.get(rank)
        if key is None:
            tables = [table for table in self._ptc.tables if len(table.local_shapes)]
            shapes = (table.local_shapes[table.of_rank[rank]].tobytes() for table in tables)
            key = (id(self._ptc.rank_paths(rank)), b"".join(shapes))
            key = self._keys[rank] = self._distinct.setdefault(key, key)
        return key

    def _lay_out(self, rank: int | None) -> FileLayout:
        tensors = self._ptc.tensors
        if rank is None:
            return lay_out((path, tensor.dtype, tensor.shape) for path, tensor in tensors.items())
        shard = partial(self._ptc.shard, rank)
        paths = self._ptc.rank_paths(rank)
        return lay_out((path, tensors[path].dtype, shard(path).local_shape) for path in paths)
