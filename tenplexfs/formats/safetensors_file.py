"""Making a safetensors file: its header, and where the bytes of each tensor go.

Byte for byte what the library writes for the same tensors without metadata: types in its order, which falls
by alignment, then names; a compact JSON object; spaces up to a multiple of 8. So every tensor is
aligned to its elements. Source: the format of huggingface/safetensors, `serialize`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tenplexfs.core.dtypes import itemsize_of
from tenplexfs.core.paths import name_of_path
from tenplexfs.errors import InvalidError
from tenplexfs.formats.safetensors import DTYPES, HEADER_BYTES_MAX

__all__ = ["FileLayout", "lay_out"]

_WORDS = {name: (turn, word) for turn, (word, name) in enumerate(DTYPES.items())}
_RESERVED = "__metadata__"


@dataclass(frozen=True)
class FileLayout:
    """A file before its data are there.

    Attributes:
        header: What stands before the data.
        paths: The tensors that hold bytes, in the order of them.
        ends: Where the bytes of each end, counted from the start of the file; each begins where the one
            before ends, the first behind the header.
    """

    header: bytes
    paths: tuple[str, ...]
    ends: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.ends[-1] if self.ends else len(self.header)


def lay_out(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> FileLayout:
    """Returns the file of ``tensors``: path, name of the element type, shape.

    >>> lay_out([("a/b", "uint8", (3,)), ("c", "float32", ())]).header[8:].rstrip()
    b'{"c":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"a.b":{"dtype":"U8","shape":[3],"data_offsets":[4,7]}}'

    Cost: About 3 us a tensor.

    Raises:
        InvalidError: The format has no word for a type or a name, or two names would be the same.
    """
    named = []
    for path, dtype, shape in tensors:
        word = _WORDS.get(dtype)
        if word is None:
            raise InvalidError(f"tensor {path}: safetensors has no type {dtype}")
        named.append(
            (word[0], name_of_path(path), path, word[1], shape, math.prod(shape) * itemsize_of(dtype))
        )
    named.sort(key=lambda item: item[:2])
    names = {item[1] for item in named}
    if _RESERVED in names or len(names) != len(named):
        raise InvalidError(f"two tensors have one name as keys joined by dots, or one is {_RESERVED!r}")
    entries: list[str] = []
    if metadata:
        entries.append(f'"{_RESERVED}":{json.dumps(metadata, separators=(",", ":"), sort_keys=True)}')
    places: list[tuple[str, int]] = []
    end = 0
    for _, name, path, kind, shape, nbytes in named:
        begin, end = end, end + nbytes
        sizes = ",".join(map(str, shape))
        quoted = json.dumps(name, ensure_ascii=False)
        entries.append(f'{quoted}:{{"dtype":"{kind}","shape":[{sizes}],"data_offsets":[{begin},{end}]}}')
        if nbytes:
            places.append((path, end))
    text = ("{" + ",".join(entries) + "}").encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES_MAX:
        raise InvalidError(f"the header would take {len(text)} bytes, safetensors allows {HEADER_BYTES_MAX}")
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(header, tuple(p for p, _ in places), tuple(len(header) + e for _, e in places))
