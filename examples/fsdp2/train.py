"""FSDP2 with torch.distributed.checkpoint (DCP): a script as anybody has it, and what tenplexfs adds.

    tenplexfs run --job fsdp2 --nproc 2 -- examples/fsdp2/train.py --steps 100

Lines marked `# tenplexfs` are all there is to it. Saving and loading is one changed argument: DCP's own
`checkpoint_id=...` becomes `storage_writer=Writer(...)` and `storage_reader=Reader(...)`. `should_stop`
lets the job be stopped at a step of all ranks, to be started again with more or fewer of them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tenplexfs  # tenplexfs
from tenplexfs.torch import Reader, Writer, should_stop  # tenplexfs

JOB = f"{os.environ['TENPLEXFS_MOUNT']}/{os.environ['TENPLEXFS_JOB']}"  # tenplexfs
GLOBAL_BATCH = 32


def batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the batch of a step: the same samples for any number of ranks."""
    made = torch.Generator().manual_seed(step)
    x = torch.randn(GLOBAL_BATCH, 16, generator=made)
    return x.chunk(world)[rank], x.sum(1, keepdim=True).sin().chunk(world)[rank]


def train(given: argparse.Namespace) -> bool:
    """Trains to the end, or until the job is to stop: returns whether it is."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def state() -> dict[str, object]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "step": step}

    step, stop = 0, False
    if os.environ.get("TENPLEXFS_STEP"):  # tenplexfs: there is a state to go on from
        found = state()
        dcp.load(found, storage_reader=Reader(JOB))  # tenplexfs: was checkpoint_id=...
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        step = found["step"]

    while step < given.steps and not stop:
        step += 1
        x, y = batch(step, dist.get_rank(), dist.get_world_size())
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(given.pace)
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            mean, ranks = loss.item() / dist.get_world_size(), dist.get_world_size()
            print(f"step {step} loss {mean:.6f} ranks {ranks}", flush=True)
        stop = should_stop(JOB, step)  # tenplexfs
        if stop or step % given.save_every == 0 or step == given.steps:
            dcp.save(state(), storage_writer=Writer(JOB, step=step))  # tenplexfs: was checkpoint_id=...
    return stop


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
    dist.init_process_group("gloo")
    stop = train(parser.parse_args())
    dist.destroy_process_group()
    return tenplexfs.EXIT_RECONFIGURE if stop else 0  # tenplexfs


if __name__ == "__main__":
    sys.exit(main())
