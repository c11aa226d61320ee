"""DDP training on scikit-learn's digits, elastic: ranks come and go, the samples stay in order.

    tenplexfs run --job digits --nproc 2 -- examples/digits/train.py --epochs 3

Lines marked `# tenplexfs` are what it adds. The state is equal on all ranks, and a node keeps it once. The
global batch is the same for any number of ranks; so is what each step learns from.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tenplexfs  # tenplexfs
from tenplexfs.torch import Reader, Writer, should_stop  # tenplexfs

JOB = f"{os.environ['TENPLEXFS_MOUNT']}/{os.environ['TENPLEXFS_JOB']}"  # tenplexfs
GLOBAL_BATCH = 64


def order_of(epoch: int, count: int) -> torch.Tensor:
    """The order of the samples in an epoch, the same for any number of ranks."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(epoch))


def train(given: argparse.Namespace) -> bool:
    """Trains to the end, or until the job is to stop: returns whether it is."""
    rank, world = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
    if os.environ.get("TENPLEXFS_STEP"):  # tenplexfs: there is a state to go on from
        for parameter in model.parameters():  # so that the optimizer has something to load into
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        state["optimizer"] = optimizer.state_dict()
        dcp.load(state, storage_reader=Reader(JOB))  # tenplexfs: was checkpoint_id=...
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    trained = DistributedDataParallel(model)

    steps = len(images) // GLOBAL_BATCH
    step, stop = state["step"], False
    while step < given.epochs * steps and not stop:
        epoch, turn = divmod(step, steps)
        samples = order_of(epoch, len(images))[turn * GLOBAL_BATCH : (turn + 1) * GLOBAL_BATCH]
        mine = samples.chunk(world)[rank]
        loss = nn.functional.cross_entropy(trained(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        step += 1
        time.sleep(given.pace)
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.6f} ranks {world}", flush=True)
        stop = should_stop(JOB, step)  # tenplexfs
        if stop or step % given.save_every == 0 or step == given.epochs * steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            dcp.save(state, storage_writer=Writer(JOB, step=step))  # tenplexfs: was checkpoint_id=...
    if rank == 0 and not stop:
        right = (model(images).argmax(1) == labels).float().mean()
        print(f"accuracy {right:.3f}", flush=True)
    return stop


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
    dist.init_process_group("gloo")
    stop = train(parser.parse_args())  # its model is gone before the group is, or gloo may hang
    dist.destroy_process_group()
    return tenplexfs.EXIT_RECONFIGURE if stop else 0  # tenplexfs


if __name__ == "__main__":
    sys.exit(main())
