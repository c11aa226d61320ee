"""The structure of a state apart from its tensors: a document of containers, keys and leaves, and back.

A document is JSON, the same bytes for the same structure. Its nodes are

- ``["t", path]`` or ``["t", path, first]``: a tensor; ``first`` is the path of the one it is tied with,
- ``["l", path, value]``: a leaf, as `formats.leaves` encodes it,
- ``["d", kind, [[key, node], ...]]``: what maps keys, which are encoded as leaves,
- ``["s", kind, [node, ...]]``: a list, tuple or named tuple with tensors or maps below.

Tensors and leaves carry their whole path, for two keys may lead to one directory: ``a.b`` and ``a``.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from tenplexfs.core.paths import escape_component, path_of_name, unescape_component
from tenplexfs.errors import CorruptError, InvalidError
from tenplexfs.formats.leaves import (
    NOT_A_LEAF,
    decode_leaf,
    encode_leaf,
    is_named_tuple,
    make_named_tuple,
    named_tuple,
)

__all__ = [
    "Flat",
    "Node",
    "flatten",
    "leaf_files",
    "nested_document",
    "read_document",
    "unflatten",
    "walk",
    "write_document",
]

T = TypeVar("T")
Node = list[Any]
"""A node of a document, as JSON gives it."""

_VERSION = 1
_MAPS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_FACTORIES: dict[str, Any] = {
    "None": None,
    **{kind.__name__: kind for kind in (list, dict, set, int, float, str, bool, tuple, bytes)},
}


@dataclass(frozen=True, slots=True)
class Flat(Generic[T]):
    """A state taken apart.

    Attributes:
        tensors: Path -> tensor; of tied ones each name, with the first one's.
        ties: Path -> path of the first one with the same storage.
        document: The structure.
    """

    tensors: Mapping[str, T]
    ties: Mapping[str, str]
    document: bytes


@dataclass(frozen=True, slots=True)
class _Key:
    """One key on the way to a leaf: its components as they should be, and where two leaves would meet."""

    plain: str
    apart: str


@lru_cache(maxsize=65536)
def _text_key(text: str) -> _Key:
    return _Key(path_of_name(text), escape_component(text))


class _Walk(Generic[T]):
    """Makes nodes; paths are filled in at the end, when it is known which leaves would meet."""

    def __init__(
        self, tensor_of: Callable[[object], tuple[T, Hashable] | None], *, allow_pickle: bool
    ) -> None:
        self._tensor_of = tensor_of
        self._allow_pickle = allow_pickle
        self._ends: list[tuple[Node, tuple[_Key, ...]]] = []
        self._tensors: list[tuple[Node, T, Hashable]] = []

    def node(self, value: object, keys: tuple[_Key, ...]) -> Node:
        found = self._tensor(value, keys)
        if found is not None:
            node: Node = ["t", ""]
            self._tensors.append((node, *found))
            self._ends.append((node, keys))
            return node
        leaf = self._leaf(value, keys)
        if leaf is not NOT_A_LEAF:
            node = ["l", "", leaf]
            self._ends.append((node, keys))
            return node
        kind = _map_kind(value)
        if kind is not None:
            return ["d", kind, self._entries(value if isinstance(value, Mapping) else vars(value), keys)]
        if type(value) in (list, tuple) or is_named_tuple(value):
            assert isinstance(value, Sequence)
            items = [self.node(item, (*keys, _Key(str(i), str(i)))) for i, item in enumerate(value)]
            name = named_tuple(value) if is_named_tuple(value) else type(value).__name__
            return ["s", name, items]
        leaf = self._leaf(value, keys, otherwise_pickle=True)
        node = ["l", "", leaf]
        self._ends.append((node, keys))
        return node

    def _tensor(self, value: object, keys: tuple[_Key, ...]) -> tuple[T, Hashable] | None:
        try:
            return self._tensor_of(value)
        except InvalidError as error:
            raise InvalidError(f"state {_shown(keys)}: {error.message}") from error

    def _leaf(self, value: object, keys: tuple[_Key, ...], *, otherwise_pickle: bool = False) -> object:
        try:
            return encode_leaf(
                value, pickled=otherwise_pickle and self._allow_pickle, refuse=otherwise_pickle
            )
        except InvalidError as error:
            raise InvalidError(f"state {_shown(keys)}: {error.message}") from error

    def _entries(self, value: Mapping[Any, object], keys: tuple[_Key, ...]) -> list[list[Any]]:
        entries = []
        for key, item in value.items():
            try:
                part, encoded = _key(key, value), encode_leaf(key, pickled=False, refuse=True)
            except InvalidError as error:
                raise InvalidError(f"state {_shown(keys)}: key {key!r}: {error.message}") from error
            entries.append([encoded, self.node(item, (*keys, part))])
        return entries

    def finish(self, root: Node) -> Flat[T]:
        """Gives every leaf its path."""
        plain = ["/".join(key.plain for key in keys) or "%00" for _, keys in self._ends]
        meets = Counter(plain)
        taken: set[str] = set()
        for (node, keys), short in zip(self._ends, plain, strict=True):
            path = short if meets[short] == 1 else "/".join(key.apart for key in keys)
            if path in taken:
                raise InvalidError(f"state: two leaves would both be {path!r}")
            taken.add(path)
            node[1] = path
        tensors: dict[str, T] = {}
        ties: dict[str, str] = {}
        first: dict[Hashable, str] = {}
        for node, tensor, identity in self._tensors:
            path = node[1]
            tensors[path] = tensor
            if identity is None or first.setdefault(identity, path) == path:
                continue
            ties[path] = first[identity]
            node.append(first[identity])
        return Flat(tensors, ties, write_document(root))


def flatten(
    state: object,
    tensor_of: Callable[[object], tuple[T, Hashable] | None],
    *,
    allow_pickle: bool = False,
) -> Flat[T]:
    """Takes ``state`` apart.

    Args:
        state: Any nesting of what the module says.
        tensor_of: Returns what stands for a tensor, and what two tensors have in common exactly when they
            are tied (None: nothing); None for what is no tensor.
        allow_pickle: Whether other objects are pickled.

    Raises:
        InvalidError: Something cannot be kept; the message has its path.
    """
    walk_ = _Walk(tensor_of, allow_pickle=allow_pickle)
    try:
        return walk_.finish(walk_.node(state, ()))
    except RecursionError:
        raise InvalidError("state: nested too deep, or within itself") from None


def unflatten(document: bytes, tensor: Callable[[str], object], *, allow_pickle: bool = False) -> Any:  # noqa: ANN401
    """Puts a state together; the inverse of `flatten`.

    Args:
        document: The structure.
        tensor: Returns the tensor of a path; asked once for those that are tied.
        allow_pickle: Whether objects that were pickled are made again.

    Raises:
        InvalidError: There is a pickled object, and ``allow_pickle`` is not given.
        CorruptError: It is no such document.
    """
    known: dict[str, object] = {}

    def build(node: Node) -> object:
        tag = node[0]
        if tag == "t":
            path = node[-1]
            if path not in known:
                known[path] = tensor(path)
            return known[path]
        if tag == "l":
            try:
                return decode_leaf(node[2], allow_pickle=allow_pickle)
            except InvalidError as error:
                raise InvalidError(f"state {node[1]}: {error.message}") from error
        if tag == "d":
            entries = [(decode_leaf(key, allow_pickle=False), build(child)) for key, child in node[2]]
            return _make_map(node[1], entries)
        items = [build(child) for child in node[2]]
        if node[1] in ("list", "tuple"):
            return items if node[1] == "list" else tuple(items)
        return make_named_tuple(node[1], items)

    try:
        return build(read_document(document))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptError(f"state: no such structure: {error!r}") from error


def nested_document(paths: Sequence[str], names: Mapping[str, str]) -> bytes:
    """Returns a structure of maps alone, as paths tell it, for tensors whose structure nobody recorded.

    Args:
        paths: Of all tensors.
        names: Path -> what two paths have in common exactly when they are tied.
    """
    root: Node = ["d", "dict", []]
    maps: dict[str, list[list[Any]]] = {"": root[2]}
    first: dict[str, str] = {}
    for path in sorted(paths):
        *parents, last = path.split("/")
        entries, at = maps[""], ""
        for part in parents:
            at = f"{at}/{part}"
            if at not in maps:
                maps[at] = []
                entries.append([_unescaped(part), ["d", "dict", maps[at]]])
            entries = maps[at]
        head = first.setdefault(names[path], path)
        entries.append([_unescaped(last), ["t", path] if head == path else ["t", path, head]])
    return write_document(root)


def _unescaped(component: str) -> str:
    try:
        return unescape_component(component)
    except InvalidError:  # its text was too long for a path
        return component


def read_document(document: bytes) -> Node:
    """Returns the root of a document.

    Raises:
        CorruptError: It is none, or of another version.
    """
    try:
        content = json.loads(document)
        version, root = content["version"], content["root"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CorruptError(f"state: no document: {error}") from error
    if version != _VERSION or not isinstance(root, list):
        raise CorruptError(f"state: document of version {version}, this program reads {_VERSION}")
    return root


def write_document(root: Node) -> bytes:
    """Returns a document; `read_document` is its inverse."""
    return json.dumps({"version": _VERSION, "root": root}, separators=(",", ":")).encode()


def walk(node: Node) -> Iterator[Node]:
    """Yields ``node`` and all below."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        if node[0] == "d":
            stack.extend(child for _, child in reversed(node[2]))
        elif node[0] == "s":
            stack.extend(reversed(node[2]))


def leaf_files(document: bytes) -> dict[str, bytes]:
    """Returns what the files of the leaves hold: path -> JSON."""
    if b'["l",' not in document:  # as `write_document` writes them
        return {}
    return {
        node[1]: json.dumps(node[2]).encode() + b"\n"
        for node in walk(read_document(document))
        if node[0] == "l"
    }


def _key(key: object, among: Mapping[Any, object]) -> _Key:
    if type(key) is str:
        return _text_key(key)
    if type(key) is int:
        digits = str(key)
        text = f"%i{digits}" if digits in among else digits
        return _Key(text, text)
    # Names what it is, and differs from every other key by its hash, as keys do that are too long.
    encoded = json.dumps(encode_leaf(key, pickled=False, refuse=True)).encode()
    head = escape_component(repr(key)).encode()[:100].decode(errors="ignore").split("%", 1)[0]
    text = f"{head}%h{blake2b(encoded, digest_size=8).hexdigest()}"
    return _Key(text, text)


def _map_kind(value: object) -> str | None:
    if type(value) is defaultdict:
        factory = value.default_factory
        name = "None" if factory is None else getattr(factory, "__name__", "")
        return f"defaultdict:{name}" if name in _FACTORIES and _FACTORIES[name] is factory else None
    if type(value) is argparse.Namespace:
        return "Namespace"
    return next((name for name, kind in _MAPS.items() if type(value) is kind), None)


def _make_map(kind: str, entries: list[tuple[Any, object]]) -> object:
    if kind == "Namespace":
        made = argparse.Namespace()
        vars(made).update(entries)
        return made
    if kind.startswith("defaultdict:"):
        return defaultdict(_FACTORIES[kind.partition(":")[2]], entries)
    if kind == "Counter":
        return Counter(dict(entries))
    made_map: object = _MAPS[kind](entries)
    return made_map


def _shown(keys: tuple[_Key, ...]) -> str:
    return repr("/".join(key.plain for key in keys)) if keys else "itself"
