"""What the daemon answers to schedulers, people and the local command line."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import trio

from tenplexfs._pb import control_pb2, local_pb2
from tenplexfs.core.snapshot import Head, NodeName, TxId, check_job_name, check_node_name
from tenplexfs.daemon.clients import Clients
from tenplexfs.daemon.config import Config
from tenplexfs.daemon.deciding import Deciding
from tenplexfs.daemon.job_settings import check_changes, check_settings, with_changes
from tenplexfs.daemon.keeping import Keeping, Restore
from tenplexfs.daemon.node_calls import Nodes
from tenplexfs.daemon.transactions import Transaction, Transactions
from tenplexfs.daemon.view import VERSION, Metrics, View, progress_message, rebuilt_document
from tenplexfs.errors import InvalidError, NotFoundError
from tenplexfs.formats.requests import Request, has_request
from tenplexfs.rpc.messages import arguments_of
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.coordinator import Change, Coordinator
from tenplexfs.runtime.going_back import Rollback
from tenplexfs.runtime.importer import Import, import_state
from tenplexfs.runtime.jobs import JobTable
from tenplexfs.runtime.member import Member
from tenplexfs.runtime.orders import Description, Progress, Report
from tenplexfs.runtime.planning import Target
from tenplexfs.runtime.rebuilding import Rebuilder
from tenplexfs.storage.places import check_url
from tenplexfs.storage.store import Mismatch

__all__ = ["Service"]


class Service:
    """Implements `rpc.handlers.ControlHandler` and `LocalHandler`."""

    def __init__(
        self,
        *,
        config: Config,
        member: Member,
        table: JobTable,
        coordinator: Coordinator,
        compute: Compute,
        transactions: Transactions,
        view: View,
        metrics: Metrics,
        new_txid: Callable[[], TxId],
        stop: Callable[[], None],
        clients: Clients,
        deciding: Deciding,
        nodes: Nodes,
        keeping: Keeping,
        rebuilder: Rebuilder,
    ) -> None:
        self._config = config
        self._member = member
        self._table = table
        self._coordinator = coordinator
        self._compute = compute
        self._transactions = transactions
        self._view = view
        self._metrics = metrics
        self._new_txid = new_txid
        self._stop = stop
        self._clients = clients
        self._deciding = deciding
        self._nodes = nodes
        self._keeping = keeping
        self._rebuilder = rebuilder

    # Control

    async def create_job(self, request: control_pb2.CreateJobRequest) -> control_pb2.Job:
        """Makes a job without state."""
        job = check_job_name(request.name)
        settings = check_settings(request.settings_json, insecure=self._config.insecure)
        layout = request.layout_json.encode()
        if not layout.strip():
            raise InvalidError(f"job {job}: no layout given")
        await self._coordinator.create(job, layout, settings)
        return self._view.job(job)

    async def plan(self, request: control_pb2.PlanRequest) -> control_pb2.PlanSummary:
        """Says what a reconfiguration would move."""
        change = Change(check_job_name(request.job), _target(request), tuple(request.drop))
        summary = await self._coordinator.plan(change, operations=request.operations)
        return control_pb2.PlanSummary(json=json.dumps({"format": "tenplexfs-plan", "version": 1, **summary}))

    async def reconfigure(
        self, request: control_pb2.ReconfigureRequest
    ) -> AsyncIterator[control_pb2.Progress]:
        """Moves a job to another layout."""
        job = check_job_name(request.job)
        change = Change(
            job,
            _target(request),
            tuple(request.drop),
            request.expected_generation or None,
            request.request_id,
            arguments_of(request),
        )

        async def work(report: Report) -> Head:
            return await self._clients.stopped(
                job,
                request.stop_timeout_s,
                report,
                lambda stop: self._coordinator.reconfigure(change, report, stop=stop),
            )

        async for message in self._watch(
            self._transactions.start(job, request.request_id, self._counted(work), change.arguments)
        ):
            yield message

    async def notify_resources(
        self, request: control_pb2.NotifyResourcesRequest
    ) -> AsyncIterator[control_pb2.Progress]:
        """Makes a job what its parallelizer says for the devices that it has from now on."""
        job = check_job_name(request.job)
        nodes = {check_node_name(name): count for name, count in request.nodes.items()}
        self._view.job(job)
        self._nodes.check_known(nodes)
        asked = Request(job, request.request_id, arguments_of(request))

        async def work(report: Report) -> Head:
            return await self._deciding.notify(asked, nodes, report, stop_timeout_s=request.stop_timeout_s)

        transaction = self._transactions.start(job, asked.id, self._counted(work), asked.arguments)
        async for message in self._watch(transaction):
            yield message

    async def get_job(self, request: control_pb2.GetJobRequest) -> control_pb2.Job:
        """Returns a job as it is."""
        return self._view.job(check_job_name(request.job))

    async def watch_job(self, request: control_pb2.GetJobRequest) -> AsyncIterator[control_pb2.Job]:
        """Yields a job at each change, until it is removed."""
        job = check_job_name(request.job)
        last = None
        while True:
            changed = self._table.changed
            try:
                now = self._view.job(job)
            except NotFoundError:
                if last is None:
                    raise
                return
            if now != last:
                last = now
                yield now
            await changed.wait()

    async def rollback(self, request: control_pb2.RollbackRequest) -> AsyncIterator[control_pb2.Progress]:
        """Gives a job the state of an earlier step."""
        job = check_job_name(request.job)
        asked = Rollback(job, request.step, request.skip_samples, request.request_id, arguments_of(request))
        self._view.job(job)

        async def work(report: Report) -> Head:
            return await self._clients.stopped(
                job, 0.0, report, lambda stop: self._keeping.roll_back(asked, report, stop)
            )

        transaction = self._transactions.start(job, asked.request_id, self._counted(work), asked.arguments)
        async for message in self._watch(transaction):
            yield message

    async def abort(self, request: control_pb2.AbortRequest) -> control_pb2.Job:
        """Drops the transaction that this daemon runs for the job, unless it has committed already."""
        job = check_job_name(request.job)
        running = self._transactions.running(job)
        if running is not None:
            running.scope.cancel()
            await running.ended.wait()
        return self._view.job(job)

    async def remove_job(self, request: control_pb2.RemoveJobRequest) -> control_pb2.Job:
        """Removes a job and its bytes; one that is not there is removed already."""
        job = check_job_name(request.job)
        try:
            was = self._view.job(job)
        except NotFoundError:
            was = control_pb2.Job(name=job)
        await self._coordinator.remove(job)
        return was

    # Local

    async def status(self, request: local_pb2.StatusRequest) -> local_pb2.StatusReply:
        """Returns the state of the daemon."""
        document = self._view.status()
        if self._member.past():
            document["holders"] = await trio.to_thread.run_sync(self._member.holders)
        return local_pb2.StatusReply(
            node=self._config.node,
            version=VERSION,
            pid=os.getpid(),
            mount=str(self._config.mount or ""),
            listen=self._config.listen,
            store_used_bytes=self._member.store.used_bytes,
            store_limit_bytes=self._member.store.limit_bytes,
            jobs=self._view.jobs(),
            json=json.dumps(document),
        )

    async def list_jobs(self, request: local_pb2.ListJobsRequest) -> local_pb2.ListJobsReply:
        """Returns every job, by name."""
        return local_pb2.ListJobsReply(jobs=self._view.jobs())

    async def import_(self, request: local_pb2.ImportRequest) -> AsyncIterator[control_pb2.Progress]:
        """Gives a job the state of a file."""
        path = Path(request.path)
        if not path.is_absolute():
            raise InvalidError(f"import: path {request.path!r}: need an absolute one")
        asked = Import(
            check_job_name(request.job),
            path,
            request.step,
            tuple(request.ignore),
            request.request_id,
            arguments_of(request),
        )

        async def work(report: Report) -> Head:
            return await import_state(
                asked,
                coordinator=self._coordinator,
                member=self._member,
                compute=self._compute,
                new_txid=self._new_txid,
                report=report,
            )

        transaction = self._transactions.start(
            asked.job, asked.request_id, self._counted(work), asked.arguments
        )
        async for message in self._watch(transaction):
            yield message

    async def rebuild_registry(
        self, request: local_pb2.RebuildRegistryRequest
    ) -> local_pb2.RebuildRegistryReply:
        """Says what the heads of a lost registry would be, and writes them when told to."""
        survey = await self._rebuilder.survey()
        if request.write:
            await self._rebuilder.write(survey, force=request.force)
        content = rebuilt_document(survey, written=request.write)
        return local_pb2.RebuildRegistryReply(json=json.dumps(content))

    async def history(self, request: local_pb2.HistoryRequest) -> local_pb2.HistoryReply:
        """Returns the steps of a job that are kept or persisted."""
        job = check_job_name(request.job)
        self._view.job(job)
        return local_pb2.HistoryReply(json=json.dumps(await self._keeping.history(job)))

    async def restore(self, request: local_pb2.RestoreRequest) -> AsyncIterator[control_pb2.Progress]:
        """Makes a job of a persisted step, or replaces the state of one."""
        given = bool(request.layout_json or request.mesh or request.nodes)
        asked = Restore(
            check_job_name(request.job),
            check_url(request.url),
            request.step if request.HasField("step") else None,
            _target(request) if given else None,
            request.request_id,
            arguments_of(request),
            replace=request.replace,
        )

        async def work(report: Report) -> Head:
            return await self._keeping.restore(asked, report)

        transaction = self._transactions.start(
            asked.job, asked.request_id, self._counted(work), asked.arguments
        )
        async for message in self._watch(transaction):
            yield message

    async def set_job(self, request: local_pb2.SetJobRequest) -> AsyncIterator[control_pb2.Progress]:
        """Changes settings of a job, once its ranks have stopped."""
        job = check_job_name(request.job)
        asked = Request(job, request.request_id, arguments_of(request))
        changes = check_changes(request.settings_json, insecure=self._config.insecure)
        self._view.job(job)

        async def change(known: Description, head: Head) -> bytes:
            step, layout = head.snapshot.step, known.layout_json
            return await self._compute(with_changes, known.settings_json, changes, step, layout)

        async def work(report: Report) -> Head:
            async def switch(stop: Callable[[Head], Awaitable[None]]) -> Head:
                head, known = await self._coordinator.current(job)
                is_made = has_request(known.settings_json, asked)
                if not is_made and await change(known, head) != known.settings_json:
                    await stop(head)
                return await self._coordinator.change_settings(
                    job, asked.id, change, report, arguments=asked.arguments
                )

            return await self._clients.stopped(job, 0.0, report, switch)

        transaction = self._transactions.start(job, asked.id, self._counted(work), asked.arguments)
        async for message in self._watch(transaction):
            yield message

    async def verify(self, request: local_pb2.VerifyRequest) -> AsyncIterator[local_pb2.VerifyReply]:
        """Makes all sums again."""
        job = check_job_name(request.job) if request.job else None
        if job is not None:
            self._view.job(job)
        store = self._member.store
        total = sum(
            {(r.file, r.offset): r.nbytes for s in store.snapshots(job) for r in s.arrays.values()}.values()
        )
        yield local_pb2.VerifyReply(bytes_total=total)
        found: Iterator[Mismatch] = store.verify(job)
        while (wrong := await trio.to_thread.run_sync(next, found, None)) is not None:
            rank, path = wrong.keys[0]
            mismatch = local_pb2.Mismatch(
                job=wrong.job, txid=wrong.id.txid, rank=rank, path=path, message=str(wrong)
            )
            yield local_pb2.VerifyReply(bytes_total=total, mismatches=[mismatch])
        yield local_pb2.VerifyReply(bytes_done=total, bytes_total=total)

    async def stop(self, request: local_pb2.StopRequest) -> local_pb2.StopReply:
        """Answers, then unmounts and ends the daemon."""
        self._stop()
        return local_pb2.StopReply()

    # Both

    def _counted(self, work: Callable[[Report], Awaitable[Head]]) -> Callable[[Report], Awaitable[Head]]:
        async def count(report: Report) -> Head:
            outcome = "failed"
            try:
                head = await work(report)
                outcome = "done"
            finally:
                self._metrics.switches.labels(outcome).inc()
            return head

        return count

    async def _watch(self, transaction: Transaction) -> AsyncIterator[control_pb2.Progress]:
        async for progress in transaction.watch():
            yield progress_message(progress)
        done = transaction.progress
        last = Progress("done", done.message, done.nodes, done.plan)
        yield progress_message(last, self._view.job(transaction.job))


def _target(
    request: control_pb2.PlanRequest | control_pb2.ReconfigureRequest | local_pb2.RestoreRequest,
) -> Target:
    mesh = {axis.name: axis.size for axis in request.mesh}
    if len(mesh) < len(request.mesh):
        raise InvalidError(f"mesh: an axis is named twice in {[axis.name for axis in request.mesh]}")
    nodes: dict[NodeName, int] = {check_node_name(name): count for name, count in request.nodes.items()}
    if request.layout_json and (mesh or nodes):
        raise InvalidError("give a layout, or a mesh with or without nodes, not both")
    if not (request.layout_json or mesh or nodes):
        raise InvalidError("give a layout, a mesh or nodes")
    return Target(request.layout_json.encode(), mesh, nodes or None)
