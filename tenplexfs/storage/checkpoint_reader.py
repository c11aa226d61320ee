"""Reading ranges of a persisted step: whole blocks, checked by their sums, and what is asked for cut out."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import xxhash

from tenplexfs.core.dtypes import dtype_of
from tenplexfs.core.region import Boxes
from tenplexfs.core.snapshot import SnapshotId
from tenplexfs.errors import CorruptError, InvalidError, NotFoundError
from tenplexfs.formats.checkpoint import (
    BLOCK_BYTES,
    LAYOUT,
    MANIFEST,
    VALUES,
    Checkpoint,
    CheckpointFile,
    Local,
    snapshot_of_directory,
)
from tenplexfs.storage.places import Place

__all__ = ["BlockReader", "Cut", "OpenCheckpoint", "cuts_of", "find_steps", "index_of"]

_MESSAGE_BYTES = 1 << 20
_SPAN_BYTES = 4 << 20
_REQUEST_BLOCKS = 8
_AHEAD_BLOCKS = 48
_HELD_BLOCKS = 96
_PARALLEL = 6


def find_steps(place: Place) -> dict[SnapshotId, str]:
    """Returns the complete steps below ``place``, oldest first by generation and step: the name of each."""
    found = {}
    for name in place.directories():
        snapshot = snapshot_of_directory(name)
        if snapshot is not None and place.size(f"{name}/{MANIFEST}") is not None:
            found[snapshot] = name
    return dict(sorted(found.items(), key=lambda item: (item[0].generation, item[0].step or 0)))


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A persisted step, and what it holds beside arrays.

    Attributes:
        place: Its directory.
    """

    place: Place
    manifest: Checkpoint
    layout_json: bytes
    values: bytes

    @classmethod
    def open(cls, place: Place) -> OpenCheckpoint:
        """Reads what is small.

        Raises:
            NotFoundError: It is not complete, or gone.
            CorruptError: Something is not what its sum says.
            InvalidError: It is of another version.
        """
        try:
            manifest = Checkpoint.decode(place.get(MANIFEST))
        except (CorruptError, InvalidError) as error:
            raise type(error)(f"{place.url}/{error.message}; take another step (--step)") from error
        layout, values = place.get(LAYOUT), place.get(VALUES)
        for name, data, wanted in (
            (LAYOUT, layout, manifest.layout_sum),
            (VALUES, values, manifest.values_sum),
        ):
            if (got := xxhash.xxh3_64_intdigest(data)) != wanted:
                raise CorruptError(f"{place.url}/{name}: checksum {got:016x}, should be {wanted:016x}")
        return cls(place, manifest, layout, values)


@dataclass(frozen=True, slots=True)
class Cut:
    """Bytes [begin, end) of a file, and how elements lie in them.

    Attributes:
        shape: Of what is asked for.
        strides: Of it in those bytes.
    """

    begin: int
    end: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def take(self, data: bytes | bytearray) -> bytes:
        """Returns the elements in C order."""
        view = np.ndarray(self.shape, dtype_of(self.dtype), buffer=data, strides=self.strides)
        return view.tobytes()


def cuts_of(local: Local, boxes: Boxes) -> Iterator[Cut]:
    """Yields the parts of a file that hold ``boxes`` of an array, in the order of their elements.

    None spans more than about 4 MiB, unless one element of the first dim does, of which all is asked for.

    Args:
        local: The array.
        boxes: int64 (n, 2, ndim) of it, or (n, 2, 1) of it raveled.
    """
    itemsize = dtype_of(local.dtype).itemsize
    shape = local.shape if boxes.shape[2] == len(local.shape) else (math.prod(local.shape),)
    strides = [itemsize] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    for low, high in zip(boxes[:, 0].tolist(), boxes[:, 1].tolist(), strict=True):
        begin = local.begin + sum(a * b for a, b in zip(low, strides, strict=True))
        extents = tuple(b - a for a, b in zip(low, high, strict=True))
        if 0 not in extents:
            yield from _cuts(local.dtype, begin, extents, tuple(strides), itemsize)


def _cuts(
    dtype: str, begin: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> Iterator[Cut]:
    span = itemsize + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if span <= _SPAN_BYTES or not shape:
        yield Cut(begin, begin + span, dtype, shape, strides)
        return
    rows = max(1, _SPAN_BYTES // strides[0])
    if rows == 1 and len(shape) > 1:
        for row in range(shape[0]):
            yield from _cuts(dtype, begin + row * strides[0], shape[1:], strides[1:], itemsize)
        return
    for at in range(0, shape[0], rows):
        part = (min(rows, shape[0] - at), *shape[1:])
        inner = itemsize + sum((n - 1) * stride for n, stride in zip(part, strides, strict=True))
        yield Cut(begin + at * strides[0], begin + at * strides[0] + inner, dtype, part, strides)


class BlockReader:
    """Reads arrays of one step. For one thread; it fetches ahead with several.

    Args:
        place: The directory of the step.
        find: Returns the file that has an array of a rank, under whatever rank, and where in it.

    Attributes:
        read_bytes: Bytes that were asked of the place.
    """

    def __init__(self, place: Place, find: Callable[[int, str], tuple[CheckpointFile, Local]]) -> None:
        self.read_bytes = 0
        self._place = place
        self._find = find
        self._pool = ThreadPoolExecutor(_PARALLEL, thread_name_prefix="checkpoint")
        self._files: dict[str, CheckpointFile] = {}
        self._blocks: OrderedDict[tuple[str, int], Future[Mapping[int, memoryview]]] = OrderedDict()

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def stream(self, ranges: Sequence[tuple[int, str, Boxes]]) -> Iterator[bytes]:
        """Yields the elements of all boxes in order, in messages of about 1 MiB.

        Raises:
            NotFoundError: An array or a file is not there.
            CorruptError: A block is not what its sum says.
        """
        pending: list[bytes] = []
        held = 0
        for file, cut in self._ahead(ranges):
            data = self._bytes(file, cut.begin, cut.end)
            part = cut.take(data)
            for at in range(0, len(part), _MESSAGE_BYTES):
                piece = part[at : at + _MESSAGE_BYTES]
                if held + len(piece) > _MESSAGE_BYTES:
                    yield b"".join(pending)
                    pending, held = [], 0
                pending.append(piece)
                held += len(piece)
        if held:
            yield b"".join(pending)

    def _ahead(self, ranges: Sequence[tuple[int, str, Boxes]]) -> Iterator[tuple[CheckpointFile, Cut]]:
        """Yields every cut, while the blocks of those behind it are on their way."""
        waiting: list[tuple[CheckpointFile, Cut, int]] = []
        ahead = 0
        for rank, path, boxes in ranges:
            file, local = self._find(rank, path)
            for cut in cuts_of(local, boxes):
                blocks = -(-cut.end // BLOCK_BYTES) - cut.begin // BLOCK_BYTES
                self._order(file, cut)
                waiting.append((file, cut, blocks))
                ahead += blocks
                while ahead > _AHEAD_BLOCKS or len(waiting) > 4096:
                    first, taken, count = waiting.pop(0)
                    ahead -= count
                    yield first, taken
        for first, taken, _ in waiting:
            yield first, taken

    def _order(self, file: CheckpointFile, cut: Cut) -> None:
        """Asks for the blocks of ``cut`` that are neither here nor on their way."""
        missing: list[int] = []
        for block in range(cut.begin // BLOCK_BYTES, -(-cut.end // BLOCK_BYTES)):
            if (file.name, block) in self._blocks:
                self._blocks.move_to_end((file.name, block))
            else:
                missing.append(block)
        while missing:
            run = [missing.pop(0)]
            while missing and missing[0] == run[-1] + 1 and len(run) < _REQUEST_BLOCKS:
                run.append(missing.pop(0))
            future = self._pool.submit(self._fetch, file, run[0], run[-1] + 1)
            for block in run:
                self._blocks[file.name, block] = future
        while len(self._blocks) > _HELD_BLOCKS:
            self._blocks.popitem(last=False)

    def _bytes(self, file: CheckpointFile, begin: int, end: int) -> bytes:
        parts = []
        for block in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            future = self._blocks.get((file.name, block))
            if future is None:  # it was let go of before it was used
                future = self._blocks[file.name, block] = self._pool.submit(
                    self._fetch, file, block, block + 1
                )
            at = block * BLOCK_BYTES
            parts.append(future.result()[block][max(begin - at, 0) : end - at])
        return b"".join(parts)

    def _fetch(self, file: CheckpointFile, first: int, last: int) -> Mapping[int, memoryview]:
        """Returns blocks [first, last) of a file, checked; what is wrong is read once more."""
        for attempt in (1, 2):
            begin, end = first * BLOCK_BYTES, min(last * BLOCK_BYTES, file.nbytes)
            data = self._place.get_range(file.name, begin, end)
            self.read_bytes += len(data)
            found = {
                block: data[(block - first) * BLOCK_BYTES : (block - first + 1) * BLOCK_BYTES]
                for block in range(first, last)
            }
            sums = {block: xxhash.xxh3_64_intdigest(part) for block, part in found.items()}
            wrong = [block for block in found if sums[block] != file.sums[block]]
            if not wrong and len(data) == end - begin:
                return found
            if attempt == 2:
                break
        block = wrong[0] if wrong else first
        raise CorruptError(
            f"{self._place.url}/{file.name}: block {block}, bytes from {block * BLOCK_BYTES} on: "
            f"checksum {sums[block]:016x}, should be {file.sums[block]:016x}"
        )


def index_of(
    files: Sequence[CheckpointFile], what: Callable[[int, str], object | None]
) -> Callable[[int, str], tuple[CheckpointFile, Local]]:
    """Returns what finds the array of any rank, by ``what``, which is equal for equal arrays."""
    known = {what(local.rank, local.path): (file, local) for file in files for local in file.locals}

    def find(rank: int, path: str) -> tuple[CheckpointFile, Local]:
        found = known.get(what(rank, path))
        if found is None:
            raise NotFoundError(f"{path} of rank {rank} is not in the persisted step")
        return found

    return find
