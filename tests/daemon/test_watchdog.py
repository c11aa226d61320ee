import os
import socket

import pytest
import trio
import trio.testing

from tenplexfs.daemon import watchdog
from tenplexfs.daemon.watchdog import check_mount, interval_s, watch
from tenplexfs.errors import TimedOutError


@pytest.fixture
def manager(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "20000")
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        yield receiver


@pytest.fixture
def mount(tmp_path):
    (tmp_path / "mnt/.tenplexfs").mkdir(parents=True)
    (tmp_path / "mnt/.tenplexfs/version").write_text("1\n")
    return tmp_path / "mnt"


async def hear(manager: socket.socket, patience_s: float = 5) -> bytes:
    with trio.fail_after(patience_s):
        await trio.lowlevel.wait_readable(manager)
    return manager.recv(100)


def test_it_tells_as_long_as_reads_come(manager, mount):
    async def main():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, mount)
            for _ in range(3):
                assert await hear(manager) == b"WATCHDOG=1"
            (mount / ".tenplexfs/version").unlink()
            with pytest.raises(trio.TooSlowError):
                while True:
                    await hear(manager, 0.2)
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_without_a_mount_it_tells_that_the_loop_runs(manager):
    async def main():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, None)
            assert await hear(manager) == b"WATCHDOG=1"
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_nobody_who_did_not_ask_is_told(monkeypatch, mount):
    for environ in (
        {},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "x"},
        {"WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"},
    ):
        assert interval_s(environ, os.getpid()) is None
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    trio.run(watch, mount)


def test_a_mount_that_hangs_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "_FIRST_READ_S", 0.05)
    (tmp_path / ".tenplexfs").mkdir()
    os.mkfifo(tmp_path / ".tenplexfs/version")
    with pytest.raises(TimedOutError, match="did not come"):
        trio.run(check_mount, tmp_path)
    fd = os.open(tmp_path / ".tenplexfs/version", os.O_RDWR | os.O_NONBLOCK)  # lets the thread go
    os.write(fd, b"x")
    os.close(fd)
