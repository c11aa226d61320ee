"""Messages as nobody should send them, to a real daemon: each gets a status, soon, and the daemon goes on."""

from __future__ import annotations

import os
import subprocess

import grpc
import numpy as np
import pytest
from daemons import cluster
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tenplexfs._pb import control_pb2, peer_pb2
from tenplexfs.cli.client import Daemon
from tenplexfs.rpc.connection import SERVICES, Connection
from tenplexfs.rpc.wire import FETCH, MAX_REQUEST_BYTES, FetchRequest
from tenplexfs.runtime.protocols import Ranges
from tests.cluster.daemons import COMMAND
from tests.runtime.cluster import layout_json

pytestmark = pytest.mark.cluster

PATIENCE_S = 20.0
UNCLEAN = {"INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED", "UNAVAILABLE", "CANCELLED"}
WAITING = {("Registry", "Watch")}  # for changes, which do not come
LOCAL = {"Local", "Datasets", "Members"}
METHODS = [
    (service, method.name)
    for service, descriptor in SERVICES.items()
    for method in descriptor.methods
    if (service, method.name) != ("Local", "Stop")
]

texts = st.text(max_size=20) | st.sampled_from(
    ["", "gpt", "node0", "node1", "0" * 16, "../x", "a" * 5000, "\0", "\n", "/", "/dev/zero", "127.0.0.1:1",
     "{}", "[]", "null", "[[" * 5000, '{"keep_steps": 1e999}', '{"keep_steps": NaN}', layout_json().decode()]
)  # fmt: skip
INTS = (0, 1, 2, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63))
BITS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}


def values(field):
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return texts
        case FieldDescriptor.TYPE_BYTES:
            return st.binary(max_size=200)
        case FieldDescriptor.TYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
            return st.sampled_from([0.0, -1.0, 0.5, 1e308, float("inf"), float("nan")])
        case FieldDescriptor.TYPE_MESSAGE:
            return messages(field.message_type)
        case kind:
            low, high = BITS[kind]
            return st.sampled_from([n for n in INTS if low <= n <= high])


@st.composite
def messages(draw, descriptor):
    message = descriptor._concrete_class()
    for field in descriptor.fields:
        if draw(st.integers(0, 3)) == 0:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            entries = draw(st.dictionaries(values(key), values(value), max_size=3))
            target = getattr(message, field.name)
            for name, content in entries.items():
                if isinstance(content, Message):
                    target[name].CopyFrom(content)
                else:
                    target[name] = content
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(values(field), max_size=3)))
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(draw(values(field)))
        else:
            setattr(message, field.name, draw(values(field)))
    return message


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """(channel over TCP, channel over the Unix socket, connection, txid) of a daemon with a job."""
    base = tmp_path_factory.mktemp("fuzz")
    with cluster(("node0",), mount=False) as (node,):
        layout = base / "layout.json"
        layout.write_text(
            '{"format": "tenplexfs-layout", "version": 1, "mesh": {"tp": 1}, "nodes": {"node0": [0]},'
            ' "tensors": {"w": {"shape": [6, 4], "dtype": "float32"}}}'
        )
        save_file({"w": np.arange(24, dtype=np.float32).reshape(6, 4)}, base / "w.safetensors")
        create, load = ["job", "create", "gpt", "--layout", layout], ["import", "gpt", base / "w.safetensors"]
        for command in (create, load):
            whole = [*COMMAND, "--socket", str(node.socket), *map(str, command)]
            subprocess.run(whole, check=True, capture_output=True)
        with Daemon(str(node.socket)) as own:
            (job,) = own.jobs()
        connection = Connection(node.address)
        with (
            grpc.insecure_channel(node.address) as remote,
            grpc.insecure_channel(f"unix:{node.socket}.grpc") as local,
        ):
            yield remote, local, connection, job.txid
        connection.close()
        assert node.process.poll() is None


def send(daemon, service, method, data):
    """Returns the status, "OK" also for a stream that has begun; what it says must be one line."""
    remote, local, *_ = daemon
    descriptor = SERVICES[service]
    waits = (service, method) in WAITING
    path = f"/{descriptor.full_name}/{method}"
    channel = local if service in LOCAL else remote
    try:
        if descriptor.methods_by_name[method].server_streaming:
            stream = channel.unary_stream(path)(data, timeout=0.2 if waits else PATIENCE_S)
            next(stream, None)
            stream.cancel()
        else:
            channel.unary_unary(path)(data, timeout=PATIENCE_S)
    except grpc.RpcError as error:
        assert "\n" not in error.details()
        if waits and error.code().name == "DEADLINE_EXCEEDED":
            return "OK"
        assert error.code().name not in UNCLEAN, (service, method, error.details())
        return error.code().name
    return "OK"


def test_a_malformed_frame_is_the_callers_fault(daemon):
    assert send(daemon, "Control", "GetJob", b"\xff\xff\xff") == "INVALID_ARGUMENT"
    assert send(daemon, "Control", "WatchJob", b"\xff\xff\xff") == "INVALID_ARGUMENT"


def test_a_message_that_is_too_large_is_refused(daemon):
    large = peer_pb2.DropRequest(job="x" * ((1 << 28) + 1)).SerializeToString()
    assert send(daemon, "Peer", "Drop", large) == "RESOURCE_EXHAUSTED"
    assert fetch(daemon, b"\x00" * (MAX_REQUEST_BYTES + 5000)) == "INVALID_ARGUMENT"


def fetch(daemon, data):
    remote, *_ = daemon
    try:
        for _ in remote.unary_stream(FETCH)(data, timeout=PATIENCE_S):
            pass
    except grpc.RpcError as error:
        assert "\n" not in error.details()
        assert error.code().name not in UNCLEAN, error.details()
        return error.code().name
    return "OK"


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400))
def test_requests_for_ranges_that_are_none(daemon, data):
    assert fetch(daemon, data) != "OK"


numbers = st.sampled_from([*range(-2, 8), 2**31, 2**62, 2**63 - 1, -(2**63)])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_ranges_with_odd_boxes(daemon, data):
    *_, txid = daemon
    ndim, count = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 3))
    flat = data.draw(st.lists(numbers, min_size=2 * ndim * count, max_size=2 * ndim * count))
    boxes = np.array(flat, np.int64).reshape(count, 2, ndim)
    path = data.draw(st.sampled_from(["w", "w", "w", "", "x", "../w", "w\0"]))
    rank, itemsize = data.draw(st.sampled_from([0, 0, 1, 2**40])), data.draw(st.sampled_from([4, 4, 1]))
    start = data.draw(st.sampled_from([0, 0, 1, 5, 2**62]))
    named = data.draw(st.sampled_from([txid, "0" * 16]))
    status = fetch(daemon, FetchRequest("gpt", named, start, (Ranges(rank, path, itemsize, boxes),)).encode())
    if count and ndim == 2 and not all(map(fits, boxes)):
        assert status != "OK", boxes


def fits(box):
    return (box[0] >= 0).all() and (box[0] <= box[1]).all() and (box[1] <= (6, 4)).all()


@pytest.mark.parametrize(("service", "method"), METHODS, ids=[f"{s}-{m}" for s, m in METHODS])
def test_messages_with_odd_fields(daemon, service, method):
    @settings(
        max_examples=int(os.environ.get("FUZZ_COUNT", "25")),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
    )
    @given(messages(SERVICES[service].methods_by_name[method].input_type))
    def run(message):
        send(daemon, service, method, message.SerializeToString())

    run()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(METHODS), st.binary(max_size=300))
def test_frames_that_are_no_messages(daemon, target, data):
    send(daemon, *target, data)


def test_it_still_serves(daemon):
    """Last: after all that."""
    _, _, connection, _ = daemon
    assert connection.call("Peer/Hello", peer_pb2.HelloRequest(), deadline_s=5).node == "node0"
    layout = '{"format": "tenplexfs-layout", "version": 1, "mesh": {"tp": 1}, "nodes": {"node0": [0]}}'
    create = control_pb2.CreateJobRequest(name="after", layout_json=layout)
    assert connection.call("Control/CreateJob", create, deadline_s=20).generation == 1
