"""A head as the text that a registry keeps: one form, whichever registry it is."""

from __future__ import annotations

import json

from tenplexfs.core.snapshot import Head, NodeName, SnapshotId, TxId
from tenplexfs.errors import CorruptError, TenplexError

__all__ = ["head_of_text", "text_of_head"]


def text_of_head(head: Head) -> str:
    """Returns ``head`` as text, the same for equal heads.

    >>> text_of_head(Head(SnapshotId(1, None, TxId("ab")), "digest", (NodeName("n0"),)))
    '[1,null,"ab","digest",["n0"]]'
    """
    snapshot = head.snapshot
    return json.dumps(
        [snapshot.generation, snapshot.step, snapshot.txid, head.layout_digest, head.nodes],
        separators=(",", ":"),
    )


def head_of_text(text: str | bytes) -> Head:
    """Returns the head that ``text`` is.

    Raises:
        CorruptError: It is none.
    """
    try:
        generation, step, txid, digest, nodes = json.loads(text)
        return Head(SnapshotId(generation, step, TxId(txid)), digest, tuple(map(NodeName, nodes)))
    except (ValueError, TypeError, RecursionError, TenplexError) as error:
        raise CorruptError(f"head {text[:200]!r}: {error}") from error
