"""Old, broken and hostile clients get an error, never a hang; the daemon goes on."""

from __future__ import annotations

import array
import os
import socket
import struct
from pathlib import Path

import msgpack
import pytest
import trio

from tenplexfs.errors import ExistsError, NoRoomError
from tenplexfs.formats import frames
from tenplexfs.unix.server import UnixServer


class Echo:
    """Answers what it is asked; `ended` counts closed connections."""

    ended = 0

    def __init__(self, pid: int) -> None:
        self.pid = pid

    async def handle(self, op, message):
        await trio.lowlevel.checkpoint()
        if op == "full":
            raise NoRoomError("no room: 5 needed", needed_bytes=5)
        if op == "broken":
            raise ZeroDivisionError("inside")
        if op == "big":
            return {"data": bytes(frames.MAX_FRAME_BYTES)}, ()
        if op == "fds":
            fds = [os.memfd_create("x") for _ in range(message["count"])]
            for i, fd in enumerate(fds):
                os.write(fd, b"%d" % i)
            return {"data": b"x" * message["bytes"]}, fds
        return {"op": op, "pid": self.pid}, ()

    async def close(self):
        Echo.ended += 1
        await trio.lowlevel.checkpoint()


def fds_count() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def until(what) -> None:
    with trio.fail_after(5):
        while not what():  # noqa: ASYNC110 - what another task does has no event
            await trio.sleep(0.001)


def exchange(path: Path, data: bytes, *, count: int = 1) -> list[dict]:
    """Sends raw bytes, reads answers until there are `count`, or the end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(10)
        client.connect(str(path))
        client.sendall(data)
        stream, found = client.makefile("rb"), []
        with stream:
            while len(found) < count and (prefix := stream.read(4)):
                found.append(msgpack.unpackb(stream.read(struct.unpack("<I", prefix)[0])))
        return found


async def with_server(tmp_path, test):
    path = tmp_path / "socket"
    async with trio.open_nursery() as nursery:
        await nursery.start(UnixServer(path, Echo).run)
        await test(path)
        nursery.cancel_scope.cancel()
    assert not path.exists()


def request(op: str, number: int = 1, **fields: object) -> bytes:
    return frames.encode({"id": number, "op": op, **fields})


def test_answers_and_errors(tmp_path):
    async def test(path):
        data = request("hello", 7) + request("full", 8) + request("broken", 9) + request("big", 10)
        first, full, broken, big = await trio.to_thread.run_sync(lambda: exchange(path, data, count=4))
        assert first == {"v": 1, "id": 7, "ok": {"op": "hello", "pid": os.getpid()}}
        assert full["error"] == {
            "code": "RESOURCE_EXHAUSTED",
            "message": "no room: 5 needed",
            "details": {"needed_bytes": 5},
        }
        assert broken["error"]["code"] == "INTERNAL" and "inside" in broken["error"]["message"]
        assert "67108" in big["error"]["message"]

    trio.run(with_server, tmp_path, test)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff\xff\xff\xff", "announced"),
        (b"GET / HTTP/1.1\r\n\r\n", "announced"),
        (struct.pack("<I", 3) + b"\xc1\xc1\xc1", "no msgpack"),
        (struct.pack("<I", 1) + b"\x90", "version None"),
        (frames.encode({"id": 1, "op": "hello"}).replace(b"\xa1v\x01", b"\xa1v\x02"), "version 2"),
        (frames.encode({"op": "hello"}), "id None"),
        (frames.encode({"id": 1}), "op None"),
        (frames.encode({"id": 1, "op": 5}), "op 5"),
    ],
)
def test_what_is_no_request_is_answered_with_an_error(tmp_path, data, why):
    async def test(path):
        (answer,) = await trio.to_thread.run_sync(lambda: exchange(path, data))
        assert answer["error"]["code"] == "INVALID_ARGUMENT" and why in answer["error"]["message"]
        (again,) = await trio.to_thread.run_sync(lambda: exchange(path, request("hello")))
        assert again["ok"]["op"] == "hello"

    trio.run(with_server, tmp_path, test)


@pytest.mark.parametrize("cut", [0, 2, 4, 9])
def test_a_client_that_ends_in_the_middle_ends_its_session(tmp_path, cut):
    async def test(path):
        before = Echo.ended
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(path))
            client.sendall(request("hello")[:cut])
        await until(lambda: Echo.ended > before)

    trio.run(with_server, tmp_path, test)


@pytest.mark.parametrize(("count", "size"), [(1, 0), (64, 10), (64, 5 << 20)])
def test_descriptors_travel_beside_frames(tmp_path, count, size):
    def ask(path):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(10)
            client.connect(str(path))
            client.sendall(request("fds", count=count, bytes=size))
            data, ancillary, flags, _ = client.recvmsg(4, socket.CMSG_SPACE(4 * 64))
            assert not flags & socket.MSG_CTRUNC
            fds = array.array("i", ancillary[0][2])
            left = struct.unpack("<I", data)[0]
            while left:
                left -= len(client.recv(left))
            found = [os.pread(fd, 9, 0) for fd in fds]
            for fd in fds:
                os.close(fd)
            return found

    async def test(path):
        before = fds_count()
        assert await trio.to_thread.run_sync(ask, path) == [b"%d" % i for i in range(count)]
        await until(lambda: fds_count() <= before)  # the daemon's own are closed

    trio.run(with_server, tmp_path, test)


def test_one_daemon_a_socket_and_a_dead_one_is_replaced(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    async def test(found):
        assert (found.stat().st_mode & 0o777) == 0o600
        with pytest.raises(ExistsError, match="another daemon listens"):
            await UnixServer(path, Echo).run()

    trio.run(with_server, tmp_path, test)
