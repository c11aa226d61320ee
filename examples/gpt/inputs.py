"""What the job of `train.py` is made of: its data, and which rank has which part of its state."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
import train

GLOBAL_BATCH = 8
DATA_BYTES = 1 << 20
Mesh = tuple[int, int, int]
"""(dp, tp, pp)"""


def write_data(file: Path) -> Path:
    """Writes sources as rows of bytes, each with the byte that comes next."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(source.read_bytes() for source in sources)[:DATA_BYTES]
    width = train.CONTEXT + 1
    np.save(file, np.frombuffer(text, np.uint8)[: len(text) // width * width].reshape(-1, width))
    return file


def layout(mesh: Mesh, nodes: str, dtype: str) -> dict[str, Any]:
    """Returns how the state is laid out, which tenplexfs follows to other meshes: who has which layer."""
    dp, tp, pp = mesh
    stages = [s for s, mine in enumerate(np.array_split(range(train.LAYERS), pp)) for _ in mine]
    tensors: dict[str, Any] = {}
    with torch.device("meta"):
        parameters = dict(train.GPT().named_parameters())
    for name, parameter in parameters.items():
        if re.search(r"blocks\.[1-9]", name):
            continue
        entry: dict[str, Any] = {"shape": list(parameter.shape), "dtype": dtype}
        if "blocks" in name:
            entry |= {"count": train.LAYERS, "on": {"pp": {"by": "i", "owner": stages}}}
        else:
            entry["on"] = {"pp": 0 if name.startswith(("bytes", "places")) else -1}
        whole = {**entry, "shape": []}
        if (part := name.split(".")[-2]) in train.COLUMNS + train.ROWS:
            entry["shard"] = [{"axis": "tp", "dim": int(part in train.ROWS)}]
        path = name.replace("blocks.0", "blocks.{i}").replace(".", "/")
        tensors[f"model/{path}"] = entry
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[f"optimizer/state/{path}/{moment}"] = entry
        tensors[f"optimizer/state/{path}/step"] = whole
    return {
        "format": "tenplexfs-layout",
        "version": 1,
        "mesh": {"pp": pp, "dp": dp, "tp": tp},
        "nodes": {name: int(count) for name, count in (each.split(":") for each in nodes.split(","))},
        "dataset": {"axis": "dp", "global_batch": GLOBAL_BATCH},
        "tensors": tensors,
    }
