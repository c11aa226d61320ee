from __future__ import annotations

import os
import signal

import pytest
import trio

from tenplexfs.errors import InvalidError, UnavailableError
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.runtime.compute import Compute


@pytest.fixture
def compute():
    made = Compute()
    yield made
    made.close()


def test_it_computes_elsewhere_and_keeps_its_worker(compute):
    async def main():
        first = await compute(os.getpid)
        assert first != os.getpid()
        assert await compute(os.getpid) == first
        assert await compute(max, 3, 7) == 7

    trio.run(main)


def test_errors_come_back_as_they_are(compute):
    async def main():
        with pytest.raises(InvalidError, match="JSON"):
            await compute(parse_layout, "{")
        with pytest.raises(ZeroDivisionError):
            await compute(divmod, 1, 0)

    trio.run(main)


def test_a_worker_that_was_killed_is_replaced(compute):
    async def main():
        pid = await compute(os.getpid)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - it is dead at once
        assert await compute(max, 1, 2) == 2

    trio.run(main)


def test_a_call_that_kills_every_worker_is_an_error(compute):
    async def main():
        with pytest.raises(UnavailableError, match="died twice"):
            await compute(os._exit, 1)
        assert await compute(max, 1, 2) == 2

    trio.run(main)


def test_after_close_it_refuses():
    compute = Compute()
    compute.close()

    async def main():
        with pytest.raises(UnavailableError, match="stopping"):
            await compute(os.getpid)

    trio.run(main)
