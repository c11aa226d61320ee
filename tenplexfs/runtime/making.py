"""Making this node's part of a snapshot, as a coordinator orders it, and the arrays that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import trio

from tenplexfs.core.snapshot import JobName, NodeName, TxId
from tenplexfs.errors import CorruptError, NotFoundError, StaleError, TimedOutError, UnavailableError
from tenplexfs.runtime.array_sums import AnyOf, parts_of
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.orders import SOURCE, StageOrder
from tenplexfs.runtime.past import job_memory_bytes
from tenplexfs.runtime.planning import Expanded, StagePart, expand, stage_part
from tenplexfs.runtime.protocols import ArraySource, PeerReader, Ranges
from tenplexfs.runtime.snapshot import NoArrays
from tenplexfs.runtime.staging import Base, ScatterFactory, Staging
from tenplexfs.runtime.views import Views
from tenplexfs.storage.store import SnapshotArrays, Store

__all__ = ["Maker"]

_PATIENCE_S = 45.0  # with a source that does not answer; a restart is quicker


class Maker:
    """Makes parts of snapshots in the store of this node."""

    def __init__(
        self,
        *,
        node: NodeName,
        store: Store,
        peers: PeerReader,
        scatter: ScatterFactory,
        compute: Compute,
        views: Views,
        transfer_bytes: int,
    ) -> None:
        self._node = node
        self._transfer_bytes = transfer_bytes
        self._store = store
        self._peers = peers
        self._scatter = scatter
        self._compute = compute
        self._views = views
        self._sources: dict[TxId, ArraySource] = {}

    async def make(
        self, order: StageOrder, report: Callable[[int, int], None], persisted: PeerReader | None = None
    ) -> Expanded:
        """Stages the part in the store; returns what its layout means.

        Args:
            order: Of a coordinator.
            report: Gets bytes done and bytes in all.
            persisted: Reads the base, where no node has it.

        Raises:
            TenplexError: It could not be made; nothing of it is left. The details name the source that did
                not send what it has, if it was that.
        """
        part: StagePart | None = None
        if order.base_txid is None:
            expanded = await self._compute(expand, order.new_layout_json)
        else:
            part = await self._compute(
                stage_part, order.old_layout_json, order.new_layout_json, order.drop, order.lost, self._node
            )
            expanded = part.expanded
        # Before anything is staged: an index that cannot be had refuses the switch.
        await self._views.datasets_of(order.settings_json, expanded.ptc, order.snapshot.step)
        ingest = self._store.ingest(
            order.job,
            order.snapshot,
            order.new_layout_json,
            order.created_ns,
            settings_json=order.settings_json,
            values=order.values,
            fence=order.by.fence,
            limit_bytes=job_memory_bytes(order.settings_json),
        )
        try:
            if part is not None and order.base_txid is not None:
                peers = persisted or _Blaming(self._peers, order.base_txid)
                txid = order.snapshot.txid
                with self._base(order.job, order.base_txid) as base:
                    staging = Staging(
                        ingest,
                        part,
                        base,
                        peers,
                        self._scatter,
                        report,
                        txid=txid,
                        max_bytes=self._transfer_bytes,
                    )
                    with self.serving(txid, staging.board):  # to nodes that have it passed on to them
                        await staging.run()
            else:
                await trio.to_thread.run_sync(ingest.seal, {})
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(ingest.drop)
        return expanded

    def serves(self, txid: TxId) -> bool:
        """Returns whether `serving` serves it."""
        return txid in self._sources

    @contextmanager
    def serving(self, txid: TxId, source: ArraySource) -> Iterator[None]:
        """Serves ``source`` as the snapshot ``txid``, to this node and others, while entered."""
        self._sources[txid] = source
        try:
            yield
        finally:
            del self._sources[txid]

    @contextmanager
    def open_arrays(self, job: JobName, txid: TxId) -> Iterator[ArraySource]:
        """Gives the local arrays of a snapshot, committed or staged. For worker threads.

        Raises:
            NotFoundError: There is no such snapshot here (any more).
        """
        source = self._sources.get(txid)
        if source is not None:
            yield source
            return
        with ExitStack() as stack:
            parts = self._parts(job, txid, stack)
            if not parts:
                raise NotFoundError(f"node {self._node}: stores no snapshot {txid} of job {job}")
            yield AnyOf(parts)

    @contextmanager
    def _base(self, job: JobName, txid: TxId) -> Iterator[Base]:
        with ExitStack() as stack:
            parts = self._parts(job, txid, stack)
            if not parts:
                yield Base(job, txid, self._sources.get(txid) or NoArrays(), {})
                return
            refs = {key: ref for part in reversed(parts) for key, ref in part.stored.arrays.items()}
            yield Base(job, txid, AnyOf(parts), refs)

    def _parts(self, job: JobName, txid: TxId, stack: ExitStack) -> tuple[SnapshotArrays, ...]:
        found = parts_of(self._store, job, txid)
        return tuple(stack.enter_context(self._store.arrays(each)) for each in found)


class _Blaming:
    """A `PeerReader` that names in its errors which source of ``base`` did not send what it has."""

    def __init__(self, peers: PeerReader, base: TxId) -> None:
        self._peers = peers
        self._base = base

    async def fetch(
        self,
        node: NodeName,
        job: JobName,
        txid: TxId,
        ranges: Sequence[Ranges],
        write: Callable[[int, bytes | memoryview], None],
        *,
        deadline_s: float,
        patience_s: float | None = None,
    ) -> None:
        """Streams ``ranges`` in order, as the reader that it wraps."""
        is_base = txid == self._base
        if is_base and patience_s is None:
            patience_s = _PATIENCE_S
        try:
            await self._peers.fetch(
                node, job, txid, ranges, write, deadline_s=deadline_s, patience_s=patience_s
            )
        except (NotFoundError, StaleError, UnavailableError, TimedOutError, CorruptError) as error:
            if not is_base:
                raise
            details = {**error.details, SOURCE: node}
            raise type(error)(f"its source {node}: {error.message}", **details) from error
