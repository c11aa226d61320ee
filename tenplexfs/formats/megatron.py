"""The index of Megatron's token datasets: ``.idx`` beside ``.bin``.

Source: Megatron-Core ``datasets/indexed_dataset.py`` (format) and ``gpt_dataset.py`` (rule of the samples).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tenplexfs.errors import CorruptError, InvalidError

__all__ = ["MegatronIndex", "parse_idx"]

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<QBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


@dataclass(frozen=True, slots=True)
class MegatronIndex:
    """Where documents lie in a ``.bin`` file.

    Attributes:
        dtype: Of a token.
        documents: int64 (n, 2), bytes of each document, end exclusive.
        tokens: Of all documents, which lie one after another from ``begin`` on.
        begin: Where the first document begins.
    """

    dtype: np.dtype[np.generic]
    documents: npt.NDArray[np.int64]
    tokens: int
    begin: int

    def sequences(self, length: int) -> int:
        """Returns how many samples of ``length`` tokens the documents give.

        Sample i is tokens [i * length, i * length + length + 1) of the documents one after another: the last
        token is the label of the one before and comes again as the first of sample i + 1.

        Raises:
            InvalidError: The length is not positive.
        """
        if length < 1:
            raise InvalidError(f"sequence length: need >= 1, got {length}")
        return max(self.tokens - 1, 0) // length


def parse_idx(data: bytes | memoryview) -> MegatronIndex:
    """Parses a whole ``.idx`` file.

    Raises:
        InvalidError: It is none, or of a version or dtype that is not known.
        CorruptError: It is cut short, or documents are not one after another in the ``.bin`` file.
    """
    head_at = len(_MAGIC)
    if bytes(data[:head_at]) != _MAGIC or len(data) < head_at + _HEAD.size:
        raise InvalidError(f"no Megatron index: begins with {bytes(data[:head_at])!r}")
    version, code, sequences, bounds = _HEAD.unpack_from(data, head_at)
    if version != 1 or code not in _DTYPES:
        raise InvalidError(
            f"Megatron index: version {version}, dtype code {code}: need version 1, codes 1 to 8"
        )
    lengths_at = head_at + _HEAD.size
    pointers_at = lengths_at + 4 * sequences
    bounds_at = pointers_at + 8 * sequences
    if len(data) < bounds_at + 8 * bounds:
        raise CorruptError(
            f"Megatron index: {sequences} sequences, {bounds} bounds: need {bounds_at + 8 * bounds} bytes, "
            f"got {len(data)}"
        )
    dtype = np.dtype(_DTYPES[code])
    lengths = np.frombuffer(data, "<i4", sequences, lengths_at).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", sequences, pointers_at).astype(np.int64)
    document = np.frombuffer(data, "<i8", bounds, bounds_at).astype(np.int64)
    if sequences and int(lengths.min()) < 0:
        raise CorruptError(f"Megatron index: sequence {int(lengths.argmin())} of {int(lengths.min())} tokens")
    ends = pointers + lengths * dtype.itemsize
    apart = np.flatnonzero(pointers[1:] != ends[:-1])
    if apart.size:
        first = int(apart[0]) + 1
        raise CorruptError(
            f"Megatron index: sequence {first} begins at {int(pointers[first])}, the one before ends at "
            f"{int(ends[first - 1])}: sequences must lie one after another"
        )
    # Bounds are compared, not subtracted: a difference of damaged ones could overflow.
    if bounds < 1 or document[0] != 0 or document[-1] != sequences or (document[1:] < document[:-1]).any():
        raise CorruptError(f"Megatron index: the bounds of documents do not go from 0 up to {sequences}")
    begin = int(pointers[0]) if sequences else 0
    edges = np.append(pointers, ends[-1:] if sequences else [0])[document]
    return MegatronIndex(dtype, np.stack([edges[:-1], edges[1:]], axis=1), int(lengths.sum()), begin)
