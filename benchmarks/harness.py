"""What benchmarks share: interleaved rounds, the table of their medians beside targets, tables as files."""

from __future__ import annotations

import csv
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from daemons import Node, cluster, run

__all__ = ["MIB", "Node", "cluster", "measure", "record", "run", "write_layout", "write_safetensors"]

ROUNDS = 7
MIB = 1 << 20


Work = Mapping[str, tuple[int, Callable[[], object]]]
Rows = list[dict[str, object]]


def measure(title: str, work: Work, rounds: int = ROUNDS, targets: Mapping[str, float] | None = None) -> Rows:
    """Runs all pieces of work in turn, ``rounds`` times, and prints medians as ratios to the first.

    Args:
        title: What is measured.
        work: Name -> bytes that it handles, and what to run.
        rounds: How often; one more comes first and does not count. The order turns round by round.
        targets: Name -> the least ratio that was asked for.

    Returns:
        What was printed, a row for each piece of work, for `record`.
    """
    times: dict[str, list[float]] = {name: [] for name in work}
    names = list(work)
    for n in range(rounds + 1):
        for name in names[n % len(names) :] + names[: n % len(names)]:
            begin = time.perf_counter()
            work[name][1]()
            if n:
                times[name].append(time.perf_counter() - begin)
    base, rows = names[0], []
    print(f"\n{title} ({rounds} interleaved rounds)")
    for name in names:
        size, target = work[name][0], (targets or {}).get(name)
        speed = size / statistics.median(times[name])
        ratios = [
            (size / own) / (work[base][0] / of) for own, of in zip(times[name], times[base], strict=True)
        ]
        ratio = f"{statistics.median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        asked = f"     >= {target}" if target is not None else ""
        print(f"  {name:34} {speed / 1e9:7.2f} GB/s   ratio {ratio}{asked}", flush=True)
        row = {"part": title, "name": name, "gb_per_s": speed / 1e9, "ratio": statistics.median(ratios)}
        rows.append(row | {"lowest": min(ratios), "highest": max(ratios), "target": target})
    return rows


def record(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Writes ``rows``, which have the columns of the first, as CSV; its directory is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


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
