"""What the benchmarks share: interleaved rounds, and the table of their medians."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from daemons import Node, cluster, run

__all__ = ["MIB", "Node", "cluster", "measure", "run", "write_layout", "write_safetensors"]

ROUNDS = 7
MIB = 1 << 20


Work = Mapping[str, tuple[int, Callable[[], object]]]


def measure(title: str, work: Work, rounds: int = ROUNDS) -> None:
    """Runs all pieces of work in turn, ``rounds`` times, and prints medians as ratios to the first.

    Args:
        title: What is measured.
        work: Name -> bytes that it handles, and what to run.
        rounds: How often; one more comes first and does not count. The order turns round by round.
    """
    times: dict[str, list[float]] = {name: [] for name in work}
    names = list(work)
    for n in range(rounds + 1):
        for name in names[n % len(names) :] + names[: n % len(names)]:
            begin = time.perf_counter()
            work[name][1]()
            if n:
                times[name].append(time.perf_counter() - begin)
    base = names[0]
    print(f"\n{title} ({rounds} interleaved rounds)")
    for name in names:
        size = work[name][0]
        speed = size / statistics.median(times[name])
        ratios = [
            (size / own) / (work[base][0] / of) for own, of in zip(times[name], times[base], strict=True)
        ]
        ratio = f"{statistics.median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"  {name:34} {speed / 1e9:7.2f} GB/s   ratio {ratio}")


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes float32 ``tensors`` as one safetensors file."""
    header, begin = {}, 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor)


Shapes = Mapping[str, tuple[int, ...]]


def write_layout(path: Path, shapes: Shapes, nodes: Mapping[str, list[int]], dim: int) -> Path:
    """Writes a layout that cuts dim ``dim`` of every tensor over all ranks."""
    tensors = {
        name: {"shape": list(shape), "dtype": "float32", "shard": [{"axis": "tp", "dim": dim}]}
        for name, shape in shapes.items()
    }
    mesh = {"tp": sum(map(len, nodes.values()))}
    layout = {"format": "tenplexfs-layout", "version": 1, "mesh": mesh, "nodes": nodes, "tensors": tensors}
    path.write_text(json.dumps(layout))
    return path
