import http.server
import re
import threading
import urllib.parse

import pytest

from tenplexfs.storage.samples.objects import Limits, ObjectReader
from tenplexfs.storage.samples.reader import LocalReader


class RangeServer:
    """A real HTTP server with ranges over files in memory; ``trouble(path, number)`` may spoil an answer."""

    def __init__(self):
        self.files = {}
        self.requests = []
        self.trouble = lambda path, number: None
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):
                self.answer(body=False)

            def do_GET(self):
                self.answer(body=True)

            def answer(self, *, body):
                path = urllib.parse.unquote(self.path)
                number = len(outer.requests)
                if body:
                    outer.requests.append((path, self.headers.get("Range")))
                trouble = outer.trouble(path, number) if body else None
                data = outer.files.get(path)
                status, part, extra = 200, data, {}
                wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                if data is None or isinstance(trouble, int):
                    status, part = trouble or 404, b""
                elif wanted and trouble != "ignore range":
                    begin, end = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
                    if begin >= len(data):
                        status, part, extra = 416, b"", {"Content-Range": f"bytes */{len(data)}"}
                    else:
                        status, part = 206, data[begin:end]
                        extra = {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
                self.send_response(status)
                for name, value in extra.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(part)))
                self.end_headers()
                if trouble == "cut":
                    self.wfile.write(part[: len(part) // 2])
                    self.close_connection = True
                elif trouble == "stall":
                    outer.released.wait(20)
                    self.close_connection = True
                elif body:
                    self.wfile.write(part)

        self.released = threading.Event()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.block_on_close = False
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()

    def close(self):
        self.released.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def server():
    running = RangeServer()
    yield running
    running.close()


@pytest.fixture
def objects():
    """Makes readers of objects, and closes them."""
    made = []

    def make(config=None, **limits):
        made.append(ObjectReader(config=config, limits=Limits(**{"backoff_s": 0.01, **limits})))
        return made[-1]

    yield make
    for reader in made:
        reader.close()


@pytest.fixture
def local():
    reader = LocalReader()
    yield reader
    reader.close()
