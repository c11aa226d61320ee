"""All of one snapshot, in order and by parts, for whoever copies it; through restarts of the daemon."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tenplexfs.client.connection import Place, patiently
from tenplexfs.client.regions import OpenSnapshot, RegionOf, cut
from tenplexfs.core.dtypes import dtype_of
from tenplexfs.core.ptc import PTC
from tenplexfs.errors import UnavailableError
from tenplexfs.formats.structure import leaf_files

__all__ = ["WholeSnapshot"]

Array = npt.NDArray[np.generic]

_PART_BYTES = 16 << 20


class WholeSnapshot:
    """One snapshot, whatever is committed meanwhile, held until `close`; for one thread.

    Attributes:
        snapshot: Its name.
        layout_json: Of the snapshot.

    Raises:
        NotFoundError: There is no such job or step, or it has no state.
        UnavailableError: The daemon is not there.
    """

    def __init__(self, place: Place, *, step: int | None, socket: str) -> None:
        self._place = place
        self._socket = socket
        self._opened = OpenSnapshot(place, step=step, snapshot=None, socket=socket)
        self.snapshot = self._opened.snapshot
        self.layout_json = self._opened.layout_json

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

    def parts(self, regions: Sequence[RegionOf]) -> Iterator[Array]:
        """Yields regions of whole tensors one after the other, big ones in parts, in C order.

        Args:
            regions: None of them empty.

        Raises:
            UnavailableError: The daemon stayed away, or nobody has the bytes any more.
        """
        parts = [part for region in regions for part in cut(region, _PART_BYTES)]
        done, failed_at = 0, -1
        while done < len(parts):
            try:
                for _, _, data in self._opened.read(parts[done:], uses=1, batch_bytes=_PART_BYTES):
                    yield data
                    done += 1
            except UnavailableError:
                if failed_at == done:
                    raise
                failed_at = done
                self._open_again()

    def shard(self, ptc: PTC, rank: int, path: str) -> Array:
        """Returns the local array of ``rank``, made of the regions that it holds; padding is zeros.

        Args:
            ptc: Of `layout_json`.
            rank: Which.
            path: As shown on that rank.
        """
        tensor, shard = ptc.tensors[path], ptc.shard(rank, path)
        local: npt.NDArray[Any] = np.zeros(shard.local_shape, dtype_of(tensor.dtype))
        for piece in shard.pieces:
            region = RegionOf(tensor.path, piece.region.start, piece.region.stop, tensor.dtype)
            held = np.empty(piece.region.volume, local.dtype)
            at = 0
            for part in self.parts([region] if held.size else []):
                held[at : at + part.size] = part.reshape(-1)
                at += part.size
            if len(piece.at) == len(region.shape):
                where = tuple(slice(a, a + n) for a, n in zip(piece.at, region.shape, strict=True))
                local[where] = held.reshape(region.shape)
            else:
                local.reshape(-1)[piece.at[0] : piece.at[0] + held.size] = held
        return local

    def _open_again(self) -> None:
        self._opened.close()
        place, socket, snapshot = self._place, self._socket, self.snapshot
        self._opened = patiently(lambda: OpenSnapshot(place, step=None, snapshot=snapshot, socket=socket))
