"""The header of a ``.npy`` file, format 1.0.

The same bytes for the same shape and dtype, whatever numpy is installed, so that the size of a file is known
before it is there. Source: numpy.lib.format; the room for the first dim to grow is kept as numpy keeps it.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from tenplexfs.core.dtypes import EXTENDED, dtype_of
from tenplexfs.errors import InvalidError

__all__ = ["file_size", "header", "header_size"]

_MAGIC = b"\x93NUMPY\x01\x00"
_ALIGNMENT = 64
_GROWTH_DIGITS = 21
_NDIM_MAX = 64


@lru_cache(maxsize=4096)
def header(shape: tuple[int, ...], dtype_name: str) -> bytes:
    """Returns what stands before the data: a multiple of 64 bytes.

    Types that have no npy code stand as ``<V2`` (bfloat16) and ``|V1`` (float8).

    Raises:
        InvalidError: The dtype has no fixed size or is structured, or the shape is none that numpy can hold.
    """
    dtype = dtype_of(dtype_name)
    if dtype.kind not in "biufcSUmM" and dtype_name not in EXTENDED:
        raise InvalidError(f"dtype {dtype_name!r}: has no place in a .npy file of one plain type")
    bytes_count = math.prod(shape) * dtype.itemsize
    if len(shape) > _NDIM_MAX or min(shape, default=0) < 0 or bytes_count > np.iinfo(np.int64).max:
        raise InvalidError(f"shape {shape}, dtype {dtype_name}: no array can be of it")
    descr = dtype.str if dtype_name not in EXTENDED else "<V2" if dtype.itemsize == 2 else "|V1"
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    if shape:
        text += " " * (_GROWTH_DIGITS - len(repr(shape[0])))
    size = -(-(len(_MAGIC) + 2 + len(text) + 1) // _ALIGNMENT) * _ALIGNMENT
    text = text.ljust(size - len(_MAGIC) - 3) + "\n"
    return _MAGIC + len(text).to_bytes(2, "little") + text.encode("latin1")


def header_size(shape: tuple[int, ...], dtype_name: str) -> int:
    """Returns the bytes before the data."""
    return len(header(shape, dtype_name))


def file_size(shape: tuple[int, ...], dtype_name: str) -> int:
    """Returns the bytes of the whole file."""
    return header_size(shape, dtype_name) + math.prod(shape) * dtype_of(dtype_name).itemsize
