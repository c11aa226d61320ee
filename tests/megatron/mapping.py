"""Doubles of Megatron-Core's sharded objects: the fields and rules of `dist_checkpointing/mapping.py` 0.16.

Only what a layout is read from, written anew: `ShardedTensor` with its rank-offset constructor,
`ShardedObject`, `ShardedTensorFactory`, `LocalNonpersistentObject`, and the SwiGLU factory of
`transformer/mlp.py`. Point TENPLEXFS_MEGATRON at an unpacked megatron-core to run the tests with its own.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch


@dataclass
class ShardedTensor:
    key: str
    data: torch.Tensor | None
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: int | tuple[int, ...] = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    @classmethod
    def from_rank_offsets(cls, key, data, *rank_offsets, replica_id=0, prepend_axis_num=0, **options):
        """Each offset is (axis, rank, ways): the data is that one of so many equal parts along the axis."""
        width = [1] * prepend_axis_num + list(data.shape)
        place, ways = [0] * len(width), [1] * len(width)
        for axis, rank, parts in rank_offsets:
            place[axis], ways[axis] = rank, parts
        return cls(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            tuple(n * w for n, w in zip(width, ways, strict=True)),
            tuple(n * p for n, p in zip(width, place, strict=True)),
            tuple(ways),
            replica_id,
            prepend_axis_num,
            **options,
        )


@dataclass
class ShardedObject:
    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int | tuple[int, ...] = 0


@dataclass
class ShardedTensorFactory:
    key: str
    data: torch.Tensor
    build_fn: Callable
    merge_fn: Callable
    replica_id: int | tuple[int, ...] = 0
    flattened_range: slice | None = None

    def build(self):
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)


class LocalNonpersistentObject:
    def __init__(self, obj):
        self.obj = obj


def apply_swiglu_sharded_factory(original, sharded_offsets, singleton_local_shards=False):
    """Splits a rank's weight in gate and value, each a part of its own half of the tensor."""
    lead = len(sharded_offsets)
    ways = original.axis_fragmentations[lead]
    rank = original.global_offset[lead] // original.local_shape[0]

    def build(key, data, replica_id, flattened_range):
        options = {"replica_id": replica_id, "prepend_axis_num": lead}
        out = []
        for half, part in enumerate(torch.chunk(data, 2, dim=0)):
            if singleton_local_shards:
                name, offset = f"{key}_{'wv'[half]}", (lead, rank, ways)
            else:
                name, offset = key, (lead, rank + half * ways, ways * 2)
            out.append(ShardedTensor.from_rank_offsets(name, part, *sharded_offsets, offset, **options))
        return out

    return ShardedTensorFactory(original.key, original.data, build, torch.cat, original.replica_id)


if "TENPLEXFS_MEGATRON" in os.environ:
    sys.path.insert(0, os.environ["TENPLEXFS_MEGATRON"])
    theirs = import_module("megatron.core.dist_checkpointing.mapping")
    ShardedTensor = theirs.ShardedTensor
    ShardedObject = theirs.ShardedObject
    ShardedTensorFactory = theirs.ShardedTensorFactory
    LocalNonpersistentObject = theirs.LocalNonpersistentObject
    apply_swiglu_sharded_factory = import_module("megatron.core.transformer.mlp").apply_swiglu_sharded_factory
