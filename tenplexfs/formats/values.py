"""What all ranks of a job hold beside tensors: a document for each, equal ones once.

Every node keeps all of them: they are small, and so no value is lost with its node. When a job gets other
ranks, rank r goes on with the values of old rank r modulo their number; containers that it needs for tensors
it did not hold are taken from the first rank that has them. Where there are fewer ranks, old rank q leaves
what it alone has to rank q modulo their number. A random-number state that is a rank's own is no new rank's:
that one's is derived (`formats.rng`). One that several ranks have in common stays common, as tensor parallel
ranks need it.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import msgspec

from tenplexfs.errors import CorruptError, InvalidError
from tenplexfs.formats.rng import derive, is_random_state
from tenplexfs.formats.structure import Node, read_document, walk, write_document

__all__ = ["Values", "pack", "regroup", "unpack", "values_by_rank"]

_LIMIT_BYTES = 256 << 20


class _Packed(msgspec.Struct):
    version: int
    documents: list[bytes]
    of_rank: dict[int, int]
    consumed: int | None


@dataclass(frozen=True, slots=True)
class Values:
    """What a snapshot holds beside tensors.

    Attributes:
        documents: Rank -> its structure; the same object for ranks whose are equal.
        consumed: Samples of the epoch that were consumed, where a rank said so.
    """

    documents: Mapping[int, bytes] = field(default_factory=dict)
    consumed: int | None = None


def pack(values: Values) -> bytes:
    """Returns ``values`` as bytes, none where there are none.

    Raises:
        InvalidError: More than 256 MiB.
    """
    if not values.documents and values.consumed is None:
        return b""
    index: dict[bytes, int] = {}
    of_rank = {rank: index.setdefault(each, len(index)) for rank, each in sorted(values.documents.items())}
    size = sum(map(len, index))
    if size > _LIMIT_BYTES:
        raise InvalidError(f"values that are no tensors: {size} bytes on all ranks, at most {_LIMIT_BYTES}")
    return msgspec.msgpack.encode(_Packed(1, list(index), of_rank, values.consumed))


def unpack(data: bytes) -> Values:
    """Returns what `pack` made ``data`` of.

    Raises:
        CorruptError: Nothing.
    """
    if not data:
        return Values()
    try:
        packed = msgspec.msgpack.decode(data, type=_Packed)
        documents = {rank: packed.documents[i] for rank, i in packed.of_rank.items()}
    except (msgspec.DecodeError, IndexError) as error:
        raise CorruptError(f"values: {error}") from error
    return Values(documents, packed.consumed)


def regroup(values: Values, held: Sequence[Sequence[str]]) -> Values:
    """Returns the values of new ranks.

    Args:
        values: Of the old ranks.
        held: The tensor paths that each new rank shows.
    """
    old = values.documents
    if not old:
        return values
    ranks = sorted(old)
    roots = _roots(values)
    drawn = {path for path in _differing(roots.values(), len(ranks)) if is_random_state(path)}
    known: dict[tuple[tuple[bytes, ...], int], tuple[Node, bytes]] = {}
    sets: dict[int, set[str]] = {}
    documents: dict[int, bytes] = {}
    for rank, paths in enumerate(held):
        # Its own first; then, where there are fewer ranks now, those that come to be it.
        own = tuple(dict.fromkeys(old[each] for each in ranks[rank % len(ranks) :: max(len(held), 1)]))
        if (own, id(paths)) not in known:
            here = sets.setdefault(id(paths), set(paths))
            root = _joined([_prune(roots[each], here, keep_values=True) for each in own], take_values=True)
            root = _joined([root, *(_prune(each, here, keep_values=False) for each in roots.values())])
            root = _untie(root) if root is not None else ["d", "dict", []]
            known[own, id(paths)] = root, write_document(root)
        root, documents[rank] = known[own, id(paths)]
        if drawn and rank >= len(ranks):
            changed = {id(node): new for node in walk(root) if (new := _drawn(node, rank, drawn)) is not None}
            documents[rank] = write_document(_replace(root, changed))
    return Values(documents, values.consumed)


def values_by_rank(values: Values, world_size: int) -> Iterator[dict[str, Any]]:
    """Yields how each value that is not the same on all old ranks comes to each new one, as a plan says it.

    Args:
        values: Of the old ranks.
        world_size: How many new ones there are.
    """
    ranks = sorted(values.documents)
    roots = _roots(values)
    own = _differing(roots.values(), len(ranks))
    if not own:
        return
    leaves = {
        document: [node for node in walk(root) if node[0] == "l" and node[1] in own]
        for document, root in roots.items()
    }
    for rank in range(world_size):
        source = ranks[rank % len(ranks)]
        for node in leaves[values.documents[source]]:
            is_drawn = rank >= len(ranks) and _drawn(node, rank, own) is not None
            how = {"derived": True} if is_drawn else {"source_rank": source}
            yield {"path": node[1], "target_rank": rank, **how}


def _roots(values: Values) -> dict[bytes, Node]:
    """Returns each distinct document, in the order of the first ranks that have it, and its root."""
    ranks = sorted(values.documents)
    return {each: read_document(each) for each in dict.fromkeys(values.documents[rank] for rank in ranks)}


def _differing(roots: Iterable[Node], rank_count: int) -> set[str]:
    """Returns the paths of the values that are a rank's own; the random state of an only rank is."""
    seen: dict[str, str] = {}
    own: set[str] = set()
    for root in roots:
        for node in walk(root):
            if node[0] != "l" or node[1] in own:
                continue
            text = json.dumps(node[2])
            if seen.setdefault(node[1], text) != text or (rank_count == 1 and is_random_state(node[1])):
                own.add(node[1])
    return own


def _drawn(node: Node, rank: int, among: Container[str]) -> Node | None:
    """Returns the random-number state of a new rank in place of ``node``; None where that is none."""
    if node[0] != "l" or node[1] not in among or not is_random_state(node[1]):
        return None
    new = derive(node[1], node[2], rank)
    return None if new is None else ["l", node[1], new]


def _prune(node: Node, here: set[str], *, keep_values: bool) -> Node | None:
    """Returns ``node`` without tensors that are not ``here``; None where nothing is left.

    Without ``keep_values``, values stay only beside tensors, as those of containers that are needed.
    """
    tag = node[0]
    if tag == "t":
        return node if node[1] in here else None
    if tag == "l":
        return node if keep_values else None
    if tag == "d":
        pairs = [(key, child, _prune(child, here, keep_values=keep_values)) for key, child in node[2]]
        if not keep_values and all(kept is None for _, _, kept in pairs):
            return None
        entries: list[list[Any]] = []
        for key, child, kept in pairs:
            if child[0] == "l" or kept is not None:
                entries.append([key, child if child[0] == "l" else kept])
        return [tag, node[1], entries] if entries or (keep_values and not pairs) else None
    items = [_prune(child, here, keep_values=keep_values) for child in node[2]]
    if not keep_values and all(item is None for item in items):
        return None
    # The place of an item is its index: what is not here stays, and a load says that it is missing.
    return [
        tag,
        node[1],
        [child if item is None else item for child, item in zip(node[2], items, strict=True)],
    ]


def _joined(roots: Iterable[Node | None], *, take_values: bool = False) -> Node | None:
    found = [root for root in roots if root is not None]
    return reduce(lambda own, other: _merge(own, other, take_values=take_values), found) if found else None


def _merge(own: Node, other: Node, *, take_values: bool) -> Node:
    """Returns ``own`` with the entries of ``other`` that it lacks."""
    if own[0] != "d" or other[0] != "d":
        return own
    theirs = {_hashable(key): child for key, child in other[2]}
    known = {_hashable(key) for key, _ in own[2]}
    entries = [
        [
            key,
            _merge(child, theirs[_hashable(key)], take_values=take_values)
            if _hashable(key) in theirs
            else child,
        ]
        for key, child in own[2]
    ]
    # Without it, values beside entries that are known are the own rank's to have or not.
    entries += [
        [key, child]
        for key, child in other[2]
        if _hashable(key) not in known and (take_values or child[0] != "l")
    ]
    return ["d", own[1], entries]


def _untie(root: Node) -> Node:
    """Ties what is tied with a tensor that is not in ``root`` with the first that is."""
    tensors = [node for node in walk(root) if node[0] == "t"]
    present = {node[1] for node in tensors}
    heads: dict[str, str] = {}
    changed: dict[int, Node] = {}
    for node in tensors:
        if len(node) == 3 and node[2] not in present:
            head = heads.setdefault(node[2], node[1])
            changed[id(node)] = ["t", node[1]] if head == node[1] else ["t", node[1], head]
    return _replace(root, changed) if changed else root


def _replace(node: Node, changed: Mapping[int, Node]) -> Node:
    if node[0] == "d":
        return ["d", node[1], [[key, _replace(child, changed)] for key, child in node[2]]]
    if node[0] == "s":
        return ["s", node[1], [_replace(child, changed) for child in node[2]]]
    return changed.get(id(node), node)


def _hashable(key: object) -> object:
    return (type(key).__name__, key if not isinstance(key, dict | list) else repr(key))
