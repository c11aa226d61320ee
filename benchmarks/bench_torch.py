"""Saves and loads through torch's DCP: our `Writer` and `Reader` against its own files, on one file system.

1.34 GB of float32 and bfloat16 in 1,000 DTensors, cut over 2 ranks, then over 4; the processes of both groups
are started before, and what is timed is from the order to all ranks until the last one is done. Every value
is checked after each load. And a rank's share by itself: `tenplexfs.load` against `torch.load(mmap=True)`.
Only one group's state is there at a time, so that all of it takes 13 GB of memory.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import MIB, cluster, run

ROUNDS = 5
TENSORS = int(os.environ.get("TENSORS", "1000"))
WORLDS = (2, 4)


def worker(rank: int, world: int, base: Path, mount: Path) -> None:
    """Obeys lines of JSON on its input, until that ends."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    import tenplexfs
    from tenplexfs.torch import Reader, Writer

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{base}/group{world}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))

    def fresh(*, filled: bool) -> dict[str, DTensor]:
        state = {}
        for i in range(TENSORS):
            rows = 1024 + i % 8 * 80
            dtype = torch.float32 if i % 2 else torch.bfloat16
            local = torch.empty(rows // world, 256 if i % 2 else 512, dtype=dtype)
            if filled:
                local[:] = i % 200 + rank / world
            state[f"layers.{i}.w"] = DTensor.from_local(local, mesh, [Shard(0)])
        return state

    def is_right(state: dict[str, DTensor], saved: int) -> bool:
        """Says whether each row is of the rank that saved it."""
        for i, tensor in enumerate(state.values()):
            local = tensor.to_local()
            first = torch.arange(len(local)) + rank * len(local)
            owner = first // (tensor.shape[0] // saved)
            wanted = (i % 200 + owner / saved).to(local.dtype)
            if not torch.equal(local, wanted[:, None].expand_as(local)):
                return False
        return True

    print(json.dumps("ready"), flush=True)
    state: dict[str, DTensor] = {}
    found: dict[str, DTensor] = {}
    for line in sys.stdin:
        do, saved, step = json.loads(line)
        job, files = mount / f"bench{saved}", str(base / "memory" / f"dcp{saved}")
        answer: object = True
        if do == "fill":
            state = fresh(filled=True)
        elif do == "blank":
            found = fresh(filled=False)
        elif do == "clear":
            state, found = {}, {}
        elif do == "our save":
            dcp.save(state, storage_writer=Writer(job, step=step))
        elif do == "their save":
            dcp.save(state, checkpoint_id=files)
        elif do == "our load":
            dcp.load(found, storage_reader=Reader(job))
        elif do == "their load":
            dcp.load(found, checkpoint_id=files)
        elif do == "torch.save":
            torch.save({name: each.to_local() for name, each in state.items()}, f"{files}-{rank}.pt")
        elif do == "torch.load and touch":
            loaded = torch.load(f"{files}-{rank}.pt", mmap=True)
            answer = sum(float(each.view(-1)[::1024].sum()) for each in loaded.values()) > 0
            Path(f"{files}-{rank}.pt").unlink()
        elif do == "our plain load and touch":
            loaded = tenplexfs.load(job / "model" / str(rank), framework="torch")
            answer = sum(float(each.view(-1)[::1024].sum()) for each in loaded.values()) > 0
        else:
            answer, found = is_right(found, saved), {}
        loaded = None
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


class Group:
    """The training processes of one mesh."""

    def __init__(self, world: int, base: Path, mount: Path) -> None:
        self.world = world
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "worker", str(rank), str(world), str(base), str(mount)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]

    def hear(self) -> list[object]:
        """Returns what all ranks answer."""
        return [json.loads(process.stdout.readline()) for process in self.processes]

    def do(self, what: str, saved: int, step: int = 0) -> float:
        """Returns the seconds until all ranks have done it."""
        begin = time.perf_counter()
        for process in self.processes:
            process.stdin.write(json.dumps([what, saved, step]) + "\n")
            process.stdin.flush()
        answers = self.hear()
        took = time.perf_counter() - begin
        if answers != [True] * self.world:
            raise SystemExit(f"{what} on {self.world} ranks: {answers}")
        return took

    def end(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.stdin.close()
            process.wait()


def round_of(group: Group, other: Group, step: int) -> Iterator[tuple[str, float]]:
    """Saves by ``group``, and loads by both; yields what was done and how long it took."""
    plan = [(group, f"{who} save") for who in ("our", "their")]
    plan += [(each, f"{who} load") for each in (group, other) for who in ("our", "their")]
    plan += [(group, each) for each in ("torch.save", "torch.load and touch", "our plain load and touch")]
    for each, what in plan:
        is_load = what in ("our load", "their load")
        if is_load:
            each.do("blank", group.world)
        took = each.do(what, group.world, step)
        if is_load:
            each.do("check", group.world)
        yield what + (", other mesh" if each is other else ""), took


def main(worlds: Sequence[int]) -> None:
    times: dict[tuple[int, str], list[float]] = {}
    with cluster(("node0",)) as (node,):
        base = node.socket.parent
        (base / "memory").symlink_to(node.store.parent)
        groups = {world: Group(world, base, node.mount) for world in WORLDS}
        for group in groups.values():
            group.hear()
        for saved, group in ((world, groups[world]) for world in worlds):
            other = groups[sum(WORLDS) - saved]
            group.do("fill", saved)
            for n in range(ROUNDS + 3):  # files are used again from the fourth on
                for what, took in round_of(group, other, n + 1):
                    if n >= 3:
                        times.setdefault((saved, what), []).append(took)
                shutil.rmtree(node.store.parent / f"dcp{saved}")
            group.do("clear", saved)
            run("job", "remove", f"bench{saved}", "--socket", node.socket)
        for group in groups.values():
            group.end()
    size = sum((1024 + i % 8 * 80) * 1024 for i in range(TENSORS))
    print(f"\n{size / 1e9:.2f} GB in {TENSORS} tensors of {size // TENSORS / MIB:.2f} MiB, {ROUNDS} rounds")
    for saved in worlds:
        print(f"saved by {saved} ranks, seconds")
        median = {what: statistics.median(each) for (world, what), each in times.items() if world == saved}
        for ours, theirs, wanted in (
            ("our save", "their save", "<= 0.5"),
            ("our load", "their load", ""),
            ("our load, other mesh", "their load, other mesh", "<= 0.5"),
            ("our plain load and touch", "their load", "<= 0.33"),
            ("our plain load and touch", "torch.load and touch", "<= 0.67"),
        ):
            ratio = median[ours] / median[theirs]
            print(
                f"  {ours:26} {median[ours]:6.3f}  {theirs:24} {median[theirs]:6.3f}  {ratio:5.2f} {wanted}"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
    else:
        main([int(each) for each in sys.argv[1:]] or WORLDS)
