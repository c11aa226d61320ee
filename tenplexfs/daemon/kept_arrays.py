"""What other nodes read again and again stays mapped, for as long as they hold a lease."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import trio

from tenplexfs.core.snapshot import TxId
from tenplexfs.runtime.leases import LeaseTable
from tenplexfs.runtime.protocols import ArraySource, GrowingArrays

__all__ = ["KeptArrays"]

_Array = npt.NDArray[np.generic]
_LOOK_S = 1.0


class KeptArrays:
    """Arrays that were asked for under a lease.

    A read through the mount asks for a MiB at a time; to map the file for each one costs its page faults.
    """

    def __init__(self, leases: LeaseTable, nursery: trio.Nursery) -> None:
        self._leases = leases
        self._nursery = nursery
        self._kept: dict[TxId, dict[tuple[int, str], _Array]] = {}

    def keep(self, txid: TxId) -> None:
        """Keeps what is asked for of a snapshot while a lease of it lasts. On the trio thread."""
        if txid not in self._kept:
            self._kept[txid] = {}
            self._nursery.start_soon(self._until_over, txid)

    async def _until_over(self, txid: TxId) -> None:
        try:
            while self._leases.count(txid):  # noqa: ASYNC110 - a lease may also just expire
                await trio.sleep(_LOOK_S)
        finally:
            del self._kept[txid]

    def of(self, txid: TxId, arrays: ArraySource) -> ArraySource:
        """Returns ``arrays``, of which what is asked for is kept. For worker threads."""
        kept = self._kept.get(txid)
        return arrays if kept is None or isinstance(arrays, GrowingArrays) else _Keeping(arrays, kept)


class _Keeping:
    """An `ArraySource` that remembers what it gave: as long as it is referenced its file stays mapped."""

    def __init__(self, arrays: ArraySource, kept: dict[tuple[int, str], _Array]) -> None:
        self._arrays = arrays
        self._kept = kept

    def array(self, rank: int, path: str) -> _Array | None:
        """Returns the array, or None when it is not here."""
        found = self._arrays.array(rank, path)
        if found is not None:
            self._kept[rank, path] = found
        return found
