"""Bytes of a snapshot from other nodes: whom to ask, whom to ask next, and that all of them came."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import trio

from tenplexfs.core.region import Boxes, box_volumes
from tenplexfs.core.snapshot import JobName, NodeName, TxId
from tenplexfs.errors import (
    CorruptError,
    NotFoundError,
    PreconditionError,
    StaleError,
    TenplexError,
    TimedOutError,
    UnavailableError,
)
from tenplexfs.runtime.protocols import PeerReader, Ranges
from tenplexfs.runtime.tasks import run_all

__all__ = ["Bytes", "Fetcher", "Handles", "Wanted"]

Bytes = npt.NDArray[np.uint8]


class Handles(Protocol):
    """Counts the open handles that need bytes of another node; see `runtime.leases.LeaseKeeper`."""

    def hold(self, node: NodeName, job: JobName, txid: TxId) -> None:
        """Counts one more."""
        ...

    def drop(self, node: NodeName, job: JobName, txid: TxId) -> None:
        """Counts one less."""
        ...

    async def settle(self) -> None:
        """Returns once the other nodes know, as far as they answer."""
        ...


@dataclass(frozen=True)
class Wanted:
    """Boxes of an array, local coordinates, in the order of their bytes.

    Attributes:
        keys: (rank, path as shown) of all that hold the same array.
    """

    keys: tuple[tuple[int, str], ...]
    itemsize: int
    boxes: Boxes


@dataclass(frozen=True)
class Fetcher:
    """Reads arrays of one snapshot from other nodes.

    Attributes:
        rank_nodes: The node of each rank of the snapshot.
        here: This node, which is never asked.
        allowed: False where ``--remote-reads off`` forbids it.
    """

    job: JobName
    txid: TxId
    rank_nodes: Mapping[int, NodeName]
    here: NodeName
    peers: PeerReader
    handles: Handles
    timeout_s: float
    allowed: bool = True

    def nodes_of(self, keys: Iterable[tuple[int, str]]) -> tuple[NodeName, ...]:
        """Returns the other nodes that hold what ``keys`` name, the one to ask first in front."""
        nodes = [n for n in dict.fromkeys(self.rank_nodes[rank] for rank, _ in keys) if n != self.here]
        turn = sum(self.here.encode()) % len(nodes) if nodes else 0  # so that not all nodes ask the same one
        return tuple(nodes[turn:] + nodes[:turn])

    def hold(self, nodes: Iterable[NodeName]) -> None:
        """Keeps the snapshot on ``nodes`` while a handle is open."""
        for node in nodes:
            self.handles.hold(node, self.job, self.txid)

    def drop(self, nodes: Iterable[NodeName]) -> None:
        """The handle was closed."""
        for node in nodes:
            self.handles.drop(node, self.job, self.txid)

    def others(self) -> tuple[NodeName, ...]:
        """Returns every other node that holds a part of the snapshot."""
        return tuple(sorted({*self.rank_nodes.values()} - {self.here}))

    async def fetch(self, wanted: Sequence[Wanted]) -> list[Bytes]:
        """Returns the bytes of each item, whole.

        Each node is asked once, for all that it has; where it fails, the next that holds the same is asked.

        Raises:
            TimedOutError: They did not come within ``timeout_s``.
            TenplexError: No node has them, or none answers.
        """
        groups: dict[tuple[NodeName, ...], list[int]] = {}
        for index, item in enumerate(wanted):
            nodes = self.nodes_of(item.keys)
            if not nodes or not self.allowed:
                raise self._nowhere(item)
            groups.setdefault(nodes, []).append(index)
        results: list[Bytes] = [np.empty(0, np.uint8)] * len(wanted)

        async def fetch_group(nodes: tuple[NodeName, ...], indices: list[int]) -> None:
            sizes = [int(box_volumes(wanted[i].boxes).sum()) * wanted[i].itemsize for i in indices]
            flat = await self._fetch_group(nodes, [wanted[i] for i in indices], sum(sizes))
            for i, end, size in zip(indices, np.cumsum(sizes).tolist(), sizes, strict=True):
                results[i] = flat[end - size : end]

        with trio.move_on_after(self.timeout_s) as waited:
            await run_all(partial(fetch_group, nodes, indices) for nodes, indices in groups.items())
        if waited.cancelled_caught:
            raise TimedOutError(f"job {self.job}: {_names(wanted)} did not come within {self.timeout_s:g} s")
        return results

    async def _fetch_group(
        self, nodes: Sequence[NodeName], wanted: Sequence[Wanted], total_bytes: int
    ) -> Bytes:
        until_s = trio.current_time() + self.timeout_s
        failure: TenplexError | None = None
        for turn, node in enumerate(nodes):
            ranges = []
            for item in wanted:
                rank, path = next(key for key in item.keys if self.rank_nodes[key[0]] == node)
                ranges.append(Ranges(rank, path, item.itemsize, item.boxes))
            landing = _Landing(total_bytes)
            left_s = max(until_s - trio.current_time(), 0.001) / (len(nodes) - turn)
            try:
                await self.peers.fetch(node, self.job, self.txid, ranges, landing.write, deadline_s=left_s)
            except (NotFoundError, StaleError) as error:
                failure = UnavailableError(f"{_names(wanted)}: node {node} freed it: {error.message}")
                continue
            except (UnavailableError, TimedOutError, CorruptError) as error:
                failure = error
                continue
            return landing.whole(node)
        raise failure or UnavailableError(f"job {self.job}: no node holds {_names(wanted)}")

    def _nowhere(self, item: Wanted) -> TenplexError:
        where = ", ".join(sorted({self.rank_nodes[rank] for rank, _ in item.keys}))
        if not self.allowed:
            return PreconditionError(
                f"job {self.job}: {_names([item])} is on {where}, and --remote-reads is off"
            )
        return UnavailableError(f"job {self.job}: {_names([item])} is lost on {where}")


def _names(wanted: Sequence[Wanted]) -> str:
    rank, path = wanted[0].keys[0]
    first = f"{path} of rank {rank}"
    return first if len(wanted) == 1 else f"{first} and {len(wanted) - 1} more"


class _Landing:
    """Where a stream of bytes lands, in order and whole."""

    def __init__(self, total_bytes: int) -> None:
        self._flat: Bytes = np.empty(total_bytes, np.uint8)
        self._done = 0

    def write(self, offset: int, data: bytes | memoryview) -> None:
        if offset != self._done or offset + len(data) > len(self._flat):
            raise CorruptError(f"range stream: got bytes [{offset}, {offset + len(data)}) after {self._done}")
        self._flat[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        self._done += len(data)

    def whole(self, node: NodeName) -> Bytes:
        if self._done != len(self._flat):
            raise CorruptError(f"node {node}: sent {self._done} bytes of {len(self._flat)}")
        return self._flat
