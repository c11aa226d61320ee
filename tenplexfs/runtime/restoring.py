"""State from a persisted step: every node reads what it needs of it, by ranges, as of any other source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from tenplexfs.core.ptc import PTC
from tenplexfs.core.snapshot import JobName, NodeName, SnapshotId, TxId
from tenplexfs.errors import InvalidError, NotFoundError
from tenplexfs.formats.checkpoint import INDEXES
from tenplexfs.formats.dataset_settings import datasets_back, datasets_of, put_datasets
from tenplexfs.formats.keep_settings import Persist
from tenplexfs.formats.lineage import is_past_of, with_past_of
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.coordinator import State
from tenplexfs.runtime.planning import expand
from tenplexfs.runtime.protocols import PeerReader, Ranges
from tenplexfs.runtime.shares import PERSISTED, layout_of_persisted, what_is
from tenplexfs.storage.checkpoint_reader import BlockReader, OpenCheckpoint, find_steps, index_of
from tenplexfs.storage.places import Place
from tenplexfs.storage.samples.indexes import Indexes

__all__ = ["Found", "PersistedPeers", "find_step", "own_steps", "settings_with", "state_of", "take_indexes"]


@dataclass(frozen=True)
class Found:
    """A persisted step.

    Attributes:
        place: Its directory.
        siblings: The directory that has it, and the indexes of datasets.
    """

    snapshot: SnapshotId
    place: Place
    siblings: Place


def find_step(url: str, job: JobName, step: int | None) -> Found:
    """Returns a persisted step of ``job``; for a worker thread.

    Args:
        url: Where jobs are persisted, the directory of one, or that of a step.
        job: Whose steps are looked for first, where there are several.
        step: None: the newest.

    Raises:
        NotFoundError: There is none; the message lists those that are there.
    """
    root = Place(url)
    listed: dict[SnapshotId, Place] = {}
    for place in (root / job, root):
        listed = {snapshot: place / name for snapshot, name in find_steps(place).items()}
        matching = [each for each in listed if step in (None, each.step)]
        if matching:
            newest = max(matching, key=lambda each: (each.generation, each.step or 0))
            return Found(newest, listed[newest], place)
        if listed:
            break
    if not listed:
        raise NotFoundError(f"{root.url}: no persisted step of job {job} there")
    steps = ", ".join(str(each.step) for each in listed)
    raise NotFoundError(f"{root.url}: step {step} of job {job} is not there; persisted: {steps}")


def own_steps(persist: Persist | None, job: JobName, settings_json: bytes) -> dict[int, Found]:
    """Returns the persisted steps of a job; for a worker thread.

    Of several of one step the one that the job came from counts, else the one of the newest generation.
    """
    if persist is None:
        return {}
    place = Place(persist.to) / job
    steps = find_steps(place)

    def order(each: SnapshotId) -> tuple[bool, int]:
        return is_past_of(settings_json, each.generation, each.step or 0), each.generation

    return {
        each.step: Found(each, place / steps[each], place)
        for each in sorted(steps, key=order)
        if each.step is not None
    }


async def state_of(found: Found, compute: Compute) -> tuple[State, OpenCheckpoint]:
    """Returns a persisted step as a state that a job can take over.

    Raises:
        CorruptError: A sum is wrong.
    """
    opened = await trio.to_thread.run_sync(OpenCheckpoint.open, found.place)
    layout = await compute(layout_of_persisted, opened.layout_json)
    snapshot = opened.manifest.snapshot
    if snapshot != found.snapshot or snapshot.step is None:
        raise InvalidError(f"{found.place.url}: its manifest is of {snapshot}")
    state = State(snapshot.txid, layout, snapshot.step, source=found.place.url, values=opened.values)
    return state, opened


def settings_with(now_json: bytes, opened: OpenCheckpoint, *, is_own: bool) -> bytes:
    """Returns the settings of a job with the datasets and cursors of a persisted step.

    Args:
        now_json: Of the job.
        opened: The step.
        is_own: Whether the step is one of the job's own, so that the job gets its past back too.
    """
    then = opened.manifest.settings_json
    settings = datasets_back(now_json, then)
    states = {**datasets_of(then), **datasets_of(settings)}
    settings = put_datasets(settings, states.values())
    return with_past_of(settings, then) if is_own else settings


def take_indexes(found: Found, settings_json: bytes, indexes: Indexes) -> None:
    """Gets the indexes of the datasets of a persisted step that are not here; for a worker thread.

    Raises:
        TenplexError: One is not there, or not what its digest says.
    """
    for state in datasets_of(settings_json).values():
        if not indexes.has(state.digest):
            aside = indexes.path / f".get-{state.digest}"
            try:
                with aside.open("wb") as file:
                    for data in found.siblings.parts(f"{INDEXES}/{state.digest}"):
                        file.write(data)
                indexes.take(state.digest, aside)
            finally:
                aside.unlink(missing_ok=True)


class PersistedPeers:
    """A `PeerReader` that has the node `PERSISTED` read from a persisted step, and asks others as ever.

    Args:
        url: The directory of the step.
    """

    def __init__(self, url: str, peers: PeerReader, compute: Compute) -> None:
        self._url = url
        self._peers = peers
        self._compute = compute
        self._opened: tuple[OpenCheckpoint, PTC] | None = None
        self._lock = trio.Lock()

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
        """Streams ``ranges`` in order, each byte checked; the contract is that of `PeerReader.fetch`."""
        if node != PERSISTED:
            await self._peers.fetch(
                node, job, txid, ranges, write, deadline_s=deadline_s, patience_s=patience_s
            )
            return
        async with self._lock:
            if self._opened is None:
                opened = await trio.to_thread.run_sync(OpenCheckpoint.open, Place(self._url))
                expanded = await self._compute(expand, opened.layout_json)
                self._opened = opened, expanded.ptc
        opened, ptc = self._opened

        def run() -> None:
            find = index_of(opened.manifest.files, partial(what_is, ptc))
            with BlockReader(opened.place, find) as reader:
                offset = 0
                for message in reader.stream([(each.rank, each.path, each.boxes) for each in ranges]):
                    trio.from_thread.check_cancelled()
                    write(offset, message)
                    offset += len(message)

        await trio.to_thread.run_sync(run)
