"""What is known of a step that is being saved: what each rank brings, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import trio

from tenplexfs.core.ptc import PTC
from tenplexfs.core.snapshot import Head, JobName, SnapshotId
from tenplexfs.errors import TenplexError
from tenplexfs.formats.values import Values
from tenplexfs.runtime.save_parts import Sums
from tenplexfs.storage.store import Key, SaveIngest

__all__ = ["Attempt", "Base", "RankSave", "SavePart", "SaveRequest"]


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
        process: Names the process, for good.
        run: What the ranks of one run have in common.
        tensors: Path, dtype and local shape of each.
        ties: Path -> path of the one with the same storage.
        document: The structure and all values.
    """

    job: JobName
    rank: int
    step: int
    snapshot: str | None
    process: str
    run: str
    tensors: Sequence[tuple[str, str, tuple[int, ...]]]
    ties: Mapping[str, str]
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


@dataclass
class RankSave:
    """What one rank saves.

    Attributes:
        keys: Of each tensor, or None where it is tied with another.
        files, data: Indices of the tensors that are written into files, and that come as bytes.
    """

    attempt: Attempt
    request: SaveRequest
    keys: list[Key | None]
    files: list[int] = field(default_factory=list)
    data: list[int] = field(default_factory=list)
    received: set[int] = field(default_factory=set)
    sums: dict[Key, tuple[int, ...]] = field(default_factory=dict)
    is_sealed: bool = False


class Attempt:
    """One step that is being saved, on this node.

    Attributes:
        reserving_count: Ranks for which room is being taken now.
        leader: The process of rank 0 that the coordinator speaks for, once it asked.
        part: Once all ranks of this node are sealed.
        is_promised: The manifest has it as staged; only the coordinator may drop it.
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
        self.is_promised = False
        self.committed: Head | None = None
        self.failure: TenplexError | None = None
        self.changed = trio.Event()

    def touch(self) -> None:
        """Lets those who wait look again."""
        self.changed.set()
        self.changed = trio.Event()

    @property
    def is_over(self) -> bool:
        """Whether it is committed or failed."""
        return self.committed is not None or self.failure is not None

    def check(self) -> None:
        """Raises what it failed of."""
        if self.failure is not None:
            raise type(self.failure)(self.failure.message, **self.failure.details)
