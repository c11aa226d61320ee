"""Resharding a training state between runs, against torch's distributed checkpoints on the same file system.

1.34 GB of float32 on 4 ranks go to 2, and back to 4. Theirs: `dcp.save`, and `dcp.load` at the other mesh.
Ours: `tenplexfs.save`, a reconfiguration, and `tenplexfs.load` with a touch of every page. The processes are
started before; what is timed is from the order to all ranks until the last one is done.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from harness import Node, cluster, run, write_layout

import tenplexfs
from tenplexfs._pb import control_pb2
from tenplexfs.cli.client import Daemon

ROUNDS = 5
COUNT, SIDE = 20, 4096
SHAPES = {f"w{i}": (SIDE, SIDE) for i in range(COUNT)}


def worker(rank: int, base: Path, model: Path) -> None:
    """Obeys lines of JSON on its input, until that ends."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{base}/rendezvous", rank=rank, world_size=4)
    meshes = {world: DeviceMesh("cpu", list(range(world))) for world in (4, 2)}

    def fresh(world: int, *, filled: bool) -> dict[str, torch.Tensor]:
        state = {name: torch.empty(SIDE // world, SIDE) for name in SHAPES}
        for number, local in enumerate(state.values()) if filled else ():
            rows = torch.arange(SIDE // world) + rank * (SIDE // world) + 10_000 * number
            local[:] = rows[:, None]
        return state

    def as_theirs(state: dict[str, torch.Tensor], world: int) -> dict[str, DTensor]:
        return {name: DTensor.from_local(local, meshes[world], [Shard(0)]) for name, local in state.items()}

    def is_right(state: dict[str, torch.Tensor], world: int) -> bool:
        return all(torch.equal(state[n], wanted) for n, wanted in fresh(world, filled=True).items())

    states: dict[int, dict[str, torch.Tensor]] = {}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        do, world, step = json.loads(line)
        answer: object = True
        if do == "fill":
            states[world] = fresh(world, filled=True)
        elif do == "their save":
            checkpoint = base / "memory" / f"dcp{world}"
            group = meshes[world].get_group()
            dcp.save(as_theirs(states[world], world), checkpoint_id=str(checkpoint), process_group=group)
        elif do == "their load":
            checkpoint = base / "memory" / f"dcp{6 - world}"
            found = states[world] = fresh(world, filled=False)
            group = meshes[world].get_group()
            dcp.load(as_theirs(found, world), checkpoint_id=str(checkpoint), process_group=group)
        elif do == "our save":
            tenplexfs.save(states[world], model / str(rank), step=step)
        elif do == "our load":
            states[world] = tenplexfs.load(model / str(rank), framework="torch")
            answer = sum(float(local.view(-1)[::1024].sum()) for local in states[world].values()) > 0
        else:
            answer = is_right(states[world], world)
        print(json.dumps(answer), flush=True)


class Ranks:
    """The training processes."""

    def __init__(self, base: Path, model: Path) -> None:
        command = [sys.executable, __file__]
        self.processes = [
            subprocess.Popen(
                [*command, str(rank), str(base), str(model)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(4)
        ]
        for process in self.processes:
            process.stdout.readline()

    def do(self, what: str, world: int, step: int = 0) -> float:
        """Returns the seconds until the first ``world`` ranks have done it."""
        begin = time.perf_counter()
        for process in self.processes[:world]:
            process.stdin.write(json.dumps([what, world, step]) + "\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self.processes[:world]]
        if answers != ["true\n"] * world:
            raise SystemExit(f"{what} on {world} ranks: {answers}")
        return time.perf_counter() - begin

    def end(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.stdin.close()
            process.wait()


@contextmanager
def ready() -> Iterator[tuple[Node, Ranks, dict[int, str]]]:
    with cluster(("node0",)) as (node,):
        base = node.socket.parent
        (base / "memory").symlink_to(node.store.parent)
        layouts = {
            world: write_layout(base / f"{world}.json", SHAPES, {"node0": list(range(world))}, 0)
            for world in (4, 2)
        }
        run("job", "create", "bench", "--layout", layouts[4], "--socket", node.socket)
        ranks = Ranks(base, node.mount / "bench" / "model")
        try:
            yield node, ranks, {world: path.read_text() for world, path in layouts.items()}
        finally:
            ranks.end()


def main() -> None:
    times: dict[str, list[float]] = {}
    source = np.ones((COUNT, SIDE, SIDE), np.float32)
    target = np.ones_like(source)
    with ready() as (node, ranks, layouts), Daemon(str(node.socket)) as daemon:

        def reconfigure(world: int) -> float:
            begin = time.perf_counter()
            request = control_pb2.ReconfigureRequest(job="bench", layout_json=layouts[world])
            if [each.phase for each in daemon.reconfigure(request, 120)][-1] != "done":
                raise SystemExit("the reconfiguration failed")
            return time.perf_counter() - begin

        ranks.do("fill", 4)
        for turn in range(ROUNDS + 1):
            for old, new in ((4, 2), (2, 4)):
                begin = time.perf_counter()
                np.copyto(target, source)
                done = {"copy in memory": time.perf_counter() - begin}
                done["our save"] = ranks.do("our save", old, 10 * turn + old % 4 + 1)
                done["our reconfiguration"] = reconfigure(new)
                done["our load"] = ranks.do("our load", new)
                ranks.do("check", new)
                done["their save"] = ranks.do("their save", old)
                done["their load"] = ranks.do("their load", new)
                ranks.do("check", new)
                shutil.rmtree(node.store.parent / f"dcp{old}")
                for name, seconds in done.items() if turn else ():
                    times.setdefault(f"{old} to {new}, {name}", []).append(seconds)
    print(f"\n{source.nbytes:,} bytes, {ROUNDS} interleaved rounds, medians of seconds")
    for name, seconds in times.items():
        print(f"  {name:28} {statistics.median(seconds):6.3f}")
    for change in ("4 to 2", "2 to 4"):
        ours, theirs = (
            [sum(each) for each in zip(*(times[f"{change}, {who} {part}"] for part in parts), strict=True)]
            for who, parts in (("our", ("save", "reconfiguration", "load")), ("their", ("save", "load")))
        )
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"  {change}: ours / theirs, time {statistics.median(ratios):.2f} {spread}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        worker(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
