"""What training processes ask: saves, loads, whether to stop, what the job is."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from tenplexfs.core.snapshot import Head, JobName, NodeName, check_job_name, parse_snapshot
from tenplexfs.errors import InvalidError, NotFoundError
from tenplexfs.formats.frames import MAX_FDS
from tenplexfs.runtime.attempts import Attempt, RankSave, SaveRequest, save_txid
from tenplexfs.runtime.jobs import JobTable
from tenplexfs.runtime.member import Member
from tenplexfs.runtime.saving import Saves
from tenplexfs.runtime.snapshot import Snapshot
from tenplexfs.runtime.stopping import Stops
from tenplexfs.unix.loads import Load
from tenplexfs.unix.regions import Regions, SharedRegions
from tenplexfs.unix.requests import field, optional, save_request, sums_of
from tenplexfs.unix.server import Answer

__all__ = ["ClientSession", "Parts"]

Message = Mapping[str, Any]

_WAIT_S = 5.0  # of one answer; the client asks again
_STATES = ("empty", "ready", "reconfiguring", "undecided", "paused", "failed")


@dataclass(frozen=True)
class Parts:
    """What sessions use of the daemon.

    Attributes:
        mount: Where this node shows its tree, if it does.
        state: Returns the state of a job, as ``status.json`` says it.
        create: Makes a job for a save of its only rank.
        create_job: Makes a job of a layout.
        shared: Regions that several ranks of this node load.
    """

    node: NodeName
    mount: str | None
    version: str
    member: Member
    table: JobTable
    saves: Saves
    stops: Stops
    state: Callable[[JobName], str]
    create: Callable[[SaveRequest], Awaitable[None]]
    create_job: Callable[[JobName, bytes], Awaitable[object]]
    shared: SharedRegions


class ClientSession:
    """One connection of a training process. Implements `unix.server.Session`."""

    def __init__(self, parts: Parts, pid: int) -> None:
        self._parts = parts
        self._pid = pid
        self._saves: dict[int, RankSave] = {}
        self._attempt: Attempt | None = None
        self._load: Load | None = None
        self._regions: Regions | None = None
        self._asker: tuple[JobName, int, int, str] | None = None
        self._ops: Mapping[str, Callable[[Message], Awaitable[Answer]]] = {
            "hello": self._hello,
            "save.begin": self._save_begin,
            "save.files": self._save_files,
            "save.seal": self._save_seal,
            "save.wait": self._save_wait,
            "save.abort": self._save_abort,
            "save.outcome": self._save_outcome,
            "load": self._load_begin,
            "load.files": self._load_files,
            "load.data": self._load_data,
            "regions": self._regions_begin,
            "regions.document": self._regions_document,
            "regions.here": self._regions_here,
            "regions.files": self._regions_files,
            "regions.read": self._regions_read,
            "create": self._create,
            "should_stop": self._should_stop,
            "env": self._env,
            "wait": self._wait,
        }

    async def handle(self, op: str, message: Message) -> Answer:
        """Returns the answer to a request."""
        handler = self._ops.get(op)
        if handler is None:
            raise InvalidError(f"op {op!r}: unknown to tenplexfs {self._parts.version}")
        return await handler(message)

    async def close(self) -> None:
        """Drops what was begun and not finished."""
        for each in (self._load, self._regions):
            if each is not None:
                each.close()
        if self._asker is not None:
            self._parts.stops.leave(*self._asker)
        for rank in self._saves.values():
            await self._parts.saves.leave(rank)

    async def _hello(self, message: Message) -> Answer:
        await trio.lowlevel.checkpoint()
        return {"node": self._parts.node, "tenplexfs": self._parts.version, "pid": os.getpid()}, ()

    # Saves

    async def _save_begin(self, message: Message) -> Answer:
        request = save_request(message)
        if request.job not in self._parts.member.shown() and request.rank == 0 and message.get("world") == 1:
            await self._parts.create(request)
        rank = await self._parts.saves.begin(request)
        name = len(self._saves) + 1
        self._saves[name] = rank
        base = rank.attempt.base.head.snapshot.text
        plan = rank.plan
        return {
            "save": name,
            "base": base,
            "files": len(plan.arrangement.sizes),
            "places": plan.places,
            "ranks": rank.ranks_here,
        }, ()

    def _rank(self, message: Message) -> RankSave:
        found = self._saves.get(field(message, "save", int))
        if found is None:
            raise InvalidError(f"{message.get('op')}: no save {message['save']} on this connection")
        found.attempt.check()
        return found

    async def _save_files(self, message: Message) -> Answer:
        rank = self._rank(message)
        first, count = field(message, "first", int), field(message, "count", int)
        files = rank.files
        assert files is not None
        numbers = range(len(files.names))[first : first + min(count, MAX_FDS)]
        return {}, await trio.to_thread.run_sync(rank.attempt.ingest.hand_out, files, numbers)

    async def _save_seal(self, message: Message) -> Answer:
        rank = self._rank(message)
        await self._parts.saves.seal(rank, sums_of(message, len(rank.request.tensors.paths)))
        self._attempt = rank.attempt
        return {}, ()

    async def _save_wait(self, message: Message) -> Answer:
        if self._attempt is None:
            raise InvalidError("save.wait: nothing was sealed on this connection")
        head = await self._parts.saves.wait(self._attempt, _WAIT_S)
        if head is None:
            return {"snapshot": None, "missing": self._attempt.missing(self._parts.member.node)}, ()
        return {"snapshot": head.snapshot.text}, ()

    async def _save_abort(self, message: Message) -> Answer:
        await self._parts.saves.leave(self._rank(message))
        return {}, ()

    async def _save_outcome(self, message: Message) -> Answer:
        """Says whether a save of this run was committed before the daemon was restarted."""
        job, step = self._job(message), field(message, "step", int)
        run = field(message, "run", str)
        await trio.lowlevel.checkpoint()
        shown = self._parts.member.shown().get(job)
        for view in self._parts.member.views(job):
            assert shown is not None  # or there would be no views
            txid = save_txid(job, shown.settings_json, view.id.generation, step, run)
            if (view.id.step, view.id.txid) == (step, txid):
                return {"snapshot": view.id.text}, ()
        return {"snapshot": None}, ()

    # Loads

    def _view(self, message: Message) -> Snapshot:
        job = self._job(message)
        step, wanted = optional(message, "step", int), optional(message, "snapshot", str)
        txid = None if wanted is None else parse_snapshot(wanted).txid
        view = self._parts.member.view(job, step=step, txid=txid)
        if view.id.step is None:
            raise NotFoundError(f"job {job}: has no state yet; save or import first")
        return view

    async def _load_begin(self, message: Message) -> Answer:
        job, rank = self._job(message), field(message, "rank", int)
        member, view = self._parts.member, self._view(message)
        if rank >= view.ptc.world_size:
            raise NotFoundError(f"job {job}: no rank {rank}: it has {view.ptc.world_size}")
        if self._load is not None:
            self._load.close()
        made = partial(Load, view, rank, partial(member.open_arrays, job, view.id.txid))
        load = self._load = await trio.to_thread.run_sync(made)
        return {
            "snapshot": view.id.text,
            "document": view.structure(rank),
            **load.tensors,
        }, ()

    def _loading(self) -> Load:
        if self._load is None:
            raise InvalidError("load: nothing was begun on this connection")
        return self._load

    async def _load_files(self, message: Message) -> Answer:
        sizes, fds = await self._loading().files(field(message, "first", int))
        return {"sizes": sizes}, fds

    async def _load_data(self, message: Message) -> Answer:
        data, count = await self._loading().data(field(message, "first", int))
        return {"data": data, "count": count}, ()

    # Regions of tensors, for a load under another layout

    async def _regions_begin(self, message: Message) -> Answer:
        view = self._view(message)
        if self._regions is not None:
            self._regions.close()
        opened = partial(self._parts.member.open_arrays, view.job, view.id.txid)
        made = partial(Regions, view, opened, self._parts.shared)
        regions = self._regions = await trio.to_thread.run_sync(made)
        return {
            "snapshot": view.id.text,
            "node": self._parts.node,
            "layout": view.layout_json,
            "documents": regions.of_rank,
        }, ()

    def _reading(self) -> Regions:
        if self._regions is None:
            raise InvalidError("regions: nothing was begun on this connection")
        return self._regions

    async def _regions_document(self, message: Message) -> Answer:
        await trio.lowlevel.checkpoint()
        return {"document": self._reading().document(field(message, "index", int))}, ()

    async def _regions_here(self, message: Message) -> Answer:
        await trio.lowlevel.checkpoint()
        return {"places": self._reading().here(field(message, "keys", list))}, ()

    async def _regions_files(self, message: Message) -> Answer:
        await trio.lowlevel.checkpoint()
        sizes, fds = self._reading().files(field(message, "first", int))
        return {"sizes": sizes}, fds

    async def _regions_read(self, message: Message) -> Answer:
        items, uses = field(message, "items", list), field(message, "uses", int)
        fd, size = await self._reading().read(items, uses)
        return {"size": size}, [fd]

    # The job

    async def _create(self, message: Message) -> Answer:
        await self._parts.create_job(self._job(message), field(message, "layout", bytes))
        return {}, ()

    async def _should_stop(self, message: Message) -> Answer:
        job = self._job(message)
        head = self._head(job)
        loaded = optional(message, "snapshot", str)
        now = head.snapshot.generation
        generation = now if loaded is None else parse_snapshot(loaded).generation
        rank, process = field(message, "rank", int), field(message, "process", str)
        step, for_all = field(message, "step", int), field(message, "for_all", bool)
        stops = self._parts.stops
        self._asker = job, generation, rank, process
        with trio.move_on_after(_WAIT_S):
            while True:
                changed = stops.changed
                answer = stops.ask(job, generation, now, rank, process, step, for_all=for_all, pid=self._pid)
                if answer is not None:
                    return {"stop": answer}, ()
                await changed.wait()
        return {"stop": None}, ()

    async def _env(self, message: Message) -> Answer:
        await trio.lowlevel.checkpoint()
        return self._describe(self._job(message)), ()

    async def _wait(self, message: Message) -> Answer:
        job, state = self._job(message), optional(message, "state", str)
        generation, step = optional(message, "generation", int), optional(message, "step", int)
        left_s = message.get("left_s")
        if state not in (None, *_STATES):
            raise InvalidError(f"wait: state {state!r}: need one of {', '.join(_STATES)}")
        with trio.move_on_after(_WAIT_S if left_s is None else min(float(left_s), _WAIT_S)):
            while True:
                changed = self._parts.table.changed
                now = self._describe(job) if job in self._parts.member.shown() else None
                if (
                    now is not None
                    and state in (None, now["state"])
                    and now["generation"] >= (generation or 0)
                    and (step is None or (now["step"] is not None and now["step"] >= step))
                ):
                    return {"job": now}, ()
                await changed.wait()
        return {"job": None}, ()

    def _describe(self, job: JobName) -> dict[str, Any]:
        head = self._head(job)
        view = self._parts.member.shown()[job].view
        return {
            "job": job,
            "node": self._parts.node,
            "mount": self._parts.mount,
            "state": self._parts.state(job),
            "generation": head.snapshot.generation,
            "step": head.snapshot.step,
            "snapshot": head.snapshot.text,
            "mesh": dict(view.ptc.layout.mesh.axes),
            "world_size": view.ptc.world_size,
            "nodes": {node: list(ranks) for node, ranks in view.ptc.nodes.items()},
            "ranks": list(view.ptc.nodes.get(self._parts.node, ())),
            "stop": self._parts.stops.stop_at(job, head.snapshot.generation),
        }

    def _head(self, job: JobName) -> Head:
        shown = self._parts.member.shown().get(job)
        if shown is None:
            raise NotFoundError(f"job {job}: no such job")
        return shown.head

    def _job(self, message: Message) -> JobName:
        return check_job_name(field(message, "job", str))
