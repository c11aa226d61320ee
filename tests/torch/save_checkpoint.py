"""One rank of a job that saves a checkpoint with DCP; the test runs it once for each."""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def main() -> None:
    rank, world, where = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    store = dist.FileStore(str(where / "store"), world)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store)
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))

    def spread(shape, mesh, placements):
        whole = torch.arange(int(np.prod(shape))).reshape(shape)
        return distribute_tensor(whole, mesh, placements)

    state = {
        "rows.w": spread((10, 3), line, [Shard(0)]),
        "short": spread((2, 2), line, [Shard(0)]),
        "grid": spread((5, 7), grid, [Shard(0), Shard(1)]),
        "hybrid": spread((6, 2), grid, [Replicate(), Shard(0)]),
        "copies": spread((3, 3), line, [Replicate()]),
        "plain": torch.arange(4),
        "scalar": torch.tensor(0),
        "half": spread((4,), line, [Shard(0)]).to(torch.bfloat16),
        "opt": {"state": {"w.a": {"step": torch.tensor(0), "m": torch.arange(6)}}, "lr": 0.1},
    }
    dcp.save(state, checkpoint_id=where / "checkpoint")
    local = {
        name: value.to_local().to(torch.int64).numpy()
        for name, value in state.items()
        if isinstance(value, DTensor)
    }
    np.savez(where / f"rank{rank}.npz", **local)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
