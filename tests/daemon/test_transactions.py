from __future__ import annotations

import pytest
import trio

from tenplexfs.daemon.transactions import Transactions
from tenplexfs.errors import NotFoundError, TenplexError


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (ValueError("65 dims"), TenplexError, "internal error: ValueError: 65 dims; the daemon's log"),
        (ExceptionGroup("", [NotFoundError("no such job")]), NotFoundError, "no such job"),
    ],
)
def test_an_error_that_nobody_expected_ends_the_transaction_and_no_more(raised, kind, words):
    async def work(report):
        raise raised

    async def main():
        async with trio.open_nursery() as nursery:
            transactions = Transactions(nursery, lambda: None)
            for _ in range(2):
                transaction = transactions.start("gpt", "", work)
                with pytest.raises(kind, match=words):
                    async for _ in transaction.watch():
                        pass
                assert transactions.running("gpt") is None

    trio.run(main)
