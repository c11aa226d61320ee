"""The servers: what callers of every kind see, also when handlers fail, callers leave and the daemon ends."""

from __future__ import annotations

import socket
import stat

import grpc
import pytest
import trio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tenplexfs._pb import control_pb2, control_pb2_grpc, local_pb2, peer_pb2
from tenplexfs.errors import (
    ExistsError,
    InvalidError,
    NotFoundError,
    PreconditionError,
    TenplexError,
    TimedOutError,
    UnavailableError,
)
from tenplexfs.rpc.connection import Connection
from tenplexfs.rpc.threads import in_thread
from tenplexfs.rpc.wire import FETCH, FetchRequest
from tests.rpc.fakes import Arrays, Local, running


async def asked(connection, method, request, deadline_s=10):
    return await in_thread(
        lambda cancel: connection.call(method, request, deadline_s=deadline_s, cancel=cancel)
    )


async def streamed(connection, method, request):
    return await in_thread(
        lambda cancel: list(connection.stream(method, request, deadline_s=10, cancel=cancel))
    )


@pytest.fixture
def connect():
    made = []

    def connection(target, **options):
        made.append(Connection(target, **options))
        return made[-1]

    yield connection
    for each in made:
        each.close()


async def test_calls_and_streams(connect):
    async with running() as (address, _, _):
        there = connect(address)
        job = await asked(there, "Control/CreateJob", control_pb2.CreateJobRequest(name="gpt"))
        assert job == await asked(there, "Control/GetJob", control_pb2.GetJobRequest(job="gpt"))
        progress = await streamed(there, "Control/Reconfigure", control_pb2.ReconfigureRequest(job="gpt"))
        assert [p.bytes_done for p in progress[:-1]] == list(range(40))
        assert progress[-1].phase == "done"


async def test_our_errors_arrive_whole(connect):
    async with running() as (address, _, _):
        there = connect(address)
        with pytest.raises(NotFoundError, match="job no: no such job") as caught:
            await asked(there, "Control/GetJob", control_pb2.GetJobRequest(job="no"))
        assert caught.value.details == {"job": "no", "known": []}
        with pytest.raises(PreconditionError) as long:
            await asked(there, "Control/RemoveJob", control_pb2.RemoveJobRequest(job="no"))
        assert len(long.value.message) > 50_000
        assert long.value.message.endswith("end")
        with pytest.raises(NotFoundError, match="job broken"):
            await streamed(there, "Control/Reconfigure", control_pb2.ReconfigureRequest(job="broken"))


async def test_a_plain_client_sees_status_and_a_short_message():
    async with running() as (address, _, _):

        def ask():
            with grpc.insecure_channel(address) as channel:
                stub = control_pb2_grpc.ControlStub(channel)
                errors = []
                for call, request in (
                    (stub.GetJob, control_pb2.GetJobRequest(job="no")),
                    (stub.RemoveJob, control_pb2.RemoveJobRequest(job="no")),
                ):
                    with pytest.raises(grpc.RpcError) as caught:
                        call(request, timeout=10)
                    errors.append((caught.value.code(), caught.value.details()))
                return errors

        short, long = await trio.to_thread.run_sync(ask)
        assert short == (grpc.StatusCode.NOT_FOUND, "job no: no such job")
        assert long[0] == grpc.StatusCode.FAILED_PRECONDITION
        assert long[1].startswith("tensors xxx")
        assert long[1].endswith(" ...")


async def test_a_bug_in_a_handler_is_internal_and_the_server_lives(connect, caplog):
    async with running() as (address, _, _):
        there = connect(address)
        with pytest.raises(TenplexError, match="internal error: ZeroDivisionError: a bug") as caught:
            await asked(there, "Control/Plan", control_pb2.PlanRequest(job="gpt"))
        assert caught.value.code == "INTERNAL"
        assert "ZeroDivisionError" in caplog.text
        await asked(there, "Control/CreateJob", control_pb2.CreateJobRequest(name="gpt"))


async def test_a_caller_that_leaves_ends_the_handler(connect):
    async with running() as (address, control, _):
        there = connect(address)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked, there, "Control/Abort", control_pb2.AbortRequest())
            await control.started.wait()
            nursery.cancel_scope.cancel()
        await control.closed.wait()


async def test_a_reader_that_leaves_closes_the_stream(connect):
    async with running() as (address, control, _):
        stream = connect(address).stream(
            "Control/WatchJob", control_pb2.GetJobRequest(job="gpt"), deadline_s=10
        )
        first = await trio.to_thread.run_sync(next, stream)
        assert first.name == "gpt"
        stream.close()
        await control.closed.wait()


async def test_watchers_of_jobs_leave_threads_to_peers(connect, monkeypatch):
    monkeypatch.setattr("tenplexfs.rpc.server._CONTROL_COUNT", 2)
    get = control_pb2.GetJobRequest(job="gpt")
    async with running() as (address, _, _):
        there = connect(address)
        watched = [there.stream("Control/WatchJob", get, deadline_s=20) for _ in range(2)]
        for stream in watched:
            await trio.to_thread.run_sync(next, stream)
        with pytest.raises(UnavailableError, match="2 calls run already, watchers of jobs above all"):
            await asked(there, "Control/GetJob", get)
        with pytest.raises(UnavailableError, match="2 calls run already"):
            await streamed(there, "Control/WatchJob", get)
        assert (await asked(there, "Peer/Hello", peer_pb2.HelloRequest())).node
        watched[0].close()
        with trio.fail_after(10):
            while True:
                try:
                    await asked(there, "Control/GetJob", get)
                except NotFoundError:
                    break
                except UnavailableError:
                    continue
        watched[1].close()


async def test_deadline(connect):
    async with running() as (address, control, _):
        with pytest.raises(TimedOutError, match=f"{address}: Abort: no answer before the deadline"):
            await asked(connect(address), "Control/Abort", control_pb2.AbortRequest(), deadline_s=0.3)
        await control.closed.wait()


async def test_an_end_of_the_daemon_is_no_end_of_a_stream(connect):
    """A stream that was cut off must not look complete: for Stage, complete means staged."""
    async with running() as (address, _, _):
        stream = connect(address).stream(
            "Control/WatchJob", control_pb2.GetJobRequest(job="gpt"), deadline_s=20
        )
        await trio.to_thread.run_sync(next, stream)
    with pytest.raises(UnavailableError):
        await trio.to_thread.run_sync(next, stream)
    with pytest.raises(UnavailableError, match=address):
        await asked(connect(address), "Control/GetJob", control_pb2.GetJobRequest(job="gpt"))


async def test_health_and_reflection():
    async with running() as (address, _, _):

        def ask():
            with grpc.insecure_channel(address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                request = health_pb2.HealthCheckRequest(service="tenplexfs.v1.Control")
                state = health.Check(request, timeout=10).status
                reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
                request = reflection_pb2.ServerReflectionRequest(list_services="")
                (reply,) = reflection.ServerReflectionInfo(iter([request]), timeout=10)
                return state, {service.name for service in reply.list_services_response.service}

        state, names = await trio.to_thread.run_sync(ask)
        assert state == health_pb2.HealthCheckResponse.SERVING
        assert {"tenplexfs.v1.Control", "tenplexfs.v1.Peer", "grpc.health.v1.Health"} <= names
        assert "tenplexfs.v1.Local" not in names


async def test_unix_socket_serves_control_and_local_only(connect, tmp_path):
    path = tmp_path / "daemon.sock.grpc"
    async with running(listen=None, socket=path) as (address, _, _):
        assert address == ""
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        there = connect(f"unix:{path}")
        assert (await asked(there, "Local/Status", local_pb2.StatusRequest())).node == "node0"
        (progress,) = await streamed(there, "Local/Import", local_pb2.ImportRequest(path="/x"))
        assert progress.message == "/x"
        await asked(there, "Control/CreateJob", control_pb2.CreateJobRequest(name="gpt"))
        with pytest.raises(TenplexError, match="not served there"):
            await in_thread(lambda cancel: list(there.raw_stream(FETCH, b"", deadline_s=5, cancel=cancel)))


async def test_socket_in_use_is_refused_and_a_dead_one_replaced(tmp_path):
    path = tmp_path / "s.grpc"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with running(listen=None, socket=path):
        with pytest.RaisesGroup(pytest.RaisesExc(ExistsError, match="a daemon serves it already")):
            async with running(listen=None, socket=path):
                pass
        assert path.is_socket()
    path.unlink(missing_ok=True)
    path.write_text("precious")
    with pytest.RaisesGroup(pytest.RaisesExc(ExistsError, match="is no socket")):
        async with running(listen=None, socket=path):
            pass
    assert path.read_text() == "precious"


async def test_port_in_use_is_refused():
    async with running() as (address, _, _):
        with pytest.RaisesGroup(pytest.RaisesExc(ExistsError, match=f"{address}: the address is in use")):
            async with running(listen=address):
                pass


@pytest.mark.parametrize("listen", ["127.0.0.1", ":0", "127.0.0.1:70000", "127.0.0.1:x", "192.0.2.1:7070"])
async def test_bad_address_is_refused(listen):
    with pytest.RaisesGroup(pytest.RaisesExc(InvalidError, match=f"listen {listen}:")):
        async with running(listen=listen):
            pass


async def test_a_call_for_another_node_is_refused(connect):
    async with running(node="n1") as (address, _, _):
        request = control_pb2.CreateJobRequest(name="gpt")
        for node in ("n1", None):
            await asked(connect(address, node=node), "Control/CreateJob", request)
        lost = connect(address, node="n2")
        with pytest.raises(PreconditionError, match="this is n1, not n2: check the address of n2"):
            await asked(lost, "Control/CreateJob", request)
        with pytest.raises(PreconditionError, match="this is n1"):
            await streamed(lost, "Control/Reconfigure", control_pb2.ReconfigureRequest())


async def test_token(connect):
    async with running(token="secret") as (address, _, _):
        request = control_pb2.CreateJobRequest(name="gpt")
        assert (await asked(connect(address, token="secret"), "Control/CreateJob", request)).name == "gpt"
        for token in (None, "other"):
            with pytest.raises(TenplexError, match="the token is missing or wrong"):
                await asked(connect(address, token=token), "Control/CreateJob", request)
            with pytest.raises(TenplexError, match="the token is missing or wrong"):
                await streamed(
                    connect(address, token=token), "Control/Reconfigure", control_pb2.ReconfigureRequest()
                )


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"\xff" * 40,
        FetchRequest("../x", "a", 0, ()).encode(),
        FetchRequest("gpt", "", 0, ()).encode(),
        FetchRequest("gpt", "a", 1, ()).encode(),
    ],
)
async def test_bad_requests_for_ranges_are_refused(connect, request_bytes):
    async with running(ranges=Arrays({}, "a")) as (address, _, _):
        there = connect(address)
        with pytest.raises(InvalidError):
            await in_thread(
                lambda cancel: list(there.raw_stream(FETCH, request_bytes, deadline_s=5, cancel=cancel))
            )


def test_every_method_has_a_handler():
    """The edge finds handlers by name when it starts; a method without one would fail there."""
    from tenplexfs.rpc.connection import SERVICES
    from tenplexfs.rpc.server import _python_name

    for method in SERVICES["Local"].methods:
        assert hasattr(Local(), _python_name(method.name))
