"""What has landed so far of a snapshot that is being made, for nodes that have it passed on to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from tenplexfs.core.region import Boxes, box_volumes, ravel_strides
from tenplexfs.errors import UnavailableError
from tenplexfs.runtime.landing import Array, Fetch
from tenplexfs.storage.store import Key

__all__ = ["Board"]

_PULSE_S = 5.0
_PATIENCE_S = 60.0
_PAIRS = 1 << 18  # of boxes that are compared at once


class _Arrival:
    """Boxes that come one after the other, and how many bytes of them are there."""

    def __init__(self, item: Fetch) -> None:
        self._boxes = item.boxes
        self._itemsize = item.ranges.itemsize
        self._ends = np.cumsum(box_volumes(item.boxes)) * self._itemsize
        self.nbytes = item.nbytes
        self.landed_bytes = 0

    def needed(self, boxes: Boxes) -> tuple[int, int]:
        """Returns how many bytes must be there for all that lies in ``boxes``, and how many elements that is.

        Cost: A few nanoseconds for each pair of boxes; memory for some of them at a time.
        """
        step = max(1, _PAIRS // max(1, len(self._boxes)))
        found = [self._needed(boxes[at : at + step]) for at in range(0, len(boxes), step)]
        return max((nbytes for nbytes, _ in found), default=0), sum(volume for _, volume in found)

    def _needed(self, boxes: Boxes) -> tuple[int, int]:
        own = self._boxes[:, None]
        start = np.maximum(own[:, :, 0], boxes[:, 0])
        stop = np.minimum(own[:, :, 1], boxes[:, 1])
        mine, _ = pairs = np.nonzero((start < stop).all(axis=2))
        if not len(mine):
            return 0, 0
        begin, extent = self._boxes[mine, 0], self._boxes[mine, 1] - self._boxes[mine, 0]
        last = ((stop[pairs] - 1 - begin) * ravel_strides(extent)).sum(axis=1)
        first = self._ends[mine] - extent.prod(axis=1) * self._itemsize
        volume = (stop[pairs] - start[pairs]).prod(axis=1).sum()
        return int((first + (last + 1) * self._itemsize).max()), int(volume)


class Board:
    """The arrays of a snapshot that is being made; a `protocols.GrowingArrays`. Thread-safe.

    Args:
        clock: Seconds that never go back.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._arrays: dict[Key, Array] = {}
        self._names: dict[Key, Key] = {}
        self._arrivals: dict[Key, dict[object, _Arrival]] = {}
        self._changed = threading.Condition()
        self._moved_s = clock()
        self._has_ended = False

    def show(self, keys: Sequence[Key], array: Array, items: Sequence[Fetch]) -> None:
        """Shows ``array``, of which nothing has landed, under ``keys``; ``items`` will come from afar."""
        self._arrivals[keys[0]] = {item: _Arrival(item) for item in items}
        self._arrays[keys[0]] = array
        self._names.update(dict.fromkeys(keys, keys[0]))  # last, for others ask all the while

    def array(self, rank: int, path: str) -> Array | None:
        """Returns an array, whatever has landed of it, or None when it is not made here."""
        name = self._names.get((rank, path))
        return None if name is None else self._arrays[name]

    def landed(self, item: Fetch, nbytes: int) -> None:
        """So many bytes of ``item`` are there, all in all."""
        arrival = self._arrivals[item.target.keys[0]][item]
        with self._changed:
            arrival.landed_bytes = nbytes
            self._moved_s = self._clock()
            self._changed.notify_all()

    def replace(self, item: Fetch, other: Fetch) -> None:
        """The bytes of ``item`` will come as ``other``, from the beginning."""
        key = item.target.keys[0]
        with self._changed:
            rest = {each: arrival for each, arrival in self._arrivals[key].items() if each is not item}
            self._arrivals[key] = {**rest, other: _Arrival(other)}

    def end(self) -> None:
        """Nothing more will come; for who waits that is a failure."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def wait(self, rank: int, path: str, boxes: Boxes) -> bool:
        """Waits for ``boxes`` of an array; returns False after some seconds, to be asked again.

        Raises:
            UnavailableError: Nothing at all has come for a minute, or nothing will; or some of ``boxes`` does
                not come from afar, so that nobody here knows whether it is there.
        """
        key = self._names[rank, path]
        until_s = self._clock() + _PULSE_S
        with self._changed:
            needed: list[tuple[_Arrival, int]] = []
            seen: object = None
            while True:
                arrivals = self._arrivals[key]
                if arrivals is not seen:
                    found = [(a, *a.needed(boxes)) for a in arrivals.values()]
                    if sum(volume for *_, volume in found) != int(box_volumes(boxes).sum()):
                        raise UnavailableError(f"{path} of rank {rank} is not all here to be passed on")
                    needed, seen = [(a, nbytes) for a, nbytes, _ in found], arrivals
                if all(arrival.landed_bytes >= nbytes for arrival, nbytes in needed):
                    return True
                now = self._clock()
                if self._has_ended or now > self._moved_s + _PATIENCE_S:
                    why = "the stage ended" if self._has_ended else f"nothing came for {_PATIENCE_S:g} s"
                    raise UnavailableError(f"{path} of rank {rank} is not here to be passed on: {why}")
                if now >= until_s:
                    return False
                self._changed.wait(until_s - now)
