"""A rank's state as the files of Tenplex: keys are directories, a leaf is a file that is named by its type.

``<key>.numpy.ndarray`` is a tensor; ``<key>.int``, ``.float``, ``.str``, ``.bool``, ``.none`` are the text of
a value, ``<key>.argparse.Namespace`` is a pickle. A directory with a ``dir.meta`` is a list: its length is in
the second line of that, its items are named by their index. Digits are int keys. What Tenplex has no file for
is ``<key>.json``, as in the mount; bytes are a file of just that name.

Source: tenplex ``mlfs_client.py`` (`save_traverse`) and ``load.py``.
"""

from __future__ import annotations

import argparse
import base64
import json
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tenplexfs.core.paths import escape_component, path_of_name
from tenplexfs.errors import CorruptError, InvalidError, PreconditionError
from tenplexfs.formats.leaves import Leaf, Pickled, decode_leaf, make_named_tuple
from tenplexfs.formats.structure import Flat, Node, flatten, read_document, unflatten, walk, write_document

__all__ = [
    "LIST_FILE",
    "TENSOR",
    "File",
    "TensorFile",
    "array_value",
    "directories",
    "files_of",
    "is_below",
    "list_length",
    "state_of",
    "tensor_path",
    "value_of",
]

TENSOR = ".numpy.ndarray"
"""How the file of a tensor ends."""

LIST_FILE = "dir.meta"

_NAMESPACE = ".argparse.Namespace"
_LOCAL_TENSOR = "tenplexfs.torch.state:LocalTensor:dtype,shape,data"
_INT = re.compile(r"0|-?[1-9][0-9]*")
_DIGITS = re.compile(r"[+-]?[0-9]+")
_LIST = re.compile(r"list\n([0-9]{1,9})\n?")
_LONGEST_INT = 4300  # of what Python makes numbers
_MAX_DEPTH = 200


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A tensor of the layout, in the place of its bytes. No tuple, for those are values.

    Attributes:
        path: Tensor path.
    """

    path: str


class File(NamedTuple):
    """A file.

    Attributes:
        tensor: The tensor path, where it is one of the layout; then ``data`` is empty.
        data: What is in it.
        dtype, shape: Where it is an array that the layout does not know.
    """

    tensor: str | None = None
    data: bytes = b""
    dtype: str = ""
    shape: tuple[int, ...] = ()


def files_of(document: bytes) -> dict[str, File]:
    """Returns the files of a state, by their paths.

    Args:
        document: Its structure.

    Raises:
        CorruptError: It is none.
        PreconditionError: Two keys, as an int and its own digits, would be one file.
    """
    files: dict[str, File] = {}
    try:
        _add_node(files, "", read_document(document))
    except (LookupError, TypeError, ValueError) as error:
        raise CorruptError(f"state: no such structure: {error!r}") from error
    return files


def _add_node(files: dict[str, File], at: str, node: Node) -> None:
    if node[0] == "t":
        _add(files, f"{at}{TENSOR}", File(tensor=node[1]))
    elif node[0] == "l":
        _add_leaf(files, at, node[2])
    elif node[0] == "s":
        _add_list(files, at, node[2], _add_node)
    elif node[1] == "Namespace" and all(map(_is_plain, walk(node))):
        made = unflatten(write_document(node), str)
        _add(files, f"{at}{_NAMESPACE}", File(data=pickle.dumps(made, protocol=4)))
    else:
        for key, child in node[2]:
            _add_node(files, _below(at, _name(decode_leaf(key, allow_pickle=False))), child)


def _add_leaf(files: dict[str, File], at: str, leaf: Leaf) -> None:
    kind = type(leaf)
    if kind is list:
        _add_list(files, at, leaf, _add_leaf)
    elif leaf is None:
        _add(files, f"{at}.none", File(data=b"None"))
    elif kind in (bool, int):
        _add(files, f"{at}.{kind.__name__}", File(data=str(leaf).encode()))
    elif kind is float:
        _add(files, f"{at}.float", File(data=repr(leaf).encode()))
    elif kind is str:
        _add(files, f"{at}.str", File(data=leaf.encode(errors="surrogatepass")))
    elif leaf:
        _add_tagged(files, at, leaf)


def _add_tagged(files: dict[str, File], at: str, leaf: dict[str, Any]) -> None:
    match leaf:
        case {"$": "float", "text": str(text)}:
            _add(files, f"{at}.float", File(data=text.encode()))
        case {"$": "bytes" | "bytearray", "base64": str(text)}:
            _add(files, at, File(data=base64.b64decode(text)))
        case {"$": "pickle", "class": str(kind), "base64": str(text)}:
            _add(files, f"{at}.{kind}", File(data=base64.b64decode(text)))
        case {"$": "namedtuple", "class": str(kind), "items": [str(dtype), shape, data]} if (
            kind == _LOCAL_TENSOR
        ):
            sizes, array = (decode_leaf(each, allow_pickle=False) for each in (shape, data))
            _add(files, f"{at}{TENSOR}", File(None, array, dtype, tuple(sizes)))
        case {"$": "tuple" | "set" | "frozenset" | "namedtuple", "items": list(items)}:
            _add_list(files, at, items, _add_leaf)
        case {"$": "numpy"}:
            value = decode_leaf(leaf, allow_pickle=False).item()
            if type(value) in (bool, int, float, str):
                _add_leaf(files, at, value)
            else:
                _add(files, f"{at}.json", File(data=_json(leaf)))
        case {"$": "Namespace"}:
            _add(files, f"{at}{_NAMESPACE}", File(data=pickle.dumps(argparse.Namespace(), protocol=4)))
        case {"$": "OrderedDict" | "Counter"}:
            return
        case _:
            _add(files, f"{at}.json", File(data=_json(leaf)))


def _json(leaf: Leaf) -> bytes:
    return json.dumps(leaf).encode() + b"\n"


def _add_list(
    files: dict[str, File], at: str, items: list[Any], add: Callable[[dict[str, File], str, Any], None]
) -> None:
    _add(files, _below(at, LIST_FILE), File(data=b"list\n%d" % len(items)))
    for index, item in enumerate(items):
        add(files, _below(at, str(index)), item)


def _add(files: dict[str, File], name: str, file: File) -> None:
    if name in files:
        raise PreconditionError(f"{name}: two keys of the state give this file; use tenplexfs.load")
    files[name] = file


def _below(at: str, name: str) -> str:
    return f"{at}/{name}" if at else name


def _name(key: object) -> str:
    text = key if isinstance(key, str) else repr(key)
    is_plain = text not in ("", ".", "..") and "/" not in text and "\0" not in text
    return text if is_plain else escape_component(text)


def _is_plain(node: Node) -> bool:
    """Returns whether a node of a namespace is made without anything that is not built in."""
    tag = node[0]
    return tag != "t" and (
        tag != "l" or not re.search(r'"\$": "(pickle|torch|namedtuple)', json.dumps(node[2]))
    )


def is_below(name: str, directory: str) -> bool:
    """Returns whether a file is ``directory``, or below it; all are below ""."""
    return not directory or name == directory or name.startswith(f"{directory}/")


def directories(names: Iterable[str], top: str) -> set[str]:
    """Returns the directories that files which are below ``top`` make, with that, if it is none of them."""
    found = set()
    for name in names:
        parent = name
        while parent != top:
            parent = parent.rpartition("/")[0]
            if parent in found:
                break
            found.add(parent)
    return found


# The way in.


def tensor_path(name: str) -> tuple[str, str]:
    """Returns the paths that the tensor of the file ``name``, without its suffix, can have in a layout.

    The first is that of keys whose dots separate, the second that of keys that would meet others then.
    """
    parts = name.split("/")
    return "/".join(map(path_of_name, parts)), "/".join(map(escape_component, parts))


def value_of(name: str, data: bytes) -> tuple[str, object]:
    """Returns the path of keys, and the value, that the file ``name`` stands for; no tensor, no list.

    Raises:
        InvalidError: It does not hold what its name says.
    """
    for suffix, read in _READERS.items():
        stem = name.removesuffix(suffix)
        if stem not in ("", name) and not stem.endswith("/"):
            try:
                return stem, read(data)
            except ValueError:
                raise InvalidError(f"{name}: holds no {suffix[1:]}: {data[:40]!r}") from None
    return name, data


def _read_int(data: bytes) -> int:
    text = data.decode().strip()
    if not _DIGITS.fullmatch(text) or len(text) > _LONGEST_INT:
        raise ValueError
    return int(text)


def _read_bool(data: bytes) -> bool:
    return _one_of(data, {b"True": True, b"False": False})


def _read_none(data: bytes) -> None:
    _one_of(data, {b"None": True, b"": True})


def _one_of(data: bytes, words: Mapping[bytes, bool]) -> bool:
    found = words.get(data.strip())
    if found is None:
        raise ValueError
    return found


_READERS: Mapping[str, Callable[[bytes], object]] = {
    _NAMESPACE: lambda data: Pickled(_NAMESPACE[1:], data),
    ".int": _read_int,
    ".float": lambda data: float(data.decode().strip()),
    ".str": lambda data: data.decode(),
    ".bool": _read_bool,
    ".none": _read_none,
}


def list_length(data: bytes) -> int:
    """Returns how many items the list has of which ``data`` is the file.

    Raises:
        InvalidError: It is no such file.
    """
    found = _LIST.fullmatch(data.decode(errors="replace"))
    if found is None:
        raise InvalidError(f"{LIST_FILE}: need 'list', a new line, and a length, got {data[:40]!r}")
    return int(found[1])


def array_value(dtype: str, shape: tuple[int, ...], data: bytes) -> object:
    """Returns the value that stands for an array that the layout does not know."""
    return make_named_tuple(_LOCAL_TENSOR, [dtype, shape, data])


def state_of(values: Mapping[str, object], lists: Mapping[str, int]) -> Flat[TensorFile]:
    """Returns the state that files are.

    Args:
        values: Path of keys -> value, or `TensorFile`.
        lists: Path of each list -> its length; the state itself is "".

    Raises:
        InvalidError: A list lacks items, or something is a leaf and a directory, or two leaves.
    """
    root: dict[str, Any] = {}
    for name in lists:
        _directory(root, name.split("/") if name else [])
    for name, value in values.items():
        *parents, last = name.split("/")
        entries = _directory(root, parents)
        if last in entries:
            raise InvalidError(f"{name}: is there as a directory, too")
        entries[last] = _Value(value)
    state = _built("", root, lists)
    flat = flatten(state, lambda value: (value, None) if type(value) is TensorFile else None)
    for path, tensor in flat.tensors.items():
        if path != tensor.path:
            raise InvalidError(f"tensor {tensor.path}: another key gives the path {path}, too")
    return flat


class _Value(NamedTuple):
    value: object


def _directory(root: dict[str, Any], parts: list[str]) -> dict[str, Any]:
    if len(parts) > _MAX_DEPTH:
        raise InvalidError(f"{'/'.join(parts)[:100]}: {len(parts)} directories deep, at most {_MAX_DEPTH}")
    at = root
    for part in parts:
        at = at.setdefault(part, {})
        if isinstance(at, _Value):
            raise InvalidError(f"{'/'.join(parts)}: {part} is there as a file, too")
    return at


def _built(path: str, node: dict[str, Any] | _Value, lists: Mapping[str, int]) -> object:
    if isinstance(node, _Value):
        return node.value
    built = {name: _built(_below(path, name), child, lists) for name, child in node.items()}
    length = lists.get(path)
    if length is None:
        return {
            int(name) if _INT.fullmatch(name) and len(name) < 19 else name: v for name, v in built.items()
        }
    missing = next((i for i in range(length) if str(i) not in built), None)
    if missing is not None or len(built) > length:
        what = f"item {missing} is missing" if missing is not None else f"has {len(built)} items"
        raise InvalidError(f"{_below(path, LIST_FILE)}: says {length} items, {what}")
    return [built[str(i)] for i in range(length)]
