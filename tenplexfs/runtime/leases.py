"""Leases: what keeps the bytes of a snapshot on one node while a handle on another node is open."""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import trio

from tenplexfs.core.snapshot import JobName, NodeName, TxId
from tenplexfs.errors import NotFoundError, TenplexError

__all__ = ["LeaseCalls", "LeaseKeeper", "LeaseTable"]

TTL_S = 60.0
_SETTLE_S = 2.0


class LeaseCalls(Protocol):
    """Asks another node to keep a snapshot."""

    async def lease(self, node: NodeName, job: JobName, txid: TxId, lease_id: str, ttl_s: float) -> str:
        """Takes a lease (``lease_id`` empty) or renews it; returns its id."""
        ...

    async def release(self, node: NodeName, lease_id: str) -> None:
        """Ends a lease; one that is over is no error."""
        ...


@dataclass
class _Held:
    job: JobName
    txid: TxId
    until_s: float


class LeaseTable:
    """The leases that this node gave. Belongs to the trio thread."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def lease(self, job: JobName, txid: TxId, lease_id: str, ttl_s: float) -> str:
        """Returns the id of a lease for ``ttl_s`` from now, new or renewed.

        Raises:
            NotFoundError: ``lease_id`` is over.
        """
        now_s = trio.current_time()
        self._expire(now_s)
        if lease_id and lease_id not in self._held:
            raise NotFoundError(f"lease {lease_id} is over")
        lease_id = lease_id or secrets.token_hex(8)
        self._held[lease_id] = _Held(job, txid, now_s + min(ttl_s, 10 * TTL_S))
        return lease_id

    def release(self, lease_id: str) -> None:
        """Ends a lease; one that is over is no error."""
        self._held.pop(lease_id, None)

    def count(self, txid: TxId) -> int:
        """Returns how many leases keep the snapshot ``txid``."""
        self._expire(trio.current_time())
        return sum(held.txid == txid for held in self._held.values())

    def _expire(self, now_s: float) -> None:
        for lease_id in [key for key, held in self._held.items() if held.until_s <= now_s]:
            del self._held[lease_id]


class LeaseKeeper:
    """Holds leases on other nodes for the open handles of this one.

    `hold` and `drop` only count, so that opening a file waits for nobody; `run`, a task in the daemon's
    nursery, takes, renews and releases the leases behind.
    """

    def __init__(self, calls: LeaseCalls, *, ttl_s: float = TTL_S) -> None:
        self._calls = calls
        self._ttl_s = ttl_s
        self._handles: Counter[tuple[NodeName, JobName, TxId]] = Counter()
        self._ids: dict[tuple[NodeName, JobName, TxId], str] = {}
        self._changed = trio.Event()
        self._adjusting = trio.Lock()

    def hold(self, node: NodeName, job: JobName, txid: TxId) -> None:
        """Counts one more handle that reads ``txid`` from ``node``."""
        key = (node, job, txid)
        self._handles[key] += 1
        if self._handles[key] == 1:
            self._changed.set()

    def drop(self, node: NodeName, job: JobName, txid: TxId) -> None:
        """Counts one handle less."""
        key = (node, job, txid)
        self._handles[key] -= 1
        if self._handles[key] <= 0:
            del self._handles[key]
            self._changed.set()

    async def settle(self) -> None:
        """Returns once every handle has its lease, or after a moment where a node does not answer."""
        with trio.move_on_after(_SETTLE_S):
            await self._adjust(renew=False)

    async def run(self) -> None:
        """Keeps leases and handles the same, until cancelled."""
        while True:
            with trio.move_on_after(self._ttl_s / 3) as waited:
                await self._changed.wait()
            self._changed = trio.Event()
            await self._adjust(renew=waited.cancelled_caught)

    async def _adjust(self, *, renew: bool) -> None:
        async with self._adjusting, trio.open_nursery() as nursery:
            for key in list(self._ids):
                if key not in self._handles:
                    nursery.start_soon(self._release, key)
            for key in list(self._handles):
                if renew or key not in self._ids:
                    nursery.start_soon(self._renew, key)

    async def _renew(self, key: tuple[NodeName, JobName, TxId]) -> None:
        lease = partial(self._calls.lease, *key, ttl_s=self._ttl_s)
        try:
            self._ids[key] = await lease(lease_id=self._ids.get(key, ""))
        except NotFoundError:  # over, or gone with a restart: the next round takes a new one
            self._ids.pop(key, None)
        except TenplexError:  # the node is away; reads say so themselves
            return

    async def _release(self, key: tuple[NodeName, JobName, TxId]) -> None:
        lease_id = self._ids.pop(key)
        try:
            await self._calls.release(key[0], lease_id)
        except TenplexError:  # it ends by itself
            return
