"""The bytes of open files: in this node's memory, on another node, or assembled from shards anywhere.

A read of remote bytes is a run of the C-order elements of an array; the run becomes boxes, the boxes become
ranges of the arrays that hold them, and those are fetched by the snapshot's txid. Whatever is answered was
accounted for byte by byte: a read is whole or an error, never short, never zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tenplexfs.core.ptc import Holder, Piece, Shard, Tensor
from tenplexfs.core.region import (
    Boxes,
    box_volumes,
    disjoint_atoms,
    flat_boxes,
    join,
    runs_to_boxes,
    split_runs,
)
from tenplexfs.errors import CorruptError
from tenplexfs.runtime.fetching import Bytes, Fetcher, Wanted
from tenplexfs.runtime.protocols import ArraySource

__all__ = ["FullTensor", "LocalFile", "RemoteShard"]

Array = npt.NDArray[np.generic]


class LocalFile:
    """A file whose bytes are in this node's memory, or were made at once."""

    __slots__ = ("_view", "size")

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.size = len(view)

    def read(self, offset: int, size: int) -> memoryview:
        """Returns the bytes, without a copy."""
        return self._view[offset : offset + size]

    async def read_wait(self, offset: int, size: int) -> memoryview:
        """Returns the bytes; they are here."""
        return self.read(offset, size)

    def close(self) -> None:
        """Lets go of the memory."""
        self._view = memoryview(b"")


class _NpyFile(ABC):
    """A .npy file that is made on read: its header, then C-order elements."""

    def __init__(self, header: bytes, shape: Sequence[int], itemsize: int) -> None:
        self._header = header
        self._itemsize = itemsize
        self._elements = int(np.prod(shape, dtype=np.int64))
        self.size = len(header) + self._elements * itemsize

    @abstractmethod
    def _here(self, first: int, last: int) -> Bytes | None:
        """Returns the bytes of elements [first, last), or None when they are elsewhere."""

    @abstractmethod
    async def _fetched(self, first: int, last: int) -> Bytes:
        """Returns the bytes of elements [first, last)."""

    def _run(self, offset: int, size: int) -> tuple[int, int, int, int]:
        """The elements [first, last) that the bytes touch, and where in them the wanted ones lie."""
        begin = max(min(offset, self.size) - len(self._header), 0)
        end = max(min(offset + size, self.size) - len(self._header), begin)
        first, last = begin // self._itemsize, -(-end // self._itemsize)
        return first, last, begin - first * self._itemsize, end - first * self._itemsize

    def _answer(self, offset: int, size: int, data: memoryview) -> bytes | memoryview:
        if offset >= len(self._header):
            return data
        return self._header[offset : offset + size] + bytes(data)

    def read(self, offset: int, size: int) -> bytes | memoryview | None:
        """Returns the bytes when all of them are here."""
        first, last, low, high = self._run(offset, size)
        data = self._here(first, last) if first < last else np.empty(0, np.uint8)
        return None if data is None else self._answer(offset, size, data.data[low:high])

    async def read_wait(self, offset: int, size: int) -> bytes | memoryview:
        """Returns the bytes, fetched where they are elsewhere."""
        first, last, low, high = self._run(offset, size)
        data = await self._fetched(first, last) if first < last else np.empty(0, np.uint8)
        return self._answer(offset, size, data.data[low:high])

    @abstractmethod
    def close(self) -> None:
        """Gives back what the handle held."""


class RemoteShard(_NpyFile):
    """A local array that only other nodes hold."""

    def __init__(self, fetcher: Fetcher, header: bytes, holder: Holder, itemsize: int) -> None:
        super().__init__(header, holder.shard.local_shape, itemsize)
        self._fetcher = fetcher
        self._holder = holder
        self._nodes = fetcher.nodes_of(holder.keys)
        fetcher.hold(self._nodes)

    def _here(self, first: int, last: int) -> Bytes | None:
        return None

    async def _fetched(self, first: int, last: int) -> Bytes:
        boxes = flat_boxes(self._holder.shard.local_shape, first, last)
        return (await self._fetcher.fetch([Wanted(self._holder.keys, self._itemsize, boxes)]))[0]

    def close(self) -> None:
        """Ends the hold on the other nodes."""
        self._fetcher.drop(self._nodes)


@dataclass(frozen=True)
class _Source:
    """One piece of one distinct shard: where elements of a tensor can be had."""

    piece: Piece
    holder: Holder
    view: Array | None  # of the piece, in the shape of its region; None when it is elsewhere

    def local_boxes(self, box: Boxes) -> Boxes:
        """Returns the boxes of the local array whose elements are those of ``box``, (1, 2, ndim)."""
        start = np.array(self.piece.region.start, np.int64)
        if not self.holder.shard.flat:
            return np.asarray(box - start + np.array(self.piece.at, np.int64), np.int64)
        extents = np.array([self.piece.region.shape], np.int64)
        _, parts, offsets = split_runs(extents, box - start)
        begins = offsets + self.piece.at[0]
        return runs_to_boxes(self.holder.shard.local_shape, begins, begins + box_volumes(parts))[1]


def _sources(arrays: ArraySource, holder: Holder) -> list[_Source]:
    found = (arrays.array(rank, path) for rank, path in holder.keys)
    array = next((each for each in found if each is not None), None)
    return [
        _Source(piece, holder, None if array is None else _piece_view(array, holder.shard, piece))
        for piece in holder.shard.pieces
    ]


def _piece_view(array: Array, shard: Shard, piece: Piece) -> Array:
    region = piece.region
    if shard.flat:
        return array.reshape(-1)[piece.at[0] : piece.at[0] + region.volume].reshape(region.shape)
    at = np.array(piece.at, np.int64)
    view: Array = array[_slices(np.stack([at, at + np.array(region.shape, np.int64)]))]
    return view


class FullTensor(_NpyFile):
    """A whole tensor, assembled on read from the shards that hold it, those of this node first."""

    def __init__(
        self,
        fetcher: Fetcher,
        header: bytes,
        tensor: Tensor,
        holders: Sequence[Holder],
        arrays: ArraySource,
    ) -> None:
        super().__init__(header, tensor.shape, tensor.itemsize)
        self._fetcher = fetcher
        self._tensor = tensor
        sources = [each for holder in holders for each in _sources(arrays, holder)]
        self._sources = sorted(sources, key=lambda source: source.view is None)
        regions = [(source.piece.region.start, source.piece.region.stop) for source in self._sources]
        boxes = np.array(regions, np.int64).reshape(len(regions), 2, len(tensor.shape))
        # Replicas may overlap without being equal: each element is taken from the first that has it.
        self._atoms, box, atom = disjoint_atoms(boxes)
        self._owner = np.full(len(self._atoms), len(self._sources), np.int64)
        np.minimum.at(self._owner, atom, box)
        away = (self._sources[owner] for owner in np.unique(self._owner).tolist())
        self._nodes = tuple(
            dict.fromkeys(node for s in away if s.view is None for node in fetcher.nodes_of(s.holder.keys))
        )
        fetcher.hold(self._nodes)

    def _here(self, first: int, last: int) -> Bytes | None:
        out, elsewhere = self.gather(flat_boxes(self._tensor.shape, first, last))
        return None if elsewhere else out

    async def _fetched(self, first: int, last: int) -> Bytes:
        out, elsewhere = self.gather(flat_boxes(self._tensor.shape, first, last))
        fetched = await self._fetcher.fetch([wanted for wanted, _ in elsewhere])
        for data, (_, target) in zip(fetched, elsewhere, strict=True):
            target[...] = data.view(target.dtype).reshape(target.shape)
        return out

    def gather(self, boxes: Boxes) -> tuple[Bytes, list[tuple[Wanted, Array]]]:
        """Copies what is here of ``boxes``, one after the other; and returns what is not, with its places."""
        total = int(box_volumes(boxes).sum())
        out = np.empty(total * self._itemsize, np.uint8)
        run, atom = join(boxes, self._atoms)
        parts = np.stack(
            [
                np.maximum(boxes[run, 0], self._atoms[atom, 0]),
                np.minimum(boxes[run, 1], self._atoms[atom, 1]),
            ],
            axis=1,
        )
        if int(box_volumes(parts).sum()) != total:
            raise CorruptError(f"tensor {self._tensor.path}: no shard holds some of {boxes.tolist()}")
        dtype = np.dtype(f"V{self._itemsize}")
        ends = np.cumsum(box_volumes(boxes)).tolist()
        elsewhere = []
        for k, (box, owner) in enumerate(zip(run.tolist(), self._owner[atom].tolist(), strict=True)):
            source = self._sources[owner]
            shape = boxes[box, 1] - boxes[box, 0]
            begin = ends[box] - int(shape.prod())
            whole = out.view(dtype)[begin : ends[box]].reshape(shape)
            target = whole[_slices(parts[k] - boxes[box, 0])]
            if source.view is None:
                local = source.local_boxes(parts[k : k + 1])
                elsewhere.append((Wanted(source.holder.keys, self._itemsize, local), target))
            else:
                here = source.view[_slices(parts[k] - np.array(source.piece.region.start, np.int64))]
                target[...] = here.view(dtype)
        return out, elsewhere

    def close(self) -> None:
        """Ends the hold on the other nodes, and lets go of the memory."""
        self._fetcher.drop(self._nodes)
        self._nodes = ()
        self._sources = []


def _slices(box: npt.NDArray[np.int64]) -> tuple[Any, ...]:
    # The ellipsis makes the result an array also where there are no dims.
    return (..., *(slice(a, b) for a, b in zip(box[0].tolist(), box[1].tolist(), strict=True)))
