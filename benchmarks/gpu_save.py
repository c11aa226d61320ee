"""Saving a state that is on a GPU: how long the trainer waits, and how long until the step is committed.

Against copying the same bytes to pinned memory, which is the least that it can take, and `torch.save` to
tmpfs. Without a GPU it says so, and measures nothing.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import MIB, cluster

import tenplexfs

ROUNDS = 5
TENSORS = 300


def main() -> None:
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured")
        return
    state = {f"layers.{i}.w": torch.full((i % 8 + 1, MIB), i, device="cuda") for i in range(TENSORS)}
    size = sum(each.nbytes for each in state.values())
    pinned = {name: torch.empty_like(each, device="cpu", pin_memory=True) for name, each in state.items()}

    def to_pinned() -> None:
        for name, each in state.items():
            pinned[name].copy_(each, non_blocking=True)
        torch.cuda.synchronize()

    with cluster(("node0",)) as (node,), tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        path = node.mount / "gpu" / "model" / "0"
        times: dict[str, list[float]] = {}

        def timed(name: str, work: Callable[[], object]) -> object:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            found = work()
            times.setdefault(name, []).append(time.perf_counter() - begin)
            return found

        for step in range(1, ROUNDS + 4):  # files are used again from the fourth on
            timed("copy to pinned memory", to_pinned)
            begin = time.perf_counter()
            made = timed("save, until the trainer goes on", lambda s=step: save(state, path, s))
            for each in state.values():  # what the trainer does next must not show in the step
                each.add_(1)
            made.wait()
            times.setdefault("save, until committed", []).append(time.perf_counter() - begin)
            timed("torch.save to tmpfs", lambda: torch.save(state, Path(scratch) / "state.pt"))
            found = tenplexfs.load(path)
            for i in range(0, TENSORS, 50):
                wanted = i + step - 1
                if not (found[f"layers.{i}.w"] == wanted).all():
                    raise SystemExit(f"layers.{i}.w: not what it was when it was saved")
            del found
    print(f"\n{size / 1e9:.2f} GB in {TENSORS} tensors on {torch.cuda.get_device_name()}")
    base = statistics.median(times["copy to pinned memory"][3:])
    for name, each in times.items():
        median = statistics.median(each[3:])
        print(f"  {name:34} {median:7.3f} s {size / median / 1e9:6.2f} GB/s   {base / median:5.2f}")


def save(state: dict[str, torch.Tensor], path: Path, step: int) -> tenplexfs.Save:
    return tenplexfs.save(state, path, step=step, wait=False)


if __name__ == "__main__":
    main()
