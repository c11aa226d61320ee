"""Reads the header of any ``.npy`` file: formats 1.0 to 3.0, Fortran order, structured dtypes.

Source: numpy.lib.format. Objects are refused: reading them would run what the file says.
"""

from __future__ import annotations

import ast
import math
import struct
from dataclasses import dataclass

import numpy as np

from tenplexfs.errors import CorruptError, InvalidError

__all__ = [
    "HEADER_BYTES_MAX",
    "PREFIX_BYTES",
    "NpyHeader",
    "descr_text",
    "dtype_of_descr",
    "header_bytes",
    "header_of",
    "parse_npy",
]

PREFIX_BYTES = 12
"""What `header_bytes` needs to see."""
HEADER_BYTES_MAX = 1 << 20
_MAGIC = b"\x93NUMPY"


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What a header says.

    Attributes:
        dtype: In the byte order of the file.
        shape: Of the array.
        fortran_order: The first dim varies fastest; False where that makes no difference.
        data_at: Where the data begins.
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    fortran_order: bool
    data_at: int

    @property
    def data_bytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


def header_bytes(prefix: bytes | memoryview) -> int:
    """Returns how long the header is, from the first `PREFIX_BYTES` of a file.

    Raises:
        InvalidError: It is no ``.npy`` file, or of a format that is not known.
    """
    start = bytes(prefix[:PREFIX_BYTES])
    if len(start) < PREFIX_BYTES or not start.startswith(_MAGIC):
        raise InvalidError(f"no .npy file: begins with {start[:8]!r}")
    version = (start[6], start[7])
    if version == (1, 0):
        size = 10 + int(struct.unpack_from("<H", start, 8)[0])
    elif version in ((2, 0), (3, 0)):
        size = 12 + int(struct.unpack_from("<I", start, 8)[0])
    else:
        raise InvalidError(f".npy format {version[0]}.{version[1]}: need 1.0, 2.0 or 3.0")
    if size > HEADER_BYTES_MAX:
        raise InvalidError(f".npy header of {size} bytes: need at most {HEADER_BYTES_MAX}")
    return size


def parse_npy(data: bytes | memoryview) -> NpyHeader:
    """Parses the header at the start of ``data``, which may go on behind it.

    Raises:
        InvalidError: The header is no valid one, or the elements are objects.
        CorruptError: ``data`` ends within the header.
    """
    size = header_bytes(data)
    if len(data) < size:
        raise CorruptError(f".npy header of {size} bytes: the file ends after {len(data)}")
    text = bytes(data[10 if data[6] == 1 else 12 : size])
    try:
        fields = ast.literal_eval(text.decode("utf-8" if data[6] == 3 else "latin1").strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise InvalidError(f".npy header: no Python literal: {text[:80]!r}") from error
    if not isinstance(fields, dict) or fields.keys() != {"descr", "fortran_order", "shape"}:
        raise InvalidError(f".npy header: need descr, fortran_order and shape, got {text[:80]!r}")
    shape, fortran = fields["shape"], fields["fortran_order"]
    if not isinstance(shape, tuple) or not all(type(extent) is int and extent >= 0 for extent in shape):
        raise InvalidError(f".npy header: shape {shape!r}")
    if type(fortran) is not bool:
        raise InvalidError(f".npy header: fortran_order {fortran!r}")
    matters = fortran and sum(extent != 1 for extent in shape) > 1
    return NpyHeader(_dtype(fields["descr"]), shape, matters, size)


def header_of(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> bytes:
    """Returns the header of a C-order array of any dtype, structured ones too; a multiple of 64 bytes.

    Format 1.0, or 3.0 where a field has a name that 1.0 cannot hold.
    """
    text = f"{{'descr': {descr_text(dtype)}, 'fortran_order': False, 'shape': {shape!r}, }}"
    try:
        encoded, version, width = text.encode("latin1"), 1, 2
    except UnicodeEncodeError:
        encoded, version, width = text.encode(), 3, 4
    if version == 1 and len(encoded) > 65000:
        encoded, version, width = text.encode(), 3, 4
    start = len(_MAGIC) + 2 + width
    padded = encoded.ljust(-(-(start + len(encoded) + 1) // 64) * 64 - start - 1) + b"\n"
    return _MAGIC + bytes((version, 0)) + len(padded).to_bytes(width, "little") + padded


def descr_text(dtype: np.dtype[np.generic]) -> str:
    """Returns the descr of ``dtype`` as a header writes it."""
    return repr(np.lib.format.dtype_to_descr(dtype))


def dtype_of_descr(text: str) -> np.dtype[np.generic]:
    """Returns the dtype whose `descr_text` is ``text``.

    Raises:
        InvalidError: It is none.
    """
    try:
        return _dtype(ast.literal_eval(text))
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise InvalidError(f"descr {text!r}: no Python literal") from error


def _dtype(descr: object) -> np.dtype[np.generic]:
    try:
        dtype: np.dtype[np.generic] = np.lib.format.descr_to_dtype(descr)  # type: ignore[arg-type]
    except (TypeError, ValueError, IndexError, KeyError, SyntaxError) as error:
        raise InvalidError(f".npy header: unknown descr {descr!r}") from error
    if dtype.hasobject:
        raise InvalidError(f"dtype {descr!r}: objects are not read, they would run what the file says")
    return dtype
