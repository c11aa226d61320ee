"""What a node stores of a snapshot in several parts: its own, and copies of what other nodes have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from tenplexfs.core.snapshot import JobName, NodeName, TxId, copies_of
from tenplexfs.errors import CorruptError
from tenplexfs.formats.manifest import StoredSnapshot
from tenplexfs.runtime.orders import StoredPart
from tenplexfs.runtime.protocols import ArraySource
from tenplexfs.storage.store import Key, Store

__all__ = ["AnyOf", "decode_array_sums", "encode_array_sums", "owners_in", "part_of_copies", "parts_of"]


@dataclass(frozen=True)
class AnyOf:
    """An `ArraySource` of several: the first that has an array."""

    sources: tuple[ArraySource, ...]

    def array(self, rank: int, path: str) -> npt.NDArray[np.generic] | None:
        """Returns the array of ``path`` on ``rank``, or None when none has it."""
        for source in self.sources:
            if (found := source.array(rank, path)) is not None:
                return found
        return None


def owners_in(stored: StoredSnapshot) -> tuple[NodeName, ...]:
    """Returns the nodes of whose parts a set of copies is, as its settings say."""
    return tuple(map(NodeName, json.loads(stored.settings_json)["copies_of"]))


def parts_of(store: Store, job: JobName, txid: TxId) -> list[StoredSnapshot]:
    """Returns all that is stored of a snapshot: the node's own part first, then what it keeps for others."""
    own = [each for each in store.snapshots(job) if each.id.txid == txid]
    return own + [each for each in store.snapshots(copies_of(job)) if each.id.txid == txid and each.committed]


def part_of_copies(stored: StoredSnapshot) -> StoredPart:
    """Returns what a node tells others of a set of copies."""
    return StoredPart(stored.id, stored.committed, owners_in(stored))


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
