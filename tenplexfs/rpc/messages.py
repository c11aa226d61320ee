"""Heads and snapshots as messages, and back."""

from __future__ import annotations

import re

from tenplexfs._pb import registry_pb2
from tenplexfs.core.snapshot import Head, SnapshotId, TxId, check_node_name
from tenplexfs.errors import InvalidError

__all__ = ["check_txid", "head_of", "head_to_pb", "snapshot_of", "snapshot_to_pb"]

_TXID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


def check_txid(text: str) -> TxId:
    """Returns ``text`` as the name of a transaction.

    Raises:
        InvalidError: It is empty, too long, or no plain word.
    """
    if not _TXID.fullmatch(text):
        raise InvalidError(f"txid {text[:80]!r}: need 1 to 64 letters, digits, - or _")
    return TxId(text)


def snapshot_to_pb(snapshot: SnapshotId) -> registry_pb2.Snapshot:
    """Returns ``snapshot`` as a message."""
    return registry_pb2.Snapshot(generation=snapshot.generation, step=snapshot.step, txid=snapshot.txid)


def snapshot_of(message: registry_pb2.Snapshot) -> SnapshotId:
    """Returns the snapshot that ``message`` names.

    Raises:
        InvalidError: Its fields do not name one.
    """
    step = int(message.step) if message.HasField("step") else None
    return SnapshotId(int(message.generation), step, check_txid(message.txid))


def head_to_pb(head: Head) -> registry_pb2.Head:
    """Returns ``head`` as a message."""
    return registry_pb2.Head(
        snapshot=snapshot_to_pb(head.snapshot), layout_digest=head.layout_digest, nodes=list(head.nodes)
    )


def head_of(message: registry_pb2.Head) -> Head:
    """Returns the head that ``message`` gives.

    Raises:
        InvalidError: Its fields do not name a snapshot or nodes.
    """
    nodes = tuple(check_node_name(node) for node in message.nodes)
    return Head(snapshot_of(message.snapshot), str(message.layout_digest), nodes)
