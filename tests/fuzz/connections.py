"""Sockets that have nothing but what a fuzzer says, for both sides of the plain connections for bytes."""

from __future__ import annotations

import numpy as np

from tenplexfs.errors import TenplexError
from tenplexfs.rpc import bulk
from tenplexfs.rpc.bulk_client import BulkStream
from tenplexfs.rpc.bulk_server import BulkServer
from tenplexfs.rpc.wire import FetchRequest
from tenplexfs.runtime.protocols import Ranges

REQUEST = FetchRequest("gpt", "0" * 16, 0, (Ranges(0, "w", 1, np.array([[[0], [64]]], np.int64)),))


class Said:
    """A connection on which ``data`` comes, and then its end; what is sent goes nowhere."""

    def __init__(self, data: bytes) -> None:
        self._left = memoryview(data)

    def recv_into(self, view: memoryview, _nbytes: int = 0, _flags: int = 0) -> int:
        count = min(len(view), len(self._left))
        view[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def sendmsg(self, parts: list[memoryview]) -> int:
        return sum(map(len, parts))

    def fileno(self) -> int:
        return -1


def read_answers(data: bytes) -> None:
    """Reads ``data`` as what a peer answers to a request for 64 bytes."""
    stream = BulkStream(Said(data), "peer")  # type: ignore[arg-type]
    got = b"".join(map(bytes, stream.messages(REQUEST.encode(), REQUEST.nbytes, deadline_s=5)))
    assert len(got) == REQUEST.nbytes


def answerer() -> tuple[object, bytes]:
    """Returns what reads bytes as what a caller says, and what a good caller says."""
    from tests.rpc.fakes import Arrays

    server = BulkServer(Arrays({(0, "w"): np.zeros(64, np.uint8)}), "127.0.0.1", token="t")
    server.stop(0)

    def read(data: bytes) -> None:
        said = Said(data)
        if server._let_in(said):  # type: ignore[arg-type]
            while server._answer_one(said):  # type: ignore[arg-type]
                pass

    encoded = REQUEST.encode()
    greeting = b"\x82\xa5token\xa1t\xa4node\xa0"
    said = bulk.MAGIC + bulk.LENGTH.pack(len(greeting)) + greeting
    return read, said + bulk.LENGTH.pack(len(encoded)) + encoded


def good_answers() -> bytes:
    """Returns what a good peer answers."""
    from xxhash import xxh3_64_intdigest

    body = bytes(64)
    refusal = bulk.encode_error(TenplexError("no"))
    frames = ((bulk.PULSE, b""), (bulk.DATA, body[:16]), (bulk.DATA, body[16:]), (bulk.ERROR, refusal))
    return b"".join(bulk.HEADER.pack(kind, len(b), xxh3_64_intdigest(b)) + b for kind, b in frames)
