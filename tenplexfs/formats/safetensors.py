"""The header of a safetensors file, checked for everything that could make it show wrong bytes.

Source: the format of huggingface/safetensors: 8 bytes of header length (little-endian), a JSON object, then
the data, which the tensors cover without gap or overlap.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tenplexfs.errors import CorruptError, InvalidError

__all__ = ["DTYPES", "HEADER_BYTES_MAX", "Entry", "parse"]

HEADER_BYTES_MAX = 100_000_000
"""The library's own limit."""

DTYPES: Mapping[str, str] = {
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F32": "float32",
    "U32": "uint32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "U16": "uint16",
    "I16": "int16",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Our names of the file's element types, in the order in which the library writes them."""

_ITEMSIZE = {
    name: 1 if name.startswith("F8") or name == "BOOL" else int(name.lstrip("UIBFC")) // 8 for name in DTYPES
}
_SMALL = ("F4", "F6_E2M3", "F6_E3M2")
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the file.

    Attributes:
        dtype: Our name of its type.
        shape: Its shape.
        begin: Where its bytes begin, counted from the start of the file.
        end: Where they end, exclusive.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def parse(file: bytes | memoryview) -> dict[str, Entry]:
    """Returns the tensors of ``file``, a whole safetensors file, by name, in the order of their bytes.

    Cost: Reads the header alone.

    Raises:
        CorruptError: The file is cut short or has bytes too many.
        InvalidError: The header is not what the format allows.
    """
    if len(file) < 8:
        raise CorruptError(f"no safetensors file: {len(file)} bytes, need at least 8")
    header_bytes = int.from_bytes(file[:8], "little")
    if header_bytes > HEADER_BYTES_MAX:
        raise InvalidError(f"no safetensors file: header of {header_bytes} bytes, at most {HEADER_BYTES_MAX}")
    start = 8 + header_bytes
    if start > len(file):
        raise CorruptError(f"cut short: the header ends at byte {start}, the file at {len(file)}")
    header = _load(bytes(file[8:start]))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InvalidError("__metadata__: need an object of strings")
    found = [(name, _entry(name, fields, start)) for name, fields in header.items()]
    found.sort(key=lambda item: (item[1].begin, item[1].end))
    for (before, a), (name, b) in itertools.pairwise([("the header", Entry("", (), 0, start)), *found]):
        if a.end != b.begin:
            what = "overlap" if a.end > b.begin else "leave a gap"
            raise InvalidError(
                f"tensors {before!r} and {name!r} {what}: the first ends at {a.end - start}, "
                f"the second begins at {b.begin - start}"
            )
    if (end := found[-1][1].end if found else start) != len(file):
        what = "cut short" if end > len(file) else "bytes too many"
        raise CorruptError(f"{what}: the tensors end at byte {end}, the file at {len(file)}")
    return dict(found)


def _load(text: bytes) -> dict[str, object]:
    """Returns the JSON object ``text``, refusing names that stand twice."""
    if not text.startswith(b"{"):
        raise InvalidError("header: need a JSON object")
    try:
        loaded = json.loads(text.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise InvalidError(f"header: no valid JSON: {error}") from error
    return dict(loaded)


def _without_duplicates(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    loaded = dict(pairs)
    if len(loaded) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise InvalidError(f"header: {name!r} stands twice")
    return loaded


def _entry(name: str, fields: object, start: int) -> Entry:
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise InvalidError(f"tensor {name!r}: need dtype, shape and data_offsets, no more")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if dtype in _SMALL:
        raise InvalidError(
            f"tensor {name!r}: dtype {dtype}: 4-bit and 6-bit types are not supported; convert to F8"
        )
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InvalidError(f"tensor {name!r}: dtype {dtype!r}: unknown")
    if not _are_sizes(shape) or len(shape) > 64:
        raise InvalidError(f"tensor {name!r}: shape {shape!r}: need a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise InvalidError(f"tensor {name!r}: data_offsets {offsets!r}: need [begin, end]")
    needed = math.prod(shape) * _ITEMSIZE[dtype]
    if offsets[1] - offsets[0] != needed or math.prod(size or 1 for size in shape) > _INT64_MAX // 16:
        raise InvalidError(
            f"tensor {name!r}: data_offsets {offsets} hold {offsets[1] - offsets[0]} bytes, "
            f"shape {shape} of {dtype} needs {needed}"
        )
    return Entry(DTYPES[dtype], tuple(shape), start + offsets[0], start + offsets[1])


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _INT64_MAX for item in value)
