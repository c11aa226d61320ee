"""Snapshots that were shown and are the newest no more: kept as steps, or there until nobody holds them.

Belongs to the trio thread.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from tenplexfs.core.snapshot import Head, JobName, NodeName, SnapshotId, TxId
from tenplexfs.core.transaction import kept_steps
from tenplexfs.runtime.leases import LeaseTable
from tenplexfs.runtime.namespace import Handles, Namespace
from tenplexfs.runtime.snapshot import Snapshot
from tenplexfs.runtime.spilling import spilled
from tenplexfs.runtime.tree import SLOT_SHIFT
from tenplexfs.storage.processes import find_processes
from tenplexfs.storage.store import Store

__all__ = ["GRACE_S", "Held", "Past", "Relief", "Shown", "job_memory_bytes", "keep_steps", "step_name"]

KEEP_STEPS = 2
# A walk that meets what was freed is walked once more by the kernel; two in a row would be an error.
GRACE_S = 0.25
_SPARE_S = 1800.0  # more than lies between two saves


def keep_steps(settings_json: bytes) -> int:
    """Returns how many steps a job keeps, the newest one counted."""
    return int(json.loads(settings_json or b"{}").get("keep_steps", KEEP_STEPS))


def job_memory_bytes(settings_json: bytes) -> int | None:
    """Returns what a job may take of each node's store, or None where only the store limits it."""
    limit = json.loads(settings_json or b"{}").get("memory")
    return None if limit is None else int(limit)


def step_name(job: JobName, step: int) -> JobName:
    """Returns the name in the mount's root of a step; no job can be called so."""
    return JobName(f"{job}@{step}")


@dataclass(frozen=True)
class Shown:
    """What the mount shows of a job.

    Attributes:
        slot: Of the namespace, under the job's name.
        step_slot: Under the name of its step; None while the job has no state.
        stored: Whether a part of it is in this node's store.
    """

    head: Head
    view: Snapshot
    slot: int
    step_slot: int | None
    stored: bool
    settings_json: bytes
    survives_node_losses: int


@dataclass(frozen=True)
class Held:
    """A snapshot of the past, and why it is still here."""

    job: JobName
    snapshot: SnapshotId
    kept: bool
    handles: Handles
    leases: int


@dataclass
class _Retired:
    shown: Shown
    job: JobName
    since_s: float
    released: bool  # all nodes show the next one
    held_on: tuple[NodeName, ...]  # where bytes are kept for handles of this node


class Past:
    """The past of every job.

    Args:
        shown: What the mount shows now, of each job.
        retain_s: How long a snapshot is kept for others that do not say they are done with it.
        grace_s: How long it is kept at least.
        spill: Where open files go when there is no room.
    """

    def __init__(
        self,
        *,
        store: Store,
        tree: Namespace,
        leases: LeaseTable,
        retain_s: float,
        grace_s: float,
        spill: Path | None,
        shown: Mapping[JobName, Shown],
    ) -> None:
        self._store = store
        self._tree = tree
        self._leases = leases
        self._retain_s = retain_s
        self._grace_s = grace_s
        self._spill = spill
        self._shown = shown
        self._retired: dict[TxId, _Retired] = {}

    def __contains__(self, txid: object) -> bool:
        return txid in self._retired

    def held(self) -> Iterator[Held]:
        """Yields what is here, and why."""
        for txid, retired in self._retired.items():
            yield Held(
                retired.job,
                retired.shown.head.snapshot,
                txid in self._kept(retired.job),
                self._handles(retired.shown),
                self._leases.count(txid),
            )

    def shown_of(self, job: JobName) -> list[Shown]:
        """Returns the snapshots of ``job``, the newest first."""
        return [retired.shown for retired in reversed(self._retired.values()) if retired.job == job]

    def settings(self) -> list[bytes]:
        """Returns those of all snapshots that this node shows or has shown and holds."""
        retired = [each.shown.settings_json for each in self._retired.values()]
        return [*(each.settings_json for each in self._shown.values()), *retired]

    async def add(self, job: JobName, shown: Shown, *, released: bool) -> None:
        """Takes over what the mount showed until now, or, at the start, a step that is kept."""
        handles = self._handles(shown)
        # Whoever has a file or directory open goes on reading there, also what is on other nodes.
        held_on = shown.view.fetcher.others() if handles.files or handles.directories else ()
        shown.view.fetcher.hold(held_on)
        txid = shown.head.snapshot.txid
        self._retired[txid] = _Retired(shown, job, trio.current_time(), released, held_on)
        for retired in [each for each in self._retired.values() if each.job == job]:
            await self._name(retired)

    def release(self, job: JobName, txid: TxId | None = None) -> None:
        """Takes note that all nodes show the next one; of all snapshots of the job when ``txid`` is None."""
        for retired in self._retired.values():
            if retired.job == job and txid in (None, retired.shown.head.snapshot.txid):
                retired.released = True

    async def sweep(self) -> None:
        """Frees what is not kept and what nobody holds, and spare files for which nothing comes."""
        now_s = trio.current_time()
        for txid, retired in list(self._retired.items()):
            if txid in self._kept(retired.job):
                continue
            await self._name(retired)
            age_s = now_s - retired.since_s
            handles = self._handles(retired.shown)
            waited_for = not retired.released or handles.directories or self._leases.count(txid)
            is_held = age_s < self._grace_s or handles.files or (waited_for and age_s <= self._retain_s)
            if is_held or self._retired.get(txid) is not retired:  # another sweep may have been quicker
                continue
            await self._free(txid)
        if self._store.spare_bytes:
            idle_s = _SPARE_S if self._shown else 0.0
            await trio.to_thread.run_sync(self._store.free_spares, idle_s)

    async def relieve(self) -> bool:
        """Frees the oldest snapshot that nobody has a file of open, and returns whether there was one.

        Who is in it by a directory or a lease alone gets ESTALE. Of the kept steps the oldest goes where the
        next one would take its place anyway. When all have open files, those of the oldest are spilled.
        """
        past = sorted(self._retired.items(), key=lambda item: item[1].since_s)
        able = [txid for txid, retired in past if retired.released and not self._is_needed(txid)]
        for txid in able:
            if not self._handles(self._retired[txid].shown).files:
                await self._free(txid)
                return True
        if self._spill is None:
            return False
        make = partial(spilled, directory=self._spill)
        for txid in able:
            if await self._tree.replace_contents(_slots(self._retired[txid].shown), make):
                await self._free(txid)
                return True
        return False

    def holders(self) -> list[str]:
        """Returns the processes that hold files of the past. For a worker thread: it reads ``/proc``."""
        slots = {slot for retired in list(self._retired.values()) for slot in _slots(retired.shown)}
        device = self._tree.device

        def is_past(of: str, inode: int) -> bool:
            in_mount = of == device and inode >> SLOT_SHIFT in slots
            return in_mount or self._store.is_held_elsewhere(of, inode)

        return [str(process) for process in find_processes(is_past)]

    def _is_needed(self, txid: TxId) -> bool:
        job = self._retired[txid].job
        shown = self._shown.get(job)
        count = keep_steps(shown.settings_json) if shown is not None else 1
        return txid in self._kept(job, count - 1)

    async def _free(self, txid: TxId) -> None:
        retired = self._retired.pop(txid)
        shown, step = retired.shown, retired.shown.head.snapshot.step
        if step is not None and self._tree.slot(name := step_name(retired.job, step)) == shown.step_slot:
            await self._tree.retract_and_invalidate(name)
        shown.view.fetcher.drop(retired.held_on)
        for slot in _slots(shown):
            self._tree.free(slot)
        shown.view.arrays.release()
        await trio.to_thread.run_sync(self._store.drop, retired.job, txid)

    async def _name(self, retired: _Retired) -> None:
        """Lists a kept step in the root, and takes the name from one that is not kept."""
        shown, step = retired.shown, retired.shown.head.snapshot.step
        if step is None:
            return
        name = step_name(retired.job, step)
        if self._tree.slot(name) != shown.step_slot:  # it leads to a newer snapshot of that step by now
            return
        if shown.head.snapshot.txid in self._kept(retired.job):
            await self._tree.list_name(name)
        else:
            await self._tree.retract_and_invalidate(name)

    def _kept(self, job: JobName, count: int | None = None) -> frozenset[TxId]:
        shown = self._shown.get(job)
        if shown is None:
            return frozenset()
        past = [each.shown.head.snapshot for each in self._retired.values() if each.job == job]
        count = keep_steps(shown.settings_json) if count is None else count
        return kept_steps(shown.head.snapshot, past, count=count) if count else frozenset()

    def _handles(self, shown: Shown) -> Handles:
        found = [self._tree.open_handles(slot) for slot in _slots(shown)]
        return Handles(sum(each.files for each in found), sum(each.directories for each in found))


class Relief:
    """Frees what is not needed when the store has no room; called in its worker threads.

    Attributes:
        others: Asked, in order, when nothing is left that is past; each returns whether it freed something.
    """

    def __init__(self, past: Past) -> None:
        self.others: list[Callable[[], Awaitable[bool]]] = []
        self._past = past

    def relieve(self) -> bool:
        """Frees the oldest that nobody has a file of open, or what is not of the newest snapshot."""
        return any(trio.from_thread.run(relieve) for relieve in (self._past.relieve, *self.others))

    def holders(self) -> list[str]:
        """Returns who has files of it open or mapped."""
        return self._past.holders()


def _slots(shown: Shown) -> set[int]:
    return {slot for slot in (shown.slot, shown.step_slot) if slot is not None}
