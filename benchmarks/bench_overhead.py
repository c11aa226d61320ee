"""Samples/s of the GPT of `examples/gpt` with tenplexfs, against the same training without.

    python benchmarks/bench_overhead.py

With: samples from the mount, `should_stop` once a step, a save in the background every 10 steps, by
`dcp.async_save` or by `tenplexfs.save(..., wait=False)`. Without: samples from an array, no saves. They take
turns in the same processes; what a save still has to do at the end of its turn belongs to it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path[:0] = [str(EXAMPLES / "gpt"), str(EXAMPLES)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import train  # noqa: E402
from daemons import cluster, run  # noqa: E402
from elastic import end, launch  # noqa: E402
from inputs import GLOBAL_BATCH, layout, write_data  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

import tenplexfs  # noqa: E402
from tenplexfs.torch import Dataset, Writer, should_stop  # noqa: E402

SAVE_EVERY = 10
KINDS = ("without", "save", "async_save")


def endless(data: torch.utils.data.Dataset, batch: int) -> Iterator[torch.Tensor]:
    while True:
        yield from torch.utils.data.DataLoader(data, batch_size=batch, drop_last=True)


def measure(job: Path, file: Path, output: Path, rounds: int, steps: int) -> int:
    """Trains by turns; the first rank writes samples/s, round by round."""
    now = tenplexfs.env(job)
    mesh = init_device_mesh("cpu", tuple(now["mesh"].values()), mesh_dim_names=tuple(now["mesh"]))
    behind = dist.new_group(backend="gloo")  # for saves in the background
    dataset = Dataset(job / "dataset" / "train", rank=mesh.get_local_rank("dp"))
    batch = dataset.local_batch
    trainer = train.Trainer(mesh, batch, batch)
    rows = torch.from_numpy(np.load(file))
    mount, array = endless(dataset, batch), endless(rows, batch)
    step, found = now["step"], []

    def begin_save(kind: str) -> Callable[[], object]:
        """Returns what waits for its end."""
        if kind == "save":
            state = {
                part: {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}
                for part, tensors in trainer.state().items()
            }
            place = job / "model" / str(dist.get_rank())
            return tenplexfs.save(state, place, step=step, snapshot=now["snapshot"], wait=False).wait
        writer = Writer(job, step=step, snapshot=now["snapshot"])
        return dcp.async_save(trainer.state(), storage_writer=writer, process_group=behind).result

    def turn(kind: str) -> float:
        nonlocal step
        saving: list[Callable[[], object]] = []
        dist.barrier()
        begin = time.perf_counter()
        for number in range(1, steps + 1):
            trainer.step(next(array if kind == "without" else mount))
            if kind == "without":
                continue
            step += 1
            should_stop(job, step)
            if number % SAVE_EVERY == SAVE_EVERY // 2:
                saving.append(begin_save(kind))
        for each in saving:
            each()
        dist.barrier()
        return steps * GLOBAL_BATCH / (time.perf_counter() - begin)

    for number in range(rounds + 1):
        first = number % len(KINDS)
        speeds = {kind: turn(kind) for kind in KINDS[first:] + KINDS[:first]}
        found += [speeds] if number else []  # the first is for warming up
    if dist.get_rank() == 0:
        output.write_text(json.dumps(found))
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel, with a thread each (1)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20, help="of each turn")
    parser.add_argument("--width", type=int, default=256, help="of the model")
    arguments = parser.parse_args()
    train.WIDTH, train.CONTEXT = arguments.width, 128
    with tempfile.TemporaryDirectory() as directory, cluster(["node0"]) as nodes:
        base, at = Path(directory), ("--socket", nodes[0].socket)
        file = write_data(base / "sources.npy")
        first = base / "layout.json"
        first.write_text(json.dumps(layout((arguments.ranks, 1, 1), f"node0:{arguments.ranks}", "float32")))
        run("job", "create", "gpt", "--layout", first, *at)
        end(launch(nodes, "gpt", "float32", train.train, steps=0), tenplexfs.EXIT_RECONFIGURE)
        run("dataset", "add", "gpt", "train", "--source", file, "--seed", 7, *at)
        keywords = {
            "file": file,
            "output": base / "speeds",
            "rounds": arguments.rounds,
            "steps": arguments.steps,
        }
        end(launch(nodes, "gpt", "float32", measure, **keywords), 0)
        found = json.loads((base / "speeds").read_text())
    parameters = sum(p.numel() for p in train.GPT().parameters())
    speeds = {kind: statistics.median(each[kind] for each in found) for kind in KINDS}
    print(
        f"{arguments.ranks} ranks, {parameters * 12 / 1e6:.0f} MB of state, "
        f"{GLOBAL_BATCH / speeds['without']:.2f} s a step, saved every {SAVE_EVERY} steps"
    )
    for kind, speed in speeds.items():
        ratios = sorted(each[kind] / each["without"] for each in found)
        ratio = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        print(f"  {kind:10} {speed:8.2f} samples/s   ratio {ratio if kind != 'without' else '1'}")


if __name__ == "__main__":
    main()
