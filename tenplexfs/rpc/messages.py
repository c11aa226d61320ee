"""Heads and snapshots as messages, and back; what requests ask for."""

from __future__ import annotations

import re

from google.protobuf.message import Message

from tenplexfs._pb import peer_pb2, registry_pb2
from tenplexfs.core.membership import Mandate
from tenplexfs.core.snapshot import Head, NodeInfo, SnapshotId, TxId, check_node_name
from tenplexfs.errors import InvalidError

__all__ = [
    "arguments_of",
    "check_txid",
    "head_of",
    "head_to_pb",
    "mandate_of",
    "mandate_to_pb",
    "node_of",
    "node_to_pb",
    "snapshot_of",
    "snapshot_to_pb",
]

_WORD_LENGTH = 300
_TXID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


def arguments_of(request: Message) -> bytes:
    """Returns what ``request`` asks for: all but its id, and how it is to be carried out."""
    plain = type(request)()
    plain.CopyFrom(request)
    for field in ("request_id", "stop_timeout_s", "expected_generation"):
        if field in request.DESCRIPTOR.fields_by_name:
            plain.ClearField(field)
    return bytes(plain.SerializeToString(deterministic=True))


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


def mandate_to_pb(by: Mandate) -> peer_pb2.Mandate:
    """Returns ``by`` as a message."""
    return peer_pb2.Mandate(owner=by.owner, token=by.token, attempt=by.attempt)


def mandate_of(message: peer_pb2.Mandate) -> Mandate:
    """Returns by what right something is ordered; an empty message is by none."""
    return Mandate(str(message.owner), int(message.token), int(message.attempt))


def node_to_pb(info: NodeInfo) -> registry_pb2.NodeInfo:
    """Returns ``info`` as a message."""
    return registry_pb2.NodeInfo(
        node=info.node, endpoint=info.endpoint, incarnation=info.incarnation, version=info.version
    )


def node_of(message: registry_pb2.NodeInfo) -> NodeInfo:
    """Returns the node that ``message`` tells of.

    Raises:
        InvalidError: Its fields do not name one.
    """
    for name in ("endpoint", "incarnation", "version"):
        if len(getattr(message, name)) > _WORD_LENGTH:
            raise InvalidError(f"node {message.node[:80]!r}: {name} has more than {_WORD_LENGTH} letters")
    node = check_node_name(message.node)
    return NodeInfo(node, str(message.endpoint), str(message.incarnation), str(message.version))
