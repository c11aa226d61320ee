"""Writing a node's share of a step: files of local arrays, each distinct one once, summed up in blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from tenplexfs.core.dtypes import itemsize_of
from tenplexfs.errors import NotFoundError, UnavailableError
from tenplexfs.formats.checkpoint import BLOCK_BYTES, CheckpointFile, Local
from tenplexfs.formats.safetensors import DTYPES
from tenplexfs.formats.safetensors_file import FileLayout, lay_out
from tenplexfs.storage.places import Place
from tenplexfs.storage.store import SnapshotArrays
from tenplexfs.storage.sums import as_bytes

__all__ = ["Share", "ShareWriter"]

_FILE_BYTES = 1 << 30
_KNOWN = frozenset(DTYPES.values())


@dataclass(frozen=True, slots=True)
class Share:
    """A local array that a node writes, under the first rank that holds it."""

    rank: int
    path: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        size = itemsize_of(self.dtype)
        for extent in self.shape:
            size *= extent
        return size


class ShareWriter:
    """Writes what ``shares`` names of ``arrays`` below ``place``.

    What is there already with the right size and header is not sent again: the header has the sums of the
    pieces, and an object is there whole or not at all.

    Args:
        report: Gets the bytes that are done, in the thread that writes.
        stop: Ends the writing when it is set.
    """

    def __init__(
        self,
        place: Place,
        arrays: SnapshotArrays,
        shares: Sequence[Share],
        report: Callable[[int], None],
        stop: threading.Event,
    ) -> None:
        self._place = place
        self._arrays = arrays
        self._groups = list(_groups(shares))
        self._report = report
        self._stop = stop
        self.total_bytes = sum(share.nbytes for share in shares)

    def run(self) -> list[CheckpointFile]:
        """Returns the files, once they are all there.

        Raises:
            UnavailableError: The place does not answer, or it was stopped.
        """
        files, done = [], 0
        for name, shares in self._groups:
            files.append(self._write(name, shares, done))
            done += sum(share.nbytes for share in shares)
            self._report(done)
        return files

    def _write(self, name: str, shares: Sequence[Share], done: int) -> CheckpointFile:
        layout = self._lay_out(shares)
        by_path = {share.path: share for share in shares}
        sums: list[int] = []

        def parts() -> Iterator[memoryview]:
            sums.clear()
            passed, state, room = 0, xxhash.xxh3_64(), BLOCK_BYTES
            for content in self._contents(layout, by_path):
                data = content
                while data:
                    if self._stop.is_set():
                        raise UnavailableError(f"{self._place.url}/{name}: stopped")
                    part, data = data[:room], data[room:]
                    state.update(part)
                    room -= len(part)
                    if not room:
                        sums.append(state.intdigest())
                        state, room = xxhash.xxh3_64(), BLOCK_BYTES
                    passed += len(part)
                    yield part
                    self._report(done + min(passed, layout.size - len(layout.header)))
            if room < BLOCK_BYTES:
                sums.append(state.intdigest())

        if self._is_there(name, layout):
            for _ in parts():
                continue
        else:
            self._place.put(name, parts)
        return CheckpointFile(name, layout.size, tuple(_locals(layout, by_path)), tuple(sums))

    def _lay_out(self, shares: Sequence[Share]) -> FileLayout:
        stored = self._arrays.stored
        sums = xxhash.xxh3_64()
        for share in shares:
            ref = stored.arrays.get((share.rank, share.path))
            if ref is None:
                raise NotFoundError(f"job {stored.job}: {share.path} of rank {share.rank} is not here")
            for each in ref.sums:
                sums.update(each.to_bytes(8, "little"))
        metadata = {"tenplexfs": str(stored.id.text), "xxh3_64": sums.hexdigest()}
        return lay_out(((share.path, *_shown(share)) for share in shares), metadata)

    def _is_there(self, name: str, layout: FileLayout) -> bool:
        if self._place.size(name) != layout.size:
            return False
        return bytes(self._place.get_range(name, 0, len(layout.header))) == layout.header

    def _contents(self, layout: FileLayout, by_path: Mapping[str, Share]) -> Iterator[memoryview]:
        yield memoryview(layout.header)
        for path in layout.paths:
            array = self._arrays.array(by_path[path].rank, path)
            assert array is not None  # `_lay_out` looked
            yield as_bytes(array)


def _shown(share: Share) -> tuple[str, tuple[int, ...]]:
    """Returns the type and shape under which the file has an array."""
    if share.dtype in _KNOWN:
        return share.dtype, share.shape
    return "uint8", (*share.shape, itemsize_of(share.dtype))


def _locals(layout: FileLayout, by_path: Mapping[str, Share]) -> Iterator[Local]:
    begin = len(layout.header)
    for path, end in zip(layout.paths, layout.ends, strict=True):
        share = by_path[path]
        yield Local(share.rank, path, share.dtype, share.shape, begin)
        begin = end


def _groups(shares: Sequence[Share]) -> Iterator[tuple[str, list[Share]]]:
    """Yields the files of one rank after the other, of about `_FILE_BYTES` each."""
    by_rank: dict[int, list[Share]] = {}
    for share in shares:
        by_rank.setdefault(share.rank, []).append(share)
    for rank, own in sorted(by_rank.items()):
        group: list[Share] = []
        size = part = 0
        for share in own:
            if group and size + share.nbytes > _FILE_BYTES:
                yield f"model/{rank:05d}-{part}.safetensors", group
                group, size, part = [], 0, part + 1
            group.append(share)
            size += share.nbytes
        yield f"model/{rank:05d}-{part}.safetensors", group
