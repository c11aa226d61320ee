"""Making a node's part of a new snapshot: keep, copy, fetch, seal.

Files that stay are shared. Bytes of this node are copied in worker threads, while each source node streams
what it has straight into the arrays of the new snapshot, and arrays that are whole are summed up. What
several arrays need of one region crosses once, and is copied on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from tenplexfs.core.dtypes import itemsize_of
from tenplexfs.core.node_part import Moves, Target
from tenplexfs.core.region import Boxes, box_volumes
from tenplexfs.core.snapshot import JobName, NodeName, TxId
from tenplexfs.errors import CorruptError, NotFoundError
from tenplexfs.runtime.landing import Array, Fetch, Landing, Reporter, ScatterFactory, Sums, slices_of
from tenplexfs.runtime.planning import StagePart
from tenplexfs.runtime.protocols import ArraySource, PeerReader, Ranges
from tenplexfs.runtime.tasks import run_all
from tenplexfs.storage.store import ArrayRef, Ingest, Key, Wanted

__all__ = ["MAX_BYTES", "Base", "ScatterFactory", "Staging"]

log = logging.getLogger(__name__)

_CALL_BOXES = 16384
_CALL_BYTES = 1 << 30
_PATIENCE_S = 60.0
_COPIERS = 2
_HELD_BYTES = 24 << 20  # by one call: its window of 16 MiB, and the messages that are under way
MAX_BYTES = 256 << 20
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


class Staging:
    """Fills and seals ``ingest`` as ``part`` says.

    Args:
        report: Gets bytes done and bytes in all, of what crosses from other nodes or is copied on this one.
        max_bytes: What calls to other nodes may hold in memory together.
    """

    def __init__(
        self,
        ingest: Ingest,
        part: StagePart,
        base: Base,
        peers: PeerReader,
        scatter: ScatterFactory,
        report: Callable[[int, int], None],
        *,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._ingest = ingest
        self._part = part
        self._base = base
        self._peers = peers
        self._scatter = scatter
        self._calls = trio.CapacityLimiter(max(1, max_bytes // _HELD_BYTES))
        self._progress = Reporter(report)
        self._sums = Sums(ingest)

    async def run(self) -> None:
        """Returns once all is staged in the store.

        Raises:
            NoRoomError: The store has no room; the message has the numbers.
            TenplexError: Some bytes could not be had.
        """
        begun = trio.current_time()
        await trio.to_thread.run_sync(self._reserve)
        reserved = trio.current_time()
        targets = self._fresh()
        for target in targets:
            _check_whole(target)
        fetches = self._fetches(targets)
        copied = sum(_local_bytes(target) for target in targets)
        total = copied + sum(each.nbytes for items in fetches.values() for each in items)
        self._progress.begin(total)
        for target in targets:
            parts = len(target.copies) + len([*_moves(target, "local", "kept")])
            self._sums.expect(target, parts + sum(map(_call_count, _moves(target, "wire"))))
        await run_all(
            [partial(self._fill, targets, fetches), partial(trio.to_thread.run_sync, self._sums.run)]
        )
        filled = trio.current_time()
        shards = {target.keys[0]: target.shard for target in self._part.part.targets}
        await trio.to_thread.run_sync(partial(self._ingest.seal, shards, sums=self._sums.found))
        log.info(
            "job %s: %d arrays, %d bytes staged in %.3f s: room %.3f, bytes %.3f, manifest %.3f",
            self._base.job,
            len(targets),
            total,
            trio.current_time() - begun,
            reserved - begun,
            filled - reserved,
            trio.current_time() - filled,
        )

    async def _fill(self, targets: Sequence[Target], fetches: Mapping[NodeName, Sequence[Fetch]]) -> None:
        waiting = iter(targets)
        copies = [partial(trio.to_thread.run_sync, self._copy_all, waiting)] * _COPIERS
        calls = [partial(self._fetch_all, node, items) for node, items in fetches.items()]
        try:
            await run_all([*copies, *calls])
            await trio.to_thread.run_sync(self._copy_on, targets)
        finally:
            self._sums.end()

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

    def _copy_all(self, targets: Iterator[Target]) -> None:
        """Copies what old arrays of this node have; several threads share ``targets``."""
        for target in targets:
            trio.from_thread.check_cancelled()
            for move in _moves(target, "local", "kept"):
                rank, path = move.source
                source = self._base.arrays.array(rank, path)
                if source is None:
                    raise NotFoundError(f"{path} of rank {rank} should be on this node, and is not")
                self._copy(source, move.source_boxes, target, move.target_boxes)
                self._progress.add(_nbytes(move, target))
                self._sums.landed(target)

    def _copy_on(self, targets: Sequence[Target]) -> None:
        """Copies what arrived for another array of this node."""
        every = self._part.part.targets
        for target in targets:
            for copies in target.copies:
                source = self._ingest.array(every[copies.target].keys[0])
                self._copy(source, copies.source_boxes, target, copies.target_boxes)
                self._sums.landed(target)

    def _copy(self, source: Array, source_boxes: Boxes, target: Target, target_boxes: Boxes) -> None:
        key = target.keys[0]
        source, within = _as_boxed(source, source_boxes), _as_boxed(self._ingest.array(key), target_boxes)
        for source_box, target_box in zip(source_boxes, target_boxes, strict=True):
            self._ingest.put(key, within, within[slices_of(target_box)], source[slices_of(source_box)])

    def _fetches(self, targets: Sequence[Target]) -> dict[NodeName, list[Fetch]]:
        fetches: dict[NodeName, list[Fetch]] = {}
        for target in targets:
            for move in _moves(target, "wire"):
                array = self._ingest.array(target.keys[0])
                for at in range(0, len(move.source_boxes), _CALL_BOXES):
                    some = slice(at, at + _CALL_BOXES)
                    ranges = Ranges(*move.source, array.dtype.itemsize, move.source_boxes[some])
                    boxes = move.target_boxes[some]
                    item = Fetch(ranges, target, _as_boxed(array, boxes), boxes)
                    fetches.setdefault(NodeName(move.node), []).append(item)
        return fetches

    async def _fetch_all(self, node: NodeName, items: Sequence[Fetch]) -> None:
        for call in _calls(items):
            landing = Landing(self._ingest, call, self._scatter, self._progress, self._sums)
            async with self._calls:
                await self._peers.fetch(
                    node,
                    self._base.job,
                    self._base.txid,
                    [each.ranges for each in call],
                    landing.write,
                    deadline_s=_PATIENCE_S + landing.nbytes / _SLOWEST_BYTES_PER_S,
                )
            landing.check(node)


def _calls(items: Sequence[Fetch]) -> Iterator[list[Fetch]]:
    """Groups the items of one node into calls of bounded size."""
    call: list[Fetch] = []
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


def _nbytes(move: Moves, target: Target) -> int:
    return int(box_volumes(move.target_boxes).sum()) * itemsize_of(target.dtype)


def _local_bytes(target: Target) -> int:
    return sum(_nbytes(move, target) for move in _moves(target, "local", "kept"))


def _call_count(move: Moves) -> int:
    return -(-len(move.source_boxes) // _CALL_BOXES)


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
