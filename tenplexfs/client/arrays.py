"""Tensors of a state as bytes: numpy's and torch's, without importing torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tenplexfs.core.dtypes import EXTENDED, dtype_name, dtype_of
from tenplexfs.errors import InvalidError

__all__ = ["Source", "source_of", "to_torch"]

Array = npt.NDArray[np.generic]

_OWN = (np.ndarray, np.memmap)


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that is to be saved.

    Attributes:
        shape, dtype: Of it.
        value: The tensor of its framework.
    """

    shape: tuple[int, ...]
    dtype: str
    value: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    def array(self) -> Array:
        """Returns it as an array, on a device as a copy; not always contiguous."""
        if isinstance(self.value, np.ndarray):
            return self.value
        tensor = self.value.detach()
        if tensor.device.type != "cpu":
            tensor = tensor.contiguous().cpu()
        tensor = tensor.resolve_conj().resolve_neg()
        if self.dtype in EXTENDED:
            torch = sys.modules["torch"]
            bits = torch.uint16 if dtype_of(self.dtype).itemsize == 2 else torch.uint8
            return cast(Array, tensor.view(bits).numpy().view(EXTENDED[self.dtype]))
        return cast(Array, tensor.numpy())


def source_of(value: object) -> tuple[Source, Hashable] | None:
    """Returns ``value`` as what can be saved, and what it shares with those that are tied to it.

    None for what is no tensor.

    Raises:
        InvalidError: It is a tensor that cannot be saved.
    """
    if isinstance(value, np.ndarray):
        return _of_numpy(value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_torch(value)
    return None


def to_torch(array: Array) -> object:
    """Returns ``array`` as a tensor over the same memory; what torch has no type for stays an array."""
    import torch

    name = array.dtype.name
    if name in EXTENDED:
        target = getattr(torch, name, None)
        if target is None:
            return array
        return torch.from_numpy(array.view(np.uint16 if array.itemsize == 2 else np.uint8)).view(target)
    try:
        return torch.from_numpy(array)
    except TypeError:
        return array


def _of_numpy(array: Array) -> tuple[Source, Hashable]:
    if type(array) not in _OWN:
        raise InvalidError(f"{type(array).__module__}.{type(array).__qualname__}: give a plain array")
    try:
        name = dtype_name(array.dtype)
        dtype_of(name)
    except InvalidError as error:
        raise InvalidError(f"array of dtype {array.dtype}: {error.message}") from error
    where = array.__array_interface__["data"][0]
    return Source(array.shape, name, array), _identity("numpy", where, array.shape, array.strides, name)


def _of_torch(tensor: Any) -> tuple[Source, Hashable]:  # noqa: ANN401
    if hasattr(tensor, "placements"):
        raise InvalidError("a DTensor: save its to_local(), or use tenplexfs.torch.Writer")
    if str(tensor.layout) != "torch.strided" or tensor.device.type == "meta" or tensor.is_quantized:
        raise InvalidError(f"a tensor of layout {tensor.layout} on {tensor.device}: has no bytes to save")
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        name = dtype_name(dtype_of(name))
    except InvalidError as error:
        raise InvalidError(f"tensor of dtype {tensor.dtype}: {error.message}") from error
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    where = str(tensor.device), tensor.data_ptr()
    return Source(shape, name, tensor), _identity("torch", where, shape, strides, name)


def _identity(
    kind: str, where: Hashable, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str
) -> Hashable:
    """Tensors over the same storage, seen in the same way, are tied; nothing is over no storage."""
    return None if 0 in shape else (kind, where, shape, strides, dtype)
