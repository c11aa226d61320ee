"""Handlers with a small life of their own, for real servers on real sockets."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager

import trio

from tenplexfs._pb import control_pb2, local_pb2, peer_pb2
from tenplexfs.errors import NotFoundError, PreconditionError
from tenplexfs.rpc.server import serve


class Control:
    """Keeps jobs in a dict; `closed` counts streams that were closed."""

    def __init__(self):
        self.jobs = {}
        self.closed = trio.Event()
        self.started = trio.Event()

    async def create_job(self, request):
        self.jobs[request.name] = job = control_pb2.Job(name=request.name, generation=1, state="empty")
        return job

    async def get_job(self, request):
        if request.job not in self.jobs:
            raise NotFoundError(f"job {request.job}: no such job", job=request.job, known=sorted(self.jobs))
        return self.jobs[request.job]

    async def plan(self, request):
        raise ZeroDivisionError("a bug")

    async def abort(self, request):
        self.started.set()
        try:
            await trio.sleep_forever()
        finally:
            self.closed.set()

    async def remove_job(self, request):
        raise PreconditionError(f"tensors {'x' * 50_000} end", count=1)

    async def reconfigure(self, request):
        for done in range(40):
            yield control_pb2.Progress(phase="staging", bytes_done=done, bytes_total=40)
        if request.job == "broken":
            raise ExceptionGroup("of a nursery", [NotFoundError("job broken: no such job")])
        yield control_pb2.Progress(phase="done")

    notify_resources = rollback = reconfigure

    async def watch_job(self, request):
        try:
            yield control_pb2.Job(name=request.job)
            await trio.sleep_forever()
        finally:
            self.closed.set()


class Peer:
    def __init__(self):
        self.calls = []
        self.closed = trio.Event()

    async def hello(self, request):
        return peer_pb2.HelloReply(node="node0", version="1", incarnation=f"after {request.node}")

    async def stage(self, request):
        try:
            yield peer_pb2.StageProgress(bytes_done=1, bytes_total=2)
            if request.job == "slow":
                await trio.sleep_forever()
            yield peer_pb2.StageProgress(bytes_done=2, bytes_total=2)
        finally:
            self.closed.set()

    async def switch(self, request):
        self.calls.append(("switch", request.job, request.HasField("head")))
        return peer_pb2.SwitchReply()

    async def drop(self, request):
        self.calls.append(("drop", request.job, request.txid))
        return peer_pb2.DropReply()

    async def describe(self, request):
        return peer_pb2.DescribeReply(layout_json="{}", created_ns=7)

    async def inventory(self, request):
        return peer_pb2.InventoryReply(parts=[peer_pb2.StoredPart(copies_of=[request.job])])

    async def sums(self, request):
        return peer_pb2.SumsReply(sums=request.txid.encode())

    async def persist(self, request):
        yield peer_pb2.PersistReply(files=request.url.encode())

    async def collect(self, request):
        return peer_pb2.CollectReply(is_complete=True, values=request.leader.encode())

    async def stop_at(self, request):
        return peer_pb2.StopAtReply(told={0: request.step})

    async def lease(self, request):
        return peer_pb2.LeaseReply(lease_id=request.lease_id or "new")

    async def release(self, request):
        self.calls.append(("release", request.lease_id))
        return peer_pb2.ReleaseReply()


class Local:
    async def status(self, request):
        return local_pb2.StatusReply(node="node0", pid=1)

    async def list_jobs(self, request):
        return local_pb2.ListJobsReply()

    async def import_(self, request):
        yield control_pb2.Progress(phase="done", message=request.path)

    async def restore(self, request):
        yield control_pb2.Progress(phase="done", message=request.url)

    async def set_job(self, request):
        yield control_pb2.Progress(phase="done", message=request.settings_json)

    async def history(self, request):
        return local_pb2.HistoryReply(json=request.job)

    async def rebuild_registry(self, request):
        return local_pb2.RebuildRegistryReply(json="{}")

    async def verify(self, request):
        yield local_pb2.VerifyReply(bytes_done=1, bytes_total=1)

    async def stop(self, request):
        return local_pb2.StopReply()


class Arrays:
    """Arrays by (rank, path) of one snapshot; counts who has them open."""

    def __init__(self, arrays, txid="0" * 16):
        self.arrays = arrays
        self.txid = txid
        self.open_count = 0

    def array(self, rank, path):
        return self.arrays.get((rank, path))

    @contextmanager
    def open_arrays(self, job, txid):
        if txid != self.txid:
            raise NotFoundError(f"job {job} txid {txid}: no such snapshot here", job=job)
        self.open_count += 1
        try:
            yield self
        finally:
            self.open_count -= 1


@asynccontextmanager
async def running(*, ranges=None, listen="127.0.0.1:0", **more):
    """A server with fakes; gives (address, control, peer)."""
    async with trio.open_nursery() as nursery:
        control, peer = Control(), Peer()
        parts = {
            "control": control,
            "peer": peer,
            "ranges": ranges or Arrays({}),
            "local": Local(),
            "socket": None,
        }
        async with serve(nursery, listen=listen, **(parts | more)) as address:
            yield address, control, peer
        nursery.cancel_scope.cancel()
