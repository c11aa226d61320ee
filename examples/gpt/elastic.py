"""Trains the GPT of `train.py` on the standard library's sources while its parallelism changes in mid-run.

    python examples/gpt/elastic.py --losses /tmp/losses.csv

Two daemons; the job goes through (dp, tp, pp) = (2,1,1), (1,2,1), (1,1,2), (2,1,1), and another job, with the
same data, never changes. With --live, it is stopped while it trains; else each phase has so many steps. Each
step must see the same samples, and its loss be as near as another order of summation leaves it.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import train
from inputs import Mesh, layout, write_data

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from daemons import Node, cluster, run

import tenplexfs

Train = Callable[..., int]


@dataclass(frozen=True)
class Phase:
    """So many steps at a mesh (dp, tp, pp), on ``nodes`` with their devices."""

    steps: int
    mesh: Mesh
    nodes: str


@dataclass
class Result:
    """What a run did: loss of each step, ids of its samples on all ranks, and the last step of each phase."""

    losses: dict[int, float] = field(default_factory=dict)
    samples: dict[int, list[int]] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)


def phases(meshes: Sequence[Mesh], steps: int) -> list[Phase]:
    """Returns phases of ``steps`` each; several ranks are on two nodes."""
    worlds = [int(np.prod(mesh)) for mesh in meshes]
    names = [f"node0:{n // 2},node1:{n // 2}" if n > 1 else "node0:1" for n in worlds]
    return [Phase(steps, mesh, name) for mesh, name in zip(meshes, names, strict=True)]


def _rank(run_train: Train, job: Path, environment: Mapping[str, str], dtype: str, keywords: Any) -> None:  # noqa: ANN401
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, dtype))
    dist.init_process_group("gloo")
    status = run_train(job, **keywords)
    dist.destroy_process_group()
    sys.exit(status)


def launch(nodes: Sequence[Node], job: str, dtype: str, run_train: Train, **keywords: Any) -> list[Any]:  # noqa: ANN401
    """Starts the ranks of a job, forked so that torch is imported once."""
    now = tenplexfs.env(nodes[0].mount / job)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = []
    for node in nodes:
        for rank in now["nodes"].get(node.name, ()):
            texts = {"RANK": str(rank), "WORLD_SIZE": str(now["world_size"]), "MASTER_ADDR": "127.0.0.1"}
            texts |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
            arguments = (run_train, node.mount / job, texts, dtype, keywords)
            ranks.append(fork.Process(target=_rank, args=arguments))
            ranks[-1].start()
    return ranks


def end(ranks: Sequence[Any], status: int) -> None:
    """Waits for ranks, which all end with ``status``."""
    for each in ranks:
        each.join()
    if {each.exitcode for each in ranks} != {status}:
        raise SystemExit(f"ranks ended with {[each.exitcode for each in ranks]}, wanted {status}")


def _samples(job: Path, done: int) -> dict[int, list[int]]:
    """Returns the ids that the mount gives to all ranks in each step after ``done``."""
    found: dict[int, list[int]] = defaultdict(list)
    for rank in range(tenplexfs.env(job)["mesh"]["dp"]):
        data = tenplexfs.Dataset(job / "dataset" / "train", rank=rank)
        for step, row in enumerate(data.ids().reshape(-1, data.local_batch).tolist(), done + 1):
            found[step] += row
    return found


def run_job(
    nodes: Sequence[Node],
    job: str,
    data: Path,
    plan: Sequence[Phase],
    *,
    dtype: str = "float32",
    live: bool = False,
    run_train: Train = train.train,
    **keywords: Any,  # noqa: ANN401
) -> Result:
    """Trains a new job through the phases of ``plan``.

    ``live``: it is changed while it trains, and stops where its ranks agree to: phases are longer then.
    """
    first, log, path = data.parent / f"{job}.json", data.parent / f"{job}.csv", nodes[0].mount / job
    first.write_text(json.dumps(layout(plan[0].mesh, plan[0].nodes, dtype)))
    log.touch()
    at = ("--socket", nodes[0].socket)
    run("job", "create", job, "--layout", first, *at)
    end(launch(nodes, job, dtype, train.train, steps=0), tenplexfs.EXIT_RECONFIGURE)
    run("dataset", "add", job, "train", "--source", data, "--seed", 7, *at)
    result, done = Result(), 0
    for phase, after in zip(plan, [*plan[1:], None], strict=True):
        samples, until = _samples(path, done), done + phase.steps
        stops = live and after is not None
        ranks = launch(nodes, job, dtype, run_train, steps=10**9 if stops else until, log=log, **keywords)
        if not stops:
            end(ranks, 0)
        while stops and log.read_text().count("\n") < until and all(each.is_alive() for each in ranks):
            time.sleep(0.05)
        if after is not None:
            mesh = ",".join(
                f"{axis}={size}" for axis, size in zip(("dp", "tp", "pp"), after.mesh, strict=True)
            )
            stop = ("--stop-timeout", 60) if stops else ()
            run("reconfigure", job, "--mesh", mesh, "--nodes", after.nodes, *stop, *at)
        if stops:
            end(ranks, tenplexfs.EXIT_RECONFIGURE)
        done = tenplexfs.env(path)["step"]
        result.ends.append(done)
        result.samples |= {step: ids for step, ids in samples.items() if step <= done}
    with log.open() as file:
        result.losses = {int(step): float(loss) for step, loss in csv.reader(file)}
    return result


def difference(one: Result, other: Result) -> float:
    """Returns the greatest relative difference of a step's loss."""
    return max(abs(one.losses[step] / loss - 1) for step, loss in other.losses.items())


def write(file: Path, runs: Mapping[str, Result]) -> None:
    """Writes the losses side by side as CSV."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as out:
        table = csv.writer(out)
        table.writerow(["step", *runs])
        for step in next(iter(runs.values())).losses:
            table.writerow([step, *(repr(each.losses[step]) for each in runs.values())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--losses", type=Path, help="CSV of the losses of both runs")
    parser.add_argument("--steps", type=int, default=10, help="of each phase, at least")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--live", action="store_true", help="change it while it trains, not between phases")
    arguments = parser.parse_args()
    plan = phases(((2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 1)), arguments.steps)
    with tempfile.TemporaryDirectory() as base, cluster(("node0", "node1")) as nodes:
        data = write_data(Path(base) / "sources.npy")
        elastic = run_job(nodes, "elastic", data, plan, dtype=arguments.dtype, live=arguments.live)
        steps = elastic.ends[-1]
        never = run_job(nodes, "never", data, [replace(plan[0], steps=steps)], dtype=arguments.dtype)
    differ = difference(elastic, never)
    if arguments.losses:
        write(arguments.losses, {"never changed": never, "elastic": elastic})
    print(f"{steps} steps, changed after {elastic.ends[:-1]}; the last loss is {never.losses[steps]:.3f}")
    print(f"greatest relative difference of a step's loss: {differ:.1e}")
    if elastic.samples != never.samples:
        raise SystemExit("WRONG: a step did not see the same samples")
    if differ > (1e-6 if arguments.dtype == "float64" else 1e-4):
        raise SystemExit("WRONG: the losses differ by more than the order of summation explains")


if __name__ == "__main__":
    main()
