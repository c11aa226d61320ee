"""Bytes over plain sockets: whole and in order, to those who may have them, whatever the other side does."""

from __future__ import annotations

import select
import socket
import threading
import tracemalloc
from contextlib import contextmanager
from datetime import UTC, datetime

import msgspec
import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from tenplexfs.errors import (
    CorruptError,
    DeniedError,
    InvalidError,
    NotFoundError,
    PreconditionError,
    TimedOutError,
    UnavailableError,
)
from tenplexfs.rpc import bulk, bulk_server
from tenplexfs.rpc.bulk_client import BulkClient
from tenplexfs.rpc.bulk_server import BulkServer
from tenplexfs.rpc.certificates import make_authority, make_node
from tenplexfs.rpc.connection import Cancel
from tenplexfs.rpc.peer_client import PeerClient
from tenplexfs.rpc.tls import Access, Identity
from tenplexfs.rpc.wire import MAX_ENCODED_BYTES, FetchRequest
from tenplexfs.runtime.protocols import Ranges
from tests.rpc.fakes import Arrays, running

TXID = "0" * 16
BIG = np.random.default_rng(0).integers(0, 256, 9 << 20, np.uint8)
WHOLE = Ranges(0, "big", 1, np.array([[[0], [len(BIG)]]]))
REQUEST = FetchRequest("gpt", TXID, 0, (WHOLE,))
NOW = datetime.now(UTC)
OURS, THEIRS = make_authority(NOW), make_authority(NOW)


def access(authority=OURS, *, token=None):
    pair = make_node(authority, "node0", ("127.0.0.1",), NOW, days=10)
    return Access(Identity(authority.certificate, pair), token)


class Port:
    """Says where the port is, as a `Connection` does."""

    target = "127.0.0.1:1"

    def __init__(self, port):
        self.port = port
        self.asked = 0

    def raw_stream(self, path, request, *, deadline_s, cancel):
        self.asked += 1
        yield b"%d" % self.port


@contextmanager
def served(**more):
    arrays = Arrays({(0, "big"): BIG})
    server = BulkServer(arrays, "127.0.0.1", **more)
    server.start()
    try:
        yield server, arrays
    finally:
        server.stop(2)
        assert arrays.open_count == 0


def fetched(client, request=REQUEST):
    stream = client.open(5, Cancel())
    assert stream is not None
    try:
        data = b"".join(map(bytes, stream.messages(request.encode(), request.nbytes, deadline_s=5)))
    except BaseException:
        stream.cancel()
        raise
    client.give_back(stream)
    return data


def client_of(port, *, context=None, token="", node=""):
    return BulkClient(Port(port), context=context, greeting=bulk.Greeting(token, node))


@pytest.mark.parametrize("secure", [False, True])
def test_one_connection_serves_one_request_after_the_other(secure):
    mine = access() if secure else Access()
    with served(context=mine.server_context) as (server, _):
        client = client_of(server.port, context=mine.context)
        assert fetched(client) == BIG.tobytes()
        some = FetchRequest("gpt", TXID, 5, (Ranges(0, "big", 1, np.array([[[7], [99]], [[2], [3]]])),), 4096)
        stream = client.open(5, Cancel())
        data = b"".join(map(bytes, stream.messages(some.encode(), some.nbytes - 5, deadline_s=5)))
        assert data == BIG[12:99].tobytes() + BIG[2:3].tobytes()
        stream.cancel()
        client.close()


@pytest.mark.parametrize("secure", [False, True])
def test_who_may_not_is_refused(secure):
    mine = access(token="secret") if secure else Access(None, "secret")
    with served(context=mine.server_context, token="secret", node="node0") as (server, _):
        for token, node, error, words in (
            ("wrong", "node0", DeniedError, "the token is missing or wrong"),
            ("", "node0", DeniedError, "the token is missing or wrong"),
            ("secret", "node1", PreconditionError, "this is node0, not node1"),
        ):
            with pytest.raises(error, match=words):
                client_of(server.port, context=mine.context, token=token, node=node).open(5, Cancel())
        client = client_of(server.port, context=mine.context, token="secret", node="node0")
        assert fetched(client) == BIG.tobytes()
        client.close()


@pytest.mark.parametrize(
    ("server_side", "client_side"),
    [(access(), access(THEIRS)), (access(THEIRS), access()), (access(), Access()), (Access(), access())],
)
def test_strangers_get_no_connection(server_side, client_side):
    with served(context=server_side.server_context) as (server, _):
        assert client_of(server.port, context=client_side.context).open(1, Cancel()) is None


def test_a_caller_without_a_certificate_is_not_let_in():
    mine = access()
    context = mine.context
    bare = type(context)(context.protocol)
    bare.load_verify_locations(cadata=OURS.certificate.decode())
    with served(context=mine.server_context) as (server, _):
        assert client_of(server.port, context=bare).open(1, Cancel()) is None


def test_what_the_daemon_refuses_is_its_own_error_and_the_connection_lives_on():
    missing = FetchRequest("gpt", TXID, 0, (Ranges(3, "gone", 1, WHOLE.boxes),))
    with served() as (server, _):
        client = client_of(server.port)
        stream = client.open(5, Cancel())
        with pytest.raises(NotFoundError, match="rank 3 tensor gone: not on this node"):
            list(stream.messages(missing.encode(), missing.nbytes, deadline_s=5))
        assert sum(map(len, stream.messages(REQUEST.encode(), REQUEST.nbytes, deadline_s=5))) == len(BIG)
        stream.cancel()


@contextmanager
def stub(*answers):
    """A server that lets everybody in and answers each connection's request with the next of ``answers``."""

    def serve():
        for answer in answers:
            with listener.accept()[0] as sock:
                bulk.receive(sock, len(bulk.MAGIC), lambda: None)
                for reply in (bulk.HEADER.pack(bulk.PULSE, 0, 0), answer):
                    (length,) = bulk.LENGTH.unpack(bulk.receive(sock, 4, lambda: None))
                    bulk.receive(sock, length, lambda: None)
                    sock.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(5)


def frame(data, *, kind=bulk.DATA, digest=None):
    return bulk.HEADER.pack(kind, len(data), xxh3_64_intdigest(data) if digest is None else digest) + data


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (frame(b"12345678", digest=1), CorruptError, "sent as 0000000000000001"),
        (frame(b"123456789"), CorruptError, "9 bytes of kind 1, 8 left"),
        (bulk.HEADER.pack(bulk.DATA, 1 << 31, 0), CorruptError, "2147483648 bytes"),
        (bulk.HEADER.pack(9, 0, 0), CorruptError, "kind 9"),
        (bulk.HEADER.pack(bulk.PULSE, 8, 0), CorruptError, "8 bytes of kind 3"),
        (frame(b"1234") + bulk.HEADER.pack(bulk.DATA, 4, 0), UnavailableError, "connection ended"),
        (frame(b"", kind=bulk.PULSE) + b"x", UnavailableError, "connection ended"),
        (frame(b"no error", kind=bulk.ERROR), UnavailableError, "an answer that is none"),
    ],
)
def test_answers_that_are_none(answer, error, words):
    request = FetchRequest("gpt", TXID, 0, (Ranges(0, "w", 1, np.array([[[0], [8]]])),))
    with stub(answer) as port, pytest.raises(error, match=words):
        fetched(client_of(port), request)


def test_a_stream_that_only_promises_ends_at_its_deadline():
    request = FetchRequest("gpt", TXID, 0, (Ranges(0, "w", 1, np.array([[[0], [8]]])),))
    with stub(frame(b"", kind=bulk.PULSE) * 100_000) as port:
        stream = client_of(port).open(5, Cancel())
        with pytest.raises(TimedOutError, match="not done before the deadline"):
            list(stream.messages(request.encode(), 8, deadline_s=0.05))
        stream.cancel()


@pytest.mark.parametrize("secure", [False, True])
def test_a_caller_who_says_a_letter_now_and_then_is_not_waited_for(secure, monkeypatch):
    monkeypatch.setattr(bulk_server, "_GREETING_S", 0.5)
    mine = access() if secure else Access()
    with (
        served(context=mine.server_context) as (server, _),
        socket.create_connection(("127.0.0.1", server.port), 5) as plain,
        mine.context.wrap_socket(plain, server_hostname="127.0.0.1") if secure else plain as sock,
        pytest.raises(OSError, match=r"(?i)broken pipe|reset|eof"),
    ):
        for letter in bulk.MAGIC + bulk.LENGTH.pack(100) + bytes(90):
            select.select([], [], [], 0.05)
            sock.sendall(bytes([letter]))


def test_memory_is_taken_for_what_comes_and_not_for_what_is_announced():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"x")
        theirs.shutdown(socket.SHUT_WR)
        tracemalloc.start()
        try:
            with pytest.raises(UnavailableError, match="connection ended"):
                bulk.receive(ours, MAX_ENCODED_BYTES, lambda: None)
            assert tracemalloc.get_traced_memory()[1] < 1 << 18
        finally:
            tracemalloc.stop()


def test_requests_of_many_empty_parts_are_refused_before_they_are_made():
    count = MAX_ENCODED_BYTES // 9
    parts = msgspec.msgpack.encode([0, "", 1, 0, 0, b""]) * count
    head = b"".join(map(msgspec.msgpack.encode, ("gpt", TXID, 0)))
    with pytest.raises(InvalidError, match="Expected `array` of length <="):
        FetchRequest.decode(b"\x94" + head + b"\xdd" + count.to_bytes(4, "big") + parts)


async def test_a_stream_that_breaks_or_lies_is_resumed_where_it_stopped():
    data = bytes(range(100))
    request = Ranges(0, "w", 1, np.array([[[0], [100]]]))
    answers = (
        frame(data[:40]) + b"cut",
        frame(data[40:60]) + frame(data[60:], digest=3),
        frame(b"", kind=bulk.PULSE) + frame(data[60:]),
    )
    got = bytearray()
    async with running() as (address, _, _):
        with stub(*answers) as port:
            client = PeerClient({"node0": address})
            client._peer("node0").bulk._port = port
            await client.fetch(
                "node0", "gpt", TXID, [request], lambda at, part: got.extend(part), deadline_s=10
            )
            client.close()
    assert got == data


async def test_where_the_port_cannot_be_reached_grpc_carries_the_bytes(caplog):
    got = bytearray()
    async with running(ranges=Arrays({(0, "big"): BIG})) as (address, _, _):
        client = PeerClient({"node0": address})
        peer = client._peer("node0").bulk
        peer._connect = lambda port: None
        await client.fetch("node0", "gpt", TXID, [WHOLE], lambda at, part: got.extend(part), deadline_s=10)
        client.close()
    assert got == BIG.tobytes()
    assert [r.message for r in caplog.records if "cannot be reached; gRPC carries them" in r.message]


def test_a_port_that_is_somebody_elses_by_now_is_asked_for_again():
    with served(node="node1") as (other, _), served(node="node0") as (server, _):
        client = client_of(server.port, node="node0")
        client._port = other.port
        assert fetched(client) == BIG.tobytes()
        assert client._connection.asked == 1
        client.close()


@pytest.mark.parametrize("host", ["[::]", "0.0.0.0", "localhost"])
def test_every_address_is_every_ipv4_address_too(host):
    server = BulkServer(Arrays({(0, "big"): BIG}), host)
    server.start()
    client = client_of(server.port)
    assert fetched(client) == BIG.tobytes()
    client.close()
    server.stop(2)


async def test_bytes_go_over_the_port_and_not_over_grpc(monkeypatch):
    monkeypatch.setattr("tenplexfs.rpc.server.messages_of", None)  # what gRPC would send
    mine = access(token="secret")
    got = bytearray()
    parts = {"credentials": mine.server, "context": mine.server_context, "token": "secret", "node": "node0"}
    async with running(ranges=Arrays({(0, "big"): BIG}), **parts) as (address, _, _):
        client = PeerClient(
            {"node0": address}, credentials=mine.channel, context=mine.context, token="secret"
        )
        await client.fetch("node0", "gpt", TXID, [WHOLE], lambda at, part: got.extend(part), deadline_s=10)
        client.close()
    assert got == BIG.tobytes()


async def test_a_task_that_is_cancelled_lets_go_at_once():
    request = Ranges(0, "w", 1, np.array([[[0], [100]]]))
    came = trio.Event()
    token = trio.lowlevel.current_trio_token()
    with stub(frame(b"x" * 50)) as port:
        client = PeerClient({"node0": "127.0.0.1:1"})
        client._peer("node0").bulk._port = port
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:

                async def fetch():
                    def write(at, data):
                        token.run_sync_soon(came.set)

                    await client.fetch("node0", "gpt", TXID, [request], write, deadline_s=60)

                nursery.start_soon(fetch)
                await came.wait()
                nursery.cancel_scope.cancel()
        client.close()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_said_to_the_port_the_next_one_is_served(data):
    server = SERVER[0]
    greeting = msgspec.msgpack.encode(bulk.Greeting())
    good = bulk.MAGIC + bulk.LENGTH.pack(len(greeting)) + greeting
    encoded = REQUEST.encode()
    said = data.draw(
        st.one_of(
            st.binary(max_size=60),
            st.binary(max_size=60).map(lambda rest: bulk.MAGIC + rest),
            st.binary(max_size=60).map(lambda rest: good + rest),
            st.integers(0, len(encoded)).map(lambda n: good + bulk.LENGTH.pack(n) + encoded[:n]),
            st.just(good + bulk.LENGTH.pack(MAX_ENCODED_BYTES + 1)),
            st.just(bulk.MAGIC + bulk.LENGTH.pack(bulk.MAX_GREETING_BYTES + 1)),
        )
    )
    with socket.create_connection(("127.0.0.1", server.port), 5) as sock:
        sock.sendall(said)
    client = client_of(server.port)
    request = FetchRequest("gpt", TXID, 0, (Ranges(0, "big", 1, np.array([[[0], [9]]])),))
    assert fetched(client, request) == BIG[:9].tobytes()
    client.close()


SERVER = []


@pytest.fixture(scope="module", autouse=True)
def _server():
    with served() as (server, _):
        SERVER.append(server)
        yield
        SERVER.clear()
