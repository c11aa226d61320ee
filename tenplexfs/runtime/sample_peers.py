"""The seam between datasets and other nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tenplexfs.core.snapshot import NodeName

__all__ = ["SamplePeers"]

_Ints = npt.NDArray[np.int64]


class SamplePeers(Protocol):
    """Other nodes, asked for indexes and samples. Every call has a deadline."""

    def nodes(self) -> Collection[NodeName]:
        """Returns the other nodes that are known."""
        ...

    async def index(self, node: NodeName, digest: str, write: Callable[[bytes], None]) -> None:
        """Streams the file of an index; ``write`` is called in a worker thread, in order.

        Raises:
            NotFoundError: The node does not have it.
        """
        ...

    async def samples(
        self, node: NodeName, digest: str, ids: _Ints, *, read: bool, deadline_s: float
    ) -> tuple[_Ints, memoryview]:
        """Returns which of ``ids``, by position, the node has in memory, and their bytes one after another.

        With ``read`` also those that its disk has.
        """
        ...
