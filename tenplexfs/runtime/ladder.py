"""What is left when lost nodes had the only bytes of a head.

Copies on other nodes, an older step that is whole, or the last persisted one: always one step, with its
cursors, as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import trio

from tenplexfs.core.snapshot import NodeName, SnapshotId
from tenplexfs.errors import (
    CorruptError,
    InvalidError,
    NoReplicaError,
    NotFoundError,
    TenplexError,
    UnavailableError,
)
from tenplexfs.formats.dataset_settings import datasets_back
from tenplexfs.formats.keep_settings import persist_of
from tenplexfs.formats.lineage import branch_off, is_past_of, with_past_of
from tenplexfs.runtime.asking import describe_any, take_stock
from tenplexfs.runtime.changes import State
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.copying import having_of, layout_with
from tenplexfs.runtime.orders import Description, InventoryCalls, StoredPart
from tenplexfs.runtime.planning import expand, plan_summary
from tenplexfs.runtime.recovery import Found, Wish
from tenplexfs.runtime.restoring import Found as Persisted
from tenplexfs.runtime.restoring import own_steps, settings_with, state_of
from tenplexfs.runtime.snapshot import rank_nodes
from tenplexfs.runtime.switching import Base
from tenplexfs.storage.checkpoint_reader import OpenCheckpoint

__all__ = ["Ladder"]

log = logging.getLogger(__name__)


class Ladder:
    """Implements `runtime.recovery.Beyond`.

    Args:
        endpoints: The nodes that are known now, and not known as dead.
    """

    def __init__(
        self, calls: InventoryCalls, compute: Compute, endpoints: Callable[[], Iterable[NodeName]]
    ) -> None:
        self._calls = calls
        self._compute = compute
        self._endpoints = endpoints

    async def copies(self, wish: Wish) -> Found | None:
        """Returns the head from its nodes and the copies of others, or None where they lack something."""
        return await self._in_copies(wish, await self._stock(wish), wish.known)

    async def older(self, wish: Wish) -> Found:
        """Returns the newest older step that is whole somewhere.

        Raises:
            UnavailableError: There is none, or a living node does not say what it has.
        """
        job, head, lost = wish.job, wish.head, wish.lost
        stock = await self._stock(wish)
        if silent := {*self._endpoints()} - lost - stock.keys():
            raise UnavailableError(
                f"job {job}: {head.snapshot}: without {_named(lost)} it is not whole, and {_named(silent)}, "
                "which may have copies, does not answer; ask again"
            )
        kept = await self._in_older_copies(wish, stock)
        persisted, failure = await self._persisted(wish)
        if persisted is not None and (kept is None or _step(persisted) > _step(kept)):
            return persisted
        if failure is not None:
            raise UnavailableError(
                f"job {job}: {head.snapshot}: without {_named(lost)} it is not whole, and persisted steps "
                f"cannot be read: {failure.message}"
            )
        if kept is not None:
            return kept
        where = "no step is persisted" if persist_of(wish.known.settings_json) else "it is not persisted"
        raise UnavailableError(
            f"job {job}: {head.snapshot}: without {_named(lost)} no replicas and no copies have all of it, "
            f"no older step is whole, and {where}"
        )

    async def _stock(self, wish: Wish) -> dict[NodeName, tuple[StoredPart, ...]]:
        """Returns what the nodes that are left store of the job."""
        return await take_stock(self._calls, {*self._endpoints()} - wish.lost, wish.job)

    async def _in_copies(
        self, wish: Wish, stock: Mapping[NodeName, Sequence[StoredPart]], then: Description
    ) -> Found | None:
        """Returns ``then``, a snapshot of the job, from its nodes and copies, where they suffice."""
        expanded = await self._compute(expand, then.layout_json)
        having = having_of(then.snapshot, stock)
        missing = sorted(
            node for node in set(rank_nodes(expanded.ptc).values()) if node not in having.get(node, ())
        )
        layout, keepers = then.layout_json, {}
        for node in missing:
            keeper = min((each for each in having if node in having[each]), default=None)
            if keeper is not None:
                keepers[node] = keeper
                layout = await self._compute(layout_with, layout, keeper, (node,))
        lost = frozenset(missing) - keepers.keys()
        try:
            plan = await self._plan(wish, layout, then.values, lost)
        except NoReplicaError:
            return None
        base = Base(
            then.snapshot.txid,
            layout,
            lost=wish.lost,
            senders=frozenset(map(NodeName, plan["matrix"])),
        )
        from_copies = f"copies on {', '.join(sorted(set(keepers.values())))}" if keepers else "its nodes"
        return Found(base, then, plan, f"without {_named(wish.lost)}: from {from_copies}")

    async def _in_older_copies(
        self, wish: Wish, stock: Mapping[NodeName, Sequence[StoredPart]]
    ) -> Found | None:
        now = wish.head.snapshot
        older: dict[SnapshotId, list[NodeName]] = {}
        for node, parts in stock.items():
            for part in parts:
                if part.committed and not part.copies_of and _is_before(part.snapshot, now, wish.known):
                    older.setdefault(part.snapshot, []).append(node)
        for snapshot in sorted(older, key=lambda each: (each.step or 0, each.generation), reverse=True):
            try:
                then = await describe_any(self._calls, older[snapshot], wish.job, snapshot.txid)
            except NotFoundError:  # dropped since
                continue
            except TenplexError as error:  # it was there a moment ago: only lost bytes send a job back
                raise UnavailableError(
                    f"job {wish.job}: {snapshot} is kept, and {_named(older[snapshot])} stopped answering: "
                    f"{error.message}; ask again"
                ) from error
            found = await self._in_copies(wish, stock, then)
            if found is not None:
                settings = with_past_of(
                    datasets_back(wish.known.settings_json, then.settings_json), then.settings_json
                )
                message = f"{found.message}, back at step {snapshot.step}"
                return replace(found, known=self._branched(wish, then, settings), message=message)
        return None

    async def _persisted(self, wish: Wish) -> tuple[Found | None, TenplexError | None]:
        """Returns the newest persisted step of the job's past that can be read, or why there is none."""
        settings = wish.known.settings_json
        last = wish.head.snapshot.step or 0
        failure: TenplexError | None = None
        try:
            steps = await trio.to_thread.run_sync(own_steps, persist_of(settings), wish.job, settings)
        except TenplexError as error:
            return None, error
        for number in sorted((each for each in steps if each <= last), reverse=True):
            step = steps[number]
            if not is_past_of(settings, step.snapshot.generation, number):
                continue
            try:
                state, opened = await state_of(step, self._compute)
            except (CorruptError, InvalidError, NotFoundError) as error:  # torn, or just removed
                log.warning("job %s: %s", wish.job, error)
                failure = failure or error
            except TenplexError as error:
                return None, error
            else:
                return await self._found(wish, step, state, opened), None
        return None, failure

    async def _found(self, wish: Wish, step: Persisted, state: State, opened: OpenCheckpoint) -> Found:
        settings = wish.known.settings_json
        plan = await self._plan(wish, state.layout_json, state.values, frozenset())
        then = Description(
            step.snapshot, state.layout_json, settings, opened.manifest.created_ns, True, state.values
        )
        base = Base(state.txid, state.layout_json, source=state.source, lost=wish.lost)
        message = f"without {_named(wish.lost)}: back at step {state.step}, persisted at {step.place.url}"
        known = self._branched(wish, then, settings_with(settings, opened, is_own=True))
        return Found(base, known, plan, message)

    def _branched(self, wish: Wish, then: Description, settings_json: bytes) -> Description:
        """Returns ``then`` with the settings that the job has after it went back to it."""
        since = wish.head.snapshot.generation + 1
        settings = branch_off(settings_json, since, then.snapshot.generation, then.snapshot.step)
        return replace(then, settings_json=settings)

    async def _plan(
        self, wish: Wish, layout_json: bytes, values: bytes, lost: frozenset[NodeName]
    ) -> dict[str, Any]:
        return await self._compute(
            plan_summary,
            layout_json,
            wish.wanted.layout_json,
            wish.drop,
            lost=tuple(sorted(lost)),
            values=values,
        )


def _is_before(snapshot: SnapshotId, now: SnapshotId, known: Description) -> bool:
    if snapshot.step is None or now.step is None or snapshot.step >= now.step:
        return False
    return is_past_of(known.settings_json, snapshot.generation, snapshot.step)


def _step(found: Found) -> int:
    return found.known.snapshot.step or 0


def _named(nodes: Iterable[NodeName]) -> str:
    return ", ".join(sorted(nodes))
