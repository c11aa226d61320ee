"""What a rank brings to `dcp.save`, as its part of a job: nested as it was, DTensors as what is here."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from tenplexfs.client.arrays import Source, source_of, to_torch
from tenplexfs.core.dtypes import dtype_of
from tenplexfs.errors import InvalidError
from tenplexfs.formats.structure import Flat, flatten
from tenplexfs.torch.layout import describe
from tenplexfs.torch.placements import StateSpec

__all__ = ["LocalTensor", "Values", "as_tensor", "values_of"]

_SAMPLED_BYTES = 1 << 16


class LocalTensor(NamedTuple):
    """A tensor that each rank has a value of its own of, kept among the values that are no tensors."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def as_tensor(value: LocalTensor) -> torch.Tensor:
    """Returns the tensor that ``value`` was made of."""
    array = np.frombuffer(bytearray(value.data), dtype_of(value.dtype)).reshape(value.shape)
    made = to_torch(array)
    assert isinstance(made, torch.Tensor)
    return made


class Values:
    """What the planner of a save has on this rank: name and value of each item.

    Attributes:
        values: Plain tensors, local tensors of DTensors, and what is no tensor.
        spread: The DTensors among them.
    """

    def __init__(
        self,
        values: dict[str, object],
        spread: Mapping[str, DTensor],
        mappings: Mapping[str, Sequence[str | int]] | None,
    ) -> None:
        self.values = values
        self.spread = spread
        self._mappings = mappings

    def keep_local(self, patterns: Iterable[str]) -> frozenset[str]:
        """Makes each rank keep its own of what ``patterns`` name; returns the names."""
        wanted = tuple(patterns)
        local = frozenset(
            name
            for name in self.values
            if name not in self.spread
            and any(fnmatchcase(name, each) or fnmatchcase(name.replace(".", "/"), each) for each in wanted)
        )
        for name in local:
            found = source_of(self.values[name])
            if found is not None:
                source = found[0]
                data = np.ascontiguousarray(source.array()).tobytes()
                self.values[name] = LocalTensor(source.dtype, source.shape, data)
        return local

    def prepare(self, *, allow_pickle: bool) -> Flat[Source]:
        """Returns what is to be saved, nested as it was given, with local tensors.

        Raises:
            InvalidError: Something cannot be kept; the message has its path.
        """
        return flatten(self._nested(), source_of, allow_pickle=allow_pickle)

    def spec(self, flat: Flat[Source]) -> StateSpec:
        """Returns what a layout is made of."""
        spread = {id(self.values[name]): tensor for name, tensor in self.spread.items()}
        described = {path: spread.get(id(each.value), each.value) for path, each in flat.tensors.items()}
        spec = describe(described)
        tensors = {
            # A planner may change the dtype on the way.
            path: each if each.dtype == (dtype := flat.tensors[path].dtype) else replace(each, dtype=dtype)
            for path, each in spec.tensors.items()
        }
        return replace(spec, tensors=tensors)

    def digests(self, names: Iterable[str], *, whole: bool, allow_pickle: bool) -> dict[str, bytes]:
        """Returns for each of ``names`` what is the same where the values are the same.

        Args:
            names: Of what is compared; DTensors by the part that they hold.
            whole: Whether to look at every byte of big tensors, else at some of them.
            allow_pickle: As for `prepare`.
        """
        found = {}
        for name in names:
            value = self.values[name]
            if isinstance(value, torch.Tensor):
                digest, key = _digest(value, whole=whole), self._key(name)
            else:
                flat = flatten(value, source_of, allow_pickle=allow_pickle)
                parts = [_digest(each.value, whole=whole) for each in flat.tensors.values()]
                digest, key = _hash(flat.document, *parts), name
            found[key] = digest
        return found

    def _key(self, name: str) -> str:
        """Returns ``name``, and which part of it: replicas of a part are compared."""
        tensor = self.spread.get(name)
        if tensor is None:
            return name
        place: Sequence[int] = tensor.device_mesh.get_coordinate() or []
        cut = [i for i, each in enumerate(tensor.placements) if not each.is_replicate()]
        kept = [(tuple(tensor.device_mesh.mesh.shape), place[i]) for i in cut]
        return f"{name}\0{kept}"

    def named(self, key: str) -> str | None:
        """Returns the name whose key is ``key``, if this rank has it."""
        name = key.partition("\0")[0]
        return name if name in self.values and self._key(name) == key else None

    def _nested(self) -> object:
        if self._mappings is None:
            # The kind of map says that names were not made of nested keys; see `tenplexfs.torch.reader`.
            from collections import OrderedDict

            return OrderedDict(self.values)
        root: dict[str, Any] = {}
        for name, value in self.values.items():
            _set(root, self._mappings[name], value)
        return root


def values_of(planner: SavePlanner) -> Values:
    """Returns what ``planner`` has on this rank.

    Raises:
        InvalidError: The planner does not show its state, or it holds what is not known here.
    """
    for name in ("state_dict", "lookup_object"):
        if not hasattr(planner, name):
            raise InvalidError(
                f"planner {type(planner).__qualname__}: has no {name}: need one like DefaultSavePlanner"
            )
    state: Mapping[str, object] = planner.state_dict  # type: ignore[attr-defined]
    values: dict[str, object] = {}
    spread: dict[str, DTensor] = {}
    for name, value in state.items():
        index = MetadataIndex(name)
        if isinstance(value, ShardedTensor):
            raise InvalidError(f"{name}: a ShardedTensor: use FSDP2 (fully_shard), which makes DTensors")
        if isinstance(value, DTensor):
            if value.device_mesh.get_coordinate() is None:
                continue  # nothing of it is on this rank
            local = planner.resolve_data(WriteItem(index, WriteItemType.SHARD))
            spread[name] = value
            values[name] = _detached(local)
        elif isinstance(value, torch.Tensor):
            values[name] = _detached(planner.resolve_data(WriteItem(index, WriteItemType.TENSOR)))
        else:
            values[name] = planner.lookup_object(index)  # type: ignore[attr-defined]
    flattened = bool(getattr(planner, "flatten_state_dict", False))
    return Values(values, spread, planner.mappings if flattened else None)  # type: ignore[attr-defined]


def _detached(value: object) -> object:
    # Not the very object: one that is in two places would be taken for one DTensor.
    return value.detach() if isinstance(value, torch.Tensor) else value


def _set(root: dict[str, Any], keys: Sequence[str | int], value: object) -> None:
    """Sets ``value`` where ``keys`` lead; an int is a place in a list.

    Holes of a list are empty maps, so that DCP still goes into it: what was there held nothing.
    """
    container: Any = root
    for i, key in enumerate(keys):
        last = i == len(keys) - 1
        if isinstance(container, list):
            assert isinstance(key, int)
            container.extend({} for _ in range(len(container), key + 1))
            missing = not last and container[key] == {}
        else:
            missing = key not in container
        if last:
            container[key] = value
        elif missing:
            container[key] = [] if isinstance(keys[i + 1], int) else {}
        container = container[key]


def _digest(tensor: torch.Tensor, *, whole: bool) -> bytes:
    kept = tensor.detach()
    what = f"{kept.dtype}{tuple(kept.shape)}".encode()
    size = kept.numel() * kept.element_size()
    if not whole and size > _SAMPLED_BYTES and kept.is_contiguous():
        flat = kept.view(-1)
        count = _SAMPLED_BYTES // (3 * kept.element_size())
        step = max(1, len(flat) // count)
        kept = torch.cat([flat[:count], flat[::step][:count], flat[-count:]])
    found = source_of(kept.contiguous())
    assert found is not None
    array = found[0].array()
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return _hash(what, data.data) if len(data) <= _SAMPLED_BYTES else _hash(what, *_checksums(data))


def _checksums(data: np.ndarray[Any, np.dtype[np.uint8]]) -> list[bytes]:
    return [
        zlib.crc32(data[i : i + _SAMPLED_BYTES].data).to_bytes(4, "little")
        for i in range(0, len(data), _SAMPLED_BYTES)
    ]


def _hash(*parts: bytes | memoryview) -> bytes:
    made = blake2b(digest_size=8)
    for part in parts:
        made.update(part)
    return made.digest()
