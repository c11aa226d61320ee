from __future__ import annotations

import os
import signal
import time

import pytest
import trio

from tenplexfs.errors import InvalidError, TimedOutError, UnavailableError
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


def test_what_takes_too_long_is_ended_and_the_next_call_works():
    compute = Compute(workers=1, deadline_s=3.0)

    async def main():
        await compute(max, 1, 2)
        compute._deadline_s = 0.2
        with pytest.raises(TimedOutError, match=r"sleep: took more than 0\.2 s"):
            await compute(time.sleep, 60)
        compute._deadline_s = 10.0
        assert await compute(max, 1, 2) == 2

    try:
        trio.run(main)
    finally:
        compute.close()


def test_a_long_call_does_not_hold_up_a_short_one(compute, tmp_path):
    async def main():
        gate = tmp_path / "gate"
        os.mkfifo(gate)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(compute, gate.read_bytes)
            held = await trio.to_thread.run_sync(gate.open, "wb")  # the first worker reads
            assert await compute(max, 1, 2) == 2
            held.close()

    trio.run(main)


def test_when_all_are_busy_for_too_long_it_says_so(tmp_path):
    compute = Compute(workers=1, deadline_s=5.0)

    async def main():
        gate = tmp_path / "gate"
        os.mkfifo(gate)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(compute, gate.read_bytes)
            held = await trio.to_thread.run_sync(gate.open, "wb")
            compute._deadline_s = 0.1
            with pytest.raises(TimedOutError, match=r"max: the 1 workers that plan are busy for 0\.1 s"):
                await compute(max, 1, 2)
            held.close()

    try:
        trio.run(main)
    finally:
        compute.close()
