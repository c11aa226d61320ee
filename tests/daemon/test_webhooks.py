"""Events, posted to a real HTTP server."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import trio

from tenplexfs.daemon import webhooks
from tenplexfs.daemon.webhooks import Webhooks


@contextmanager
def server(*statuses: int) -> Iterator[tuple[str, list[dict[str, Any]], threading.Event]]:
    """Answers with ``statuses`` in turn; gives its address, what it got, and what is set after the last."""
    got: list[dict[str, Any]] = []
    left = list(statuses)
    done = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(left.pop(0))
            self.send_header("Location", "http://127.0.0.1:1/")
            self.send_header("Content-Length", "0")
            self.end_headers()
            if not left:
                done.set()

        def log_message(self, *_: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/", got, done
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def send(url: str | None, *, insecure: bool = False, times: int = 1) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            hooks = Webhooks(nursery, insecure=insecure, wall_s=lambda: 0.0)
            for _ in range(times):
                hooks.tell(url, {"event": "done"})

    trio.run(main)


def test_an_event_is_sent_until_it_is_taken():
    with server(500, 429, 200) as (url, got, done):
        send(url)
        assert done.wait(10)
    event = {
        "format": "tenplexfs-event",
        "version": 1,
        "time": "1970-01-01T00:00:00.000+00:00",
        "event": "done",
    }
    assert got == [event] * 3


def test_a_refusal_and_a_redirect_end_it():
    for status in (400, 302):
        with server(status) as (url, got, _):
            send(url)
        assert len(got) == 1


def test_an_answer_without_end_is_an_answer():
    def answer() -> None:
        with listener.accept()[0] as sock:
            sock.recv(1 << 16)
            sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(1 << 16))
            with suppress(ConnectionError):  # with something left to read it is a reset
                sock.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        with fail_after_s(5):
            send(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        thread.join(5)
        assert not thread.is_alive()


@contextmanager
def fail_after_s(seconds: float) -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < seconds


def test_nothing_goes_in_the_clear_to_other_machines(caplog):
    send("http://192.0.2.1/")
    assert "http beyond this machine" in caplog.text
    send(None)


def test_what_nobody_takes_is_forgotten(monkeypatch, caplog):
    monkeypatch.setattr(webhooks, "_END_S", 0.3)
    monkeypatch.setattr(webhooks, "_MOST_WAITING", 2)
    send("http://127.0.0.1:1/", times=3)
    assert "not taken within 0.3 s; given up" in caplog.text
    assert "2 events wait already; one is dropped" in caplog.text
