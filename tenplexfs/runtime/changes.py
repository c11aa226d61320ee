"""What a coordinator is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from tenplexfs.core.snapshot import Head, JobName, SnapshotId, TxId
from tenplexfs.formats.pauses import paused_of
from tenplexfs.runtime.orders import Description
from tenplexfs.runtime.planning import Resolved, Target

__all__ = ["Change", "Saved", "State"]


@dataclass(frozen=True)
class Change:
    """What somebody asks for.

    Attributes:
        target: The layout that is wanted.
        drop: Patterns of tensors that the new layout may lack.
        expected_generation: Of the job when it was asked; None is any.
        request_id: The same one is the same transaction; empty for none.
        arguments: What the request asks for, to tell it from another one of the same id.
        paused: Why the job is paused from then on, if it is.
    """

    job: JobName
    target: Target
    drop: tuple[str, ...] = ()
    expected_generation: int | None = None
    request_id: str = ""
    arguments: bytes = b""
    paused: str | None = None

    def is_so(self, wanted: Resolved, head: Head, known: Description) -> bool:
        """Returns whether the job, at ``head``, is under the layout ``wanted`` already, paused or not."""
        return wanted.digest == head.layout_digest and paused_of(known.settings_json) == self.paused


@dataclass(frozen=True)
class State:
    """State that replaces what a job has.

    Attributes:
        txid: By which the nodes of its layout serve it as a base.
        layout_json: Its layout.
        source: Where the bytes are instead, when no node has them: the URL of a persisted step.
        values: What its ranks hold beside tensors.
        settings_json: Those of the job from now on, with the cursors of ``step``; None: they stay, and
            datasets go on from where they are.
        past: The snapshot of the job that it is the state of; None where it comes from outside.
    """

    txid: TxId
    layout_json: bytes
    step: int
    source: str = ""
    values: bytes = b""
    settings_json: bytes | None = None
    past: SnapshotId | None = None


@dataclass(frozen=True)
class Saved:
    """A step that all ranks have saved.

    Attributes:
        wanted: The layout that they saved under.
        values: What they hold beside tensors.
        leader: The process of rank 0.
    """

    job: JobName
    snapshot: SnapshotId
    wanted: Resolved
    settings_json: bytes
    values: bytes
    leader: str
