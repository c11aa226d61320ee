"""What ranks do in the tests of `Writer` and `Reader` on meshes of several dims, and as daemons die."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tenplexfs.client import regions
from tenplexfs.torch import Reader, Writer
from tenplexfs.torch import writer as writer_module
from tests.torch.context import Context
from tests.torch.states import blank, same, spread


def cubes(at: Context) -> None:
    """Meshes of three dims, and stages of them, against DCP's own files; saved by 8 ranks, loaded by any."""
    line = init_device_mesh("cpu", (at.world,))
    whole: dict[str, tuple[int, ...]] = {"a": (5, 7), "b": (9, 5), "c": (6, 4, 5), "d": (4, 3)}
    whole |= {f"layers.{i}.{name}": shape for i in range(2) for name, shape in (("w", (5, 6)), ("n", (6,)))}
    if at.world == 8:
        cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        state: dict[str, Any] = {
            "a": spread(whole["a"], cube, [Shard(0), Replicate(), Shard(1)]),
            "b": spread(whole["b"], cube, [Shard(0), Shard(0), Shard(1)], torch.bfloat16),
            "c": spread(whole["c"], cube, [Shard(2), Shard(0), Shard(1)]),
            "d": spread(whole["d"], cube, [Replicate(), Replicate(), Shard(0)], torch.int64),
        }
        piped = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        stage, own = piped.get_local_rank("pp"), piped["dp", "tp"]
        state[f"layers.{stage}.w"] = spread((5, 6), own, [Shard(0), Shard(1)])
        state[f"layers.{stage}.n"] = spread((6,), own, [Replicate(), Shard(0)])
        for step in (1, 2):
            dcp.save(state, storage_writer=Writer(at.mount / "cubes", step=step))
        dcp.save(state, storage_writer=FileSystemWriter(at.where / "cubes"))
        targets = [blank(state)]
    else:
        grid = init_device_mesh("cpu", (2, at.world // 2))
        targets = [
            {name: torch.zeros_like(spread(shape, grid, [Shard(0), Shard(1 % len(shape))], kind(name)))}
            for name, shape in whole.items()
        ]
    targets.append(
        {name: torch.zeros_like(spread(shape, line, [Shard(0)], kind(name))) for name, shape in whole.items()}
    )
    for target in targets:
        ours, theirs = target, copy.deepcopy(target)
        dcp.load(ours, storage_reader=Reader(at.mount / "cubes"))
        dcp.load(theirs, storage_reader=FileSystemReader(at.where / "cubes"))
        same(ours, theirs)
        assert all(each.full_tensor().any() for each in ours.values())


def kind(name: str) -> torch.dtype:
    return {"b": torch.bfloat16, "d": torch.int64}.get(name, torch.float32)


def interrupted(at: Context) -> None:
    """The daemon is killed, and started again, while a load and a save are under way."""
    mesh = init_device_mesh("cpu", (at.world,), mesh_dim_names=("dp",))
    state = {"w": spread((64, 1 << 14), mesh, [Shard(0)]), "n": spread((5,), mesh, [Replicate()]), "step": 1}
    dcp.save(state, storage_writer=Writer(at.job, step=1))

    class Late(DefaultLoadPlanner):
        def finish_plan(self, new_plan):
            if at.rank == 0:
                restarted(at, "load")
            dist.barrier()
            return super().finish_plan(new_plan)

    found = blank(state)
    dcp.load(found, storage_reader=Reader(at.job), planner=Late())
    same(found, state)

    real = writer_module.save_held

    def late(*arguments: Any, **options: Any) -> Any:
        if at.rank == 1:  # the other one waits for the commit
            restarted(at, "save")
        return real(*arguments, **options)

    writer_module.save_held = late
    state["step"] = 2
    state["w"].to_local().add_(1)
    dcp.save(state, storage_writer=Writer(at.job, step=2))
    writer_module.save_held = real
    found = blank(state)
    dcp.load(found, storage_reader=Reader(at.job))
    same(found, state)


def elsewhere(at: Context) -> dict[str, str]:
    """A job is saved again by ranks that hold other boxes of the same shapes; returns what they are told."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows = {"rows": spread((8, 3), grid, [Shard(0), Shard(0)])}
    state = {"w": spread((4, 4), grid, [Shard(1), Shard(0)]), **rows, "plain": torch.arange(3.0)}
    dcp.save(state, storage_writer=Writer(at.job, step=1))
    others: dict[str, dict[str, Any]] = {
        "transposed": {"w": spread((4, 4), turned, [Shard(0), Shard(1)])},
        "other dims": {"w": spread((4, 4), grid, [Shard(0), Shard(1)])},
        "strided": {
            "rows": DTensor.from_local(
                torch.zeros(2, 3), grid, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False
            )
        },
        "smaller": {"w": spread((2, 2), grid, [Replicate(), Replicate()])},
        "whole": {"w": torch.ones(2, 2)},
        "absent": {"more": spread((4,), grid, [Shard(0), Replicate()])},
    }
    told = {}
    for name, other in others.items():
        try:
            dcp.save({**state, **other}, storage_writer=Writer(at.job, step=2))
        except CheckpointException as error:
            assert sorted(error.failures) == list(range(at.world)), error
            told[name] = str(error.failures[at.rank][0])
        else:
            told[name] = "saved"
    found = blank(state)
    dcp.load(found, storage_reader=Reader(at.job))
    same(found, state)
    # Said in another way, and the same: what axes are called does not matter.
    state["w"] = spread((4, 4), init_device_mesh("cpu", (2, 2)), [Shard(1), Shard(0)])
    state["w"].to_local().add_(1)
    dcp.save(state, storage_writer=Writer(at.job, step=2))
    found = blank(state)
    dcp.load(found, storage_reader=Reader(at.job))
    same(found, state)
    return told


def parts(at: Context) -> None:
    """A region is fetched in parts, where it is more than what is fetched at once."""
    mesh = init_device_mesh("cpu", (at.world,), mesh_dim_names=("dp",))
    state = {
        "w": spread((64, 41), mesh, [Shard(0)]),
        "thin": spread((2, 1, 333), mesh, [Shard(0)], torch.bfloat16),
        "small": spread((2, 3), mesh, [Shard(0)]),
    }
    dcp.save(state, storage_writer=Writer(at.job, step=1))
    sizes: list[int] = []
    real, limit = regions._arrays_of, 100

    def counted(fds: list[int], wanted: Any) -> Any:
        sizes.append(sum(each.nbytes for each in wanted))
        return real(fds, wanted)

    regions._arrays_of = counted
    regions.OpenSnapshot.read.__kwdefaults__["batch_bytes"] = limit
    placements: list[list[Any]] = [[Replicate()], [Shard(1)]]
    for placed in placements:
        wanted = {
            name: spread(tuple(tensor.shape), mesh, placed, tensor.dtype) for name, tensor in state.items()
        }
        found = blank(wanted)
        dcp.load(found, storage_reader=Reader(at.job))
        same(found, wanted)
    assert len(sizes) > 64 and max(sizes) <= limit


def restarted(at: Context, name: str) -> None:
    """Returns once the daemon was killed and started again by the test."""
    (at.where / f"{name}.kill").touch()
    while not (at.where / f"{name}.go").exists():
        time.sleep(0.01)
