"""What a snapshot holds, under the names that DCP gives it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from tenplexfs.client.regions import OpenSnapshot
from tenplexfs.core.ptc import PTC
from tenplexfs.formats.structure import unflatten
from tenplexfs.torch.state import LocalTensor, as_tensor

__all__ = ["Catalog", "Stored"]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the job: its path, global shape and dtype."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    def empty(self, device: str = "cpu") -> torch.Tensor:
        """Returns a tensor like it, of any content."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)


class Catalog:
    """All items that any rank saved, with this rank's own values.

    Attributes:
        items: Name -> a tensor of the job, a tensor that is a value of this rank, or a value.
    """

    def __init__(self, ptc: PTC, opened: OpenSnapshot, rank: int, *, allow_pickle: bool) -> None:
        self.items: dict[str, object] = {}
        self._mappings: dict[str, Sequence[str | int]] = {}
        self._ptc = ptc
        self._stored: dict[int, Stored] = {}
        self._stand_ins: dict[str, object] = {}
        for index in _documents(opened, rank):
            state = unflatten(opened.document(index), self._stand_in, allow_pickle=allow_pickle)
            if type(state) is OrderedDict:  # saved without flattening: each value is an item
                for name, value in state.items():
                    self._visit((str(name),), value)
            elif isinstance(state, Mapping):
                traverse_state_dict(cast(Any, state), self._visit)

    def _stand_in(self, path: str) -> object:
        """Returns what stands for a tensor, of which nothing is loaded yet."""
        if path not in self._stand_ins:
            tensor = self._ptc.tensors[path]
            stored = Stored(path, tensor.shape, tensor.dtype)
            known = isinstance(getattr(torch, tensor.dtype, None), torch.dtype)
            made: object = stored.empty("meta") if known else stored
            self._stored[id(made)] = stored
            self._stand_ins[path] = made
        return self._stand_ins[path]

    def _visit(self, keys: Sequence[str | int], value: object) -> None:
        name = ".".join(map(str, keys))
        if name in self.items:
            return
        self._mappings[name] = keys
        if isinstance(value, LocalTensor):
            self.items[name] = as_tensor(value)
        else:
            self.items[name] = self._stored.get(id(value), value)

    def metadata(self) -> Metadata:
        """Returns what DCP reads its plans from."""
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, item in self.items.items():
            if isinstance(item, Stored | torch.Tensor):
                size = torch.Size(item.shape)
                dtype = item.dtype if isinstance(item, torch.Tensor) else getattr(torch, item.dtype, None)
                if dtype is None:
                    continue  # torch has no such type
                chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
                entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])
            else:
                entries[name] = BytesStorageMetadata()
        return Metadata(entries, planner_data=self._mappings)

    def tensors_in(self, value: object) -> list[Stored]:
        """Returns the tensors of the job that a value holds."""
        return list(
            dict.fromkeys(self._stored[id(each)] for each in _leaves(value) if id(each) in self._stored)
        )

    def filled(self, value: object, tensors: Mapping[str, torch.Tensor]) -> object:
        """Returns ``value`` with what stands for tensors replaced by ``tensors``, by their path."""
        if id(value) in self._stored:
            return tensors[self._stored[id(value)].path]
        if isinstance(value, dict):
            filled = {key: self.filled(each, tensors) for key, each in value.items()}
            value.update(filled)
            return value
        if isinstance(value, list):
            return [self.filled(each, tensors) for each in value]
        if isinstance(value, tuple):
            items = [self.filled(each, tensors) for each in value]
            return tuple(items) if type(value) is tuple else tuple.__new__(type(value), items)
        return value


def _documents(opened: OpenSnapshot, rank: int) -> Iterator[int]:
    """Yields this rank's document, then every other one: what only another stage saved is found too."""
    own = opened.of_rank[rank % len(opened.of_rank)]
    yield own
    yield from dict.fromkeys(index for index in opened.of_rank if index != own)


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value
