"""What the daemon answers about datasets: adding (an index is built by a process of its own), removing."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import trio

from tenplexfs._pb import control_pb2, dataset_pb2
from tenplexfs.core.cursor import Cursor, Tail
from tenplexfs.core.datasets import DatasetState, Spread, spread_of
from tenplexfs.core.snapshot import Head, JobName, NodeName, check_job_name
from tenplexfs.daemon.transactions import Transaction, Transactions
from tenplexfs.daemon.view import View, progress_message
from tenplexfs.errors import (
    ConflictError,
    ExistsError,
    InvalidError,
    NotFoundError,
    TenplexError,
    internal,
)
from tenplexfs.formats.dataset_settings import check_dataset_name, datasets_of, put_datasets
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.formats.requests import Request, has_request
from tenplexfs.rpc.messages import arguments_of
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.coordinator import Coordinator
from tenplexfs.runtime.datasets import Datasets
from tenplexfs.runtime.orders import Description, Progress, Report
from tenplexfs.storage.samples.recipe import BuiltFile, Recipe, build_index
from tenplexfs.storage.samples.routes import is_url

__all__ = ["DatasetService"]

log = logging.getLogger(__name__)

_LOOK_S = 0.1


@dataclass(frozen=True)
class _Wanted:
    """A dataset that somebody wants, before its index is known."""

    job: JobName
    name: str
    recipe: Recipe
    batch: int | None
    seed: int
    shuffle: bool | None
    tail: Tail | None
    unsplit: bool
    epoch: int
    consumed: int

    @property
    def is_shuffled(self) -> bool:
        """Whether the order is a permutation."""
        return not self.unsplit if self.shuffle is None else self.shuffle


class DatasetService:
    """Implements `rpc.handlers.DatasetsHandler`.

    Args:
        nursery: Where indexes are built, whoever watches.
    """

    def __init__(
        self,
        *,
        node: NodeName,
        datasets: Datasets,
        coordinator: Coordinator,
        transactions: Transactions,
        view: View,
        nursery: trio.Nursery,
    ) -> None:
        self._node = node
        self._datasets = datasets
        self._coordinator = coordinator
        self._transactions = transactions
        self._view = view
        self._nursery = nursery
        self._running: dict[tuple[JobName, str], Transaction] = {}

    async def add(self, request: dataset_pb2.AddDatasetRequest) -> AsyncIterator[control_pb2.Progress]:
        """Builds the index, then switches the job to a snapshot that has the dataset, unless it has.

        Raises:
            ConflictError: Another request is adding it.
        """
        wanted = _wanted(request)
        self._view.job(wanted.job)
        key = (wanted.job, wanted.name)
        running, arguments = self._running.get(key), arguments_of(request)
        if running is None or running.request_id != request.request_id:
            if running is not None:
                raise ConflictError(f"job {wanted.job}: dataset {wanted.name} is being added already")
            running = self._running[key] = Transaction(wanted.job, request.request_id, arguments)
            self._nursery.start_soon(self._add, running, wanted)
        running.check_arguments(arguments)
        async for progress in running.watch():
            yield progress_message(progress)
        last = Progress("done", running.progress.message, running.progress.nodes)
        yield progress_message(last, self._view.job(wanted.job))

    async def remove(self, request: dataset_pb2.RemoveDatasetRequest) -> AsyncIterator[control_pb2.Progress]:
        """Switches the job to a snapshot without the dataset; indexes go when no snapshot names them."""
        job, name = check_job_name(request.job), check_dataset_name(request.name)
        self._view.job(job)

        async def change(known: Description, head: Head) -> bytes:
            await trio.lowlevel.checkpoint()
            states = datasets_of(known.settings_json)
            if name not in states:
                raise NotFoundError(
                    f"job {job}: no dataset {name}; there are: {', '.join(sorted(states)) or 'none'}"
                )
            del states[name]
            return put_datasets(known.settings_json, _begun(states, head, _spread(known)))

        async def work(report: Report) -> Head:
            return await self._coordinator.change_settings(
                job, request.request_id, change, report, arguments=arguments
            )

        arguments = f"dataset remove {name}".encode()
        transaction = self._transactions.start(job, request.request_id, work, arguments)
        async for progress in transaction.watch():
            yield progress_message(progress)
        done = Progress("done", f"dataset {name} is removed", transaction.progress.nodes)
        yield progress_message(done, self._view.job(job))

    async def _add(self, running: Transaction, wanted: _Wanted) -> None:
        try:
            with running.scope, self._datasets.building():
                settings = self._view.settings(wanted.job)
                if not has_request(settings, Request(wanted.job, running.request_id, running.arguments)):
                    _check_not_another(wanted, datasets_of(settings))
                built = await self._build(running, wanted)
                running.head = await self._switch(running, wanted, built)
                running.report(Progress("done", _summary(built), running.progress.nodes))
        except TenplexError as error:
            running.failure = error
        except Exception as error:  # as in `Transactions`
            log.exception("job %s: dataset %s was not added", wanted.job, wanted.name)
            running.failure = internal(error)
        finally:
            if running.head is None and running.failure is None:
                running.failure = ConflictError(f"job {wanted.job}: the daemon is stopping")
            del self._running[wanted.job, wanted.name]
            running.ended.set()
            running.report(running.progress)

    async def _build(self, running: Transaction, wanted: _Wanted) -> BuiltFile:
        directory = self._datasets.indexes.path
        progress = directory / f".progress-{wanted.job}-{wanted.name}"
        compute = Compute()
        running.report(Progress("indexing"))

        async def look() -> None:
            while True:
                await trio.sleep(_LOOK_S)
                done = await trio.to_thread.run_sync(_progress_of, progress)
                if done is not None and done != running.progress.nodes.get(self._node):
                    running.report(Progress("indexing", nodes={self._node: done}))

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(look)
                failure: TenplexError | None = None
                try:
                    built = await compute(build_index, wanted.recipe, directory, progress)
                except TenplexError as error:
                    failure = error
                nursery.cancel_scope.cancel()
        finally:
            compute.close()
            progress.unlink(missing_ok=True)
        if failure is not None:
            raise type(failure)(f"dataset {wanted.name}: {failure.message}", **failure.details) from failure
        return built

    async def _switch(self, running: Transaction, wanted: _Wanted, built: BuiltFile) -> Head:
        async def change(known: Description, head: Head) -> bytes:
            await trio.lowlevel.checkpoint()
            states = datasets_of(known.settings_json)
            _check_not_another(wanted, states)
            if (there := states.get(wanted.name)) is not None:
                _check_same(wanted, there, built.digest, head.snapshot.step)
                return known.settings_json
            spread = _spread(known)
            batch = wanted.batch or spread.global_batch or 1
            state = DatasetState(
                name=wanted.name,
                digest=built.digest,
                index_bytes=built.index_bytes,
                kind=built.kind,
                sources=wanted.recipe.sources,
                added_by=self._node,
                count=built.count,
                unsplit=wanted.unsplit,
                shuffle=wanted.is_shuffled,
                own_batch=wanted.batch,
                own_tail=wanted.tail,
                tail=wanted.tail or Tail.KEEP,
                start=Cursor(wanted.epoch, wanted.consumed, batch, wanted.seed),
                start_step=head.snapshot.step or 0,
            )
            began = [*_begun(states, head, spread), state.begun(state.start, head.snapshot.step, spread)]
            return put_datasets(known.settings_json, began)

        async def work(report: Report) -> Head:
            return await self._coordinator.change_settings(
                wanted.job, running.request_id, change, report, arguments=running.arguments
            )

        transaction = self._transactions.start(wanted.job, running.request_id, work, running.arguments)
        async for progress in transaction.watch():
            running.report(progress)
        if transaction.head is None:
            raise ConflictError(f"job {wanted.job}: the transaction was aborted")
        return transaction.head


def _spread(known: Description) -> Spread:
    return spread_of(parse_layout(known.layout_json))


def _begun(states: Mapping[str, DatasetState], head: Head, spread: Spread) -> list[DatasetState]:
    """Returns the datasets of the generation after ``head``, each from where training is in it."""
    step = head.snapshot.step
    return [state.begun(state.cursor_at(step), step, spread) for state in states.values()]


def _check_not_another(wanted: _Wanted, states: Mapping[str, DatasetState]) -> None:
    """Refuses a dataset whose name another one has, as far as that can be told without an index."""
    there = states.get(wanted.name)
    if there is None:
        return
    if there.sources != wanted.recipe.sources:
        raise _another(wanted, f"of {', '.join(there.sources)}")
    was = (there.own_batch, there.own_tail, there.unsplit, there.shuffle, there.start.seed)
    if was != (wanted.batch, wanted.tail, wanted.unsplit, wanted.is_shuffled, wanted.seed):
        raise _another(wanted, "with another batch, tail, seed or order")


def _check_same(wanted: _Wanted, there: DatasetState, digest: str, step: int | None) -> None:
    if there.digest != digest:
        raise _another(wanted, "of other samples: another kind, or files that have changed")
    now = there.cursor_at(step)
    if (wanted.epoch or wanted.consumed) and (wanted.epoch, wanted.consumed) != (now.epoch, now.consumed):
        raise _another(wanted, f"at epoch {now.epoch}, {now.consumed} consumed")


def _another(wanted: _Wanted, how: str) -> ExistsError:
    return ExistsError(
        f"job {wanted.job}: has a dataset {wanted.name} already, {how}; to replace it, first "
        f"`tenplexfs dataset remove {wanted.job} {wanted.name}`"
    )


def _wanted(request: dataset_pb2.AddDatasetRequest) -> _Wanted:
    for source in request.sources:
        if not is_url(source) and not Path(source).is_absolute():
            raise InvalidError(f"dataset: source {source!r}: need an absolute path or a URL")
    if request.unsplit and (request.epoch or request.consumed):
        raise InvalidError("dataset: one that is unsplit has no place where training is in it")
    recipe = Recipe(
        sources=tuple(request.sources),
        kind=request.kind,
        members=request.members,
        record_bytes=request.record_bytes,
        skip_bytes=request.skip_bytes,
        dtype=request.dtype,
        shape=tuple(request.shape),
        sequence_length=request.sequence_length,
    )
    return _Wanted(
        check_job_name(request.job),
        check_dataset_name(request.name),
        recipe,
        request.global_batch or None,
        request.seed,
        request.shuffle if request.HasField("shuffle") else None,
        Tail(request.tail) if request.tail else None,
        request.unsplit,
        request.epoch,
        request.consumed,
    )


def _progress_of(file: Path) -> tuple[int, int] | None:
    try:
        done, total = file.read_text().split()
    except (OSError, ValueError):
        return None
    return int(done), int(total)


def _summary(built: BuiltFile) -> str:
    said = [f"{built.count} samples of {built.files} files ({built.kind})"]
    if built.short:
        more = f" and {len(built.short) - 1} more" if len(built.short) > 1 else ""
        said.append(f"shorter than the index says, reads of those samples will fail: {built.short[0]}{more}")
    if built.overlapping_count:
        said.append(f"{built.overlapping_count} samples overlap the one before")
    if built.empty_count:
        said.append(f"{built.empty_count} samples are empty")
    return "; ".join(said)
