"""What is known of a step that is being saved: what each rank brings, and what becomes of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import trio

from tenplexfs.core.membership import Mandate
from tenplexfs.core.ptc import PTC
from tenplexfs.core.snapshot import Head, JobName, NodeName, SnapshotId, TxId
from tenplexfs.errors import TenplexError
from tenplexfs.formats.requests import birth_of
from tenplexfs.formats.values import Values
from tenplexfs.runtime.save_parts import RankPlan, Sums, Tensors
from tenplexfs.storage.store import RankFiles, SaveIngest

__all__ = ["Attempt", "Base", "RankSave", "SavePart", "SaveRequest", "save_txid"]


def save_txid(job: JobName, settings_json: bytes, generation: int, step: int, run: str) -> TxId:
    """Returns the transaction of a save, the same on all nodes, and none of a job that had the name."""
    name = f"save\0{job}\0{birth_of(settings_json)}\0{generation}\0{step}\0{run}"
    return TxId(hashlib.blake2b(name.encode(), digest_size=8).hexdigest())


@dataclass(frozen=True)
class Base:
    """What a job is when a save begins.

    Attributes:
        ptc: Of its layout.
    """

    head: Head
    ptc: PTC
    layout_json: bytes
    settings_json: bytes


@dataclass(frozen=True)
class SaveRequest:
    """What a rank is about to save.

    Attributes:
        snapshot: What it was loaded from, or None.
        process: Names the process, and which of its tries this is, for good.
        run: What the ranks of one run have in common.
        tensors: All of them.
        document: The structure and all values.
    """

    job: JobName
    rank: int
    step: int
    snapshot: str | None
    process: str
    run: str
    tensors: Tensors
    document: bytes
    consumed: int | None


@dataclass(frozen=True)
class SavePart:
    """What the coordinator wants to know of a node's part.

    Attributes:
        values: Of the node's ranks, packed.
        sums: Of its arrays, to be compared with other nodes'.
    """

    values: Values
    sums: Sums


@dataclass(eq=False)
class RankSave:
    """What one rank saves.

    Attributes:
        plan: Where its tensors go.
        files: Theirs, once there is room.
        ranks_here: How many ranks of the job are on this node, and save at the same time.
    """

    attempt: Attempt
    request: SaveRequest
    plan: RankPlan
    ranks_here: int
    files: RankFiles | None = None
    is_sealed: bool = False


class Attempt:
    """One step that is being saved, on this node.

    Attributes:
        reserving_count: Ranks for which room is being taken now.
        leader: The process of rank 0 that the coordinator speaks for, once it asked.
        part: Once all ranks of this node are sealed.
        promised_to: The manifest has it as staged, or will; only that coordinator may drop it.
        committed: The head, once it is.
        failure: Why it will not be.
    """

    def __init__(self, base: Base, snapshot: SnapshotId, run: str, ingest: SaveIngest, job: JobName) -> None:
        self.job = job
        self.base = base
        self.snapshot = snapshot
        self.run = run
        self.ingest = ingest
        self.ranks: dict[int, RankSave] = {}
        self.lock = trio.Lock()
        self.reserving_count = 0
        self.leader: str | None = None
        self.part: SavePart | None = None
        self.promised_to: Mandate | None = None
        self.committed: Head | None = None
        self.failure: TenplexError | None = None
        self.changed = trio.Event()

    def touch(self) -> None:
        """Lets those who wait look again."""
        self.changed.set()
        self.changed = trio.Event()

    @property
    def is_promised(self) -> bool:
        """Whether only a coordinator may drop it."""
        return self.promised_to is not None

    @property
    def is_over(self) -> bool:
        """Whether it is committed or failed."""
        return self.committed is not None or self.failure is not None

    def missing(self, node: NodeName) -> list[int]:
        """Returns the ranks on ``node`` that have not saved their part yet."""
        ranks = (rank for rank in self.base.ptc.ranks() if self.base.ptc.node_of(rank) == node)
        return [rank for rank in ranks if rank not in self.ranks or not self.ranks[rank].is_sealed]

    def check(self) -> None:
        """Raises what it failed of."""
        if self.failure is not None:
            raise type(self.failure)(self.failure.message, **self.failure.details)
