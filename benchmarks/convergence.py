"""Losses of the GPT of `examples/gpt` while its parallelism changes, against runs that never change.

    python benchmarks/convergence.py --output /tmp/convergence

Only placement, on another node or as stages of a pipeline: the same arithmetic, so the same loss. Tensor and
data parallelism up and down, and all three together: as near as another order of summation, which the noise
shows, the run that never changes with other micro-batches. Each step must see the same samples. The last two
are the faults of figure 2 of Tenplex (SOSP 2024), and must not be near: data cut anew without regard to what
was seen, and a global batch that grows with the number of ranks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path[:0] = [str(EXAMPLES / "gpt"), str(EXAMPLES)]

import torch  # noqa: E402
import train  # noqa: E402
from daemons import Node, cluster  # noqa: E402
from elastic import Phase, Result, difference, phases, run_job, write  # noqa: E402
from inputs import GLOBAL_BATCH, Mesh, write_data  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

import tenplexfs  # noqa: E402

ALONE = (1, 1, 1)
DEGREES = (1, 2, 4, 2)
UP_AND_DOWN: dict[str, Sequence[Mesh]] = {
    "dp 1-2-4-2": [(n, 1, 1) for n in DEGREES],
    "tp 1-2-4-2": [(1, n, 1) for n in DEGREES],
    "pp 1-2-4-2": [(1, 1, n) for n in DEGREES],
    "all three": [(2, 2, 1), (1, 2, 2), (2, 1, 1), (1, 1, 2)],
}


class Rows(torch.utils.data.Dataset):
    """Given rows of the data instead of what the mount gives."""

    def __init__(self, data: np.ndarray, ids: np.ndarray, local_batch: int) -> None:
        self.rows, self.local_batch = torch.from_numpy(data[ids]), local_batch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> torch.Tensor:
        return self.rows[item]


def cut_wrongly(data: np.ndarray, order: np.ndarray, length: int, path: Path, rank: int) -> Rows:
    """Cuts what the run sees anew for each degree, and begins each rank at the start of its part."""
    degree = tenplexfs.env(path.parents[1])["mesh"]["dp"]
    part = np.array_split(order[: len(DEGREES) * length * GLOBAL_BATCH], degree)[rank]
    return Rows(data, part, GLOBAL_BATCH // degree)


def grow_the_batch(data: np.ndarray, order: np.ndarray, length: int, path: Path, rank: int) -> Rows:
    """Keeps the batch of a rank, as a script does that knows nothing of the others."""
    now = tenplexfs.env(path.parents[1])
    phase, degree = now["step"] // length, now["mesh"]["dp"]
    seen = sum(DEGREES[:phase]) * length * GLOBAL_BATCH
    batches = order[seen : seen + length * degree * GLOBAL_BATCH].reshape(length, degree, GLOBAL_BATCH)
    return Rows(data, batches[:, rank].ravel(), GLOBAL_BATCH)


def train_on(rows: partial[Rows], job: Path, steps: int, **keywords: object) -> int:
    """Trains on other rows; called in a process of its own."""
    train.Dataset = rows
    return train.train(job, steps, **keywords)


def never_and_changed(nodes: Sequence[Node], file: Path, length: int, dtype: str) -> dict[str, Result]:
    """Runs all; the first is what the others are compared with."""
    steps = length * len(DEGREES)
    always = [Phase(steps, ALONE, "node0:1")]
    data, results = np.load(file), {}

    def add(name: str, plan: Sequence[Phase], **keywords: Any) -> None:  # noqa: ANN401
        begin = time.perf_counter()
        results[name] = run_job(nodes, f"run{len(results)}", file, plan, dtype=dtype, **keywords)
        print(f"{name:16} {time.perf_counter() - begin:5.1f} s", flush=True)

    add("never", always)
    order = tenplexfs.Dataset(nodes[0].mount / "run0" / "dataset" / "train", rank=0, remaining=False).ids()
    add("noise", always, micro_batch=2)
    add("other nodes", [Phase(length, ALONE, f"node{i % 2}:1") for i in range(len(DEGREES))])
    for name, meshes in UP_AND_DOWN.items():
        add(name, phases(meshes, length))
    for name, rows in (("wrong: data cut", cut_wrongly), ("wrong: batch", grow_the_batch)):
        wrong = partial(train_on, partial(rows, data, order, length))
        add(name, phases(UP_AND_DOWN["dp 1-2-4-2"], length), run_train=wrong)
    return results


def draw(file: Path, results: dict[str, Result]) -> None:
    """Plots losses, and how far each is from the run that never changes."""
    never = np.array([*results["never"].losses.values()])
    figure = Figure(figsize=(8, 7), layout="constrained")
    losses, distances = figure.subplots(2, sharex=True)
    for number, (name, each) in enumerate(results.items()):
        values, wrong = np.array([*each.losses.values()]), name.startswith("wrong")
        style = {"ls": "--" if wrong else "-", "lw": 3 if name == "never" else 1.2, "color": f"C{number}"}
        losses.plot([*each.losses], values, label=name, **style)
        if name != "never":
            # What is equal has no place on a logarithmic axis: it stands at the lowest.
            distances.semilogy([*each.losses], np.abs(values / never - 1).clip(1e-9), label=name, **style)
    for step in results["all three"].ends[:-1]:
        for axes in (losses, distances):
            axes.axvline(step + 0.5, color="gray", lw=0.8, ls=":")
    losses.set(ylabel="loss of the global batch", title="Parallelism changed in mid-run (dotted)")
    distances.set(xlabel="step", ylabel="relative distance from never")
    losses.legend(fontsize="small")
    figure.savefig(file, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("convergence"), help="directory of CSV and PNG")
    parser.add_argument("--steps", type=int, default=6, help="of each of the four phases")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as base, cluster(("node0", "node1")) as nodes:
        file = write_data(Path(base) / "sources.npy")
        results = never_and_changed(nodes, file, arguments.steps, arguments.dtype)
    never = results["never"]
    differ = {name: difference(each, never) for name, each in results.items()}
    noise = differ["noise"]
    wrong = []
    print(
        f"\n{'run':16} greatest relative difference of a step's loss, and mean of the last {arguments.steps}"
    )
    for name, each in results.items():
        last = np.mean([*each.losses.values()][-arguments.steps :])
        print(f"{name:16} {differ[name]:8.1e}  {last:.4f}")
        if name.startswith("wrong"):
            right = differ[name] > 1000 * noise
        else:
            only_placed = name in ("other nodes", "pp 1-2-4-2")
            right = each.samples == never.samples and differ[name] <= (1e-6 if only_placed else 10 * noise)
        wrong += [] if right else [name]
    write(arguments.output / "convergence.csv", results)
    draw(arguments.output / "convergence.png", results)
    if wrong:
        raise SystemExit(f"WRONG: not as they must be: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
