"""A small GPT on bytes, with tensor, pipeline and data parallelism. Each line that tenplexfs adds is marked.

    torchrun --nproc-per-node 4 examples/gpt/train.py MOUNT/gpt --steps 100

Started again, on as many ranks as the job has then, it goes on where it was: at any mesh, with the samples
that come next. `elastic.py` makes the job and changes its mesh.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import tenplexfs  # tenplexfs
from tenplexfs.torch import Dataset, Reader, Writer, should_stop  # tenplexfs

LAYERS, WIDTH, HEADS, CONTEXT = 4, 64, 4, 64
COLUMNS, ROWS = ("query", "key", "value", "up"), ("out", "down")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Block(nn.Module):
    """Attention and a feed-forward network; tensor parallelism leaves each rank some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = self.norm1(x)
        heads = [
            f(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        ]
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """The whole model; a stage of a pipeline keeps a part of it, under the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def cut(self, stage: int, stages: int) -> GPT:
        """Keeps what belongs to a stage."""
        if stage > 0:
            self.bytes = self.places = None
        if stage < stages - 1:
            self.norm = self.head = None
        mine = torch.arange(LAYERS).tensor_split(stages)[stage].tolist()
        self.blocks = nn.ModuleDict({str(i): self.blocks[str(i)] for i in mine})
        return self

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        if self.bytes is not None:
            x = self.bytes(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.head is not None else x


def cross_entropy(scores: Tensor, wanted: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())


class Trainer:
    """A rank: its part of the model, its optimizer, and how it works with the others."""

    def __init__(self, mesh: DeviceMesh, local_batch: int, micro_batch: int) -> None:
        self.mesh = mesh
        stage, stages = mesh.get_local_rank("pp"), mesh["pp"].size()
        self.first, self.last = stage == 0, stage == stages - 1
        torch.manual_seed(0)
        self.model = GPT().cut(stage, stages)
        cut: dict[str, Any] = dict.fromkeys(COLUMNS, ColwiseParallel())
        cut |= dict.fromkeys(ROWS, RowwiseParallel())
        for block in self.model.blocks.values():
            parallelize_module(block, mesh["tp"], cut)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        pipeline = PipelineStage(self.model, stage, stages, torch.device("cpu"), group=mesh["pp"].get_group())
        self.schedule = ScheduleGPipe(pipeline, max(local_batch // micro_batch, 1), loss_fn=cross_entropy)

    def step(self, samples: Tensor) -> float:
        """Takes one step; returns the loss of the global batch, on the last stage."""
        samples = samples.long()
        losses: list[Tensor] = []
        self.optimizer.zero_grad()
        self.schedule.step(
            *([samples[:, :-1]] if self.first else []),
            **({"target": samples[:, 1:], "losses": losses} if self.last else {}),
        )
        gradients = [parameter.grad for parameter in self.model.parameters()]
        local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
        group, degree = self.mesh["dp"].get_group(), self.mesh["dp"].size()
        joined = torch.cat([grad.flatten() for grad in local] + [torch.zeros(1, dtype=local[0].dtype)])
        if self.last:
            joined[-1] = torch.stack(losses).mean().detach()
        dist.all_reduce(joined, group=group)
        joined /= degree
        for grad, reduced in zip(local, joined.split([g.numel() for g in local] + [1])[:-1], strict=True):
            grad.copy_(reduced.view_as(grad))
        self.optimizer.step()
        return float(joined[-1])

    def state(self) -> dict[str, dict[str, Any]]:
        """Returns what to save, or to load into: all tensors; the optimizer's settings are this script's."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=FLAT)
        moments = {name: value for name, value in optimizer.items() if name.startswith("state.")}
        return {"model": model, "optimizer": moments}

    def load(self, state: dict[str, dict[str, Any]]) -> None:
        """Takes what was loaded."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=FLAT)
        optimizer |= state["optimizer"]
        model |= state["model"]
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=FLAT
        )


def train(job: Path, steps: int, *, micro_batch: int = 4, log: Path | None = None) -> int:
    """Trains up to ``steps``; returns the exit status."""
    now = tenplexfs.env(job)  # tenplexfs: mesh and step that the job has now
    mesh = init_device_mesh("cpu", tuple(now["mesh"].values()), mesh_dim_names=tuple(now["mesh"]))
    step = now["step"]
    if step is None:  # tenplexfs: the first state of the job
        dcp.save(Trainer(mesh, 1, 1).state(), storage_writer=Writer(job, step=0))  # tenplexfs
        return tenplexfs.EXIT_RECONFIGURE  # tenplexfs
    data = Dataset(job / "dataset" / "train", rank=mesh.get_local_rank("dp"))  # tenplexfs
    trainer = Trainer(mesh, data.local_batch, micro_batch)
    state = trainer.state()
    dcp.load(state, storage_reader=Reader(job))  # tenplexfs: the Reader, for any mesh
    trainer.load(state)
    for batch in torch.utils.data.DataLoader(data, batch_size=data.local_batch):
        if step >= steps:
            break
        loss = trainer.step(batch)
        step += 1
        if trainer.last and mesh.get_local_rank("dp") == mesh.get_local_rank("tp") == 0 and log:
            with log.open("a") as file:
                file.write(f"{step},{loss!r}\n")
        stop = should_stop(job, step)  # tenplexfs
        if stop or step == steps:
            dcp.save(trainer.state(), storage_writer=Writer(job, step=step))  # tenplexfs: the Writer
        if stop:  # tenplexfs
            return tenplexfs.EXIT_RECONFIGURE  # tenplexfs
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path, help="<mount>/<job>")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--losses", type=Path, help="CSV of step and loss")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        return train(arguments.job, arguments.steps, micro_batch=arguments.micro_batch, log=arguments.losses)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
