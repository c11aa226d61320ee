"""Making heads of what the nodes store, for a registry that was lost, or has gone back, or is another one.

On an operator's word alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from tenplexfs.core.snapshot import Head, JobName, NodeName, SnapshotId
from tenplexfs.core.transaction import age, is_older
from tenplexfs.errors import NotFoundError, PreconditionError, TimedOutError, UnavailableError
from tenplexfs.formats.requests import birth_of
from tenplexfs.runtime.asking import describe_any
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.heads import HeadMover
from tenplexfs.runtime.orders import Description, NodeCalls, StoredPart
from tenplexfs.runtime.planning import Target, resolve
from tenplexfs.runtime.protocols import Lock
from tenplexfs.runtime.recovery import Recovery, Wish
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
        now: What the registry says.
        head: None when nothing of the job is whole.
        missing: Nodes that have, or may have, parts that nobody can see now: of this, or of newer ones.
        newer: Committed snapshots that are newer than the head and not whole.
    """

    job: JobName
    now: Head | None
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
        """Returns what would be written: of each job that the registry lacks, or has an older head of.

        Raises:
            PreconditionError: The registry knows jobs, and the nodes have nothing newer.
            UnavailableError: It does not answer.
        """
        known = await self._heads.all()
        stored: dict[JobName, dict[NodeName, tuple[StoredPart, ...]]] = {}
        silent: list[NodeName] = []

        async def ask(node: NodeName) -> None:
            try:
                for job in await self._calls.jobs(node):
                    stored.setdefault(job, {})[node] = await self._calls.inventory(node, job)
            except (UnavailableError, TimedOutError):
                silent.append(node)

        await run_all(partial(ask, node) for node in sorted(self._nodes()))
        found = [await self._rebuilt(job, known.get(job), stored[job], silent) for job in sorted(stored)]
        jobs = tuple(each for each in found if each.now is None or each.head is not None)
        if known and not jobs:
            raise PreconditionError(
                f"registry: not empty, it knows {', '.join(sorted(known))}, and the nodes have nothing newer"
            )
        return Survey(jobs, tuple(sorted(silent)))

    async def write(self, survey: Survey, *, force: bool) -> None:
        """Writes the heads of ``survey``.

        Raises:
            PreconditionError: A job is somewhere else by now, or nodes are missing and it is not ``force``.
        """
        if survey.missing and not force:
            raise PreconditionError(
                f"registry: {', '.join(survey.missing)} may have parts of newer or of these snapshots; start "
                "them, or write it without them (--force)",
                missing=survey.missing,
            )
        for each in survey.jobs:
            if each.head is not None:
                await self._write(each.job, each.now, each.head)

    async def _write(self, job: JobName, now: Head | None, wanted: Head) -> None:
        async def body(lock: Lock, head: Head | None) -> None:
            if head != now:
                at = "is gone" if head is None else f"is at {head.snapshot}"
                raise PreconditionError(f"registry: job {job} {at} by now")
            await self._heads.commit(lock, now, wanted)

        await self._heads.under_lock(job, f"{self._node}:rebuild", body)

    async def _rebuilt(
        self,
        job: JobName,
        now: Head | None,
        parts: Mapping[NodeName, Sequence[StoredPart]],
        silent: Sequence[NodeName],
    ) -> Rebuilt:
        holders: dict[SnapshotId, set[NodeName]] = {}
        committed: set[SnapshotId] = set()
        for node, every in parts.items():
            for part in every:
                if not part.copies_of:
                    holders.setdefault(part.snapshot, set()).add(node)
                    is_newer = part.committed and (now is None or is_older(now.snapshot, part.snapshot))
                    committed |= {part.snapshot} if is_newer else set()
        was = None
        if committed and now is not None:
            was = await self._describe(job, now.snapshot, holders.get(now.snapshot, ()))
        newer: list[SnapshotId] = []
        missing = set(silent)  # who does not answer may have anything
        for snapshot in sorted(committed, key=age, reverse=True):
            known = await self._describe(job, snapshot, holders[snapshot])
            if known is None:
                continue
            if was is not None and birth_of(was.settings_json) != birth_of(known.settings_json):
                continue  # of an earlier job of that name
            wanted = await self._compute(resolve, Target(layout_json=known.layout_json), None, self._node)
            lost = frozenset(wanted.nodes) - holders[snapshot]
            missing |= lost
            head = Head(snapshot, wanted.digest, wanted.nodes)
            wish = Wish(job, head, known, wanted, lost)
            if snapshot.step is None or await self._recovery.has_replicas(wish):
                return Rebuilt(job, now, head, tuple(sorted(missing)), tuple(newer))
            newer.append(snapshot)
        return Rebuilt(job, now, None, tuple(sorted(missing)), tuple(newer))

    async def _describe(
        self, job: JobName, snapshot: SnapshotId, nodes: Collection[NodeName]
    ) -> Description | None:
        try:
            return await describe_any(
                self._calls, sorted(nodes, key=lambda each: each != self._node), job, snapshot.txid
            )
        except (NotFoundError, UnavailableError, TimedOutError):
            return None
