"""All of one snapshot, in order and by parts, for whoever copies it; through restarts of the daemon."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from tenplexfs.client.connection import Place, patiently
from tenplexfs.client.regions import LocalArray, OpenSnapshot, RegionOf, cut
from tenplexfs.client.sources import Part, Sources
from tenplexfs.core.build import build_ptc
from tenplexfs.core.dtypes import dtype_of
from tenplexfs.errors import CorruptError, NotFoundError, UnavailableError
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.formats.structure import leaf_files

__all__ = ["WholeSnapshot"]

Array: TypeAlias = npt.NDArray[Any]

_PART_BYTES = 16 << 20


class WholeSnapshot:
    """One snapshot, whatever is committed meanwhile, held until `close`; for one thread.

    Attributes:
        snapshot: Its name.
        ptc: Who holds what of it.

    Raises:
        NotFoundError: There is no such job or step, or it has no state.
        UnavailableError: The daemon is not there.
    """

    def __init__(self, place: Place, *, step: int | None, socket: str) -> None:
        self._place = place
        self._socket = socket
        self._opened = OpenSnapshot(place, step=step, snapshot=None, socket=socket)
        try:
            self._opened.hold()
            self.snapshot = self._opened.snapshot
            self.ptc = build_ptc(parse_layout(self._opened.layout_json))
            self._sources = Sources(self.ptc, self._opened.node)
        except BaseException:
            self._opened.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def leaves(self) -> list[dict[str, bytes]]:
        """Returns what each rank has beside tensors: path -> JSON; ranks that have the same share it."""
        of_rank = self._opened.of_rank
        known = {index: leaf_files(self._opened.document(index)) for index in dict.fromkeys(of_rank)}
        return [known[index] for index in of_rank]

    def parts(self, regions: Iterable[RegionOf]) -> Iterator[Array]:
        """Yields regions of whole tensors one after the other, big ones in parts, in C order.

        Args:
            regions: None of them empty.

        Raises:
            UnavailableError: The daemon stayed away, or nobody has the bytes any more.
        """
        for batch in _batches(part for region in regions for part in cut(region, _PART_BYTES)):
            try:
                found = self._read(batch)
            except UnavailableError:
                self._open_again()
                found = self._read(batch)
            yield from found

    def shards(self, rank: int, paths: Sequence[str]) -> Iterator[Array]:
        """Yields the local arrays of ``rank``, made of the regions that it holds; padding is zeros.

        Args:
            rank: Which.
            paths: As shown on that rank.
        """
        tensors = [(self.ptc.tensors[path], self.ptc.shard(rank, path)) for path in paths]
        regions = (
            RegionOf(tensor.path, piece.region.start, piece.region.stop, tensor.dtype)
            for tensor, shard in tensors
            for piece in shard.pieces
            if piece.region.volume
        )
        parts = self.parts(regions)
        for tensor, shard in tensors:
            local = np.zeros(shard.local_shape, dtype_of(tensor.dtype))
            for piece in shard.pieces:
                held, at = np.empty(piece.region.volume, local.dtype), 0
                while at < held.size:
                    part = next(parts)
                    held[at : at + part.size] = part.reshape(-1)
                    at += part.size
                if shard.flat:
                    local.reshape(-1)[piece.at[0] : piece.at[0] + held.size] = held
                else:
                    shape = piece.region.shape
                    where = tuple(slice(a, a + n) for a, n in zip(piece.at, shape, strict=True))
                    _view(local, where)[...] = held.reshape(shape)
            yield local

    def _read(self, regions: Sequence[RegionOf]) -> list[Array]:
        """Returns regions; what is on this node is read from its files, whatever the daemon does."""
        made = [np.empty(region.shape, dtype_of(region.dtype)) for region in regions]
        here: dict[tuple[int, str], list[tuple[Array, Part]]] = {}
        away: list[tuple[Array, RegionOf]] = []
        for region, target in zip(regions, made, strict=True):
            left = target.size
            for part in self._sources.parts(region):
                place = _view(target, part.target)
                left -= place.size
                if part.key is None:
                    path, start, stop = part.remote
                    away.append((place, RegionOf(path, start, stop, part.dtype)))
                else:
                    here.setdefault(part.key, []).append((place, part))
            if left:
                raise CorruptError(f"tensor {region.path}: {left} elements of {region} are nowhere")
        keys = [(key, found[0][1].dtype, found[0][1].local_shape) for key, found in here.items()]
        try:
            for key, local in self._opened.visit(keys):
                for place, part in here[key]:
                    _copy(local, part.of(local.array), place)
        except NotFoundError:  # the node has lost them; others may have the same
            away = list(zip(made, regions, strict=True))
        for i, inner, data in self._opened.read([region for _, region in away], uses=1):
            _view(away[i][0], inner)[...] = data
        return made

    def _open_again(self) -> None:
        self._opened.close()
        place, socket, snapshot = self._place, self._socket, self.snapshot
        self._opened = patiently(lambda: OpenSnapshot(place, step=None, snapshot=snapshot, socket=socket))
        self._opened.hold()


def _copy(local: LocalArray, view: Array, place: Array) -> None:
    if view.flags.c_contiguous and place.flags.c_contiguous:
        local.read_into(view, place.reshape(-1).view(np.uint8).data)
    else:
        place[...] = view


def _view(array: Array, slices: Iterable[slice]) -> Array:
    place: Any = (..., *slices)
    view: Array = array[place]  # without the dots, one of no dims would be a copy
    return view


def _batches(regions: Iterable[RegionOf]) -> Iterator[list[RegionOf]]:
    batch: list[RegionOf] = []
    size = 0
    for region in regions:
        if batch and size + region.nbytes > _PART_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(region)
        size += region.nbytes
    if batch:
        yield batch
