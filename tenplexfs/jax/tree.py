"""A pytree as JAX sees it, as nested maps: what custom nodes it is made of matters to its owner alone.

A leaf is found again by its keys (`jax.tree_util.tree_flatten_with_path`), so that a dict, a list, a named
tuple of optax or a dataclass of flax do alike. None and empty containers have no leaves: they come back as
the tree says that is given to a load. Random keys are two leaves, their data and the name of their kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from tenplexfs.errors import InvalidError
from tenplexfs.formats.structure import flatten

__all__ = [
    "ABSENT",
    "Slot",
    "is_array",
    "nested",
    "paths_of",
    "sharding_of",
    "slots_of",
    "with_keys",
    "without_keys",
]

ABSENT = object()
"""What is not on some rank."""

_DATA, _IMPL = "key_data", "impl"


@dataclass(frozen=True, eq=False)
class Slot:
    """The place of a leaf.

    Attributes:
        keys: That lead to it.
        value: The leaf.
    """

    keys: tuple[str | int, ...]
    value: Any


def slots_of(tree: object) -> tuple[list[Slot], Any]:
    """Returns the leaves of ``tree`` in JAX's order, and its structure.

    Raises:
        InvalidError: A key is neither text nor a number.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [Slot(tuple(map(_key, path)), value) for path, value in leaves], structure


def _key(entry: Any) -> str | int:  # noqa: ANN401 - one of JAX's kinds of keys
    for name in ("key", "idx", "name"):
        key: Any = getattr(entry, name, None)
        if type(key) in (str, int):
            found: str | int = key
            return found
    raise InvalidError(f"state: key {entry}: need text or a whole number")


def is_array(value: object) -> bool:
    """Returns whether ``value`` is an array, or the shape and dtype of one."""
    return isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def nested(slots: list[Slot], value_of: Callable[[Slot], object]) -> Any:  # noqa: ANN401
    """Returns nested maps with what ``value_of`` gives for each leaf, without those that are `ABSENT`."""
    root: Any = {}
    for slot in slots:
        value = value_of(slot)
        if value is ABSENT:
            continue
        if not slot.keys:
            return value
        container = root
        for key in slot.keys[:-1]:
            container = container.setdefault(key, {})
        container[slot.keys[-1]] = value
    return root


def paths_of(slots: list[Slot]) -> dict[str, Slot]:
    """Returns the path of each leaf, as a state of `nested` maps is stored.

    Raises:
        InvalidError: Two would be one path.
    """

    def tensor_of(value: object) -> tuple[Slot, Hashable] | None:
        return (value, None) if isinstance(value, Slot) else None

    return dict(flatten(nested(slots, lambda slot: slot), tensor_of).tensors)


def without_keys(tree: object) -> Any:  # noqa: ANN401
    """Returns ``tree`` with maps of plain leaves in place of random keys, those that are shapes included."""

    def plain(leaf: Any) -> object:  # noqa: ANN401
        if not _is_key(leaf):
            return leaf
        if isinstance(leaf, jax.Array):
            return {_DATA: jax.random.key_data(leaf), _IMPL: jax.random.key_impl(leaf)}
        data = jax.eval_shape(jax.random.key_data, _struct(leaf))
        # The dims of the data come after those of the keys, and are not cut.
        sharded = _struct(data, leaf.sharding)
        return {_DATA: sharded, _IMPL: _impl(leaf)}

    return jax.tree.map(plain, tree)


def with_keys(like: object, tree: object) -> Any:  # noqa: ANN401
    """Returns ``tree`` with random keys again where ``like`` has them; the inverse of `without_keys`.

    Raises:
        InvalidError: A key is of another kind than that of ``like``.
    """

    def made(leaf: Any, found: Any) -> object:  # noqa: ANN401
        if not _is_key(leaf):
            return found
        if found[_IMPL] != _impl(leaf):
            raise InvalidError(f"random key: was saved as {found[_IMPL]}, asked for {_impl(leaf)}")
        return jax.random.wrap_key_data(found[_DATA], impl=found[_IMPL])

    return jax.tree.map(made, like, tree)


def _is_key(value: object) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def _impl(leaf: Any) -> str:  # noqa: ANN401
    names: list[str] = []

    def note(keys: jax.Array) -> jax.Array:
        names.append(str(jax.random.key_impl(keys)))
        return keys

    jax.eval_shape(note, _struct(leaf))
    return names[0]


def _struct(leaf: Any, sharding: Sharding | None = None) -> Any:  # noqa: ANN401
    make: Any = jax.ShapeDtypeStruct  # which has no types of its own
    return make(leaf.shape, leaf.dtype, sharding=sharding)


def sharding_of(leaf: Any) -> Sharding | None:  # noqa: ANN401
    """Returns the sharding of an array; None where it is on one device, or is numpy's: then all have it."""
    sharding: Sharding | None = getattr(leaf, "sharding", None)
    return None if isinstance(sharding, jax.sharding.SingleDeviceSharding) else sharding
