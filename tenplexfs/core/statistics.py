"""What numbers of a tensor say about it, block by block, so that no tensor has to fit into memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tenplexfs.core.dtypes import EXTENDED

__all__ = ["Difference", "Statistics"]

Block = npt.NDArray[Any]


def _wide(block: Block) -> Block:
    """Returns numbers that add up without loss of what matters: float64, or complex128."""
    return block.astype(np.complex128 if block.dtype.kind == "c" else np.float64)


def _has_numbers(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufc" or dtype.name in EXTENDED


@dataclass
class Statistics:
    """Counts and extremes of the elements added so far.

    Minimum, maximum and mean are of the finite elements; of complex numbers there is a mean only, and of what
    is no number nothing but the count.

    >>> seen = Statistics()
    >>> seen.add(np.array([1.0, np.nan, 0.0, 5.0, np.inf]))
    >>> seen.minimum, seen.maximum, seen.mean, seen.nan, seen.inf, seen.zeros
    (0.0, 5.0, 2.0, 1, 1, 1)
    """

    count: int = 0
    finite: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    minimum: float | int | None = None
    maximum: float | int | None = None
    _sums: list[complex] = field(default_factory=list, repr=False)

    def add(self, block: Block) -> None:
        """Takes the elements of ``block`` in, any shape. Cost: A few copies of it."""
        self.count += block.size
        if not block.size or not _has_numbers(block.dtype):
            return
        if block.dtype.kind in "biu":
            numbers, low, high = block, int(block.min()), int(block.max())
        else:
            wide = _wide(block)
            isnan, isinf = int(np.isnan(wide).sum()), int(np.isinf(wide).sum())
            self.nan += isnan
            self.inf += isinf
            numbers = wide[np.isfinite(wide)] if isnan or isinf else wide
            low, high = self._extremes(numbers)
        self.finite += numbers.size
        self.zeros += int(numbers.size - np.count_nonzero(numbers))
        if numbers.size:
            kind = np.complex128 if numbers.dtype.kind == "c" else np.float64
            self._sums.append(complex(numbers.sum(dtype=kind)))
            if numbers.dtype.kind != "c":
                self.minimum = low if self.minimum is None else min(self.minimum, low)
                self.maximum = high if self.maximum is None else max(self.maximum, high)

    def _extremes(self, numbers: Block) -> tuple[Any, Any]:
        if numbers.dtype.kind == "c" or not numbers.size:
            return 0, 0
        return float(numbers.min()), float(numbers.max())

    @property
    def mean(self) -> float | complex | None:
        """Mean of the finite elements, or None where there are none."""
        if not self._sums:
            return None
        real = math.fsum(each.real for each in self._sums) / self.finite
        imag = math.fsum(each.imag for each in self._sums) / self.finite
        return complex(real, imag) if imag else real


@dataclass
class Difference:
    """How far two tensors of one shape and type are apart.

    Elements differ where their bits do. Distances are of those where both are finite.

    >>> apart = Difference()
    >>> apart.add(np.array([3.0, 4.0, np.nan]), np.array([3.0, 2.0, np.nan]))
    >>> apart.count, apart.differing, apart.maximum, apart.relative
    (3, 1, 2.0, 0.4)
    """

    count: int = 0
    differing: int = 0
    maximum: float = 0.0
    _squares: list[float] = field(default_factory=list, repr=False)
    _of_first: list[float] = field(default_factory=list, repr=False)

    def add(self, first: Block, second: Block) -> None:
        """Takes two blocks in, of the same shape and type."""
        self.count += first.size
        size = first.dtype.itemsize
        bits = [
            np.ascontiguousarray(block).reshape(-1).view(np.uint8).reshape(-1, size)
            for block in (first, second)
        ]
        self.differing += int((bits[0] != bits[1]).any(axis=1).sum())
        if not _has_numbers(first.dtype):
            return
        a, b = _wide(first), _wide(second)
        with np.errstate(invalid="ignore"):
            apart = np.abs(b - a)
        good = np.isfinite(apart)
        if good.any():
            self.maximum = max(self.maximum, float(apart[good].max()))
            self._squares.append(float(np.square(apart[good]).sum()))
            self._of_first.append(float(np.square(np.abs(a[good])).sum()))

    @property
    def relative(self) -> float:
        """Distance over the length of the first, as vectors; inf where that is zero and they differ."""
        apart, length = math.fsum(self._squares), math.fsum(self._of_first)
        if not length:
            return math.inf if apart else 0.0
        return math.sqrt(apart / length)
