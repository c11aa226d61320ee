"""The handlers, called without a mount."""

import errno
import inspect
import logging
import stat

import pyfuse3
import pytest
import trio
import trio.testing
from pyfuse3 import FUSEError

from tenplexfs.core.snapshot import JobName
from tenplexfs.errors import NoRoomError, StaleError
from tenplexfs.fuse.boundary import boundary
from tenplexfs.fuse.operations import Operations
from tenplexfs.runtime.namespace import ROOT_INO, Control, Namespace, StoreNumbers
from tests.fuse.memory import CREATED_NS, MemoryView, RemoteContent, small_ptc


class Context:
    """Operations with one job, ranks 0 to 2 here and rank 3 elsewhere."""

    def __init__(self, *, waiting_limit: int = 8, gate: trio.Event | None = None) -> None:
        control = Control({"version": lambda: b"1\n"}, list, {})
        self.namespace = Namespace(control, lambda: StoreNumbers(8192, 5000), clock_ns=lambda: 7)
        ptc = small_ptc()
        self.slot = self.namespace.publish(
            JobName("gpt"), MemoryView("gpt", 1, ptc, remote_rank=3, gate=gate), ptc
        )
        self.operations = Operations(self.namespace, waiting_limit=waiting_limit)

    async def walk(self, path: str):
        entry = await self.operations.getattr(ROOT_INO, None)
        for name in path.split("/"):
            entry = await self.operations.lookup(entry.st_ino, name.encode(), None)
        return entry


@pytest.fixture
def context() -> Context:
    return Context()


def run(function, *args):
    return trio.run(function, *args)


async def fails(awaitable) -> int:
    with pytest.raises(FUSEError) as raised:
        await awaitable
    return raised.value.errno


def test_every_handler_carries_the_boundary():
    handlers = [
        name
        for name, function in vars(pyfuse3.Operations).items()
        if inspect.iscoroutinefunction(function) and name in vars(Operations)
    ]
    assert {"lookup", "getattr", "open", "read", "readdir", "release"} <= set(handlers)
    assert [name for name in handlers if not hasattr(getattr(Operations, name), "is_boundary")] == []
    coroutines = {
        name for name, f in vars(Operations).items() if inspect.iscoroutinefunction(f) and name[0] != "_"
    }
    assert coroutines == set(handlers)


def test_the_boundary_maps_errors(caplog):
    @boundary
    async def handler(error: BaseException) -> None:
        raise error

    async def scenario() -> None:
        assert await fails(handler(StaleError("gone"))) == errno.ESTALE
        assert await fails(handler(NoRoomError("full"))) == errno.ENOSPC
        assert await fails(handler(FUSEError(errno.ENODATA))) == errno.ENODATA
        assert caplog.records == []
        assert await fails(handler(ZeroDivisionError())) == errno.EIO
        assert "ZeroDivisionError" in caplog.text
        with trio.CancelScope() as scope:
            scope.cancel()
            await boundary(trio.sleep_forever)()
        assert scope.cancelled_caught
        with pytest.raises(KeyboardInterrupt):
            await handler(KeyboardInterrupt())

    run(scenario)


def test_attributes(context):
    async def scenario() -> None:
        entry = await context.walk("gpt/full/embedding/weight.npy")
        assert entry.st_mode == stat.S_IFREG | 0o444
        assert (entry.st_nlink, entry.st_size, entry.st_blocks) == (1, 128 + 7 * 6 * 4, 1)
        assert entry.st_mtime_ns == entry.st_ctime_ns == CREATED_NS + 1
        assert entry.entry_timeout == entry.attr_timeout == 300
        entry = await context.walk("gpt/model")
        assert (entry.st_mode, entry.st_nlink, entry.entry_timeout) == (stat.S_IFDIR | 0o555, 6, 300)
        entry = await context.walk(".tenplexfs/version")
        assert (entry.st_size, entry.entry_timeout, entry.attr_timeout) == (0, 0, 0)

    run(scenario)


def test_names_that_are_missing_are_remembered_only_inside_a_snapshot(context):
    async def scenario() -> None:
        directory = await context.walk("gpt/model/0")
        missing = await context.operations.lookup(directory.st_ino, b"nothing.npy", None)
        assert (missing.st_ino, missing.entry_timeout) == (0, 300)
        assert await fails(context.operations.lookup(ROOT_INO, b"other", None)) == errno.ENOENT

    run(scenario)


def test_open_flags_and_reads(context):
    async def scenario() -> None:
        operations = context.operations
        entry = await context.walk("gpt/model/0/scale.npy")
        info = await operations.open(entry.st_ino, 0, None)
        assert (info.direct_io, info.keep_cache) == (False, True)
        data = await operations.read(info.fh, 0, 4096)
        assert isinstance(data, memoryview)
        assert len(data) == entry.st_size
        assert bytes(await operations.read(info.fh, 6, 4)) == bytes(data[6:10])
        assert len(await operations.read(info.fh, 4096, 10)) == 0
        await operations.release(info.fh)
        live = await operations.open((await context.walk(".tenplexfs/version")).st_ino, 0, None)
        assert (live.direct_io, live.keep_cache) == (True, False)
        assert bytes(await operations.read(live.fh, 0, 4096)) == b"1\n"

    run(scenario)


def test_a_short_answer_never_reaches_the_reader(context, caplog):
    async def scenario() -> int:
        entry = await context.walk("gpt/model/0/scale.npy")
        info = await context.operations.open(entry.st_ino, 0, None)
        context.namespace.content(info.fh).size += 1
        return await fails(context.operations.read(info.fh, 0, 4096))

    assert run(scenario) == errno.EIO
    assert "read of 137 bytes at 0: the source gave 136" in caplog.text


def test_a_remote_read_that_fails_is_eio_with_a_line(context, caplog):
    async def scenario() -> int:
        entry = await context.walk("gpt/model/3/scale.npy")
        info = await context.operations.open(entry.st_ino, 0, None)
        return await fails(context.operations.read(info.fh, 0, 4096))

    assert run(scenario) == errno.EIO
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        "read: node1 did not answer in 60 s"
    ]


def test_more_remote_reads_than_may_wait_fail_at_once(caplog):
    async def scenario() -> None:
        gate = trio.Event()
        context = Context(waiting_limit=2, gate=gate)
        entry = await context.walk("gpt/model/3/scale.npy")
        info = await context.operations.open(entry.st_ino, 0, None)
        assert isinstance(context.namespace.content(info.fh), RemoteContent)
        lengths: list[int] = []

        async def read() -> None:
            lengths.append(len(await context.operations.read(info.fh, 0, 4096)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            assert await fails(context.operations.read(info.fh, 0, 4096)) == errno.EIO
            gate.set()
        await read()
        assert lengths == [entry.st_size] * 3

    run(scenario)
    assert "read: 2 reads wait for other nodes already" in caplog.text


def test_a_freed_snapshot_is_estale(context):
    async def scenario() -> None:
        directory = await context.walk("gpt/model")
        context.namespace.retract(JobName("gpt"))
        context.namespace.free(context.slot)
        assert await fails(context.operations.lookup(directory.st_ino, b"0", None)) == errno.ESTALE
        assert await fails(context.operations.opendir(directory.st_ino, None)) == errno.ESTALE
        assert await fails(context.operations.readdir(directory.st_ino, 0, None)) == errno.ESTALE

    run(scenario)


def test_directories_are_counted(context):
    async def scenario() -> None:
        directory = await context.walk("gpt/model")
        fh = await context.operations.opendir(directory.st_ino, None)
        assert context.namespace.open_handles(context.slot).directories == 1
        await context.operations.releasedir(fh)
        assert context.namespace.open_handles(context.slot).directories == 0

    run(scenario)


def test_statfs_and_xattrs(context):
    async def scenario() -> None:
        numbers = await context.operations.statfs(None)
        assert (numbers.f_bsize, numbers.f_blocks, numbers.f_bavail, numbers.f_namemax) == (4096, 2, 0, 255)
        ino = (await context.walk("gpt/full/layers/0/w.npy")).st_ino
        assert await context.operations.getxattr(ino, b"user.tenplexfs.dtype", None) == b"bfloat16"
        assert await fails(context.operations.getxattr(ino, b"user.other", None)) == errno.ENODATA
        assert await fails(context.operations.getxattr(ino, b"security.selinux", None)) == errno.EOPNOTSUPP
        assert sorted(await context.operations.listxattr(ino, None)) == [
            b"user.tenplexfs.dtype",
            b"user.tenplexfs.global_shape",
            b"user.tenplexfs.pieces",
        ]

    run(scenario)


def test_flush_is_not_there_so_that_the_kernel_stops_asking(context):
    assert run(fails_flush, context) == errno.ENOSYS


async def fails_flush(context: Context) -> int:
    return await fails(context.operations.flush(1))
