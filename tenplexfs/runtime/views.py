"""Views of snapshots: what the tree shows of them, wherever their bytes are."""

from __future__ import annotations

from dataclasses import dataclass

from tenplexfs.core.ptc import PTC
from tenplexfs.core.snapshot import Head, JobName, NodeName
from tenplexfs.runtime.dataset_view import DatasetView
from tenplexfs.runtime.datasets import Datasets
from tenplexfs.runtime.fetching import Fetcher, Handles
from tenplexfs.runtime.orders import Description
from tenplexfs.runtime.protocols import PeerReader
from tenplexfs.runtime.snapshot import LocalArrays, NoArrays, Snapshot, rank_nodes
from tenplexfs.storage.store import Store, StoredSnapshot

__all__ = ["Views"]


@dataclass(frozen=True)
class Views:
    """Makes the views of this node."""

    node: NodeName
    store: Store
    peers: PeerReader
    handles: Handles
    read_timeout_s: float
    remote_reads: bool
    datasets: Datasets | None

    async def datasets_of(self, settings_json: bytes, ptc: PTC, step: int | None) -> tuple[DatasetView, ...]:
        """Returns the views of a job's datasets at ``step``.

        Raises:
            TenplexError: An index cannot be had.
        """
        if self.datasets is None:
            return ()
        return await self.datasets.views(settings_json, ptc.layout, step)

    async def make(
        self, job: JobName, head: Head, known: Description, ptc: PTC, stored: StoredSnapshot | None
    ) -> Snapshot:
        """Returns the view of a snapshot, of which this node has ``stored``; it holds that part.

        Raises:
            TenplexError: An index cannot be had.
        """
        datasets = await self.datasets_of(known.settings_json, ptc, head.snapshot.step)
        arrays: LocalArrays = NoArrays() if stored is None else self.store.arrays(stored)
        fetcher = Fetcher(
            job=job,
            txid=head.snapshot.txid,
            rank_nodes=rank_nodes(ptc),
            here=self.node,
            peers=self.peers,
            handles=self.handles,
            timeout_s=self.read_timeout_s,
            allowed=self.remote_reads,
        )
        return Snapshot(
            job=job,
            snapshot=head.snapshot,
            layout_json=known.layout_json,
            layout_digest=head.layout_digest,
            ptc=ptc,
            created_ns=known.created_ns,
            arrays=arrays,
            fetcher=fetcher,
            datasets=datasets,
            values=known.values,
        )
