"""Who sends what where replicas are equally near: the largest amount that any node sends is made smallest.

This is a restricted assignment. Its fractional optimum is the balanced one: no amount could go to a candidate
that sends less. Each demand in turn is levelled over its candidates until nothing changes much, which
converges to that optimum (descent by blocks on a convex sum); then whole items are dealt out by those quotas.
Integers only, so that the outcome is the same on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tenplexfs.core.region import Ints

__all__ = ["balanced_quotas", "deal"]

_ROUNDS = 60


def balanced_quotas(candidates: Sequence[Ints], demands: Sequence[int], load: Ints) -> list[Ints]:
    """Splits each demand over its candidates.

    Args:
        candidates: For each demand the numbers of the nodes that can serve it, at least one.
        demands: Bytes.
        load: (nodes,), bytes that each node sends in any case.

    Returns:
        For each demand the bytes of each candidate; they sum to the demand.
    """
    load = load.copy()
    quotas = []
    for nodes, demand in zip(candidates, demands, strict=True):
        quotas.append(_level(load[nodes], demand))
        load[nodes] += quotas[-1]
    free = [k for k, nodes in enumerate(candidates) if len(nodes) > 1]
    total = sum(demands)
    for _ in range(_ROUNDS):
        change = 0
        for k in free:
            nodes = candidates[k]
            load[nodes] -= quotas[k]
            fresh = _level(load[nodes], demands[k])
            change += int(np.abs(fresh - quotas[k]).sum())
            quotas[k] = fresh
            load[nodes] += fresh
        if change * 1000 <= total:
            break
    return quotas


def _level(load: Ints, amount: int) -> Ints:
    """Pours ``amount`` over vessels filled to ``load`` so that the fullest that gets any is lowest."""
    order = np.argsort(load, kind="stable")
    level = load[order]
    # Filling the k lowest up to the (k+1)-th takes this much: find how many get wet.
    filled = level * np.arange(len(level)) - (np.cumsum(level) - level)
    wet = int(np.searchsorted(filled, amount, side="left"))
    wet = max(wet, 1)
    height, more = divmod(int(level[:wet].sum()) + amount, wet)
    share = np.zeros(len(load), np.int64)
    share[order[:wet]] = height - level[:wet]
    share[order[:more]] += 1
    return share


def deal(sizes: Ints, first: int, quotas: Ints) -> Ints:
    """Gives each item to a candidate, in order, as the quotas fill up.

    Args:
        sizes: Bytes of each item.
        first: Bytes dealt out of these quotas before.
        quotas: Bytes of each candidate, in order.

    Returns:
        For each item the index of its candidate.
    """
    middle = first + np.cumsum(sizes) - (sizes + 1) // 2
    return np.minimum(np.searchsorted(np.cumsum(quotas), middle, side="right"), len(quotas) - 1)
