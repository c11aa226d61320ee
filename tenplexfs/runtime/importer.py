"""State from files: a snapshot of one rank on this node, which the transaction then spreads as any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import trio

from tenplexfs.core.snapshot import Head, JobName, TxId
from tenplexfs.errors import InvalidError
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.coordinator import Coordinator, State
from tenplexfs.runtime.member import Member
from tenplexfs.runtime.orders import Description, Report
from tenplexfs.runtime.planning import match_import
from tenplexfs.runtime.protocols import ArraySource
from tenplexfs.storage.safetensors_source import SafetensorsSource

__all__ = ["Import", "import_state"]


@dataclass(frozen=True)
class Import:
    """What somebody asks for.

    Attributes:
        path: A safetensors file, an index, or a directory with one.
        ignore: Patterns of tensors that the file may have beyond the layout.
        arguments: What the request asks for, to tell it from another one of the same id.
    """

    job: JobName
    path: Path
    step: int
    ignore: tuple[str, ...] = ()
    request_id: str = ""
    arguments: bytes = b""


@dataclass(frozen=True)
class _Renamed:
    """The arrays of a file under the names that the job has for them."""

    source: ArraySource
    names: Mapping[str, str]

    def array(self, rank: int, path: str) -> npt.NDArray[np.generic] | None:
        """Returns the whole tensor ``path`` for rank 0."""
        return self.source.array(rank, self.names[path]) if path in self.names else None


async def import_state(
    asked: Import,
    *,
    coordinator: Coordinator,
    member: Member,
    compute: Compute,
    new_txid: Callable[[], TxId],
    report: Report,
) -> Head:
    """Gives a job the state of a file; returns the head.

    Raises:
        InvalidError: Names every tensor that does not fit. Nothing changed.
    """
    source = await trio.to_thread.run_sync(SafetensorsSource.open, asked.path)
    txid = new_txid()
    with ExitStack() as stack:

        async def load(known: Description) -> State:
            match = await compute(
                match_import, known.layout_json, dict(source.tensors), asked.ignore, member.node
            )
            await trio.to_thread.run_sync(_check_ties, source, match.ties)
            stack.enter_context(member.serving(txid, _Renamed(source, match.names)))
            return State(txid, match.layout_json, asked.step)

        return await coordinator.replace_state(
            asked.job, asked.request_id, load, report, arguments=asked.arguments
        )


def _check_ties(source: ArraySource, ties: Sequence[Sequence[str]]) -> None:
    """Refuses a file in which tensors that the job ties have different bytes."""
    for first, *others in ties:
        wanted = source.array(0, first)
        for other in others:
            found = source.array(0, other)
            if wanted is None or found is None or wanted.tobytes() != found.tobytes():
                raise InvalidError(
                    f"import: {first} and {other} are tied in the layout, and differ in the file"
                )
