"""Making a node's part of a new snapshot: keep, copy, fetch, seal.

Files that stay are shared. Bytes of this node are copied in worker threads, while each source node streams
what it has straight into the arrays of the new snapshot, and arrays that are whole are summed up. What
several arrays need of one region crosses once, and is copied on; what several nodes need is passed on from
node to node while it arrives, by the `Board` of each.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from tenplexfs.core.dtypes import itemsize_of
from tenplexfs.core.node_part import Moves, Target
from tenplexfs.core.region import Boxes, box_volumes
from tenplexfs.core.snapshot import JobName, NodeName, TxId
from tenplexfs.errors import (
    CorruptError,
    NotFoundError,
    StaleError,
    TimedOutError,
    UnavailableError,
)
from tenplexfs.runtime.board import Board
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
_RELAY_PATIENCE_S = 5.0  # with a node that does not answer; a holder is asked then
_RELAY_START_S = 20.0  # until a node has begun to make its part
_LATE = (NotFoundError, StaleError, UnavailableError, TimedOutError, CorruptError)
_COPIERS = 2
_HELD_BYTES = 4 << 20  # by one call: a message, and what the kernel and Python hold of the next ones
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
        txid: Of the new snapshot.
        report: Gets bytes done and bytes in all, of what crosses from other nodes or is copied on this one.
        max_bytes: What calls to other nodes may hold in memory together.

    Attributes:
        board: What has landed so far, for other nodes.
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
        txid: TxId,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._ingest = ingest
        self._part = part
        self._base = base
        self._peers = peers
        self._scatter = scatter
        self._txid = txid
        self.board = Board()
        # Apart, for what is passed on waits for what holders send.
        count = max(2, max_bytes // _HELD_BYTES)
        self._calls, self._relayed = trio.CapacityLimiter(count // 2), trio.CapacityLimiter(count // 2)
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
        total = copied + sum(each.nbytes for each in fetches)
        self._progress.begin(total)
        counts = Counter(each.target.keys[0] for each in fetches)
        for target in targets:
            parts = len(target.copies) + len([*_moves(target, "local", "kept")])
            self._sums.expect(target, parts + counts[target.keys[0]])
        try:
            await run_all(
                [partial(self._fill, targets, fetches), partial(trio.to_thread.run_sync, self._sums.run)]
            )
        finally:
            self.board.end()
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

    async def _fill(self, targets: Sequence[Target], fetches: Sequence[Fetch]) -> None:
        waiting = iter(targets)
        copies = [partial(trio.to_thread.run_sync, self._copy_all, waiting)] * _COPIERS
        held = _by_node(each for each in fetches if each.backup is None)
        passed = _by_node(each for each in fetches if each.backup is not None)
        calls = [partial(self._fetch_held, items) for items in held]
        calls += [partial(self._fetch_passed, items) for items in passed]
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

    def _fetches(self, targets: Sequence[Target]) -> list[Fetch]:
        fetches: list[Fetch] = []
        for target in targets:
            array = self._ingest.array(target.keys[0])
            mine: list[Fetch] = []
            for move in _moves(target, "wire"):
                held = [*_held_fetches(move, target, array)]
                via = move.via
                if via is None or len(held) > 1 or len(via.source_boxes) > _CALL_BOXES:
                    mine += held
                    continue
                ranges = Ranges(*via.source, array.dtype.itemsize, via.source_boxes)
                boxed = _as_boxed(array, via.target_boxes)
                node = NodeName(via.node)
                mine.append(Fetch(node, ranges, target, boxed, via.target_boxes, held[0]))
            self.board.show(target.keys, array, mine)
            fetches += mine
        return fetches

    async def _fetch_held(self, items: Sequence[Fetch]) -> None:
        """Fetches from the one node that holds ``items`` in the old snapshot."""
        for call in _calls(items):
            landing = self._landing(call)
            async with self._calls:
                await self._fetch(self._base.txid, call, landing)

    async def _fetch_passed(self, items: Sequence[Fetch]) -> None:
        """Fetches ``items`` from the one node that passes them on, or, where it does not, from holders."""
        calls = _calls(items)
        for call in calls:
            landing = self._landing(call)
            try:
                async with self._relayed:
                    await self._fetch_when_begun(call, landing)
            except _LATE as error:
                log.warning("job %s: %s; asking holders instead", self._base.job, error.message)
                left = [*landing.left(), *(item for more in calls for item in more)]
                break
        else:
            return
        backups = []
        for item in left:
            assert item.backup is not None  # it is passed on
            self.board.replace(item, item.backup)
            backups.append(item.backup)
        await run_all(partial(self._fetch_held, some) for some in _by_node(backups))

    async def _fetch_when_begun(self, call: Sequence[Fetch], landing: Landing) -> None:
        """Fetches from a node that may not have begun to make its part."""
        until_s, wait_s = trio.current_time() + _RELAY_START_S, 0.02
        while True:
            try:
                await self._fetch(self._txid, call, landing, patience_s=_RELAY_PATIENCE_S)
            except NotFoundError:
                if landing.has_begun or trio.current_time() > until_s:
                    raise
                await trio.sleep(wait_s)
                wait_s = min(2 * wait_s, 0.5)
            else:
                return

    def _landing(self, call: Sequence[Fetch]) -> Landing:
        return Landing(self._ingest, call, self._scatter, self._progress, self._sums, self.board.landed)

    async def _fetch(
        self, txid: TxId, call: Sequence[Fetch], landing: Landing, patience_s: float | None = None
    ) -> None:
        node = call[0].node
        try:
            await self._peers.fetch(
                node,
                self._base.job,
                txid,
                [each.ranges for each in call],
                landing.write,
                deadline_s=_PATIENCE_S + landing.nbytes / _SLOWEST_BYTES_PER_S,
                patience_s=patience_s,
            )
        finally:
            landing.close()
        landing.check(node)


def _held_fetches(move: Moves, target: Target, array: Array) -> Iterator[Fetch]:
    """Yields what holders are asked for, in items of bounded size."""
    for at in range(0, len(move.source_boxes), _CALL_BOXES):
        some = slice(at, at + _CALL_BOXES)
        ranges = Ranges(*move.source, array.dtype.itemsize, move.source_boxes[some])
        boxes = move.target_boxes[some]
        yield Fetch(NodeName(move.node), ranges, target, _as_boxed(array, boxes), boxes)


def _by_node(items: Iterable[Fetch]) -> list[list[Fetch]]:
    """Groups items by the node that is asked, in the order of nodes."""
    groups: dict[NodeName, list[Fetch]] = {}
    for item in items:
        groups.setdefault(item.node, []).append(item)
    return [groups[node] for node in sorted(groups)]


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
