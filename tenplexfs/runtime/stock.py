"""What this node stores of jobs, told to those who ask."""

from __future__ import annotations

from dataclasses import dataclass

from tenplexfs.core.membership import Part
from tenplexfs.core.snapshot import COPIES, JobName, NodeName, TxId, copies_of
from tenplexfs.errors import NotFoundError
from tenplexfs.runtime.array_sums import encode_array_sums, part_of_copies
from tenplexfs.runtime.orders import Description, StoredPart
from tenplexfs.storage.store import Store, StoredSnapshot

__all__ = ["Stock"]


@dataclass(frozen=True)
class Stock:
    """The store of a node, by jobs."""

    node: NodeName
    store: Store

    def own(self, job: JobName) -> dict[TxId, StoredSnapshot]:
        """Returns the node's own parts of snapshots."""
        return {stored.id.txid: stored for stored in self.store.snapshots(job)}

    def parts(self, job: JobName) -> dict[TxId, Part]:
        """Returns those, as far as decisions need to know of them."""
        return {txid: Part(each.id, each.committed, each.fence) for txid, each in self.own(job).items()}

    def copies(self, job: JobName) -> dict[TxId, StoredSnapshot]:
        """Returns what is kept here for other nodes."""
        return {each.id.txid: each for each in self.store.snapshots(copies_of(job)) if each.committed}

    def jobs(self) -> tuple[JobName, ...]:
        """Returns the jobs of which something is stored here."""
        return tuple(sorted({each.job for each in self.store.snapshots() if COPIES not in each.job}))

    def inventory(self, job: JobName) -> tuple[StoredPart, ...]:
        """Returns what is stored here of ``job``."""
        own = [StoredPart(each.id, each.committed) for each in self.own(job).values()]
        return (*own, *(part_of_copies(each) for each in self.copies(job).values()))

    def sums(self, job: JobName, txid: TxId) -> bytes:
        """Returns the sums of the arrays that are here of a snapshot. For worker threads.

        Raises:
            NotFoundError: There is no such snapshot here.
        """
        return encode_array_sums(self.get(job, txid))

    def describe(self, job: JobName, txid: TxId) -> Description:
        """Returns what is stored here of a snapshot.

        Raises:
            NotFoundError: Nothing.
        """
        stored = self.get(job, txid)
        return Description(
            stored.id,
            stored.layout_json,
            stored.settings_json,
            stored.created_ns,
            stored.committed,
            stored.values,
        )

    def get(self, job: JobName, txid: TxId) -> StoredSnapshot:
        """Returns the node's own part of a snapshot.

        Raises:
            NotFoundError: There is none.
        """
        stored = self.own(job).get(txid)
        if stored is None:
            raise NotFoundError(f"node {self.node}: stores no snapshot {txid} of job {job}")
        return stored
