"""The socket of the HTTP edge: slow, broken and greedy clients, over real connections."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import trio

import tenplexfs.http.server as server_module
from tenplexfs.errors import ExistsError, NoRoomError, TooLargeError
from tenplexfs.http.message import Request, Response, Stream, text
from tenplexfs.http.server import HttpServer
from tests.cluster.daemons import until

LEFT: list[str] = []
"""Streams that were closed."""

BIG = bytes(range(256)) * 20_000


async def echo(request: Request) -> Response:
    """Answers with what came, or does what the path says."""
    what = request.path.strip("/")
    if what == "early":
        raise NoRoomError("no room: 5 needed")
    if what == "broken":
        raise ZeroDivisionError
    if what == "limited":
        return text(200, str(len(await request.content("it", 1000))))
    if what in ("stream", "short"):

        async def blocks():
            for begin in range(0, len(BIG), 100_000):
                await trio.lowlevel.checkpoint()
                if what == "short" and begin:
                    raise TooLargeError("not any more")
                yield memoryview(BIG)[begin : begin + 100_000]

        return Response(200, Stream(len(BIG), blocks(), lambda: LEFT.append(what)), {"x-a": "b"})
    data = bytearray()
    block = bytearray(70_000)
    while count := await request.body.read_into(memoryview(block)):
        data += block[:count]
    return Response(200, bytes(data), {"x-method": request.method, "x-query": repr(dict(request.query))})


class Client:
    """One connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.stream = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Reads one answer; status 0 where the connection ends."""
        first = self.stream.readline()
        if not first:
            return 0, {}, b""
        headers = {}
        while line := self.stream.readline().strip():
            name, _, value = line.decode().partition(": ")
            headers[name.lower()] = value
        return int(first.split()[1]), headers, self.stream.read(int(headers.get("content-length", "0")))

    def ask(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        self.send(data)
        return self.answer()

    def close(self) -> None:
        self.stream.close()
        self.socket.close()


@contextmanager
def client(port: int):
    made = Client(port)
    try:
        yield made
    finally:
        made.close()


def served(test: Callable[[int], None], **options: object) -> None:
    """Runs ``test`` in a thread against a server on a free port."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        async with trio.open_nursery() as nursery:
            await nursery.start(HttpServer(f"127.0.0.1:{port}", echo, **options).run)
            with pytest.raises(ExistsError, match="cannot be bound"):
                await HttpServer(f"127.0.0.1:{port}", echo).run()
            with trio.fail_after(30):
                await trio.to_thread.run_sync(partial(test, port))
            nursery.cancel_scope.cancel()

    trio.run(main)


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def test_bodies_answers_and_connections_that_go_on():
    def test(port):
        with client(port) as one:
            for body in (b"", b"x", BIG):
                status, headers, data = one.ask(post("/a?b=c%2Fd+e&b=2&f=", body))
                assert (status, data) == (200, body)
                assert headers["x-query"] == "{'f': '', 'b': 'c/d e'}"
            # in one go
            one.send(post("/", b"first") + post("/", BIG) + b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert [one.answer()[2] for _ in range(3)] == [b"first", BIG, b""]
            # in chunks, then as usual
            chunks = b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in (b"abc", BIG, b"d")) + b"0\r\n\r\n"
            head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            assert one.ask(head + chunks + post("/", b"next"))[2] == b"abc" + BIG + b"d"
            assert one.answer()[2] == b"next"
            assert one.ask(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")[2] == BIG
            # until it is told to end
            assert one.ask(post("/", b"last", "connection: close"))[1]["connection"] == "close"
            assert one.answer()[0] == 0
        with client(port) as old:
            assert old.ask(b"POST / HTTP/1.0\r\ncontent-length: 2\r\n\r\nhi")[2] == b"hi"

    served(test)


def test_who_waits_for_a_word_gets_it_or_the_refusal():
    def test(port):
        with client(port) as one:
            one.send(post("/", b"", "expect: 100-continue").replace(b"length: 0", b"length: 3"))
            assert one.answer()[0] == 100
            assert one.ask(b"abc")[2] == b"abc"
            assert one.ask(post("/early", b"", "expect: 100-continue").replace(b": 0", b": 3"))[0] == 507
            assert one.answer()[0] == 0

    served(test)


def test_errors_are_a_line_and_the_connection_goes_on():
    def test(port):
        with client(port) as one:
            assert one.ask(post("/early", BIG))[::2] == (507, b"no room: 5 needed")
            assert one.ask(post("/limited", b"x" * 1001))[0] == 413
            chunked = b"POST /limited HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            assert one.ask(chunked + b"3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n")[0] == 413
            status, _, line = one.ask(post("/broken", b""))
            assert (status, line) == (500, b"internal error: ZeroDivisionError; the daemon's log has more")
            assert one.ask(post("/", b"still here"))[2] == b"still here"

    served(test)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no host
        (b"GET / HTTP/1.1\r\nhost: x\r\na b: c\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"x" * 300_000 + b"\r\n\r\n", 431),
        (b"GET /?a=%ff HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET /?" + b"a=1&" * 20 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\norigin: http://evil\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nsec-fetch-site: same-origin\r\n\r\n", 400),
    ],
)
def test_what_is_no_request_is_refused(data, status):
    def test(port):
        with client(port) as one:
            found, _, line = one.ask(data)
            assert found == status
            assert line and b"\n" not in line
        with client(port) as other:
            assert other.ask(post("/", b"hello"))[2] == b"hello"

    served(test)


def test_a_token_is_asked_for():
    def test(port):
        with client(port) as one:
            for word in (
                "",
                "authorization: Bearer",
                "authorization: Basic secret",
                "authorization: Bearer no",
            ):
                status, headers, _ = one.ask(post("/", b"x", *filter(None, [word])))
                assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert one.ask(post("/", b"x", "authorization: bearer secret"))[2] == b"x"

    served(test, token="secret")


def test_who_does_nothing_is_left(monkeypatch):
    monkeypatch.setattr(server_module, "_HEADER_S", 0.1)
    monkeypatch.setattr(server_module, "_STALL_S", 0.1)

    def test(port):
        for data in (b"", b"GET / HT", post("/", b"abc")[:-1]):
            with client(port) as one:
                assert one.ask(data)[0] == 0
        with client(port) as drip:  # a little now and then is too little
            drip.send(post("/", b"x" * 100)[:-100])
            drip.socket.settimeout(0.02)
            for _ in range(100):
                try:
                    drip.send(b"x")
                    assert drip.socket.recv(1) == b""
                    break
                except TimeoutError:
                    continue
                except ConnectionError:
                    break
            else:
                pytest.fail("it was listened to all the while")

    served(test)


def test_who_does_not_read_is_left(monkeypatch):
    monkeypatch.setattr(server_module, "_STALL_S", 0.1)

    def test(port):
        with client(port) as deaf:
            deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.send(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n" * 8)
            until(lambda: LEFT)
            received = 0
            with suppress(ConnectionError):
                while data := deaf.socket.recv(1 << 20):
                    received += len(data)
            assert received < 8 * len(BIG)

    LEFT.clear()
    served(test)


def test_an_answer_that_breaks_off_is_not_taken_for_whole():
    def test(port):
        with client(port) as one:
            status, headers, data = one.ask(b"GET /short HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (status, int(headers["content-length"]), len(data)) == (200, len(BIG), 100_000)

    served(test)


def test_there_is_an_end_to_connections(monkeypatch):
    monkeypatch.setattr(server_module, "_MOST_CONNECTIONS", 2)

    def test(port):
        with client(port) as one, client(port) as two:
            assert [each.ask(post("/", b"x"))[0] for each in (one, two)] == [200, 200]
            with client(port) as three:
                assert three.answer()[0] == 503
            assert one.ask(post("/", b"y"))[2] == b"y"

    served(test)
