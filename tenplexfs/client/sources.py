"""Where the elements of a region are: in arrays of this node, or elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tenplexfs.client.regions import RegionOf
from tenplexfs.core.ptc import PTC, Piece, Shard

__all__ = ["Part", "Sources"]

Array: TypeAlias = npt.NDArray[np.generic]
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a region, from one place.

    Attributes:
        target: Where it goes in the region.
        remote: Path, start and stop, in global coordinates.
        key: (rank, path) of the array of this node that has it; None where it is elsewhere.
        shard, piece: Of that array.
        dtype: Of the tensor.
    """

    target: tuple[slice, ...]
    remote: tuple[str, tuple[int, ...], tuple[int, ...]]
    dtype: str
    key: tuple[int, str] | None = None
    shard: Shard | None = None
    piece: Piece | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of the array that has it."""
        assert self.shard is not None
        return self.shard.local_shape

    def of(self, array: Array) -> Array:
        """Returns it as a view of ``array``."""
        assert self.shard is not None and self.piece is not None
        region, at = self.piece.region, self.piece.at
        view: Any = array
        if self.shard.flat:
            view = array.reshape(-1)[at[0] : at[0] + region.volume].reshape(region.shape)
        else:
            view = view[(..., *(slice(a, a + n) for a, n in zip(at, region.shape, strict=True)))]
        _, start, stop = self.remote
        inner = (slice(a - o, b - o) for a, b, o in zip(start, stop, region.start, strict=True))
        found: Array = view[(..., *inner)]
        return found


class Sources:
    """The shards of all tensors, those of this node in front."""

    def __init__(self, ptc: PTC, node: str) -> None:
        self._ptc = ptc
        self._here = frozenset(ptc.nodes.get(node, ()))
        self._known: dict[str, list[tuple[tuple[int, str], Shard]]] = {}

    def parts(self, region: RegionOf) -> Iterator[Part]:
        """Yields what ``region`` is made of, each element once."""
        left: list[Box] = [(region.start, region.stop)] if region.nbytes else []
        for key, shard in self._shards(region.path):
            for piece in shard.pieces:
                rest: list[Box] = []
                for box in left:
                    found = _common(box, (piece.region.start, piece.region.stop))
                    if found is None:
                        rest.append(box)
                        continue
                    yield self._part(region, found, key, shard, piece)
                    rest += _without(box, found)
                left = rest
            if not left:
                return
        for box in left:
            yield self._part(region, box)

    def _part(
        self,
        region: RegionOf,
        box: Box,
        key: tuple[int, str] | None = None,
        shard: Shard | None = None,
        piece: Piece | None = None,
    ) -> Part:
        start, stop = box
        target = tuple(slice(a - o, b - o) for a, b, o in zip(start, stop, region.start, strict=True))
        return Part(target, (region.path, start, stop), region.dtype, key, shard, piece)

    def _shards(self, path: str) -> list[tuple[tuple[int, str], Shard]]:
        if path not in self._known:
            found = []
            for holder in self._ptc.holders(path):
                key = next((each for each in holder.keys if each[0] in self._here), None)
                if key is not None:
                    found.append((key, holder.shard))
            self._known[path] = found
        return self._known[path]


def _common(a: Box, b: Box) -> Box | None:
    start = tuple(map(max, a[0], b[0]))
    stop = tuple(map(min, a[1], b[1]))
    return None if any(x >= y for x, y in zip(start, stop, strict=True)) else (start, stop)


def _without(box: Box, inner: Box) -> Iterator[Box]:
    """Yields boxes that are ``box`` without ``inner``, which lies in it."""
    start, stop = list(box[0]), list(box[1])
    for dim, (low, high) in enumerate(zip(*inner, strict=True)):
        if start[dim] < low:
            yield tuple(start), (*stop[:dim], low, *stop[dim + 1 :])
        if high < stop[dim]:
            yield (*start[:dim], high, *start[dim + 1 :]), tuple(stop)
        start[dim], stop[dim] = low, high
