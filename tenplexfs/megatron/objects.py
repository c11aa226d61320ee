"""What a `ShardedObject` holds, as leaves: tensors and arrays within it are no tensors of the job."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from tenplexfs.client.arrays import source_of
from tenplexfs.core.dtypes import dtype_name, dtype_of
from tenplexfs.formats.leaves import NOT_A_LEAF, decode_leaf, encode_leaf
from tenplexfs.formats.rng import derive, is_random_state
from tenplexfs.torch.state import LocalTensor, as_tensor

__all__ = ["LocalArray", "LocalStream", "derived", "pack", "unpack"]


class LocalArray(NamedTuple):
    """An array of numpy."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class LocalStream(NamedTuple):
    """An `io.BytesIO`, as Transformer Engine keeps its extra state in."""

    data: bytes


def pack(value: Any) -> Any:  # noqa: ANN401
    """Returns ``value`` without tensors; `unpack` is the inverse."""
    if isinstance(value, torch.Tensor) and (found := source_of(value)) is not None:
        return LocalTensor(found[0].dtype, found[0].shape, np.ascontiguousarray(found[0].array()).tobytes())
    if isinstance(value, np.ndarray):
        return LocalArray(dtype_name(value.dtype), value.shape, np.ascontiguousarray(value).tobytes())
    if isinstance(value, io.BytesIO):
        return LocalStream(value.getvalue())
    return _mapped(value, pack)


def unpack(value: Any) -> Any:  # noqa: ANN401
    """Returns what `pack` made ``value`` of."""
    if isinstance(value, LocalTensor):
        return as_tensor(value)
    if isinstance(value, LocalArray):
        return np.frombuffer(bytearray(value.data), dtype_of(value.dtype)).reshape(value.shape)
    if isinstance(value, LocalStream):
        return io.BytesIO(value.data)
    return _mapped(value, unpack)


def derived(value: Any, key: str, number: int) -> Any:  # noqa: ANN401
    """Returns the random-number states of place ``number``, which is new, from those of another place."""
    if not is_random_state(key):
        return value
    leaf = encode_leaf(value, pickled=False, refuse=False)
    new = None if leaf is NOT_A_LEAF else derive(key, leaf, number)
    if new is not None:
        return decode_leaf(new, allow_pickle=False)
    return _mapped(value, lambda each: derived(each, key, number))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    """Returns a map, list or tuple with each item changed; anything else as it is."""
    if type(value) is dict or type(value).__name__ == "OrderedDict":
        return type(value)({key: change(each) for key, each in value.items()})
    if type(value) in (list, tuple):
        return type(value)(map(change, value))
    return value
