"""Names of element types: numpy's fixed-size ones, and bfloat16 and float8 of ml_dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import ml_dtypes
import numpy as np

from tenplexfs.errors import InvalidError

__all__ = ["EXTENDED", "MAX_TENSOR_BYTES", "check_shape", "dtype_name", "dtype_of", "itemsize_of"]

MAX_TENSOR_BYTES = 1 << 60
"""So that sums over a tensor and its padding fit int64."""

_MAX_NDIM = 32  # the most that every numpy reads

EXTENDED: dict[str, np.dtype[np.generic]] = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in (
        "bfloat16",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(ml_dtypes, name)
}
"""Types without an npy code, by name."""


@cache
def dtype_of(name: str) -> np.dtype[np.generic]:
    """Returns the dtype that ``name`` stands for, in native byte order.

    Raises:
        InvalidError: The name is unknown, or its elements have no fixed size.
    """
    if name in EXTENDED:
        return EXTENDED[name]
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError, MemoryError, RecursionError) as error:
        # numpy reads what has commas or brackets as Python.
        raise InvalidError(f"dtype {name!r}: unknown") from error
    if dtype.hasobject or dtype.itemsize == 0 or dtype.kind == "V" or not dtype.isnative:
        raise InvalidError(f"dtype {name!r}: elements need a fixed size, native byte order and no objects")
    return dtype


@cache
def dtype_name(dtype: np.dtype[np.generic]) -> str:
    """Returns the name of ``dtype``, such that ``dtype_of`` gives it back.

    Raises:
        InvalidError: It has another byte order than the machine.
    """
    if not dtype.isnative:
        raise InvalidError(f"dtype {dtype.str!r}: need native byte order")
    return dtype.name if dtype.name in EXTENDED or dtype.kind in "biufc" else dtype.str


def itemsize_of(name: str) -> int:
    """Returns the bytes of one element of the type called ``name``."""
    return dtype_of(name).itemsize


def check_shape(what: str, shape: Sequence[int], dtype: str) -> None:
    """Refuses a tensor that no file can be.

    Raises:
        InvalidError: A size is negative, there are too many dims, or the bytes cannot be counted.
    """
    if any(n < 0 for n in shape):
        raise InvalidError(f"{what}: shape: need sizes >= 0, got {list(shape)}")
    if len(shape) > _MAX_NDIM:
        raise InvalidError(f"{what}: {len(shape)} dims, at most {_MAX_NDIM}")
    if math.prod(max(n, 1) for n in shape) * itemsize_of(dtype) > MAX_TENSOR_BYTES:
        raise InvalidError(f"{what}: shape {list(shape)} of {dtype}: more than {MAX_TENSOR_BYTES} bytes")
