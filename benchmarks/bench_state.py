"""Saving and loading a training state: 1.3 GB of fp32 and bf16 in 1,000 tensors, and 20,000 small ones."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import ml_dtypes
import numpy as np
from harness import MIB, cluster, run

import tenplexfs

ROUNDS = 5
LAST = ("again", "save", "load", "touch", "clean")
TENSORS, SMALL = 1000, 20_000


def state_of(part: int, parts: int) -> dict[str, np.ndarray]:
    """The tensors of one process: half fp32, half bf16, 1.3 MB each on average."""
    state: dict[str, np.ndarray] = {}
    for i in range(part, TENSORS, parts):
        elements = (MIB + (i % 8) * 81_920) // 4
        one = np.full(elements, i, np.float32)
        state[f"layers.{i}.w"] = one if i % 2 else np.full(2 * elements, i, ml_dtypes.bfloat16)
    return state


def small_state() -> dict[str, np.ndarray]:
    return {f"layers.{i // 10}.p{i % 10}": np.full(1024, i, np.float32) for i in range(SMALL)}


def layout_of(states: list[dict[str, np.ndarray]], node: str) -> dict[str, object]:
    ranks = [
        {
            name.replace(".", "/"): {
                "tensor": list(array.shape),
                "dtype": array.dtype.name,
                "pieces": [{"start": [0], "stop": list(array.shape), "at": [0]}],
            }
            for name, array in state.items()
        }
        for state in states
    ]
    shapes = {path: each["tensor"] for rank in ranks for path, each in rank.items()}
    return {
        "format": "tenplexfs-layout",
        "version": 1,
        "mesh": {"rank": len(ranks)},
        "nodes": {node: list(range(len(ranks)))},
        "ranks": ranks,
        "global": shapes,
    }


def write_all(state: dict[str, np.ndarray], base: Path, *, fresh: bool) -> None:
    """The same bytes into files on tmpfs."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if fresh else 0)
    for name, array in state.items():
        fd = os.open(base / name, flags, 0o600)
        view, done = memoryview(array.view(np.uint8)), 0
        while done < len(view):
            done += os.pwrite(fd, view[done:], done)
        os.close(fd)


def work(pipe: Connection, rank: int, count: int, mount: Path, scratch: Path) -> None:
    """One training process: does what it is told, answers how long it took."""
    state = state_of(rank, count)
    pipe.send(0.0)
    step = 0
    mine = scratch / str(rank)
    while (what := pipe.recv()) is not None:
        if what == "clean":
            for file in mine.iterdir():
                file.unlink()
        begin = time.perf_counter()
        if what in ("fresh", "again"):
            mine.mkdir(exist_ok=True)
            write_all(state, mine, fresh=what == "fresh")
        elif what.startswith("new "):
            job, step = mount / what.removeprefix("new "), 0
        elif what == "save":
            step += 1
            tenplexfs.save(state, job / "model" / str(rank), step=step)
        elif what == "load":
            found = tenplexfs.load(job / "model" / str(rank))
            if what == "load" and len(found) != len(state):
                raise SystemExit("tensors are missing")
        elif what == "touch":
            found = tenplexfs.load(job / "model" / str(rank))
            for array in found.values():
                array.view(np.uint8).max()
        pipe.send(time.perf_counter() - begin)
        found = None
    pipe.close()


def tell(pipes: list[Connection], what: str) -> float:
    """Returns the seconds until the last process is done."""
    begin = time.perf_counter()
    for pipe in pipes:
        pipe.send(what)
    for pipe in pipes:
        pipe.recv()
    return time.perf_counter() - begin


def big(count: int) -> None:
    with cluster(("node0",)) as (node,), tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        scratch = Path(directory)
        layout = scratch / "layout.json"
        layout.write_text(json.dumps(layout_of([state_of(r, count) for r in range(count)], node.name)))
        context = multiprocessing.get_context("spawn")
        pipes, processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, rank, count, node.mount, scratch))
            process.start()
            processes.append(process)
            pipes.append(ours)
        for pipe in pipes:
            pipe.recv()
        size = sum(array.nbytes for r in range(count) for array in state_of(r, count).values())
        times: dict[str, list[float]] = {}
        for n in range(ROUNDS + 1):
            job = (f"bench{n}", "--socket", node.socket)
            run("job", "create", *job, "--layout", layout)
            tell(pipes, f"new {job[0]}")
            # The steps that are kept, and the one before, are there before files are used again.
            for what in ("fresh", "save, fresh", "again", "save, fresh", "save, fresh", "save", *LAST):
                took = tell(pipes, what.partition(",")[0] if what.startswith("save") else what)
                if n:
                    times.setdefault(what, []).append(took)
            run("job", "remove", *job)
        report(f"{size / 1e9:.2f} GB in {TENSORS} tensors, {count} processes", size, times)
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join()


def report(title: str, size: int, times: dict[str, list[float]]) -> None:
    median = {name: statistics.median(each) for name, each in times.items()}
    print(f"\n{title}")
    for name, base in (
        ("fresh", "fresh"),
        ("save, fresh", "fresh"),
        ("again", "again"),
        ("save", "again"),
        ("save", "fresh"),
    ):
        ratio = median[base] / median[name]
        speed = size / median[name] / 1e9
        print(f"  {name:14} {median[name]:7.3f} s {speed:6.2f} GB/s  {ratio:5.2f} of pwrite, {base}")
    print(
        f"  load, ready    {median['load'] * 1e3:7.1f} ms ({median['load'] / TENSORS * 1e6:.0f} us a tensor)"
    )
    print(f"  load and touch {median['touch']:7.3f} s")


def small() -> None:
    state = small_state()
    with cluster(("node0",)) as (node,):
        path = node.mount / "small" / "model" / "0"
        times: dict[str, list[float]] = {"save": [], "load": []}
        calls: dict[str, Callable[[int], object]] = {
            "save": lambda step: tenplexfs.save(state, path, step=step),
            "load": lambda step: tenplexfs.load(path),
        }
        for step in range(1, ROUNDS + 2):
            for name, call in calls.items():
                begin = time.perf_counter()
                call(step)
                times[name].append(time.perf_counter() - begin)
    print(f"\n{SMALL} tensors of 4 KiB, one process")
    for name, each in times.items():
        print(f"  {name:14} first {each[0]:6.3f} s, then {statistics.median(each[1:]):6.3f} s")


if __name__ == "__main__":
    small()
    for processes_count in [int(each) for each in sys.argv[1:]] or [2, 4]:
        big(processes_count)
