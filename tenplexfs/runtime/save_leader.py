"""Committing a step that is being saved: the node of rank 0 gathers the parts, compares, and switches."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import trio

from tenplexfs.core.membership import Mandate
from tenplexfs.core.snapshot import Head, JobName, NodeName, SnapshotId, TxId
from tenplexfs.errors import TenplexError, TimedOutError, UnavailableError
from tenplexfs.formats.dataset_settings import give_cursors
from tenplexfs.formats.values import Values, pack
from tenplexfs.runtime.attempts import Attempt, SavePart
from tenplexfs.runtime.coordinator import Coordinator, Saved
from tenplexfs.runtime.planning import Resolved
from tenplexfs.runtime.save_parts import check_sums
from tenplexfs.runtime.tasks import run_all

__all__ = ["CollectCalls", "SaveLeader"]


class CollectCalls(Protocol):
    """What a leader asks of nodes."""

    async def collect(
        self, node: NodeName, job: JobName, snapshot: SnapshotId, leader: str
    ) -> SavePart | None:
        """Returns what the node's ranks have saved, or None when it is not complete yet."""
        ...

    async def drop(
        self, node: NodeName, job: JobName, txid: TxId, by: Mandate | None, reason: str = ""
    ) -> None:
        """Gives a save up."""
        ...


class SaveLeader:
    """Implements what `Saves` wants to be led by.

    Args:
        patience_s: How long ranks of other nodes may take after those of this one.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        calls: CollectCalls,
        *,
        node: NodeName,
        patience_s: float,
    ) -> None:
        self._coordinator = coordinator
        self._calls = calls
        self._node = node
        self._patience_s = patience_s

    async def __call__(self, attempt: Attempt) -> Head:
        """Returns the head once the step is committed.

        Raises:
            TenplexError: It is not, and never will be, and all nodes were told; or nobody knows yet.
        """
        job, snapshot, base = attempt.job, attempt.snapshot, attempt.base
        nodes = base.head.nodes
        phases: set[str] = set()
        try:
            parts: dict[NodeName, SavePart] = {}
            await run_all([partial(self._collect, attempt, node, parts) for node in nodes])
            if len(parts) > 1:
                await trio.to_thread.run_sync(check_sums, [part.sums for part in parts.values()])
            documents = {
                rank: each for part in parts.values() for rank, each in part.values.documents.items()
            }
            said = (part.values.consumed for part in parts.values() if part.values.consumed is not None)
            consumed = next(said, None)
            values = pack(Values(documents, consumed))
            settings = base.settings_json
            if consumed is not None:
                settings = give_cursors(settings, snapshot.step or 0, consumed)
            wanted = Resolved(base.layout_json, base.head.layout_digest, nodes)
            assert attempt.leader is not None  # or nothing would have been collected
            saved = Saved(job, snapshot, wanted, settings, values, attempt.leader)
            return await self._coordinator.commit_save(saved, lambda now: phases.add(now.phase))
        except TenplexError as error:
            if "committing" in phases:  # then the nodes were told, unless the head may have moved
                raise
            with trio.move_on_after(10, shield=True):
                await run_all([partial(self._drop, attempt, node, error.message) for node in nodes])
            raise

    async def _collect(self, attempt: Attempt, node: NodeName, parts: dict[NodeName, SavePart]) -> None:
        end_s = trio.current_time() + self._patience_s
        assert attempt.leader is not None
        while True:
            attempt.check()
            try:
                part = await self._calls.collect(node, attempt.job, attempt.snapshot, attempt.leader)
            except (UnavailableError, TimedOutError):  # it may be restarted; its ranks then save again
                await trio.sleep(0.1)
                part = None
            if part is not None:
                parts[node] = part
                return
            if trio.current_time() > end_s:
                raise TimedOutError(
                    f"job {attempt.job}: {attempt.snapshot}: the ranks of node {node} have not saved "
                    f"within {self._patience_s:g} s"
                )

    async def _drop(self, attempt: Attempt, node: NodeName, reason: str) -> None:
        if node == self._node:
            return
        try:
            await self._calls.drop(node, attempt.job, attempt.snapshot.txid, None, reason)
        except TenplexError:
            return  # it settles with the head by itself
