"""What coordinators ask of nodes, and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tenplexfs.core.membership import Mandate
from tenplexfs.core.snapshot import Head, JobName, NodeName, SnapshotId, TxId

__all__ = [
    "SOURCE",
    "DescribeCalls",
    "Description",
    "InventoryCalls",
    "NodeCalls",
    "Progress",
    "Report",
    "StageOrder",
    "StoredPart",
]


SOURCE = "source"
"""Detail of an error of a stage: the node that did not send what it has of the base."""


@dataclass(frozen=True, slots=True)
class StageOrder:
    """Make this node's part of a new snapshot.

    Attributes:
        base_txid: The snapshot that the bytes come from; None when there is no state to move.
        old_layout_json: Of the base; empty as the base is None.
        drop: Patterns of tensors of the base that the new layout may lack.
        endpoints: Where the other nodes listen.
        created_ns: Time of the new snapshot's files, the same on all nodes.
        values: What the new ranks hold beside tensors, as `formats.values` packs it.
        leader: The process of rank 0 for which the node's part of a save was collected; empty: it is none.
        source: The URL of a persisted step, where the bytes come from there and no node has them.
        lost: Nodes that have no bytes of the base any more.
        by: By what right.
    """

    job: JobName
    by: Mandate
    snapshot: SnapshotId
    base_txid: TxId | None
    old_layout_json: bytes
    new_layout_json: bytes
    settings_json: bytes
    coordinator: NodeName
    drop: tuple[str, ...]
    endpoints: Mapping[NodeName, str]
    created_ns: int
    values: bytes = b""
    leader: str = ""
    source: str = ""
    lost: tuple[NodeName, ...] = ()


@dataclass(frozen=True, slots=True)
class Description:
    """What a node stores of a snapshot, without its bytes."""

    snapshot: SnapshotId
    layout_json: bytes
    settings_json: bytes
    created_ns: int
    committed: bool
    values: bytes = b""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a snapshot that a node stores.

    Attributes:
        copies_of: The nodes whose parts it has copies of; empty for the node's own part.
    """

    snapshot: SnapshotId
    committed: bool
    copies_of: tuple[NodeName, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a transaction is.

    Attributes:
        phase: "planning", "staging", "committing", "done" or "failed".
        is_undecided: Nobody can know yet whether the head has moved: the registry does not answer.
        nodes: Node to bytes done and bytes in all.
        plan: The summary of the plan, once there is one.
    """

    phase: str
    message: str = ""
    nodes: Mapping[NodeName, tuple[int, int]] = field(default_factory=dict)
    plan: Mapping[str, object] | None = None
    is_undecided: bool = False

    @property
    def bytes_done(self) -> int:
        """Bytes that arrived, on all nodes."""
        return sum(done for done, _ in self.nodes.values())

    @property
    def bytes_total(self) -> int:
        """Bytes that have to arrive, on all nodes."""
        return sum(total for _, total in self.nodes.values())


Report = Callable[[Progress], None]


class DescribeCalls(Protocol):
    """Asks a node, this one or another, what it stores of a snapshot. Calls have a deadline of their own."""

    async def describe(
        self, node: NodeName, job: JobName, txid: TxId, *, patience_s: float | None = None
    ) -> Description:
        """Returns what the node stores of the snapshot.

        Args:
            node: Whom to ask.
            job: Name of the job.
            txid: Of the snapshot.
            patience_s: How long to try again where nobody is there; None: until the call's deadline.

        Raises:
            NotFoundError: Nothing.
        """
        ...


class InventoryCalls(DescribeCalls, Protocol):
    """Asks a node, besides, what it stores of a job."""

    async def inventory(
        self, node: NodeName, job: JobName, *, patience_s: float | None = None
    ) -> tuple[StoredPart, ...]:
        """Returns its parts of snapshots of ``job``, and the copies it keeps for other nodes."""
        ...


class NodeCalls(InventoryCalls, Protocol):
    """Orders and asks a node, this one or another."""

    async def stage(self, node: NodeName, order: StageOrder, report: Callable[[int, int], None]) -> None:
        """Returns once the node's part is staged; ``report`` gets bytes done and bytes in all."""
        ...

    async def switch(self, node: NodeName, job: JobName, head: Head | None) -> None:
        """Returns once fresh opens on the node see ``head``, or one that is newer."""
        ...

    async def drop(
        self, node: NodeName, job: JobName, txid: TxId, by: Mandate | None, reason: str = ""
    ) -> None:
        """Drops a snapshot that is staged or no longer the head; ``reason`` is for who waits for it."""
        ...
