"""Everything through one node, as fast as plain TCP can: what reconfigurations are compared with.

    python benchmarks/central.py serve                                    on every other node; says "ready"
    python benchmarks/central.py move 10.77.0.2=BYTES,... 10.77.0.3=BYTES,...    on the one node

The one node gathers what each of the first holds, then hands out what each of the second needs, to all at
once. It prints the seconds. No checksums, no files, no agreement: at least so long it takes.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

PORT = 7071
_ASK = struct.Struct("<?Q")
"""Whether the other side sends, and how many bytes."""
_BLOCK = 1 << 20


def _send(sock: socket.socket, nbytes: int) -> None:
    block = memoryview(bytes(_BLOCK))
    for at in range(0, nbytes, _BLOCK):
        sock.sendall(block[: nbytes - at])


def _receive(sock: socket.socket, nbytes: int) -> None:
    block = memoryview(bytearray(_BLOCK))
    while nbytes:
        count = sock.recv_into(block[:nbytes])
        if not count:
            raise ConnectionError("the other side went away")
        nbytes -= count


def _answer(sock: socket.socket) -> None:
    with sock:
        sends, nbytes = _ASK.unpack(sock.recv(_ASK.size, socket.MSG_WAITALL))
        (_send if sends else _receive)(sock, nbytes)
        sock.sendall(b"!")


def _fetch(address: str, nbytes: int) -> None:
    with socket.create_connection((address, PORT)) as sock:
        sock.sendall(_ASK.pack(True, nbytes))
        _receive(sock, nbytes + 1)


def _give(address: str, nbytes: int) -> None:
    with socket.create_connection((address, PORT)) as sock:
        sock.sendall(_ASK.pack(False, nbytes))
        _send(sock, nbytes)
        _receive(sock, 1)


def _all(work: Callable[[str, int], None], what: Mapping[str, int]) -> None:
    with ThreadPoolExecutor(max(1, len(what))) as pool:
        list(pool.map(work, what.keys(), what.values()))


def serve() -> None:
    """Answers, until it is ended."""
    with socket.create_server(("", PORT)) as server:
        print("ready", flush=True)
        while True:
            threading.Thread(target=_answer, args=(server.accept()[0],), daemon=True).start()


def move(held: Mapping[str, int], needed: Mapping[str, int]) -> float:
    """Returns how long it takes; both are bytes by address."""
    begin = time.perf_counter()
    _all(_fetch, held)
    _all(_give, needed)
    return time.perf_counter() - begin


def _parsed(text: str) -> dict[str, int]:
    pairs = (pair.split("=") for pair in text.split(",") if pair)
    return {address: int(nbytes) for address, nbytes in pairs}


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    print(move(_parsed(sys.argv[2]), _parsed(sys.argv[3])))
