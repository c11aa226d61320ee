"""How the ranks of a context-parallel axis cut each sample along a dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tenplexfs.errors import InvalidError

__all__ = ["ContextOrder", "context_parts", "context_runs"]


class ContextOrder(StrEnum):
    """CONTIGUOUS: part i of n. ZIGZAG: parts i and 2n-1-i of 2n; causal attention costs each the same."""

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"


def context_parts(length: int, *, degree: int, rank: int, order: ContextOrder) -> tuple[tuple[int, int], ...]:
    """Returns what ``rank`` holds of a dim of ``length``: intervals [begin, end), joined in this order.

    Raises:
        InvalidError: The rank is not of the axis, or the dim does not divide into equal parts.

    Source: zigzag is the split of Megatron-Core's ``get_batch_on_this_cp_rank``.

    >>> context_parts(16, degree=2, rank=0, order=ContextOrder.ZIGZAG)
    ((0, 4), (12, 16))
    """
    if degree < 1 or not 0 <= rank < degree:
        raise InvalidError(f"context-parallel rank {rank} of {degree}: need 0 <= rank < degree")
    zigzag = order is ContextOrder.ZIGZAG and degree > 1
    parts = 2 * degree if zigzag else degree
    if length % parts:
        raise InvalidError(
            f"a dim of {length} does not divide into {parts} equal parts ({order}, degree {degree})"
        )
    width = length // parts
    numbers = (rank, parts - 1 - rank) if zigzag else (rank,)
    return tuple((number * width, (number + 1) * width) for number in numbers)


def context_runs(
    shape: Sequence[int], itemsize: int, *, dim: int, parts: Sequence[tuple[int, int]]
) -> npt.NDArray[np.int64]:
    """Returns the bytes of a C-order sample that lie in ``parts`` of ``dim``: int64 (n, 2), begin and end.

    Joined in this order they are the local sample in C order.

    Raises:
        InvalidError: The sample has no such dim.
    """
    if not -len(shape) <= dim < len(shape):
        raise InvalidError(f"dim {dim}: the samples have shape {tuple(shape)}")
    dim %= len(shape)
    row_bytes = math.prod(shape[dim + 1 :]) * itemsize
    starts = np.arange(math.prod(shape[:dim]), dtype=np.int64) * (shape[dim] * row_bytes)
    runs = np.asarray(parts, np.int64).reshape(1, -1, 2) * row_bytes + starts[:, None, None]
    return runs.reshape(-1, 2)
