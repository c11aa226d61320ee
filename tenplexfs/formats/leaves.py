"""What a state holds beside tensors, as JSON: tagged objects, ``{"$": ...}``, where JSON has no word."""

from __future__ import annotations

import argparse
import base64
import collections
import collections.abc
import importlib
import json
import math
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from tenplexfs.core.dtypes import dtype_name, dtype_of
from tenplexfs.errors import CorruptError, InvalidError

__all__ = [
    "NOT_A_LEAF",
    "Leaf",
    "Pickled",
    "decode_leaf",
    "encode_leaf",
    "is_named_tuple",
    "make_named_tuple",
    "named_tuple",
]

Leaf = Any
"""A leaf as JSON has it."""

NOT_A_LEAF = object()
"""What `encode_leaf` answers for what holds maps or tensors, or is unknown."""

_TAG = "$"
_EMPTY_MAPS: dict[str, Callable[[], object]] = {
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
    "Namespace": argparse.Namespace,
}


@dataclass(frozen=True, slots=True)
class Pickled:
    """An object that somebody else has pickled, and that is not made here.

    Attributes:
        kind: Its class, as ``module.name``.
    """

    kind: str
    data: bytes


def encode_leaf(value: object, *, pickled: bool, refuse: bool) -> Leaf:
    """Returns ``value`` as JSON, or `NOT_A_LEAF`.

    Args:
        value: None, bool, int, float, complex, str, bytes, numpy's scalars, torch's dtypes, devices and
            sizes, an empty map, and lists, tuples, sets of those.
        pickled: Whether anything else is pickled.
        refuse: Whether anything else is an error.

    Raises:
        InvalidError: It is to be refused.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return _float(cast(float, value))
    if kind is complex:
        number = cast(complex, value)
        return {_TAG: "complex", "real": _float(number.real), "imag": _float(number.imag)}
    if kind in (bytes, bytearray):
        return {_TAG: kind.__name__, "base64": _base64(cast(bytes, value))}
    if isinstance(value, np.generic):
        return {_TAG: "numpy", "dtype": _scalar_dtype(value), "base64": _base64(value.tobytes())}
    if kind in (list, tuple, set, frozenset) or is_named_tuple(value):
        leaf = _sequence(cast("Sequence[object]", value))
        if leaf is not NOT_A_LEAF:
            return leaf
    if kind is dict and not value:
        return {}
    if kind.__name__ in _EMPTY_MAPS and kind is _EMPTY_MAPS[kind.__name__] and not _size(value):
        return {_TAG: kind.__name__}
    if kind.__module__ == "torch":
        if kind.__name__ == "Size":
            return {_TAG: "torch.Size", "items": list(cast("Sequence[int]", value))}
        if kind.__name__ in ("dtype", "device"):
            return {_TAG: f"torch.{kind.__name__}", "name": str(value).removeprefix("torch.")}
    if kind is Pickled:
        made = cast(Pickled, value)
        return {_TAG: "pickle", "class": made.kind, "base64": _base64(made.data)}
    if pickled:
        return _pickle(value)
    if refuse:
        raise InvalidError(
            f"{kind.__module__}.{kind.__qualname__}: needs pickle; take it out, or give allow_pickle=True"
        )
    return NOT_A_LEAF


def decode_leaf(leaf: Leaf, *, allow_pickle: bool) -> Any:  # noqa: ANN401
    """Returns the value that `encode_leaf` made ``leaf`` of.

    Raises:
        InvalidError: It was pickled, and ``allow_pickle`` is not given.
        CorruptError: It is no such leaf.
    """
    if isinstance(leaf, list):
        return [decode_leaf(item, allow_pickle=allow_pickle) for item in leaf]
    if not isinstance(leaf, dict):
        return leaf
    if not leaf:
        return {}
    tag = leaf.get(_TAG)
    if tag == "pickle":
        if not allow_pickle:
            raise InvalidError(f"{leaf.get('class')}: was pickled; give allow_pickle=True to load it")
        return pickle.loads(base64.b64decode(leaf["base64"]))
    if tag in ("tuple", "set", "frozenset", "namedtuple"):
        items = [decode_leaf(item, allow_pickle=allow_pickle) for item in leaf["items"]]
        if tag == "namedtuple":
            return make_named_tuple(leaf["class"], items)
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](items)
    make = _DECODERS.get(tag)
    if make is None:
        raise CorruptError(f"leaf: unknown tag {tag!r}")
    return make(leaf)


def is_named_tuple(value: object) -> bool:
    """Returns whether ``value`` is of a class that `collections.namedtuple` or `typing.NamedTuple` made."""
    fields = getattr(type(value), "_fields", None)
    return isinstance(value, tuple) and type(value).__bases__ == (tuple,) and isinstance(fields, tuple)


def named_tuple(value: object) -> str:
    """Returns what says of which class a named tuple is: ``module:class:field,field``."""
    kind = cast(Any, type(value))
    return f"{kind.__module__}:{kind.__qualname__}:{','.join(kind._fields)}"


def make_named_tuple(kind: str, items: list[Any]) -> object:
    """Returns a named tuple; of the class itself where its module is imported, else of one like it."""
    module, qualname, joined = kind.split(":")
    fields = tuple(joined.split(",")) if joined else ()
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, tuple) and getattr(found, "_fields", None) == fields:
        return tuple.__new__(found, items)
    name = qualname.rpartition(".")[2]
    made = cast(Any, collections.namedtuple(name, fields, module=module))
    return cast(object, made(*items))


def _sequence(value: Sequence[object]) -> Leaf:
    items = []
    for item in value:
        leaf = encode_leaf(item, pickled=False, refuse=False)
        if leaf is NOT_A_LEAF:
            return NOT_A_LEAF
        items.append(leaf)
    if type(value) is list:
        return items
    if isinstance(value, set | frozenset):
        items.sort(key=json.dumps)  # equal sets are equal bytes
        return {_TAG: type(value).__name__, "items": items}
    if type(value) is tuple:
        return {_TAG: "tuple", "items": items}
    return {_TAG: "namedtuple", "class": named_tuple(value), "items": items}


def _size(value: object) -> int:
    return len(value if isinstance(value, collections.abc.Sized) else vars(value))


def _float(value: float) -> Leaf:
    if math.isfinite(value):
        return value
    return {_TAG: "float", "text": repr(value), "bits": struct.pack(">d", value).hex()}


def _scalar_dtype(value: np.generic) -> str:
    name = dtype_name(value.dtype)
    dtype_of(name)
    return name


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _pickle(value: object) -> Leaf:
    kind = type(value)
    try:
        data = pickle.dumps(value, protocol=5)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InvalidError(f"{kind.__module__}.{kind.__qualname__}: cannot be pickled: {error}") from error
    return {_TAG: "pickle", "class": f"{kind.__module__}.{kind.__qualname__}", "base64": _base64(data)}


def _torch(leaf: dict[str, Any]) -> Any:  # noqa: ANN401
    """Makes what only torch has; it is imported here and nowhere else, for who kept such a thing has it."""
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError:
        raise InvalidError(f"{leaf[_TAG]}: needs torch, which is not installed") from None
    if leaf[_TAG] == "torch.Size":
        return torch.Size(leaf["items"])
    if leaf[_TAG] == "torch.device":
        return torch.device(leaf["name"])
    return getattr(torch, leaf["name"])


_DECODERS: dict[str | None, Callable[[dict[str, Any]], Any]] = {
    "float": lambda leaf: struct.unpack(">d", bytes.fromhex(leaf["bits"]))[0],
    "complex": lambda leaf: complex(_real(leaf["real"]), _real(leaf["imag"])),
    "bytes": lambda leaf: base64.b64decode(leaf["base64"]),
    "bytearray": lambda leaf: bytearray(base64.b64decode(leaf["base64"])),
    "numpy": lambda leaf: np.frombuffer(base64.b64decode(leaf["base64"]), dtype_of(leaf["dtype"]))[0],
    "torch.Size": _torch,
    "torch.dtype": _torch,
    "torch.device": _torch,
    **{name: lambda leaf, make=make: make() for name, make in _EMPTY_MAPS.items()},  # type: ignore[misc]
}


def _real(leaf: Leaf) -> float:
    return cast(float, decode_leaf(leaf, allow_pickle=False))
