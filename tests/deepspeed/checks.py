"""What ranks do in the tests of `tenplexfs.deepspeed`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tenplexfs.deepspeed import load, save
from tenplexfs.errors import TenplexError
from tests.deepspeed.engine import STATES, engine, model
from tests.torch.context import Context


def value(name: str, kind: str, step: int) -> torch.Tensor:
    """Returns what a parameter's state is to be: numbers that no two places share."""
    shape = dict(model(0).named_parameters())[name].shape
    salt = 10 * step + ["fp32", *STATES].index(kind)
    return (torch.arange(shape.numel()) * 100.0 + salt).reshape(shape)


def parts(given: Any, rank: int, world: int) -> Any:
    """Yields name, kind and run of each part that this rank has, and the part, anew by DeepSpeed's rule."""
    optimizer = given.optimizer
    names = {id(p): name for name, p in given.module.named_parameters()}
    is_three = hasattr(optimizer, "fp16_groups")
    groups = optimizer.fp16_groups if is_three else optimizer.bit16_groups
    flats = optimizer.fp32_partitioned_groups_flat if is_three else optimizer.single_partition_of_fp32_groups
    for params, flat in zip(groups, flats, strict=True):
        begin = 0
        for p in params:
            name = names[id(p)]
            count = value(name, "fp32", 0).numel()
            size = -(-count // world) if is_three else len(flat)
            first = size * rank if is_three else size * rank - begin
            low, high = max(first, 0), max(min(first + size, count), 0)
            if low < high:
                at = (begin if is_three else 0) + low - first
                for kind in ("fp32", *STATES):
                    data = flat if kind == "fp32" else optimizer.optimizer.state[flat][kind]
                    yield name, kind, slice(low, high), data[at : at + high - low]
            begin += size if is_three else count


def train(given: Any, rank: int, world: int, step: int) -> None:
    """Gives the engine the state of a step."""
    for name, kind, run, part in parts(given, rank, world):
        part.copy_(value(name, kind, step).reshape(-1)[run])
    for name, p in given.module.named_parameters():
        low = value(name, "fp32", step).to(torch.bfloat16)
        if hasattr(p, "ds_tensor"):
            size = len(p.ds_tensor)
            mine = low.reshape(-1)[size * rank : size * (rank + 1)]
            p.ds_tensor[: len(mine)] = mine
        else:
            p.detach().copy_(low)
    given.module.count.fill_(step)
    given.global_steps, given.global_samples = step, 8 * step
    for group in given.optimizer.optimizer.param_groups:
        group["lr"] = 0.05 if group["weight_decay"] else 0.025
    for state in given.optimizer.optimizer.state.values():
        state["step"].fill_(step)


def check(given: Any, rank: int, world: int, step: int) -> None:
    seen = 0
    for name, kind, run, part in parts(given, rank, world):
        assert torch.equal(part, value(name, kind, step).reshape(-1)[run]), (name, kind)
        seen += part.numel()
    total = torch.tensor(seen)
    if dist.is_initialized():
        dist.all_reduce(total)
    assert int(total) == 3 * sum(p.numel() for p in model(0).parameters())
    for name, p in given.module.named_parameters():
        low = value(name, "fp32", step).to(torch.bfloat16)
        if hasattr(p, "ds_tensor"):
            mine = low.reshape(-1)[len(p.ds_tensor) * rank : len(p.ds_tensor) * (rank + 1)]
            assert torch.equal(p.ds_tensor[: len(mine)], mine), name
        else:
            assert torch.equal(p.detach(), low), name
    assert float(given.module.count) == step
    assert (given.global_steps, given.global_samples) == (step, 8 * step)
    groups = {g["weight_decay"]: g["lr"] for g in given.optimizer.optimizer.param_groups}
    assert groups == {0.2: 0.05, 0.0: 0.025}, groups
    assert {float(s["step"]) for s in given.optimizer.optimizer.state.values()} == {float(step)}


def save_at(context: Context, job: str, stage: int, step: int) -> None:
    made = engine(context.rank, context.world, stage)
    train(made, context.rank, context.world, step)
    save(made, context.mount / job, step=step, client_state={"who": context.rank})


def load_at(context: Context, job: str, stage: int, step: int, save_as: int | None = None) -> Any:
    """Loads into an engine of other values, whose groups are in another order."""
    made = engine(context.rank, context.world, stage, seed=5, reverse=save_as is None)
    client = load(made, context.mount / job)
    check(made, context.rank, context.world, step)
    if save_as is not None:
        train(made, context.rank, context.world, save_as)
        save(made, context.mount / job, step=save_as)
    return client


def refusals(context: Context, job: str) -> dict[str, str]:
    def said(work: Any) -> str:
        try:
            work()
        except TenplexError as error:
            return error.message
        return "was taken"

    path, rank, world = context.mount / job, context.rank, context.world
    load(engine(rank, world, 1), path)
    plain = engine(rank, world, 1)
    for p in plain.module.parameters():
        del p._hp_mapping
    mixed = engine(rank, world, 1)
    names = [p for group in mixed.optimizer.bit16_groups for p in group]
    mixed.optimizer.bit16_groups[0][:], mixed.optimizer.bit16_groups[1][:] = names[2:5], names[:2] + names[5:]
    return {
        "stage": said(lambda: save(engine(rank, world, 3), path, step=9)),
        "order": said(lambda: save(engine(rank, world, 1, reverse=True), path, step=9)),
        "none": said(lambda: save(plain, path, step=9)),
        "mixed": said(lambda: load(mixed, path)),
    }
