"""A living node as the text that a registry keeps."""

from __future__ import annotations

import json

from tenplexfs.core.snapshot import NodeInfo, NodeName
from tenplexfs.errors import CorruptError

__all__ = ["node_of_text", "text_of_node"]


def text_of_node(info: NodeInfo) -> str:
    """Returns ``info`` as text, the same for equal ones.

    >>> text_of_node(NodeInfo(NodeName("n0"), "host:7070", "ab", "0.1"))
    '["n0","host:7070","ab","0.1"]'
    """
    return json.dumps([info.node, info.endpoint, info.incarnation, info.version], separators=(",", ":"))


def node_of_text(text: str | bytes) -> NodeInfo:
    """Returns the node that ``text`` is.

    Raises:
        CorruptError: It is none.
    """
    try:
        node, endpoint, incarnation, version = map(str, json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptError(f"node {text[:200]!r}: {error}") from error
    return NodeInfo(NodeName(node), endpoint, incarnation, version)
