"""What the daemon says about jobs and itself, to every edge: messages, status files, metrics."""

from __future__ import annotations

import importlib.metadata
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from tenplexfs._pb import control_pb2
from tenplexfs.core.snapshot import JobName
from tenplexfs.daemon.config import Config
from tenplexfs.daemon.transactions import Transaction, Transactions
from tenplexfs.errors import NotFoundError
from tenplexfs.formats.pauses import paused_of
from tenplexfs.formats.requests import without_requests
from tenplexfs.runtime.jobs import JobTable
from tenplexfs.runtime.member import Member, Shown
from tenplexfs.runtime.orders import Progress
from tenplexfs.runtime.past import Held
from tenplexfs.runtime.rebuilding import Survey

__all__ = ["VERSION", "Metrics", "View", "progress_message", "rebuilt_document"]

VERSION = importlib.metadata.version("tenplexfs")


class Metrics:
    """What is counted, for Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.switches = Counter(
            "tenplexfs_switches",
            "Transactions coordinated here, by outcome",
            ["outcome"],
            registry=self.registry,
        )
        self.staged_bytes = Counter(
            "tenplexfs_staged_bytes", "Bytes copied or fetched into new snapshots", registry=self.registry
        )
        self.store_used = Gauge(
            "tenplexfs_store_used_bytes", "Bytes of the store's files", registry=self.registry
        )
        self.store_limit = Gauge("tenplexfs_store_limit_bytes", "Limit of the store", registry=self.registry)
        self.samples = Gauge(
            "tenplexfs_sample_bytes",
            "Bytes of samples got for the window, by index and by where they were",
            ["index", "source"],
            registry=self.registry,
        )
        self.jobs = Gauge("tenplexfs_jobs", "Jobs, by state", ["state"], registry=self.registry)


class Kept(Protocol):
    """Says what is kept of a job beside its newest snapshot."""

    def status(self, job: JobName) -> Mapping[str, object]:
        """Returns what ``status.json`` says of it."""
        ...

    def survives(self, job: JobName, shown: Shown) -> int:
        """Returns how many node losses a job survives at this moment."""
        ...


class View:
    """Reads the parts of the daemon; changes nothing. Belongs to the trio thread.

    Attributes:
        keeping: Set once it is made.
    """

    keeping: Kept | None = None

    def __init__(
        self, config: Config, member: Member, table: JobTable, transactions: Transactions, metrics: Metrics
    ) -> None:
        self._config = config
        self._member = member
        self._table = table
        self._transactions = transactions
        self._metrics = metrics

    def state(self, job: JobName) -> str:
        """Returns "empty", "ready", "reconfiguring", "undecided", "paused" or "failed"."""
        running = self._transactions.running(job)
        shown = self._member.shown().get(job)
        if running is not None and running.progress.is_undecided:
            return "undecided"
        if running is not None or self._member.is_staging(job):
            return "reconfiguring"
        if shown is None or self._table.failure(job) is not None:
            return "failed"
        if paused_of(shown.settings_json) is not None:
            return "paused"
        return "empty" if shown.head.snapshot.step is None else "ready"

    def settings(self, job: JobName) -> bytes:
        """Returns the settings of the newest snapshot that is shown, requests included; empty: none is."""
        shown = self._member.shown().get(job)
        return b"" if shown is None else shown.settings_json

    def job(self, job: JobName) -> control_pb2.Job:
        """Returns a job as a message.

        Raises:
            NotFoundError: There is no such job.
        """
        shown = self._member.shown().get(job)
        if shown is None:
            return self._job_that_is_not_shown(job)
        return self.job_shown(job, shown)

    def job_shown(self, job: JobName, shown: Shown) -> control_pb2.Job:
        """Returns a job as a message, with what is or was shown of it."""
        snapshot, ptc = shown.head.snapshot, shown.view.ptc
        return control_pb2.Job(
            name=job,
            generation=snapshot.generation,
            step=snapshot.step,
            txid=snapshot.txid,
            state=self.state(job),
            mesh=[control_pb2.Axis(name=name, size=size) for name, size in ptc.layout.mesh.axes],
            nodes={node: control_pb2.RankList(ranks=ranks) for node, ranks in ptc.nodes.items()},
            layout_json=shown.view.layout_json.decode(),
            settings_json=without_requests(shown.settings_json).decode(),
            survives_node_losses=self._survives(job, shown),
            message=self._message(job),
        )

    def _job_that_is_not_shown(self, job: JobName) -> control_pb2.Job:
        head = self._table.heads().get(job)
        if head is None and self._table.failure(job) is None:
            raise NotFoundError(f"job {job}: no such job")
        if head is None:
            return control_pb2.Job(name=job, state="failed", message=self._message(job))
        snapshot = head.snapshot
        return control_pb2.Job(
            name=job,
            generation=snapshot.generation,
            step=snapshot.step,
            txid=snapshot.txid,
            state=self.state(job),
            message=self._message(job),
        )

    def _survives(self, job: JobName, shown: Shown) -> int:
        return shown.survives_node_losses if self.keeping is None else self.keeping.survives(job, shown)

    def job_names(self) -> list[JobName]:
        """Returns the name of every job, sorted."""
        return self._table.jobs()

    def jobs(self) -> list[control_pb2.Job]:
        """Returns every job, by name."""
        return [self.job(job) for job in self._table.jobs()]

    def job_status(self, job: JobName) -> dict[str, object]:
        """Returns what ``jobs/<job>/status.json`` says."""
        shown = self._member.shown().get(job)
        head = shown.head if shown is not None else self._table.heads().get(job)
        running = self._transactions.running(job)
        return {
            "format": "tenplexfs-job-status",
            "version": 1,
            "name": job,
            "state": self.state(job),
            "generation": head.snapshot.generation if head else None,
            "step": head.snapshot.step if head else None,
            "txid": head.snapshot.txid if head else None,
            "progress": _progress(running.progress) if running else None,
            "members": list(head.nodes) if head else [],
            "survives_node_losses": self._survives(job, shown) if shown else 0,
            **(self.keeping.status(job) if self.keeping is not None else {}),
            "message": self._message(job) or self._away(),
        }

    def event(self, transaction: Transaction) -> tuple[str | None, dict[str, object]]:
        """Returns where to tell of a transaction that has ended, if anywhere, and what."""
        job = transaction.job
        shown = self._member.shown().get(job)
        url = None if shown is None else json.loads(shown.settings_json or b"{}").get("webhook")
        failure = transaction.failure
        kind = "failed" if failure is not None else "paused" if self.state(job) == "paused" else "done"
        head = shown.head if shown is not None else None
        ptc = shown.view.ptc if shown is not None else None
        return url, {
            "event": kind,
            "request_id": transaction.request_id or None,
            "message": failure.message if failure is not None else self._message(job),
            "job": {
                "name": job,
                "state": self.state(job),
                "generation": head.snapshot.generation if head else None,
                "step": head.snapshot.step if head else None,
                "txid": head.snapshot.txid if head else None,
                "mesh": dict(ptc.layout.mesh.axes) if ptc else {},
                "nodes": {node: list(ranks) for node, ranks in ptc.nodes.items()} if ptc else {},
            },
        }

    def status(self) -> dict[str, object]:
        """Returns what ``status.json`` says."""
        store = self._member.store
        return {
            "format": "tenplexfs-status",
            "version": 1,
            "node": self._config.node,
            "tenplexfs": VERSION,
            "pid": os.getpid(),
            "time": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds"),
            "mount": str(self._config.mount) if self._config.mount else None,
            "listen": self._config.listen,
            "http": self._config.http,
            "incarnation": store.incarnation,
            "registry": {"node": self._config.registry, "away": self._table.registry_away},
            "peers": dict(self._config.peers),
            "store": {
                "path": str(store.path),
                "used_bytes": store.used_bytes,
                "spare_bytes": store.spare_bytes,
                "limit_bytes": store.limit_bytes,
                "past": [_held(past) for past in self._member.past() if not past.kept],
                "kept": [_held(past) for past in self._member.past() if past.kept],
            },
            "jobs": {job: self.job_status(job) for job in self._table.jobs()},
        }

    def metrics(self) -> bytes:
        """Returns the metrics in Prometheus' text format."""
        self._metrics.store_used.set(self._member.store.used_bytes)
        self._metrics.store_limit.set(self._member.store.limit_bytes)
        if self._member.datasets is not None:
            for digest, counts in self._member.datasets.counts().items():
                for source, count in asdict(counts).items():
                    self._metrics.samples.labels(digest, source).set(count)
        self._metrics.jobs.clear()
        for job in self._table.jobs():
            self._metrics.jobs.labels(self.state(job)).inc()
        return generate_latest(self._metrics.registry)

    def _message(self, job: JobName) -> str | None:
        """Returns why a job is failed or paused."""
        shown = self._member.shown().get(job)
        return self._table.failure(job) or (paused_of(shown.settings_json) if shown is not None else None)

    def _away(self) -> str | None:
        away = self._table.registry_away
        return f"nothing switches, the registry is away: {away}" if away else None


def _held(past: Held) -> Mapping[str, object]:
    return {
        "job": past.job,
        "generation": past.snapshot.generation,
        "step": past.snapshot.step,
        "txid": past.snapshot.txid,
        "open_files": past.handles.files,
        "open_directories": past.handles.directories,
        "leases": past.leases,
    }


def rebuilt_document(survey: Survey, *, written: bool) -> dict[str, object]:
    """Returns what ``registry rebuild --json`` prints."""
    return {
        "written": written,
        "silent": list(survey.silent),
        "jobs": [
            {
                "name": each.job,
                "generation": each.head.snapshot.generation if each.head else None,
                "step": each.head.snapshot.step if each.head else None,
                "txid": each.head.snapshot.txid if each.head else None,
                "nodes": list(each.head.nodes) if each.head else [],
                "missing": list(each.missing),
                "newer": [str(snapshot) for snapshot in each.newer],
            }
            for each in survey.jobs
        ],
    }


def progress_message(progress: Progress, job: control_pb2.Job | None = None) -> control_pb2.Progress:
    """Returns ``progress`` as a message."""
    plan = progress.plan
    return control_pb2.Progress(
        phase=progress.phase,
        bytes_done=progress.bytes_done,
        bytes_total=progress.bytes_total,
        nodes={
            node: control_pb2.NodeProgress(bytes_done=done, bytes_total=total)
            for node, (done, total) in progress.nodes.items()
        },
        message=progress.message,
        plan=None if plan is None else control_pb2.PlanSummary(json=json.dumps(plan)),
        job=job,
    )


def _progress(progress: Progress) -> Mapping[str, object]:
    return {
        "phase": progress.phase,
        "message": progress.message,
        "bytes_done": progress.bytes_done,
        "bytes_total": progress.bytes_total,
        "nodes": {
            node: {"bytes_done": done, "bytes_total": total} for node, (done, total) in progress.nodes.items()
        },
    }
