"""Start and end of a mount."""

import errno
import json
import os
import signal
import subprocess
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import trio

from tenplexfs.fuse.mount import Mount
from tenplexfs.fuse.mountpoint import find_mount
from tenplexfs.runtime.namespace import Control, Namespace, StoreNumbers


def test_it_leaves_at_sigterm_also_with_open_files(start):
    daemon = start(grace_s=0.5)
    daemon("publish", version=1)
    opened = (daemon.path / "gpt/full/head.npy").open("rb")
    directory = os.open(daemon.path / "gpt", os.O_RDONLY)
    begin = time.monotonic()
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(20) == 0
    assert time.monotonic() - begin < 5
    assert find_mount(str(daemon.path)) is None
    assert list(daemon.path.iterdir()) == []
    with pytest.raises(OSError) as raised:
        list(os.scandir(directory))
    assert raised.value.errno == errno.ENOTCONN
    os.close(directory)
    with suppress(OSError):  # the last close of a file asks the daemon, which is gone
        opened.close()


def test_it_leaves_while_a_read_waits(start):
    daemon = start()
    daemon("publish", remote=3)
    with subprocess.Popen(["cat", daemon.path / "gpt/model/3/head.npy"], stderr=subprocess.PIPE) as reader:
        while daemon("waiting") == 0:
            assert reader.poll() is None
        assert daemon.stop() == 0
        assert b"not connected" in reader.communicate(timeout=20)[1]
    assert find_mount(str(daemon.path)) is None


def test_it_ends_when_somebody_else_unmounts(start):
    daemon = start()
    subprocess.run(["fusermount3", "-u", daemon.path], check=True)
    assert daemon.process.wait(20) == 0
    assert find_mount(str(daemon.path)) is None


def test_a_killed_daemons_mount_is_cleared(start):
    first = start()
    first("publish", version=1)
    opened = (first.path / "gpt/full/scale.npy").open("rb")
    first.process.kill()
    first.process.wait()
    with pytest.raises(OSError) as raised:
        list(first.path.iterdir())
    assert raised.value.errno == errno.ENOTCONN
    second = start()
    second("publish", version=2)
    assert json.loads((second.path / "gpt/job.json").read_text())["version"] == 2
    with suppress(OSError):  # the last close of a file asks the daemon, which is gone
        opened.close()


def test_places_that_are_taken(start, tmp_path):
    first = start()
    second = start()
    assert second.greeting["error"] == "ExistsError"
    assert "another tenplexfs serves it" in second.greeting["message"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "data").touch()
    third = start(tmp_path / "full")
    assert "not empty ('data' is there)" in third.greeting["message"]
    assert {second.process.wait(20), third.process.wait(20)} == {1}
    assert (tmp_path / "full" / "data").exists()
    first("publish", version=1)
    assert (first.path / "gpt").exists()


def test_the_kernel_reads_ahead_in_big_steps(daemon):
    mount = find_mount(str(daemon.path))
    assert (mount.fstype, mount.source) == ("fuse.tenplexfs", "tenplexfs")
    if os.geteuid() == 0:
        assert Path(f"/sys/class/bdi/{mount.device}/read_ahead_kb").read_text() == "4096\n"
        assert "max_background stays" not in daemon.log.read_text()


def test_errors_and_cancellation_pass_through_and_leave_nothing(tmp_path):
    namespace = Namespace(Control({}, list, {}), lambda: StoreNumbers(1, 0), clock_ns=lambda: 0)

    async def fail() -> None:
        async with Mount(namespace, tmp_path):
            assert find_mount(str(tmp_path)) is not None
            assert namespace.notify is not None
            raise KeyError

    async def cancelled() -> None:
        with trio.CancelScope() as scope:
            async with Mount(namespace, tmp_path):
                scope.cancel()
                await trio.sleep_forever()

    for body in (fail, cancelled, fail):
        with pytest.raises(KeyError) if body is fail else nullcontext():
            trio.run(body)
        assert find_mount(str(tmp_path)) is None
        assert namespace.notify is None
