"""States of ranks for the tests of `Writer` and `Reader`: models in training, and how two are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.torch.context import Context


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, f"{path}.{key}")
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from leaves(each, f"{path}.{i}")
    else:
        yield path, value


def bits(value: object) -> object:
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        local = value.detach().contiguous()
        return str(local.dtype), tuple(local.shape), local.view(-1).view(torch.uint8).numpy().tobytes()
    return type(value), value


def same(found: object, wanted: object) -> None:
    a, b = dict(leaves(found)), dict(leaves(wanted))
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    wrong = [key for key in b if bits(a[key]) != bits(b[key])]
    assert not wrong, (wrong, a[wrong[0]], b[wrong[0]])


def blank(value: Any) -> Any:
    """The same state, of other values, as the target of a load."""
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    if isinstance(value, list):
        return [blank(each) for each in value]
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    return "nothing"


def spread(shape: tuple[int, ...], mesh: DeviceMesh, placements: list[Any], dtype=torch.float32) -> DTensor:
    count = int(torch.Size(shape).numel())
    whole = (torch.arange(count) % 249).reshape(shape).to(dtype)
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


class Net(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 6)
        self.up = nn.Linear(6, width)
        self.down = nn.Linear(width, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.down(torch.relu(self.up(self.emb(x))))))


def trained(mesh: DeviceMesh, kind: str, *, seed: int = 0, width: int = 7) -> dict[str, Any]:
    """A model that took two steps, its optimizer and schedule, as a script gives them to DCP."""
    torch.manual_seed(seed)
    net = Net(width)
    if kind == "half":
        net = net.to(torch.bfloat16)
    if kind == "ddp":
        pass
    elif kind == "tp":
        parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    elif kind == "fsdp_tp":
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(net, mesh=mesh["dp"])
    else:
        fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for step in range(2):
        if kind in ("tp", "fsdp_tp"):  # gradients of any value do, and need no forward that fits
            for i, parameter in enumerate(net.parameters()):
                parameter.grad = torch.ones_like(parameter) * (0.1 * i + step)
        else:
            net(torch.arange(5)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model, optim = get_state_dict(net, optimizer)
    return {"model": model, "optim": optim, "schedule": schedule.state_dict()}


def states(world: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """Kinds of state that a group of ``world`` ranks can have."""
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    found = {
        "ddp": lambda: trained(line, "ddp"),
        "fsdp": lambda: trained(line, "fsdp"),
        "half": lambda: trained(line, "half"),
        "tp": lambda: trained(line, "tp", width=8),
    }
    if world >= 4:
        grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        hybrid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replica", "shard"))
        found["hsdp"] = lambda: trained(hybrid, "hsdp")
        found["fsdp_tp"] = lambda: trained(grid, "fsdp_tp", width=8)
        found["uneven"] = lambda: {
            "a": spread((5, 7), grid, [Shard(0), Shard(1)]),
            "b": spread((3, 5), grid, [Replicate(), Shard(1)], torch.float16),
            "c": spread((2, 3), grid, [Shard(0), Shard(0)], torch.int64),
            "d": spread((), grid, [Replicate(), Replicate()]),
            "e": spread((0, 3), grid, [Shard(0), Replicate()], torch.bfloat16),
            "f": spread((300, 1100), grid, [Shard(1), Shard(0)]),
        }
    found["plain"] = lambda: {
        "step": 3,
        "args": {"lr": 0.1, "names": ["a", None], "nested": [{"x": 1}, {"x": [2, torch.arange(3)]}]},
        "pair": (1, "two", b"three"),
        "flags": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "empty": torch.empty(0, 3),
        "dots.in.name": torch.arange(3, dtype=torch.int16),
        "best": float("inf"),
    }
    return found


def grouped(context: Context, *, reverse: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose weights and biases are in two groups, in either order."""
    torch.manual_seed(0)
    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (context.world,), mesh_dim_names=("dp",)))
    named = dict(net.named_parameters())
    groups = [
        {
            "params": [p for name, p in named.items() if name.endswith("weight")],
            "lr": 0.1,
            "weight_decay": 0.2,
        },
        {
            "params": [p for name, p in named.items() if name.endswith("bias")],
            "lr": 0.01,
            "weight_decay": 0.0,
        },
    ]
    if reverse:
        groups = [{**group, "params": group["params"][::-1]} for group in groups[::-1]]
    return net, torch.optim.AdamW(groups, foreach=False)


def by_name(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What each parameter is trained with, and its state, whole."""
    found = {}
    names = {id(p): name for name, p in net.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = {
                key: (value.full_tensor() if isinstance(value, DTensor) else value).tolist()
                for key, value in optimizer.state[p].items()
            }
            found[names[id(p)]] = [group["lr"], group["weight_decay"], p.full_tensor().tolist(), state]
    return found
