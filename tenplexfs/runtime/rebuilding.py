"""Making the heads of a registry that was lost, of what the nodes store; on an operator's word alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from tenplexfs.core.snapshot import Head, JobName, NodeName, SnapshotId
from tenplexfs.errors import NotFoundError, PreconditionError, TimedOutError, UnavailableError
from tenplexfs.runtime.asking import describe_any
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.heads import HeadMover
from tenplexfs.runtime.orders import Description, NodeCalls, StoredPart
from tenplexfs.runtime.planning import Target, resolve
from tenplexfs.runtime.protocols import Lock
from tenplexfs.runtime.recovery import Recovery
from tenplexfs.runtime.tasks import run_all

__all__ = ["Rebuilder", "Rebuilt", "StoreCalls", "Survey"]


class StoreCalls(NodeCalls, Protocol):
    """Asks nodes, besides, what they store."""

    async def jobs(self, node: NodeName) -> tuple[JobName, ...]:
        """Returns the jobs of which the node stores something."""
        ...


@dataclass(frozen=True)
class Rebuilt:
    """A head as it would be written.

    Attributes:
        head: None when nothing of the job is whole.
        missing: Nodes that have, or may have, parts that nobody can see now: of this, or of newer ones.
        newer: Committed snapshots that are newer than the head and not whole.
    """

    job: JobName
    head: Head | None
    missing: tuple[NodeName, ...]
    newer: tuple[SnapshotId, ...]


@dataclass(frozen=True)
class Survey:
    """What a registry would be made of.

    Attributes:
        silent: Nodes that do not answer.
    """

    jobs: tuple[Rebuilt, ...]
    silent: tuple[NodeName, ...]

    @property
    def missing(self) -> tuple[NodeName, ...]:
        """Every node that is missing for some job."""
        return tuple(sorted({node for each in self.jobs for node in each.missing}))


class Rebuilder:
    """Looks at the nodes, and writes heads.

    Args:
        node: This one.
        nodes: Those that are known.
    """

    def __init__(
        self,
        *,
        node: NodeName,
        heads: HeadMover,
        calls: StoreCalls,
        compute: Compute,
        recovery: Recovery,
        nodes: Callable[[], Collection[NodeName]],
    ) -> None:
        self._node = node
        self._heads = heads
        self._calls = calls
        self._compute = compute
        self._recovery = recovery
        self._nodes = nodes

    async def survey(self) -> Survey:
        """Returns what would be written; changes nothing.

        Raises:
            PreconditionError: The registry knows jobs.
            UnavailableError: It does not answer.
        """
        await self._check_empty()
        stored: dict[JobName, dict[NodeName, tuple[StoredPart, ...]]] = {}
        silent: list[NodeName] = []

        async def ask(node: NodeName) -> None:
            try:
                for job in await self._calls.jobs(node):
                    stored.setdefault(job, {})[node] = await self._calls.inventory(node, job)
            except (UnavailableError, TimedOutError):
                silent.append(node)

        await run_all(partial(ask, node) for node in sorted(self._nodes()))
        found = [await self._rebuilt(job, parts, silent) for job, parts in sorted(stored.items())]
        return Survey(tuple(found), tuple(sorted(silent)))

    async def write(self, survey: Survey, *, force: bool) -> None:
        """Writes the heads of ``survey``.

        Raises:
            PreconditionError: The registry knows jobs by now, or nodes are missing and it is not ``force``.
        """
        if survey.missing and not force:
            raise PreconditionError(
                f"registry: {', '.join(survey.missing)} may have parts of newer or of these snapshots; start "
                "them, or write it without them (--force)",
                missing=survey.missing,
            )
        await self._check_empty()
        for each in survey.jobs:
            if each.head is not None:
                await self._write(each.job, each.head)

    async def _write(self, job: JobName, wanted: Head) -> None:
        async def body(lock: Lock, head: Head | None) -> None:
            if head is not None:
                raise PreconditionError(f"registry: job {job} is at {head.snapshot} by now")
            await self._heads.commit(lock, None, wanted)

        await self._heads.under_lock(job, f"{self._node}:rebuild", body)

    async def _check_empty(self) -> None:
        known = await self._heads.all()
        if known:
            raise PreconditionError(
                f"registry: not empty, it knows {', '.join(sorted(known))}; only one that was lost is rebuilt"
            )

    async def _rebuilt(
        self, job: JobName, parts: Mapping[NodeName, Sequence[StoredPart]], silent: Sequence[NodeName]
    ) -> Rebuilt:
        holders: dict[SnapshotId, set[NodeName]] = {}
        committed: set[SnapshotId] = set()
        for node, every in parts.items():
            for part in every:
                if not part.copies_of:
                    holders.setdefault(part.snapshot, set()).add(node)
                    committed |= {part.snapshot} if part.committed else set()
        newer: list[SnapshotId] = []
        missing = set(silent)  # who does not answer may have anything
        for snapshot in sorted(committed, key=_order, reverse=True):
            known = await self._describe(job, snapshot, holders[snapshot])
            if known is None:
                continue
            wanted = await self._compute(resolve, Target(layout_json=known.layout_json), None, self._node)
            lost = frozenset(wanted.nodes) - holders[snapshot]
            missing |= lost
            head = Head(snapshot, wanted.digest, wanted.nodes)
            if snapshot.step is None or await self._recovery.has_replicas(job, head, known, wanted, lost):
                return Rebuilt(job, head, tuple(sorted(missing)), tuple(newer))
            newer.append(snapshot)
        return Rebuilt(job, None, tuple(sorted(missing)), tuple(newer))

    async def _describe(
        self, job: JobName, snapshot: SnapshotId, nodes: Collection[NodeName]
    ) -> Description | None:
        try:
            return await describe_any(
                self._calls, sorted(nodes, key=lambda each: each != self._node), job, snapshot.txid
            )
        except (NotFoundError, UnavailableError, TimedOutError):
            return None


def _order(snapshot: SnapshotId) -> tuple[int, int]:
    return snapshot.generation, -1 if snapshot.step is None else snapshot.step
