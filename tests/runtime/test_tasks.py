"""Running several things at once."""

from __future__ import annotations

from functools import partial

import pytest
import trio
from trio.testing import MockClock

from tenplexfs.errors import UnavailableError
from tenplexfs.runtime.tasks import first_answer


async def after(seconds: float, answer: str | None) -> str:
    await trio.sleep(seconds)
    if answer is None:
        raise UnavailableError(f"after {seconds}")
    return answer


@pytest.mark.parametrize(
    ("asks", "answer", "ends_s"),
    [
        ([(0.5, "first"), (0, "second")], "first", 0.5),
        ([(9, "first"), (0, "second")], "second", 1.0),
        ([(9, None), (9, None), (0, "third")], "third", 2.0),
        ([(0.2, None), (0.2, "second")], "second", 0.4),
        ([(1.5, "first"), (9, "second")], "first", 1.5),
    ],
)
def test_the_next_is_asked_when_one_fails_or_is_silent(asks, answer, ends_s):
    async def main() -> None:
        begin_s = trio.current_time()
        assert await first_answer([partial(after, *each) for each in asks], patience_s=1.0) == answer
        assert trio.current_time() - begin_s == pytest.approx(ends_s)

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_all_fail_as_the_last_one():
    async def main() -> None:
        with pytest.raises(UnavailableError, match="after 5"):
            await first_answer([partial(after, 5, None), partial(after, 1, None)], patience_s=1.0)

    trio.run(main, clock=MockClock(autojump_threshold=0))
