"""The seams between the runtime and the edges: what each side may rely on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tenplexfs.core.membership import Standing
from tenplexfs.core.snapshot import Head, JobName, NodeInfo, NodeName, TxId

__all__ = [
    "ArraySource",
    "FileContent",
    "GrowingArrays",
    "Heads",
    "Lock",
    "NodeRegistry",
    "PeerReader",
    "Ranges",
    "Registry",
    "RegistryEvent",
    "SnapshotView",
    "UncomputedError",
]


class UncomputedError(Exception):
    """What is asked for takes longer to compute than the mount may stand still. Then ask again.

    Attributes:
        compute: Computes it; for a worker thread.
    """

    def __init__(self, compute: Callable[[], object]) -> None:
        super().__init__("not computed yet")
        self.compute = compute


class ArraySource(Protocol):
    """Local arrays of one snapshot. Thread-safe; what it gave stays valid as long as it is referenced."""

    def array(self, rank: int, path: str) -> npt.NDArray[np.generic] | None:
        """Returns the read-only local array of ``path`` (as shown) on ``rank``, or None when not here."""
        ...


@runtime_checkable
class GrowingArrays(ArraySource, Protocol):
    """Arrays that are still being filled; what is not waited for may hold anything."""

    def wait(self, rank: int, path: str, boxes: npt.NDArray[np.int64]) -> bool:
        """Returns True once all of ``boxes``, (n, 2, ndim), is there, False after some seconds of waiting.

        Raises:
            UnavailableError: It does not come.
        """
        ...


@dataclass(frozen=True, slots=True)
class Ranges:
    """Boxes of one rank's local array, in the order in which their bytes are streamed.

    Attributes:
        rank: In the numbering of the snapshot that is asked.
        path: Tensor path, as shown there.
        itemsize: Bytes of one element.
        boxes: int64 (n, 2, ndim): start and stop, half-open, local coordinates; ndim may be 0.
    """

    rank: int
    path: str
    itemsize: int
    boxes: npt.NDArray[np.int64]

    @property
    def nbytes(self) -> npt.NDArray[np.int64]:
        """Bytes of each box, int64 (n,)."""
        extents = self.boxes[:, 1, :] - self.boxes[:, 0, :]
        return np.asarray(extents.prod(axis=1) * self.itemsize, np.int64)


class PeerReader(Protocol):
    """Reads ranges of named snapshots from other nodes."""

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
        """Streams ``ranges`` in order.

        ``write(offset, data)`` is called in a worker thread, in order, with the bytes from ``offset`` on of
        the concatenation of all boxes (each in C order), which are valid until it returns. Each message's
        checksum is verified before it is handed over. A transient failure resumes where the stream stopped,
        until ``deadline_s``, or until it has failed for ``patience_s`` without anything new.

        Raises:
            NotFoundError, StaleError: The node has no such snapshot, rank or tensor (any more).
            UnavailableError, TimedOutError, CorruptError: After the retries.
        """
        ...


class FileContent(Protocol):
    """The bytes of an open file. They never change, also when its snapshot is dropped."""

    size: int

    def read(self, offset: int, size: int) -> bytes | memoryview | None:
        """Returns up to ``size`` bytes at ``offset`` at once, or None when they are elsewhere."""
        ...

    async def read_wait(self, offset: int, size: int) -> bytes | memoryview:
        """Returns the bytes as `read` does, after fetching them; never short, never zeros.

        Raises:
            TenplexError: They did not come in time, or are gone.
        """
        ...

    def close(self) -> None:
        """Gives back what the handle held."""
        ...


class SnapshotView(Protocol):
    """What the tree needs to know of a snapshot."""

    job: JobName
    created_ns: int

    def document(self, name: str) -> bytes:
        """Returns ``job.json``, ``layout.json`` or ``ptc/<rank>.json``; the same bytes at each call."""
        ...

    def open_shard(self, rank: int, path: str) -> FileContent:
        """Opens the .npy of ``path`` (as shown) on ``rank``. Does not wait."""
        ...

    def open_full(self, path: str) -> FileContent:
        """Opens the .npy of the whole tensor ``path`` (as shown). Does not wait."""
        ...


@dataclass(frozen=True, slots=True)
class RegistryEvent:
    """A job's head as of a revision; ``head`` is None once the job was removed."""

    revision: int
    job: JobName
    head: Head | None


@dataclass(frozen=True, slots=True)
class Lock:
    """The right to coordinate a job, until it is released or ``ttl_s`` passes without a renewal.

    Attributes:
        token: Another one for each lock of a registry; with the owner, of all registries.
    """

    job: JobName
    owner: str
    token: int


class Heads(Protocol):
    """Where heads live. Linearizable; each call has a deadline and raises UnavailableError when it passes."""

    async def heads(self) -> tuple[int, dict[JobName, Head]]:
        """Returns the current revision and the head of every job as of it."""
        ...

    async def look(self, job: JobName) -> Standing:
        """Returns what the job is, and who has its lock, as of one moment after the call."""
        ...

    def watch(self, revision: int) -> AsyncIterator[RegistryEvent]:
        """Yields each change after ``revision``, in order; reconnects by itself."""
        ...


class Registry(Heads, Protocol):
    """Where heads are moved, too. Deadlines and UnavailableError as for `Heads`."""

    async def lock(self, job: JobName, owner: str, *, ttl_s: float) -> Lock:
        """Takes the job's lock, also from the same ``owner``, whose lock before that is lost.

        Raises:
            ConflictError: Another owner holds it; the message names it.
        """
        ...

    async def renew(self, lock: Lock, *, ttl_s: float) -> None:
        """Keeps ``lock`` for ``ttl_s`` from now.

        Raises:
            ConflictError: It is lost, also where nobody has it by now.
        """
        ...

    async def unlock(self, lock: Lock) -> None:
        """Releases ``lock`` if it is still held."""
        ...

    async def compare_and_set(self, lock: Lock, expected: Head | None, new: Head | None) -> None:
        """Moves the head of ``lock.job`` from ``expected`` to ``new`` (None: no such job). The commit.

        Raises:
            ConflictError: The head is another, or the lock is lost. Nothing changed.
            UnavailableError: The reply was lost: read the head's txid to know.
        """
        ...


class NamedRegistry(Protocol):
    """Which cluster it is of; every registry says so. Deadlines and UnavailableError as for `Registry`."""

    async def name(self, proposed: str) -> str:
        """Returns the registry's name: ``proposed`` if it had none before."""
        ...


class NodeRegistry(Protocol):
    """Which nodes live; every registry is one too. Deadlines and UnavailableError as for `Registry`."""

    async def announce(self, info: NodeInfo, *, ttl_s: float) -> None:
        """Says that a node lives, for ``ttl_s`` from now; the last word about a name counts."""
        ...

    async def withdraw(self, info: NodeInfo) -> None:
        """Says that it lives no more, unless another one has announced itself under its name."""
        ...

    async def nodes(self) -> dict[NodeName, NodeInfo]:
        """Returns the living ones."""
        ...

    def watch_nodes(self) -> AsyncIterator[Mapping[NodeName, NodeInfo]]:
        """Yields the living ones now and after each change; reconnects by itself.

        Changes that come fast are told as one. While the registry is away nothing is told, whoever dies.
        """
        ...
