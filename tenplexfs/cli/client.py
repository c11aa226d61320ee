"""The daemon on this machine, over its Unix socket."""

from __future__ import annotations

import os
import socket as socket_library
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tenplexfs._pb import control_pb2, dataset_pb2, local_pb2, members_pb2
from tenplexfs.errors import UnavailableError
from tenplexfs.rpc.connection import Connection

__all__ = ["Daemon", "find_socket", "job_content", "to_axes"]

_CALL_S = 60.0
_LONG_S = 24 * 3600.0


def find_socket(given: str | None) -> str:
    """Returns the socket of the daemon: as given, else by environment, else of the mount we stand in.

    Raises:
        UnavailableError: There is none.
    """
    if socket := given or os.environ.get("TENPLEXFS_SOCKET"):
        return socket
    try:
        here = Path(os.environ.get("TENPLEXFS_MOUNT") or Path.cwd())
        for directory in (here, *here.parents):
            endpoint = directory / ".tenplexfs" / "endpoint"
            if endpoint.is_file():
                return endpoint.read_text().strip().removeprefix("unix:")
    except OSError as error:
        raise UnavailableError(f"no daemon answers around the working directory: {error}") from error
    raise UnavailableError(
        "no daemon: give --socket, set TENPLEXFS_SOCKET or TENPLEXFS_MOUNT, or stand in a mount"
    )


def to_axes(mesh: Mapping[str, int]) -> list[control_pb2.Axis]:
    """Returns ``mesh`` as messages, in order."""
    return [control_pb2.Axis(name=name, size=size) for name, size in mesh.items()]


def job_content(job: control_pb2.Job) -> dict[str, Any]:
    """Returns ``job`` for machines, without its layout."""
    return {
        "name": job.name,
        "generation": job.generation,
        "step": job.step if job.HasField("step") else None,
        "txid": job.txid,
        "state": job.state,
        "mesh": {axis.name: axis.size for axis in job.mesh},
        "nodes": {name: list(job.nodes[name].ranks) for name in sorted(job.nodes)},
        "survives_node_losses": job.survives_node_losses,
        "message": job.message or None,
    }


class Daemon:
    """Calls to the daemon behind ``socket``. Every call has a deadline."""

    def __init__(self, socket: str) -> None:
        self.socket = socket
        self._path = f"{Path(socket).absolute()}.grpc"
        self._connection = Connection(f"unix:{self._path}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def _call(self, method: str, request: object, timeout_s: float = _CALL_S) -> Any:  # noqa: ANN401
        with self._reached():
            return self._connection.call(method, request, deadline_s=timeout_s)

    def _stream(self, method: str, request: object, timeout_s: float | None) -> Iterator[Any]:
        with self._reached():
            yield from self._connection.stream(method, request, deadline_s=timeout_s or _LONG_S)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Says in words what it means that nobody listens on the socket."""
        try:
            yield
        except UnavailableError as error:
            if self._listens():
                raise
            message = f"no daemon answers on {self.socket}: is it running? (tenplexfs serve)"
            raise UnavailableError(message, socket=self.socket) from error

    def _listens(self) -> bool:
        with socket_library.socket(socket_library.AF_UNIX) as probe:
            try:
                probe.connect(self._path)
            except OSError:
                return False
        return True

    def status(self) -> local_pb2.StatusReply:
        """Returns what the daemon is and holds."""
        reply: local_pb2.StatusReply = self._call("Local/Status", local_pb2.StatusRequest())
        return reply

    def jobs(self) -> list[control_pb2.Job]:
        """Returns every job."""
        return list(self._call("Local/ListJobs", local_pb2.ListJobsRequest()).jobs)

    def job(self, name: str) -> control_pb2.Job:
        """Returns one job."""
        job: control_pb2.Job = self._call("Control/GetJob", control_pb2.GetJobRequest(job=name))
        return job

    def create_job(self, name: str, layout_json: str, settings_json: str) -> control_pb2.Job:
        """Returns the job, made now or there already just so."""
        request = control_pb2.CreateJobRequest(
            name=name, layout_json=layout_json, settings_json=settings_json
        )
        job: control_pb2.Job = self._call("Control/CreateJob", request)
        return job

    def remove_job(self, name: str) -> control_pb2.Job:
        """Returns the job as it was."""
        job: control_pb2.Job = self._call("Control/RemoveJob", control_pb2.RemoveJobRequest(job=name))
        return job

    def plan(self, request: control_pb2.PlanRequest) -> str:
        """Returns what a reconfiguration would move, as JSON."""
        return str(self._call("Control/Plan", request, _LONG_S).json)

    def reconfigure(
        self, request: control_pb2.ReconfigureRequest, timeout_s: float | None
    ) -> Iterator[control_pb2.Progress]:
        """Yields the progress of the transaction."""
        return self._stream("Control/Reconfigure", request, timeout_s)

    def import_state(
        self, request: local_pb2.ImportRequest, timeout_s: float | None
    ) -> Iterator[control_pb2.Progress]:
        """Yields the progress of the import."""
        return self._stream("Local/Import", request, timeout_s)

    def notify(
        self, request: control_pb2.NotifyResourcesRequest, timeout_s: float | None
    ) -> Iterator[control_pb2.Progress]:
        """Yields the progress of what the devices make of the job."""
        return self._stream("Control/NotifyResources", request, timeout_s)

    def rollback(
        self, request: control_pb2.RollbackRequest, timeout_s: float | None
    ) -> Iterator[control_pb2.Progress]:
        """Yields the progress of the transaction."""
        return self._stream("Control/Rollback", request, timeout_s)

    def restore(
        self, request: local_pb2.RestoreRequest, timeout_s: float | None
    ) -> Iterator[control_pb2.Progress]:
        """Yields the progress of the transaction."""
        return self._stream("Local/Restore", request, timeout_s)

    def set_job(
        self, request: local_pb2.SetJobRequest, timeout_s: float | None
    ) -> Iterator[control_pb2.Progress]:
        """Yields the progress of the transaction."""
        return self._stream("Local/SetJob", request, timeout_s)

    def history(self, job: str) -> str:
        """Returns the steps that a job can go back to, as JSON."""
        return str(self._call("Local/History", local_pb2.HistoryRequest(job=job)).json)

    def rebuild_registry(self, *, write: bool, force: bool) -> str:
        """Returns what the heads of a lost registry would be, or are now, as JSON."""
        request = local_pb2.RebuildRegistryRequest(write=write, force=force)
        return str(self._call("Local/RebuildRegistry", request).json)

    def add_dataset(
        self, request: dataset_pb2.AddDatasetRequest, timeout_s: float | None
    ) -> Iterator[control_pb2.Progress]:
        """Yields the progress of the index, then that of the switch."""
        return self._stream("Datasets/Add", request, timeout_s)

    def remove_dataset(
        self, request: dataset_pb2.RemoveDatasetRequest, timeout_s: float | None
    ) -> Iterator[control_pb2.Progress]:
        """Yields the progress of the switch."""
        return self._stream("Datasets/Remove", request, timeout_s)

    def nodes(self) -> members_pb2.ListNodesReply:
        """Returns every node."""
        reply: members_pb2.ListNodesReply = self._call("Members/List", members_pb2.ListNodesRequest())
        return reply

    def drain(self, node: str, deadline_s: float, timeout_s: float) -> Iterator[members_pb2.DrainProgress]:
        """Yields how far each job is."""
        request = members_pb2.DrainRequest(node=node, deadline_s=deadline_s)
        return self._stream("Members/Drain", request, timeout_s)

    def forget(self, node: str) -> None:
        """Makes the daemons forget a node that is gone."""
        self._call("Members/Forget", members_pb2.ForgetRequest(node=node))

    def verify(self, job: str) -> Iterator[local_pb2.VerifyReply]:
        """Yields progress and what is corrupt."""
        return self._stream("Local/Verify", local_pb2.VerifyRequest(job=job), None)

    def stop(self) -> None:
        """Asks the daemon to unmount and end; the store stays."""
        self._call("Local/Stop", local_pb2.StopRequest())
