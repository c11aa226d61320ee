"""Where the parts of new arrays land: counted, written, and summed up once an array is whole."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import trio

from tenplexfs.core.node_part import Target
from tenplexfs.core.region import Boxes
from tenplexfs.core.snapshot import NodeName
from tenplexfs.errors import CorruptError
from tenplexfs.runtime.protocols import Ranges
from tenplexfs.storage.store import Ingest, Key
from tenplexfs.storage.writers import Writer

__all__ = ["Array", "Fetch", "Landing", "Reporter", "Scatter", "ScatterFactory", "Sums", "slices_of"]

Array = npt.NDArray[np.generic]

_REPORT_S = 0.02  # each one wakes the thread that serves the mount


class Scatter(Protocol):
    """Writes a stream of bytes into place."""

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Writes ``data``, the bytes of the stream from ``offset`` on."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


ScatterFactory = Callable[[Sequence[tuple[Array, Boxes]]], Scatter]
"""Takes arrays and boxes of them, in the order of the stream."""


@dataclass(frozen=True, eq=False)
class Fetch:
    """One item of a call to a node: what one array of this node gets of one of that node.

    Attributes:
        node: Which is asked.
        backup: The same bytes from a holder, where ``node`` only passes them on.
    """

    node: NodeName
    ranges: Ranges
    target: Target
    array: Array
    boxes: Boxes
    backup: Fetch | None = None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the item."""
        return int(self.ranges.nbytes.sum())


class Reporter:
    """Tells how many bytes are done, from any thread: a hundred times at most, and nobody waits for it.

    Args:
        clock: Seconds that never go back.
    """

    def __init__(
        self, report: Callable[[int, int], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report = report
        self._clock = clock
        self._next_s = 0.0
        self._lock = threading.Lock()
        self._done = self._total = self._told = 0

    def begin(self, total_bytes: int) -> None:
        """Says how many there will be; on the trio thread."""
        self._total = total_bytes
        self._token = trio.lowlevel.current_trio_token()
        self._report(0, total_bytes)

    def take_back(self, nbytes: int) -> None:
        """So many are not done after all."""
        with self._lock:
            self._done -= nbytes

    def add(self, nbytes: int) -> None:
        """So many more are done."""
        with self._lock:
            self._done += nbytes
            if self._done < self._total:
                if 100 * (self._done - self._told) < self._total or self._clock() < self._next_s:
                    return
                self._next_s = self._clock() + _REPORT_S
            self._told = self._done
        self._token.run_sync_soon(self._tell, idempotent=True)

    def _tell(self) -> None:
        self._report(self._told, self._total)


class Sums:
    """Sums up arrays as soon as all their parts have landed, while they are in the caches.

    Attributes:
        found: Key -> sums of the pieces.
    """

    def __init__(self, ingest: Ingest) -> None:
        self.found: dict[Key, tuple[int, ...]] = {}
        self._ingest = ingest
        self._left: Counter[Key] = Counter()
        self._lock = threading.Lock()
        self._ready: SimpleQueue[Target | None] = SimpleQueue()

    def expect(self, target: Target, count: int) -> None:
        """Says how often `landed` will be called for ``target``."""
        self._left[target.keys[0]] = count
        if not count:
            self._ready.put(target)

    def landed(self, target: Target) -> None:
        """A part of ``target`` is written."""
        key = target.keys[0]
        with self._lock:
            self._left[key] -= 1
            ready = not self._left[key]
        if ready:
            self._ready.put(target)

    def end(self) -> None:
        """Lets `run` return once all that has landed is summed up."""
        self._ready.put(None)

    def run(self) -> None:
        """Sums up what lands, until `end`. For a worker thread of trio."""
        while (target := self._ready.get()) is not None:
            trio.from_thread.check_cancelled()
            self.found[target.keys[0]] = self._ingest.sums(target.keys[0], target.shard)


class Landing:
    """Where the stream of one call lands: each byte once, in order.

    What is contiguous in its array, and big, is written into the file; the rest is scattered into the map.

    Args:
        tell: Gets each item that grew, and how many of its bytes have landed.

    Attributes:
        nbytes: Of the whole stream.
    """

    def __init__(
        self,
        ingest: Ingest,
        call: Sequence[Fetch],
        scatter: ScatterFactory,
        progress: Reporter,
        sums: Sums,
        tell: Callable[[Fetch, int], None] = lambda item, nbytes: None,
    ) -> None:
        self._ingest = ingest
        self._call = call
        self._progress = progress
        self._sums = sums
        self._tell = tell
        self._ends = list(accumulate(each.nbytes for each in call))
        self.nbytes = self._ends[-1]
        self._arrived = self._finished = 0
        self._writes: deque[tuple[int, int, Callable[[], Writer]]] = deque()  # begin, end, what makes it
        self._writer: Writer | None = None
        scattered: list[Fetch] = []
        begin = at = 0
        for item, end in zip(call, self._ends, strict=True):
            if (place := _as_span(item)) is None:
                scattered.append(item)
            else:
                self._add(begin, at, scattered, scatter)
                self._writes.append((at, end, partial(ingest.writer, item.target.keys[0], item.array, place)))
                scattered, begin = [], end
            at = end
        self._add(begin, at, scattered, scatter)

    def _add(self, begin: int, end: int, items: Sequence[Fetch], scatter: ScatterFactory) -> None:
        if items:
            made = scatter([(each.array, each.boxes) for each in items])
            self._writes.append((begin, end, lambda: made))

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Writes the bytes of the stream from ``offset`` on; called in order, by one thread."""
        if offset != self._arrived or offset + len(data) > self.nbytes:
            raise CorruptError(
                f"stream of {self.nbytes} bytes: got {len(data)} at {offset}, not {self._arrived}"
            )
        self._arrived += len(data)
        view = memoryview(data)
        while view:
            begin, end, make = self._writes[0]
            if self._writer is None:
                self._writer = make()
            self._writer.write(offset - begin, view[: end - offset])
            view, offset = view[end - offset :], min(end, offset + len(view))
            if offset == end:
                self._writes.popleft()
                self.close()
        self._progress.add(len(data))
        while self._finished < len(self._call):
            item, left = self._call[self._finished], self._ends[self._finished] - self._arrived
            if left >= item.nbytes > 0:
                break
            self._tell(item, item.nbytes - max(left, 0))
            if left > 0:
                break
            self._sums.landed(item.target)
            self._finished += 1

    def close(self) -> None:
        """Gives back what writing needs."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    @property
    def has_begun(self) -> bool:
        """Whether anything has landed."""
        return self._arrived > 0

    def left(self) -> Sequence[Fetch]:
        """Returns the items that have not landed as a whole, and forgets what has landed of them."""
        items = self._call[self._finished :]
        self._progress.take_back(sum(item.nbytes for item in items) - (self.nbytes - self._arrived))
        return items

    def check(self, node: NodeName) -> None:
        """Refuses a stream that was cut short."""
        if self._arrived != self.nbytes:
            raise CorruptError(f"node {node}: sent {self._arrived} bytes of {self.nbytes}")


def _as_span(item: Fetch) -> Array | None:
    """Returns the place of what is one contiguous box of its array, else None."""
    if len(item.boxes) != 1:
        return None
    place = item.array[slices_of(item.boxes[0])]
    return place if place.flags.c_contiguous else None


def slices_of(box: Boxes) -> tuple[Any, ...]:
    """Returns the index that cuts ``box``, (2, ndim), out of an array."""
    # The ellipsis makes the result an array also where there are no dims.
    return (..., *(slice(a, b) for a, b in zip(box[0].tolist(), box[1].tolist(), strict=True)))
