"""Making a node's part of a new snapshot: keep, copy, fetch, seal.

Files that stay are shared. Bytes of this node are copied in a worker thread, while each source node streams
what it has straight into the arrays of the new snapshot. What several arrays need of one region crosses once,
and is copied on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import trio

from tenplexfs.core.dtypes import itemsize_of
from tenplexfs.core.node_part import Moves, Target
from tenplexfs.core.region import Boxes, box_volumes
from tenplexfs.core.snapshot import JobName, NodeName, TxId
from tenplexfs.errors import CorruptError, NotFoundError
from tenplexfs.runtime.planning import StagePart
from tenplexfs.runtime.protocols import ArraySource, PeerReader, Ranges
from tenplexfs.runtime.tasks import run_all
from tenplexfs.storage.store import ArrayRef, Ingest, Key, Wanted

__all__ = ["Base", "Scatter", "ScatterFactory", "Staging"]

Array = npt.NDArray[np.generic]

_CALL_BOXES = 16384
_CALL_BYTES = 1 << 30
_PATIENCE_S = 60.0
_SLOWEST_BYTES_PER_S = 4e6


@dataclass(frozen=True)
class Base:
    """The snapshot that the bytes come from, as far as it is on this node.

    Attributes:
        refs: Its stored arrays, which can be shared; empty for state from outside.
    """

    job: JobName
    txid: TxId
    arrays: ArraySource
    refs: Mapping[Key, ArrayRef]


class Scatter(Protocol):
    """Writes a stream of bytes into place."""

    def write(self, offset: int, data: bytes) -> None:
        """Writes ``data``, the bytes of the stream from ``offset`` on."""
        ...


ScatterFactory = Callable[[Sequence[tuple[Array, Boxes]]], Scatter]
"""Takes arrays and boxes of them, in the order of the stream."""


@dataclass(frozen=True)
class _Fetch:
    """One item of a call to a source node."""

    ranges: Ranges
    array: Array
    boxes: Boxes

    @property
    def nbytes(self) -> int:
        return int(self.ranges.nbytes.sum())


class Staging:
    """Fills and seals ``ingest`` as ``part`` says.

    Args:
        report: Gets bytes done and bytes in all, of what crosses from other nodes or is copied on this one.
    """

    def __init__(
        self,
        ingest: Ingest,
        part: StagePart,
        base: Base,
        peers: PeerReader,
        scatter: ScatterFactory,
        report: Callable[[int, int], None],
    ) -> None:
        self._ingest = ingest
        self._part = part
        self._base = base
        self._peers = peers
        self._scatter = scatter
        self._report = report
        self._done_bytes = 0
        self._total_bytes = 0

    async def run(self) -> None:
        """Returns once all is staged in the store.

        Raises:
            NoRoomError: The store has no room; the message has the numbers.
            TenplexError: Some bytes could not be had.
        """
        await trio.to_thread.run_sync(self._reserve)
        targets = self._fresh()
        for target in targets:
            _check_whole(target)
        fetches = self._fetches(targets)
        copied = sum(_local_bytes(target) for target in targets)
        self._total_bytes = copied + sum(each.nbytes for items in fetches.values() for each in items)
        self._report(0, self._total_bytes)
        calls = [partial(self._fetch_all, node, items) for node, items in fetches.items()]
        await run_all([partial(self._copy_all, targets), *calls])
        await trio.to_thread.run_sync(self._copy_on, targets)
        shards = {target.keys[0]: target.shard for target in self._part.part.targets}
        await trio.to_thread.run_sync(self._ingest.seal, shards)

    def _fresh(self) -> list[Target]:
        """Returns the arrays that are made; of an import also what stays, for there is no file to share."""
        return [target for target in self._part.part.targets if self._shared(target) is None]

    def _shared(self, target: Target) -> ArrayRef | None:
        return None if target.kept_from is None else self._base.refs.get(target.kept_from)

    def _reserve(self) -> None:
        wanted = []
        for target in self._part.part.targets:
            ref = self._shared(target)
            if ref is not None:
                self._ingest.share(target.keys, ref)
            else:
                wanted.append(Wanted(target.keys, target.shard.local_shape, target.dtype))
        self._ingest.reserve(wanted)

    async def _copy_all(self, targets: Sequence[Target]) -> None:
        for target in targets:
            nbytes = _local_bytes(target)
            if nbytes:
                await trio.to_thread.run_sync(self._copy, target)
                self._count(nbytes)

    def _copy(self, target: Target) -> None:
        """Copies what an old array of this node has."""
        array = self._ingest.array(target.keys[0])
        for move in _moves(target, "local", "kept"):
            rank, path = move.source
            source = self._base.arrays.array(rank, path)
            if source is None:
                raise NotFoundError(f"{path} of rank {rank} should be on this node, and is not")
            _copy_boxes(source, move.source_boxes, array, move.target_boxes)

    def _copy_on(self, targets: Sequence[Target]) -> None:
        """Copies what arrived for another array of this node."""
        every = self._part.part.targets
        for target in targets:
            array = self._ingest.array(target.keys[0])
            for copies in target.copies:
                source = self._ingest.array(every[copies.target].keys[0])
                _copy_boxes(source, copies.source_boxes, array, copies.target_boxes)

    def _fetches(self, targets: Sequence[Target]) -> dict[NodeName, list[_Fetch]]:
        fetches: dict[NodeName, list[_Fetch]] = {}
        for target in targets:
            for move in _moves(target, "wire"):
                array = self._ingest.array(target.keys[0])
                for at in range(0, len(move.source_boxes), _CALL_BOXES):
                    some = slice(at, at + _CALL_BOXES)
                    ranges = Ranges(*move.source, array.dtype.itemsize, move.source_boxes[some])
                    boxes = move.target_boxes[some]
                    item = _Fetch(ranges, _as_boxed(array, boxes), boxes)
                    fetches.setdefault(NodeName(move.node), []).append(item)
        return fetches

    async def _fetch_all(self, node: NodeName, items: Sequence[_Fetch]) -> None:
        for call in _calls(items):
            total = sum(each.nbytes for each in call)
            write = self._scatter([(each.array, each.boxes) for each in call]).write
            arrived = 0

            def count(offset: int, data: bytes, write: Callable[[int, bytes], None] = write) -> None:
                nonlocal arrived
                write(offset, data)
                arrived += len(data)
                trio.from_thread.run_sync(self._count, len(data))

            await self._peers.fetch(
                node,
                self._base.job,
                self._base.txid,
                [each.ranges for each in call],
                count,
                deadline_s=_PATIENCE_S + total / _SLOWEST_BYTES_PER_S,
            )
            if arrived != total:
                raise CorruptError(f"node {node}: sent {arrived} bytes of {total}")

    def _count(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        self._report(self._done_bytes, self._total_bytes)


def _calls(items: Sequence[_Fetch]) -> Iterator[list[_Fetch]]:
    """Groups the items of one node into calls of bounded size."""
    call: list[_Fetch] = []
    boxes = nbytes = 0
    for item in items:
        count = len(item.ranges.boxes)
        if call and (boxes + count > _CALL_BOXES or nbytes + item.nbytes > _CALL_BYTES):
            yield call
            call, boxes, nbytes = [], 0, 0
        call.append(item)
        boxes += count
        nbytes += item.nbytes
    if call:
        yield call


def _moves(target: Target, *ways: str) -> Iterator[Moves]:
    return (move for move in target.moves if move.way in ways)


def _local_bytes(target: Target) -> int:
    moves = _moves(target, "local", "kept")
    return sum(int(box_volumes(move.target_boxes).sum()) for move in moves) * itemsize_of(target.dtype)


def _check_whole(target: Target) -> None:
    """Refuses a plan that leaves elements of an array out: they would be zeros."""
    boxes = [m.target_boxes for m in target.moves if m.way != "shared"]
    boxes += [copies.target_boxes for copies in target.copies]
    found = sum(int(box_volumes(each).sum()) for each in boxes)
    wanted = sum(piece.region.volume for piece in target.shard.pieces)
    if found != wanted:
        rank, path = target.keys[0]
        raise CorruptError(f"plan: {path} of rank {rank} gets {found} elements, needs {wanted}")


def _as_boxed(array: Array, boxes: Boxes) -> Array:
    """Returns the array raveled where the boxes are runs of it."""
    return array if array.ndim == boxes.shape[2] else array.reshape(-1)


def _copy_boxes(source: Array, source_boxes: Boxes, target: Array, target_boxes: Boxes) -> None:
    source, target = _as_boxed(source, source_boxes), _as_boxed(target, target_boxes)
    for source_box, target_box in zip(source_boxes, target_boxes, strict=True):
        place = target[_slices(target_box)]
        place[...] = source[_slices(source_box)].reshape(place.shape)


def _slices(box: Boxes) -> tuple[Any, ...]:
    # The ellipsis makes the result an array also where there are no dims.
    return (..., *(slice(a, b) for a, b in zip(box[0].tolist(), box[1].tolist(), strict=True)))
