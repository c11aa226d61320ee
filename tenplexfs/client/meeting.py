"""Where the launchers of a job's nodes agree on each start: a small table of texts on one of their hosts.

Texts are exchanged by compare-and-set, in lines of JSON over TCP. torchrun's own rendezvous cannot be this
place: it begins anew for each start, under a name and at an address that all know, on a host that has ranks.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from contextlib import suppress

from tenplexfs.errors import UnavailableError, UsageError

__all__ = ["Meeting"]

_ANSWER_S = 10.0
_LINE_BYTES = 1 << 16
_MAX_TEXTS = 100_000
_LINGER_S = 5.0
_POLL_S = 0.05


class Meeting:
    """The table, at ``place``: served by the first launcher there, reached from all others.

    Args:
        place: ``HOST:PORT``, the same on all nodes.
        linger_s: How long `close` waits for the others to leave.

    Raises:
        UsageError: It is no such place.
    """

    def __init__(self, place: str, *, linger_s: float = _LINGER_S) -> None:
        host, colon, port = place.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise UsageError(f"--rendezvous {place!r}: need HOST:PORT")
        self._address = host.strip("[]"), int(port)
        self._linger_s = linger_s
        self._board: _Board | None = None
        self._line: socket.socket | None = None

    def swap(self, name: str, expected: str | None, wanted: str) -> str:
        """Returns the text of ``name``, which is ``wanted`` now if there was none, or ``expected``.

        Raises:
            UnavailableError: Nobody answers there.
        """
        return str(self._ask({"name": name, "expected": expected, "wanted": wanted}))

    def get(self, name: str) -> str | None:
        """Returns the text of ``name``, if there is one.

        Raises:
            UnavailableError: Nobody answers there.
        """
        found = self._ask({"name": name})
        return None if found is None else str(found)

    def own_host(self) -> str:
        """Returns by which address the others reach this host."""
        if self._board is not None:
            return self._address[0]
        line = self._line or self._connect()
        return str(line.getsockname()[0])

    def close(self) -> None:
        """Leaves; where the table is here, once the others have left, or after a while."""
        if self._line is not None:
            self._line.close()
        if self._board is not None:
            end = time.monotonic() + self._linger_s
            while self._board.lines and time.monotonic() < end:
                time.sleep(_POLL_S)
            self._board.end()

    def _ask(self, request: dict[str, str | None]) -> object:
        line = self._line or self._connect()
        try:
            line.sendall(json.dumps(request).encode() + b"\n")
            with line.makefile("rb") as answers:
                return json.loads(answers.readline(_LINE_BYTES))
        except (OSError, ValueError) as error:
            line.close()
            self._line = None
            raise self._away(error) from error

    def _connect(self) -> socket.socket:
        try:
            self._line = socket.create_connection(self._address, _ANSWER_S)
        except OSError as error:
            if self._board is not None:
                raise self._away(error) from error
            with suppress(OSError):
                self._board = _Board(self._address)
            if self._board is None:
                raise self._away(error) from error
            return self._connect()
        return self._line

    def _away(self, error: Exception) -> UnavailableError:
        host, port = self._address
        return UnavailableError(f"rendezvous {host}:{port}: no launcher answers there: {error}")


class _Board(socketserver.ThreadingTCPServer):
    """The table itself.

    Raises:
        OSError: This is not the host, or somebody listens there.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int]) -> None:
        host, port = address
        self.address_family, *_, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(self.address_family) as probe:
            probe.bind((found[0], 0))  # fails where the host is another one
        # Here a host's own name may stand for an address that nobody else reaches, as 127.0.1.1.
        super().__init__((host if host in (found[0], "localhost") else "", port), _Talk)
        self.lines: set[socket.socket] = set()
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": _POLL_S}, daemon=True).start()

    def end(self) -> None:
        """Ends it, and the connections that are left."""
        self.shutdown()
        self.server_close()
        for line in list(self.lines):
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def answer(self, request: object) -> str | None:
        """Returns the text that is there after a request.

        Raises:
            ValueError: It is none.
        """
        match request:
            case {"name": str(name), "wanted": str(wanted), "expected": str() | None as expected}:
                with self._lock:
                    if len(self._texts) >= _MAX_TEXTS:
                        raise ValueError("full")
                    if self._texts.setdefault(name, wanted) == expected:
                        self._texts[name] = wanted
                    return self._texts[name]
            case {"name": str(name)}:
                return self._texts.get(name)
        raise ValueError("no request")


class _Talk(socketserver.StreamRequestHandler):
    server: _Board

    def handle(self) -> None:
        self.server.lines.add(self.request)
        try:
            while line := self.rfile.readline(_LINE_BYTES):
                self.wfile.write(json.dumps(self.server.answer(json.loads(line))).encode() + b"\n")
        except (OSError, ValueError):
            pass  # it went away, or is none of ours
        finally:
            self.server.lines.discard(self.request)
