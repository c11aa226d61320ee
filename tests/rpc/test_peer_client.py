"""Calls between daemons: bytes arrive whole and in order, whatever happens on the way."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager

import grpc
import ml_dtypes
import numpy as np
import pytest
import trio
import trio.testing

from tenplexfs._pb import peer_pb2
from tenplexfs.errors import (
    CorruptError,
    InvalidError,
    NotFoundError,
    TenplexError,
    TimedOutError,
    UnavailableError,
)
from tenplexfs.rpc.peer_client import PeerClient
from tenplexfs.rpc.ranges import Scatter, gather
from tenplexfs.rpc.wire import FETCH, GROUP_COUNT, MAX_REQUEST_BYTES, FetchRequest, checked, split, with_sums
from tenplexfs.runtime.protocols import Ranges
from tests.rpc.fakes import Arrays, running

TXID = "0" * 16
BIG = np.random.default_rng(0).integers(0, 256, 9 << 20, np.uint8)
WHOLE = Ranges(0, "big", 1, np.array([[[0], [len(BIG)]]]))


@contextmanager
def client_of(address, **options):
    client = PeerClient({"node0": address}, **options)
    try:
        yield client
    finally:
        client.close()


class Sink:
    """Where bytes are written; checks that they come in order."""

    def __init__(self):
        self.data = bytearray()

    def write(self, offset, data):
        assert offset == len(self.data)
        assert threading.current_thread() is not threading.main_thread()
        self.data += data


async def fetch(client, ranges, write, *, txid=TXID, deadline_s=20.0):
    await client.fetch("node0", "gpt", txid, ranges, write, deadline_s=deadline_s)


async def test_ranges_of_many_arrays_into_other_shapes():
    rng = np.random.default_rng(1)
    half = rng.standard_normal((600, 700)).astype(ml_dtypes.bfloat16)
    scalar, empty = np.float64(3.5).reshape(()), np.zeros((0, 3), "f4")
    arrays = Arrays({(3, "layers/0/w"): half, (0, "scalar"): scalar, (1, "empty"): empty, (0, "big"): BIG})
    columns = np.array([[[0, 100], [600, 500]], [[5, 0], [6, 3]]])
    ranges = [
        Ranges(3, "layers/0/w", 2, columns),
        Ranges(0, "scalar", 8, np.zeros((1, 2, 0), np.int64)),
        Ranges(1, "empty", 4, np.array([[[0, 0], [0, 3]]])),
        Ranges(0, "big", 1, np.array([[[3], [9 << 20]], [[0], [3]]])),
    ]
    flat, one, rest = (
        np.zeros(600 * 400 + 3, ml_dtypes.bfloat16),
        np.zeros((), "f8"),
        np.zeros(len(BIG), "u1"),
    )
    scatter = Scatter(
        [
            (flat, np.array([[[3], [len(flat)]], [[0], [3]]])),
            (one, np.zeros((1, 2, 0), np.int64)),
            (np.zeros((0, 3), "f4"), np.array([[[0, 0], [0, 3]]])),
            (rest, np.array([[[3], [len(rest)]], [[0], [3]]])),
        ]
    )
    async with running(ranges=arrays) as (address, _, _):
        with client_of(address) as client:
            await fetch(client, ranges, scatter.write)
    assert flat[3:].tobytes() == half[:, 100:500].tobytes()
    assert flat[:3].tobytes() == half[5, :3].tobytes()
    assert one == 3.5
    assert (rest == BIG).all()
    assert arrays.open_count == 0


@pytest.mark.parametrize(
    ("ranges", "txid", "error", "words"),
    [
        (WHOLE, "other", NotFoundError, "no such snapshot here"),
        (Ranges(1, "big", 1, WHOLE.boxes), TXID, NotFoundError, "rank 1 tensor big: not on this node"),
        (Ranges(0, "big", 4, WHOLE.boxes), TXID, InvalidError, "need itemsize 1, got 4"),
        (Ranges(0, "big", 1, WHOLE.boxes + 1), TXID, InvalidError, "box 0: need"),
        (Ranges(0, "big", 1, np.array([[[0, 0], [1, 1]]])), TXID, InvalidError, "need shape"),
    ],
)
async def test_refusals_are_not_tried_again(ranges, txid, error, words):
    async with running(ranges=Arrays({(0, "big"): BIG})) as (address, _, _):
        with client_of(address) as client, pytest.raises(error, match=words):
            await fetch(client, [ranges], Sink().write, txid=txid)


@contextmanager
def stub_server(fetch_bytes):
    """A peer whose stream is what ``fetch_bytes(request, context)`` yields."""
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool, options=[("grpc.max_receive_message_length", -1)])
        _, service, method = FETCH.split("/")
        handler = grpc.method_handlers_generic_handler(
            service, {method: grpc.unary_stream_rpc_method_handler(fetch_bytes)}
        )
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(0).wait()


def honest(request):
    start = FetchRequest.decode(request).start
    return with_sums(bytes(message) for message in gather([(BIG, WHOLE.boxes)], start=start))


async def test_a_stream_that_breaks_is_resumed_where_it_stopped():
    starts = []

    def breaking(request, context):
        starts.append(FetchRequest.decode(request).start)
        for count, message in enumerate(honest(request)):
            if len(starts) < 3 and count == GROUP_COUNT + 2:
                context.abort(grpc.StatusCode.UNAVAILABLE, "pulled the plug")
            yield message

    sink = Sink()
    with stub_server(breaking) as address, client_of(address) as client:
        await fetch(client, [WHOLE], sink.write)
    assert sink.data == BIG.tobytes()
    assert starts == [0, GROUP_COUNT << 20, 2 * GROUP_COUNT << 20]


async def test_corrupt_bytes_are_fetched_again_and_never_handed_over():
    calls = []

    def corrupting(request, _):
        calls.append(request)
        for count, message in enumerate(honest(request)):
            yield message[:-1] + b"?" if len(calls) == 1 and count == 2 else message

    sink = Sink()
    with stub_server(corrupting) as address, client_of(address) as client:
        await fetch(client, [WHOLE], sink.write)
    assert sink.data == BIG.tobytes()
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda messages: [*messages[:2], messages[2][::-1], *messages[3:]], "checksums are"),
        (lambda messages: messages[:-1], "ended at byte"),
        (lambda messages: messages[:3], "ended at byte"),
        (lambda messages: [*messages, b"more"], "got 4 more"),
        (lambda messages: [messages[0] * 20, *messages[1:]], "got a message of"),
        (lambda messages: [b"", *messages], "got a message of 0"),
    ],
)
async def test_a_wrong_stream_is_refused_in_the_end(wrong, words):
    with (
        stub_server(lambda request, _: iter(wrong(list(honest(request))))) as address,
        client_of(address) as client,
        pytest.raises(CorruptError, match=words),
    ):
        await fetch(client, [WHOLE], Sink().write)


async def test_a_peer_that_is_not_there():
    with client_of("127.0.0.1:1", call_deadline_s=0.3) as client:
        with pytest.raises(UnavailableError, match=r"127.0.0.1:1: Endpoint: UNAVAILABLE"):
            await fetch(client, [WHOLE], Sink().write, deadline_s=0.3)
        with pytest.raises(UnavailableError, match=r"127.0.0.1:1: Hello: UNAVAILABLE"):
            await client.hello("node0", peer_pb2.HelloRequest())
        with pytest.raises(NotFoundError, match="node node9: no address; this daemon knows node0"):
            await client.hello("node9", peer_pb2.HelloRequest())


async def test_a_peer_that_comes_back():
    sink = Sink()
    async with trio.open_nursery() as nursery:
        async with running() as (address, _, _):
            pass
        with client_of(address) as client:
            nursery.start_soon(fetch, client, [WHOLE], sink.write)
            await trio.testing.wait_all_tasks_blocked(0.1)
            async with running(listen=address, ranges=Arrays({(0, "big"): BIG})):
                while len(sink.data) < len(BIG):
                    await trio.testing.wait_all_tasks_blocked(0.01)
    assert sink.data == BIG.tobytes()


async def test_a_stage_reaches_a_peer_that_has_just_come_back():
    stages: list[int] = []

    async def stage(client: PeerClient) -> None:
        stages.extend([p.bytes_done async for p in client.stage("node0", peer_pb2.StageRequest(job="gpt"))])

    async with running() as (address, _, _):
        pass
    with client_of(address, call_deadline_s=1.5) as client:
        with pytest.raises(UnavailableError):  # for so long that the connection is tried seldom
            await client.hello("node0", peer_pb2.HelloRequest())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stage, client)
            await trio.testing.wait_all_tasks_blocked(0.05)
            async with running(listen=address):
                while not stages:
                    await trio.testing.wait_all_tasks_blocked(0.01)
    assert stages == [1, 2]


async def test_a_peer_that_hangs_ends_by_the_deadline():
    release = threading.Event()

    def hanging(_, context):
        context.add_callback(release.set)
        release.wait()
        yield b""

    with stub_server(hanging) as address, client_of(address) as client, pytest.raises(TimedOutError):
        await fetch(client, [WHOLE], Sink().write, deadline_s=0.3)


async def test_cancelling_ends_the_stream_at_once():
    arrays = Arrays({(0, "big"): BIG})
    started = trio.Event()
    token = trio.lowlevel.current_trio_token()
    async with running(ranges=arrays) as (address, _, _):
        with client_of(address) as client:
            async with trio.open_nursery() as nursery:
                many = [WHOLE] * 1000
                nursery.start_soon(
                    fetch, client, many, lambda offset, _: offset or token.run_sync_soon(started.set)
                )
                await started.wait()
                nursery.cancel_scope.cancel()
    assert arrays.open_count == 0


async def test_an_error_of_the_writer_comes_back_as_it_is():
    def full(offset, data):
        raise OSError(28, "no space left")

    async with running(ranges=Arrays({(0, "big"): BIG})) as (address, _, _):
        with client_of(address) as client, pytest.raises(OSError, match="no space left"):
            await fetch(client, [WHOLE], full)


async def test_the_steps_of_a_transaction():
    async with running() as (address, _, peer):
        with client_of(address) as client:
            reply = await client.hello("node0", peer_pb2.HelloRequest(node="node1"))
            assert reply.incarnation == "after node1"
            stages = [p.bytes_done async for p in client.stage("node0", peer_pb2.StageRequest(job="gpt"))]
            assert stages == [1, 2]
            await client.switch("node0", peer_pb2.SwitchRequest(job="gpt"))
            await client.drop("node0", peer_pb2.DropRequest(job="gpt", txid="a"))
            assert (await client.describe("node0", peer_pb2.DescribeRequest(job="gpt"))).created_ns == 7
            assert (await client.lease("node0", peer_pb2.LeaseRequest(ttl_s=3))).lease_id == "new"
            await client.release("node0", peer_pb2.ReleaseRequest(lease_id="new"))
    assert peer.calls == [("switch", "gpt", False), ("drop", "gpt", "a"), ("release", "new")]


async def test_a_coordinator_that_leaves_ends_the_stage():
    async with running() as (address, _, peer):
        with client_of(address) as client:
            async with aclosing(client.stage("node0", peer_pb2.StageRequest(job="slow"))) as progress:
                async for _ in progress:
                    break
            await peer.closed.wait()


async def test_a_stage_that_is_cut_off_is_an_error():
    async with running() as (address, _, _):
        client = PeerClient({"node0": address})
        progress = client.stage("node0", peer_pb2.StageRequest(job="slow"))
        await anext(progress)
    with pytest.raises(UnavailableError):
        await anext(progress)
    await progress.aclose()
    client.close()


def test_requests_survive_the_wire():
    boxes = np.arange(12).reshape(2, 2, 3)
    request = FetchRequest(
        "gpt", TXID, 0, (Ranges(7, "a/b", 2, boxes), Ranges(0, "s", 8, np.zeros((3, 2, 0), int)))
    )
    back = FetchRequest.decode(request.encode())
    assert (back.job, back.txid, back.start) == ("gpt", TXID, 0)
    for one, two in zip(request.ranges, back.ranges, strict=True):
        assert (one.rank, one.path, one.itemsize) == (two.rank, two.path, two.itemsize)
        assert np.array_equal(one.boxes, two.boxes)


def test_long_requests_are_split_and_lose_nothing():
    boxes = np.arange(1000)[:, None, None] + np.array([[[0], [1]]])
    ranges = [Ranges(0, "a", 1, boxes), Ranges(1, "b" * 50, 1, boxes[:5]), Ranges(2, "c", 1, boxes[:0])]
    batches = list(split(ranges, 1600))
    assert len(batches) > 5
    for batch in batches:
        assert len(FetchRequest("gpt", TXID, 0, batch).encode()) < 1600 + 100
    whole = [(r.rank, *box.ravel()) for batch in batches for r in batch for box in r.boxes]
    assert whole == [(r.rank, *box.ravel()) for r in ranges for box in r.boxes]
    assert [len(batch) for batch in split(ranges)] == [2]


def test_too_long_a_request_is_refused():
    boxes = np.zeros((MAX_REQUEST_BYTES // 16, 2, 1), np.int64)
    with pytest.raises(InvalidError, match="ask in parts"):
        FetchRequest.decode(FetchRequest("gpt", TXID, 0, (Ranges(0, "a", 1, boxes),)).encode())


def test_sums_leave_the_bytes_alone():
    messages = [bytes([i]) * (i + 1) for i in range(11)]
    assert list(checked(with_sums(messages), sum(map(len, messages)))) == messages
    assert list(checked(with_sums([]), 0)) == []
    assert issubclass(CorruptError, TenplexError)
