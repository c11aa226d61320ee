"""Going back: a new snapshot of a job with the state of an earlier step, kept on its nodes or persisted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from tenplexfs.core.snapshot import Head, JobName, NodeName, SnapshotId
from tenplexfs.core.transaction import kept_steps
from tenplexfs.errors import InvalidError, NotFoundError, TenplexError
from tenplexfs.formats.dataset_settings import datasets_back, datasets_of, skip_samples
from tenplexfs.formats.lineage import with_past_of
from tenplexfs.formats.requests import Request, has_request
from tenplexfs.runtime.asking import describe_any, take_stock
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.coordinator import Coordinator, State
from tenplexfs.runtime.orders import Description, InventoryCalls, Report
from tenplexfs.runtime.past import keep_steps
from tenplexfs.runtime.planning import expand
from tenplexfs.runtime.restoring import Found, state_of
from tenplexfs.runtime.snapshot import rank_nodes
from tenplexfs.runtime.tasks import run_all

__all__ = ["PastSteps", "Rollback"]


@dataclass(frozen=True)
class Rollback:
    """What somebody asks for.

    Attributes:
        step: Whose state the job gets back.
        skip_samples: So many samples after that step are left out, of each dataset that is split.
        request_id: The same one is the same transaction; empty for none.
        arguments: What it asks for, in whatever form.
    """

    job: JobName
    step: int
    skip_samples: int = 0
    request_id: str = ""
    arguments: bytes = b""


class PastSteps:
    """The steps that jobs can go back to.

    Args:
        endpoints: The nodes that are known now.
        persisted: Returns the steps of a job that are persisted.
    """

    def __init__(
        self,
        calls: InventoryCalls,
        compute: Compute,
        *,
        endpoints: Callable[[], Mapping[NodeName, str]],
        persisted: Callable[[JobName, bytes], Awaitable[Mapping[int, Found]]],
    ) -> None:
        self._calls = calls
        self._compute = compute
        self._endpoints = endpoints
        self.persisted = persisted

    async def kept(self, job: JobName, known: Description) -> dict[int, SnapshotId]:
        """Returns the steps that all their nodes keep, that of the head too, each with its snapshot.

        Args:
            job: Name of the job.
            known: Its head.
        """
        now = known.snapshot
        parts = await take_stock(self._calls, self._endpoints(), job)
        nodes: dict[SnapshotId, set[NodeName]] = {}
        for node, stored in parts.items():
            for part in stored:
                if part.committed and not part.copies_of:
                    nodes.setdefault(part.snapshot, set()).add(node)
        found: dict[int, SnapshotId] = {}
        kept = kept_steps(now, nodes, count=keep_steps(known.settings_json))

        async def look(snapshot: SnapshotId, step: int) -> None:
            then = await describe_any(self._calls, nodes[snapshot], job, snapshot.txid)
            expanded = await self._compute(expand, then.layout_json)
            if nodes[snapshot] >= set(rank_nodes(expanded.ptc).values()):
                found[step] = snapshot

        await run_all(
            partial(look, snapshot, snapshot.step)
            for snapshot in nodes
            if snapshot.step is not None and (snapshot == now or snapshot.txid in kept)
        )
        return found

    async def describe(self, job: JobName, snapshot: SnapshotId) -> Description:
        """Returns a kept snapshot, from any node that has it.

        Raises:
            NotFoundError: No node has it any more.
        """
        stock = await take_stock(self._calls, self._endpoints(), job)
        holding = [node for node, parts in stock.items() if any(part.snapshot == snapshot for part in parts)]
        try:
            return await describe_any(self._calls, holding, job, snapshot.txid)
        except TenplexError as error:
            raise NotFoundError(f"job {job}: {snapshot} is not kept any more: {error.message}") from error

    async def state(self, asked: Rollback, known: Description) -> State:
        """Returns the state of a step, for a job that is at ``known``.

        Raises:
            NotFoundError: It is not there any more; the message lists what is.
            InvalidError: There are no samples to skip.
        """
        kept = await self.kept(asked.job, known)
        if asked.step not in kept:
            return await self._persisted_state(asked, known, kept)
        then = await self.describe(asked.job, kept[asked.step])
        state = State(then.snapshot.txid, then.layout_json, asked.step, values=then.values)
        settings = self._settings_back(asked, known.settings_json, then.settings_json)
        return replace(state, settings_json=settings, past=then.snapshot)

    async def _persisted_state(self, asked: Rollback, known: Description, kept: Iterable[int]) -> State:
        found = await self.persisted(asked.job, known.settings_json)
        if asked.step not in found:
            steps = ", ".join(map(str, sorted(kept))) or "none"
            there = f"; persisted: {', '.join(map(str, sorted(found)))}" if found else ""
            message = f"job {asked.job}: step {asked.step} is not kept; kept steps: {steps}{there}"
            raise NotFoundError(message)
        state, opened = await state_of(found[asked.step], self._compute)
        settings = self._settings_back(asked, known.settings_json, opened.manifest.settings_json)
        return replace(state, settings_json=settings, past=opened.manifest.snapshot)

    @staticmethod
    def _settings_back(asked: Rollback, now_json: bytes, then_json: bytes) -> bytes:
        settings = with_past_of(datasets_back(now_json, then_json), then_json)
        if asked.skip_samples and all(each.unsplit for each in datasets_of(settings).values()):
            raise InvalidError(
                f"job {asked.job}: skip {asked.skip_samples} samples: it has no dataset to skip in"
            )
        return skip_samples(settings, asked.step, asked.skip_samples)

    async def roll_back(
        self,
        asked: Rollback,
        coordinator: Coordinator,
        report: Report,
        *,
        head: Head,
        stop: Callable[[Head], Awaitable[None]],
    ) -> Head:
        """Gives a job the state and the cursors of an earlier step; returns the head.

        Args:
            asked: What is wanted.
            coordinator: Of this node.
            report: Gets the progress.
            head: What the job is now, as far as this node knows.
            stop: Stops its ranks, once it is known that there is such a step.

        Raises:
            NotFoundError, InvalidError: Nothing changed.
        """
        known = await coordinator.describe(asked.job, head)
        if has_request(known.settings_json, Request(asked.job, asked.request_id, asked.arguments)):
            return head
        await self.state(asked, known)
        await stop(head)
        return await coordinator.replace_state(
            asked.job, asked.request_id, partial(self.state, asked), report, arguments=asked.arguments
        )
