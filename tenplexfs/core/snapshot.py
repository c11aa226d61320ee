"""Which state a tree shows: snapshots, heads, and the names of jobs and nodes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NewType

from tenplexfs.errors import InvalidError

__all__ = [
    "COPIES",
    "Head",
    "JobName",
    "NodeInfo",
    "NodeName",
    "SnapshotId",
    "TxId",
    "check_job_name",
    "check_node_name",
    "copies_of",
    "parse_snapshot",
]

JobName = NewType("JobName", str)
NodeName = NewType("NodeName", str)
TxId = NewType("TxId", str)

COPIES = "@copies"
"""Behind the name of a job in a store: what it keeps for other nodes. No job can be called so."""

_SNAPSHOT = re.compile(r"([1-9][0-9]{0,17}):(-|[0-9]{1,18}):([0-9a-f]{16})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)


def check_job_name(text: str) -> JobName:
    """Returns ``text`` as the name of a job.

    Raises:
        InvalidError: It is not ``[A-Za-z0-9][A-Za-z0-9_.-]{0,63}``.
    """
    if not _NAME.fullmatch(text):
        raise InvalidError(f"job name {text[:80]!r}: need [A-Za-z0-9][A-Za-z0-9_.-]{{0,63}}")
    return JobName(text)


def copies_of(job: JobName) -> JobName:
    """Returns under which name a store has the copies of ``job`` that it keeps for other nodes."""
    return JobName(job + COPIES)


def check_node_name(text: str) -> NodeName:
    """Returns ``text`` as the name of a node, by the rule for jobs.

    Raises:
        InvalidError: It is not ``[A-Za-z0-9][A-Za-z0-9_.-]{0,63}``.
    """
    if not _NAME.fullmatch(text):
        raise InvalidError(f"node name {text[:80]!r}: need [A-Za-z0-9][A-Za-z0-9_.-]{{0,63}}")
    return NodeName(text)


@dataclass(frozen=True, slots=True)
class SnapshotId:
    """The state at one step under one layout; what is in it never changes.

    Attributes:
        generation: Number of the committed PTC of the job, from 1.
        step: Optimiser step, or None while the job has no state.
        txid: The transaction that made it, 16 hex digits; names it alone.
    """

    generation: int
    step: int | None
    txid: TxId

    def __post_init__(self) -> None:
        if self.generation < 1:
            raise InvalidError(f"generation: need >= 1, got {self.generation}")
        if self.step is not None and self.step < 0:
            raise InvalidError(f"step: need >= 0, got {self.step}")

    def __str__(self) -> str:
        step = "-" if self.step is None else str(self.step)
        return f"generation {self.generation} step {step} txid {self.txid}"

    @property
    def text(self) -> str:
        """It in one word, as ``TENPLEXFS_SNAPSHOT`` has it: ``generation:step:txid``."""
        return f"{self.generation}:{'-' if self.step is None else self.step}:{self.txid}"


def parse_snapshot(text: str) -> SnapshotId:
    """Returns the snapshot that `SnapshotId.text` gave ``text`` of.

    >>> parse_snapshot("2:120:00000000000000ab").step
    120

    Raises:
        InvalidError: It is no such text.
    """
    found = _SNAPSHOT.fullmatch(text)
    if found is None:
        raise InvalidError(f"snapshot {text!r}: need generation:step:txid, as job.json and load say")
    return SnapshotId(int(found[1]), None if found[2] == "-" else int(found[2]), TxId(found[3]))


@dataclass(frozen=True, slots=True)
class Head:
    """A job's current snapshot: the one key of the registry that a commit moves.

    Attributes:
        snapshot: What the job is now.
        layout_digest: Of the committed layout, as `formats.layout_json.layout_digest` gives it.
        nodes: The nodes that hold the snapshot, in the order of their names.
    """

    snapshot: SnapshotId
    layout_digest: str
    nodes: tuple[NodeName, ...]


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A living node, as its daemon announces it.

    Attributes:
        node: Its name.
        endpoint: ``host:port`` where other daemons reach it.
        incarnation: Of its store: another one whenever that began anew, empty.
        version: Of tenplexfs.
    """

    node: NodeName
    endpoint: str
    incarnation: str
    version: str
