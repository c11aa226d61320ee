"""The sums of a node's arrays, for another node that may have the same ones."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tenplexfs.errors import CorruptError
from tenplexfs.formats.manifest import StoredSnapshot
from tenplexfs.storage.store import Key

__all__ = ["decode_array_sums", "encode_array_sums"]


def encode_array_sums(stored: StoredSnapshot) -> bytes:
    """Returns the sums of the pieces of each array, under each of its keys, as bytes."""
    return msgspec.msgpack.encode([(*key, ref.sums) for key, ref in stored.arrays.items()])


def decode_array_sums(data: bytes) -> Mapping[Key, tuple[int, ...]]:
    """Returns what `encode_array_sums` made ``data`` of.

    Raises:
        CorruptError: Nothing.
    """
    try:
        rows = msgspec.msgpack.decode(data, type=list[tuple[int, str, tuple[int, ...]]])
    except msgspec.DecodeError as error:
        raise CorruptError(f"sums of arrays: {error}") from error
    return {(rank, path): sums for rank, path, sums in rows}
