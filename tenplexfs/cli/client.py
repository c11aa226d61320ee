"""The daemon on this machine, over its Unix socket."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from tenplexfs._pb import control_pb2, control_pb2_grpc, local_pb2, local_pb2_grpc
from tenplexfs.errors import TenplexError, UnavailableError, error_from_code

__all__ = ["Daemon", "find_socket", "job_content", "to_axes"]

Reply = TypeVar("Reply")

_CALL_S = 60.0
_LONG_S = 24 * 3600.0
# Layouts of large models, written out, are tens of MiB.
_OPTIONS = (("grpc.max_receive_message_length", 1 << 30), ("grpc.max_send_message_length", 1 << 30))


def find_socket(given: str | None) -> str:
    """Returns the socket of the daemon: as given, else by environment, else of the mount we stand in.

    Raises:
        UnavailableError: There is none.
    """
    if socket := given or os.environ.get("TENPLEXFS_SOCKET"):
        return socket
    try:
        here = Path.cwd()
        for directory in (here, *here.parents):
            endpoint = directory / ".tenplexfs" / "endpoint"
            if endpoint.is_file():
                return endpoint.read_text().strip().removeprefix("unix:")
    except OSError as error:
        raise UnavailableError(f"no daemon answers around the working directory: {error}") from error
    raise UnavailableError("no daemon: give --socket or TENPLEXFS_SOCKET, or stand in a mount")


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
    }


@contextmanager
def _as_ours(socket: str) -> Iterator[None]:
    """Turns what gRPC raises into errors of our tree."""
    try:
        yield
    except grpc.RpcError as error:
        raise _translate(error, socket) from error


def _translate(error: Any, socket: str) -> TenplexError:
    code, message = error.code().name, error.details() or ""
    if code == "UNAVAILABLE" and not any(
        key == "tenplexfs-error" for key, _ in error.trailing_metadata() or ()
    ):
        return UnavailableError(
            f"no daemon answers on {socket}: is it running? (tenplexfs serve)", socket=socket
        )
    return error_from_code(code, message)


class Daemon:
    """Calls to the daemon behind ``socket``. Every call has a deadline."""

    def __init__(self, socket: str) -> None:
        self.socket = socket
        self._channel = grpc.insecure_channel(f"unix:{Path(socket).absolute()}.grpc", options=_OPTIONS)
        self._control = control_pb2_grpc.ControlStub(self._channel)
        self._local = local_pb2_grpc.LocalStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def _call(self, method: Callable[..., Reply], request: object, timeout_s: float = _CALL_S) -> Reply:
        with _as_ours(self.socket):
            return method(request, timeout=timeout_s)

    def _stream(
        self, method: Callable[..., Reply], request: object, timeout_s: float | None
    ) -> Iterator[Reply]:
        with _as_ours(self.socket):
            call: Any = method(request, timeout=_LONG_S if timeout_s is None else timeout_s)
            try:
                yield from call
            finally:
                call.cancel()

    def status(self) -> local_pb2.StatusReply:
        """Returns what the daemon is and holds."""
        reply: local_pb2.StatusReply = self._call(self._local.Status, local_pb2.StatusRequest())
        return reply

    def jobs(self) -> list[control_pb2.Job]:
        """Returns every job."""
        return list(self._call(self._local.ListJobs, local_pb2.ListJobsRequest()).jobs)

    def job(self, name: str) -> control_pb2.Job:
        """Returns one job."""
        job: control_pb2.Job = self._call(self._control.GetJob, control_pb2.GetJobRequest(job=name))
        return job

    def create_job(self, name: str, layout_json: str, settings_json: str) -> control_pb2.Job:
        """Returns the job, made now or there already just so."""
        request = control_pb2.CreateJobRequest(
            name=name, layout_json=layout_json, settings_json=settings_json
        )
        job: control_pb2.Job = self._call(self._control.CreateJob, request)
        return job

    def remove_job(self, name: str) -> control_pb2.Job:
        """Returns the job as it was."""
        job: control_pb2.Job = self._call(self._control.RemoveJob, control_pb2.RemoveJobRequest(job=name))
        return job

    def plan(self, request: control_pb2.PlanRequest) -> str:
        """Returns what a reconfiguration would move, as JSON."""
        return str(self._call(self._control.Plan, request, _LONG_S).json)

    def reconfigure(
        self, request: control_pb2.ReconfigureRequest, timeout_s: float | None
    ) -> Iterator[control_pb2.Progress]:
        """Yields the progress of the transaction."""
        return self._stream(self._control.Reconfigure, request, timeout_s)

    def import_state(
        self, request: local_pb2.ImportRequest, timeout_s: float | None
    ) -> Iterator[control_pb2.Progress]:
        """Yields the progress of the import."""
        return self._stream(self._local.Import, request, timeout_s)

    def verify(self, job: str) -> Iterator[local_pb2.VerifyReply]:
        """Yields progress and what is corrupt."""
        return self._stream(self._local.Verify, local_pb2.VerifyRequest(job=job), None)

    def stop(self) -> None:
        """Asks the daemon to unmount and end; the store stays."""
        self._call(self._local.Stop, local_pb2.StopRequest())
