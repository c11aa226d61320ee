"""Doubles of a DeepSpeed engine: the attributes that `tenplexfs.deepspeed` reads, and nothing else.

As deepspeed 0.19 has them: `DeepSpeedZeroOptimizer` (stages 1 and 2) joins the parameters of a group and cuts
them in parts of equal size, padded to twice the ranks; `DeepSpeedZeroOptimizer_Stage3` cuts each parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

STATES = ("exp_avg", "exp_avg_sq")


@dataclass
class Address:
    numel: int
    start: int


class Mapping:
    """As `tensor_fragment`: a run of the parameter is a run of this rank's part of the group."""

    def __init__(self, group: int, in_param: Address, in_part: Address) -> None:
        self.param_group_index = group
        self.lp_fragment_address, self.hp_fragment_address = in_param, in_part


class Adam:
    """The optimizer within: its groups and the states of its flat tensors."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.param_groups = groups
        self.state: dict[torch.Tensor, dict[str, Any]] = {}

    def fill(self, flat: torch.Tensor) -> None:
        self.state[flat] = {"step": torch.tensor(0.0), **{key: torch.zeros_like(flat) for key in STATES}}


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.LayerNorm(3)).to(torch.bfloat16)
    made.register_buffer("count", torch.tensor(float(seed)))
    return made


def engine(rank: int, world: int, stage: int, *, seed: int = 0, reverse: bool = False) -> Any:
    """Returns an engine of a stage whose two groups are weights and biases, in either order."""
    module = model(seed)
    named = dict(module.named_parameters())
    groups = [
        ([p for name, p in named.items() if name.endswith("weight")], {"lr": 0.1, "weight_decay": 0.2}),
        ([p for name, p in named.items() if name.endswith("bias")], {"lr": 0.05, "weight_decay": 0.0}),
    ]
    if reverse:
        groups = [(params[::-1], given) for params, given in groups[::-1]]
    inner = Adam([dict(given) for _, given in groups])
    made = (_three if stage == 3 else _one)(rank, world, [params for params, _ in groups], inner)
    made.loss_scaler = SimpleNamespace(cur_scale=1.0, dynamic=False)
    counters = {"global_steps": 0, "global_samples": 0, "micro_steps": 0, "skipped_steps": 0}
    return SimpleNamespace(module=module, optimizer=made, lr_scheduler=None, **counters)


def _one(rank: int, world: int, groups: list[list[nn.Parameter]], inner: Adam) -> Any:
    parts = []
    for number, params in enumerate(groups):
        whole = torch.cat([p.detach().float().reshape(-1) for p in params])
        size = -(-len(whole) // (2 * world)) * 2
        padded = torch.cat([whole, torch.zeros(size * world - len(whole))])
        part = padded[size * rank : size * (rank + 1)].clone()
        parts.append(part)
        inner.fill(part)
        begin = 0
        for p in params:
            low, high = max(begin, size * rank), min(begin + p.numel(), size * (rank + 1))
            p._hp_mapping = None
            if low < high:
                count = high - low
                p._hp_mapping = Mapping(
                    number, Address(count, low - begin), Address(count, low - size * rank)
                )
            begin += p.numel()
    return SimpleNamespace(optimizer=inner, bit16_groups=groups, single_partition_of_fp32_groups=parts)


class _Three(SimpleNamespace):
    def get_param_id(self, param: Any) -> int:
        return param.ds_id

    def _part(self, param: Any, key: str | None) -> torch.Tensor:
        group, begin, count = self.grad_position[param.ds_id]
        flat = self.fp32_partitioned_groups_flat[group]
        return (flat if key is None else self.optimizer.state[flat][key]).narrow(0, begin, count)

    def get_local_fp32_param(self, param: Any, optim_state_key: str | None = None) -> torch.Tensor:
        return self._part(param, optim_state_key)

    def set_local_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        self._part(param, optim_state_key).copy_(value)


def _three(rank: int, world: int, groups: list[list[nn.Parameter]], inner: Adam) -> Any:
    flats, position = [], {}
    made = _Three(
        optimizer=inner, fp16_groups=groups, sub_group_to_group_id=dict(enumerate(range(len(groups))))
    )
    for number, params in enumerate(groups):
        begin, pieces = 0, []
        for p in params:
            size = -(-p.numel() // world)
            padded = torch.cat([p.detach().reshape(-1), torch.zeros(size * world - p.numel(), dtype=p.dtype)])
            p.ds_id, p.ds_shape, p.ds_numel = len(position), p.shape, p.numel()
            p.ds_tensor = padded[size * rank : size * (rank + 1)].clone()
            p.ds_tensor.ds_numel = size
            p._z3_optimizer = made
            position[p.ds_id] = (number, begin, size)
            pieces.append(p.ds_tensor.float())
            begin += size
            p.data = torch.empty(0, dtype=p.dtype)
        flats.append(torch.cat(pieces))
        inner.fill(flats[-1])
    made.fp32_partitioned_groups_flat, made.grad_position = flats, position
    return made
