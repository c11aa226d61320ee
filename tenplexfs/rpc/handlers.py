"""What the daemon gives to the rpc edge: one handler for each service.

Every method is called on the trio thread of `tenplexfs.rpc.server.serve`, in a cancel scope of its own that
ends when the client goes away or its deadline passes: work that outlives the call belongs to a nursery of the
daemon, and the call only watches it. A `TenplexError` becomes the status of the call, with its message and
details; anything else is logged with its traceback and becomes INTERNAL. Streams are async generators, closed
in the task that ran them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Protocol

from tenplexfs._pb import control_pb2, dataset_pb2, local_pb2, members_pb2, peer_pb2
from tenplexfs.core.snapshot import JobName, TxId
from tenplexfs.runtime.protocols import ArraySource

__all__ = [
    "ControlHandler",
    "DatasetsHandler",
    "LocalHandler",
    "MeetingHandler",
    "MembersHandler",
    "PeerHandler",
    "RangesHandler",
    "SamplesHandler",
]


class ControlHandler(Protocol):
    """What schedulers and people ask; see ``protos/tenplexfs/v1/control.proto``."""

    async def create_job(self, request: control_pb2.CreateJobRequest) -> control_pb2.Job:
        """Returns the job, made now or there already with the same layout and settings."""
        ...

    async def plan(self, request: control_pb2.PlanRequest) -> control_pb2.PlanSummary:
        """Returns what a reconfiguration would move; changes nothing."""
        ...

    def reconfigure(self, request: control_pb2.ReconfigureRequest) -> AsyncIterator[control_pb2.Progress]:
        """Yields the progress of the transaction; the last one is "done" and carries the job."""
        ...

    def notify_resources(
        self, request: control_pb2.NotifyResourcesRequest
    ) -> AsyncIterator[control_pb2.Progress]:
        """Yields progress as `reconfigure`, for the layout that the resources give."""
        ...

    async def get_job(self, request: control_pb2.GetJobRequest) -> control_pb2.Job:
        """Returns the job as it is now."""
        ...

    def watch_job(self, request: control_pb2.GetJobRequest) -> AsyncIterator[control_pb2.Job]:
        """Yields the job now, and again after each change, until it is removed."""
        ...

    def rollback(self, request: control_pb2.RollbackRequest) -> AsyncIterator[control_pb2.Progress]:
        """Yields progress as `reconfigure`, back to a step that is kept."""
        ...

    async def abort(self, request: control_pb2.AbortRequest) -> control_pb2.Job:
        """Returns the job after its running transaction, if any, was dropped."""
        ...

    async def remove_job(self, request: control_pb2.RemoveJobRequest) -> control_pb2.Job:
        """Returns the job as it was, only its name where there was none; its name and its bytes are gone."""
        ...


class PeerHandler(Protocol):
    """What another daemon asks; see ``protos/tenplexfs/v1/peer.proto``."""

    async def hello(self, request: peer_pb2.HelloRequest) -> peer_pb2.HelloReply:
        """Returns who this is."""
        ...

    def stage(self, request: peer_pb2.StageRequest) -> AsyncIterator[peer_pb2.StageProgress]:
        """Yields progress; ends once this node's part of the snapshot is staged."""
        ...

    async def switch(self, request: peer_pb2.SwitchRequest) -> peer_pb2.SwitchReply:
        """Returns once fresh opens see the head."""
        ...

    async def drop(self, request: peer_pb2.DropRequest) -> peer_pb2.DropReply:
        """Drops a snapshot; one that is not here is no error."""
        ...

    async def describe(self, request: peer_pb2.DescribeRequest) -> peer_pb2.DescribeReply:
        """Returns what is here of a snapshot, committed or staged."""
        ...

    async def inventory(self, request: peer_pb2.InventoryRequest) -> peer_pb2.InventoryReply:
        """Returns what is here of a job: parts of snapshots, and copies for other nodes."""
        ...

    async def sums(self, request: peer_pb2.SumsRequest) -> peer_pb2.SumsReply:
        """Returns the sums of the arrays that are here of a snapshot."""
        ...

    def persist(self, request: peer_pb2.PersistRequest) -> AsyncIterator[peer_pb2.PersistReply]:
        """Yields progress; the last one names the files that this node has written of a step."""
        ...

    async def collect(self, request: peer_pb2.CollectRequest) -> peer_pb2.CollectReply:
        """Returns what the node's ranks have saved of a step, or, after some patience, that it is not all."""
        ...

    async def stop_at(self, request: peer_pb2.StopAtRequest) -> peer_pb2.StopAtReply:
        """Holds answers to `should_stop`, publishes where to stop, or releases; returns what was told."""
        ...

    async def lease(self, request: peer_pb2.LeaseRequest) -> peer_pb2.LeaseReply:
        """Keeps the bytes of a snapshot for ``ttl_s`` from now."""
        ...

    async def release(self, request: peer_pb2.ReleaseRequest) -> peer_pb2.ReleaseReply:
        """Ends a lease; one that is over is no error."""
        ...


class RangesHandler(Protocol):
    """Where the bytes for other nodes are."""

    def open_arrays(self, job: JobName, txid: TxId) -> AbstractContextManager[ArraySource]:
        """Returns the local arrays of a snapshot, committed or staged, which stay until the context ends.

        Called in worker threads, often several at the same time: nothing here may wait for the trio thread.

        Raises:
            NotFoundError, StaleError: There is no such snapshot here (any more).
        """
        ...


class DatasetsHandler(Protocol):
    """What the command line asks about datasets; see ``protos/tenplexfs/v1/dataset.proto``."""

    def add(self, request: dataset_pb2.AddDatasetRequest) -> AsyncIterator[control_pb2.Progress]:
        """Yields progress; the last one is "done" and carries the job, which has the dataset."""
        ...

    def remove(self, request: dataset_pb2.RemoveDatasetRequest) -> AsyncIterator[control_pb2.Progress]:
        """Yields progress; the last one is "done" and carries the job, which has the dataset no more."""
        ...


class SamplesHandler(Protocol):
    """What other daemons ask about samples."""

    def index(self, request: dataset_pb2.IndexRequest) -> AsyncIterator[dataset_pb2.IndexReply]:
        """Yields the file of an index."""
        ...

    def read(self, request: dataset_pb2.ReadSamplesRequest) -> AsyncIterator[dataset_pb2.ReadSamplesReply]:
        """Yields which of the samples are here, and their bytes."""
        ...


class MembersHandler(Protocol):
    """What the command line asks about nodes; see ``protos/tenplexfs/v1/members.proto``."""

    async def list(self, request: members_pb2.ListNodesRequest) -> members_pb2.ListNodesReply:
        """Returns every node, by name."""
        ...

    def drain(self, request: members_pb2.DrainRequest) -> AsyncIterator[members_pb2.DrainProgress]:
        """Yields how far each job is; the last one is of no job, "done" or "failed"."""
        ...

    async def forget(self, request: members_pb2.ForgetRequest) -> members_pb2.ForgetReply:
        """Drops a node that is gone, here and on the living nodes."""
        ...


class MeetingHandler(Protocol):
    """What a daemon that joins asks, and what one tells the others."""

    async def meet(self, request: members_pb2.MeetRequest) -> members_pb2.MeetReply:
        """Returns the nodes that are known, and where the registry is."""
        ...

    async def forget(self, request: members_pb2.ForgetRequest) -> members_pb2.ForgetReply:
        """Drops a node that is gone, here."""
        ...


class LocalHandler(Protocol):
    """What the command line on this machine asks; see ``protos/tenplexfs/v1/local.proto``."""

    async def status(self, request: local_pb2.StatusRequest) -> local_pb2.StatusReply:
        """Returns the state of the daemon."""
        ...

    async def list_jobs(self, request: local_pb2.ListJobsRequest) -> local_pb2.ListJobsReply:
        """Returns every job, by name."""
        ...

    # `import` is a word of Python; the edge maps the method Import to this one.
    def import_(self, request: local_pb2.ImportRequest) -> AsyncIterator[control_pb2.Progress]:
        """Yields progress as `ControlHandler.reconfigure`, of state from a file."""
        ...

    def restore(self, request: local_pb2.RestoreRequest) -> AsyncIterator[control_pb2.Progress]:
        """Yields progress as `ControlHandler.reconfigure`, of a state that was persisted."""
        ...

    def set_job(self, request: local_pb2.SetJobRequest) -> AsyncIterator[control_pb2.Progress]:
        """Yields progress as `ControlHandler.reconfigure`, to the same state with other settings."""
        ...

    async def history(self, request: local_pb2.HistoryRequest) -> local_pb2.HistoryReply:
        """Returns the steps of a job that are kept or persisted."""
        ...

    async def rebuild_registry(
        self, request: local_pb2.RebuildRegistryRequest
    ) -> local_pb2.RebuildRegistryReply:
        """Returns what the heads of a lost registry would be, or are now."""
        ...

    def verify(self, request: local_pb2.VerifyRequest) -> AsyncIterator[local_pb2.VerifyReply]:
        """Yields progress, with the mismatches as they are found."""
        ...

    async def stop(self, request: local_pb2.StopRequest) -> local_pb2.StopReply:
        """Answers, then unmounts and ends the daemon."""
        ...
