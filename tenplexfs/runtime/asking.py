"""Asking several nodes what they store, where some may be gone: nobody is waited for longer than needed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import trio

from tenplexfs.core.snapshot import JobName, NodeName, TxId
from tenplexfs.errors import NotFoundError, TenplexError
from tenplexfs.runtime.orders import DescribeCalls, Description, InventoryCalls, StoredPart
from tenplexfs.runtime.tasks import first_answer, run_all

__all__ = ["REFUSED_S", "describe_any", "take_stock"]

REFUSED_S = 0.4
"""How long a node that refuses connections is asked again, where it can be done without."""

_NEXT_S = 0.3  # after so long without an answer another node is asked, too
_PATIENCE_S = 3.0


async def take_stock(
    calls: InventoryCalls, nodes: Iterable[NodeName], job: JobName, *, patience_s: float = _PATIENCE_S
) -> dict[NodeName, tuple[StoredPart, ...]]:
    """Returns what each of ``nodes`` stores of ``job``; without those that do not answer."""
    found: dict[NodeName, tuple[StoredPart, ...]] = {}

    async def ask(node: NodeName) -> None:
        with trio.move_on_after(patience_s):
            try:
                found[node] = await calls.inventory(node, job, patience_s=REFUSED_S)
            except TenplexError:
                return

    await run_all(partial(ask, node) for node in nodes)
    return found


async def describe_any(
    calls: DescribeCalls, nodes: Iterable[NodeName], job: JobName, txid: TxId
) -> Description:
    """Returns what the first of ``nodes`` that answers stores of a snapshot.

    Those that are there come first; then those are waited for that may be just starting.

    Raises:
        TenplexError: What the last of them said.
    """
    named = tuple(nodes)
    ask = partial(calls.describe, job=job, txid=txid)
    asks = [partial(ask, node, patience_s=patience_s) for patience_s in (0.0, None) for node in named]
    if not asks:
        raise NotFoundError(f"job {job}: no node to ask for {txid}")
    return await first_answer(asks, patience_s=_NEXT_S)
