"""A reconfiguration on two nodes, against copying the same bytes in memory."""

from __future__ import annotations

import itertools

import numpy as np
from harness import MIB, cluster, measure, run, write_layout, write_safetensors

from tenplexfs._pb import control_pb2
from tenplexfs.cli.client import Daemon

SHAPES = {f"layers/{n}/w": (8 * MIB // 4 // 1024, 1024) for n in range(32)}
NODES = {"node0": [0, 1], "node1": [2, 3]}


def main() -> None:
    random = np.random.default_rng(0)
    tensors = {name.replace("/", "."): random.random(shape, np.float32) for name, shape in SHAPES.items()}
    with cluster(("node0", "node1"), mount=False) as nodes:
        asked, base = nodes[0].socket, nodes[0].socket.parent
        write_safetensors(base / "model.safetensors", tensors)
        rows, columns = (write_layout(base / f"{dim}.json", SHAPES, NODES, dim) for dim in (0, 1))
        run("job", "create", "bench", "--layout", rows, "--socket", asked)
        run("import", "bench", base / "model.safetensors", "--socket", asked)
        cost = run("plan", rows, columns)["bytes"]
        turn = itertools.cycle((columns.read_text(), rows.read_text()))

        def reconfigure() -> None:
            request = control_pb2.ReconfigureRequest(job="bench", layout_json=next(turn))
            if [step.phase for step in daemon.reconfigure(request, 120)][-1] != "done":
                raise SystemExit("the reconfiguration failed")

        needed, moved = cost["needed"], cost["moved"]
        print(f"\nrows to columns and back, tp 4 on two nodes: needed {needed:,} bytes, moved {moved:,}")
        with Daemon(str(asked)) as daemon:
            used = {name: np.ones_like(tensor) for name, tensor in tensors.items()}
            work = {
                "copy into memory used before": (
                    needed,
                    lambda: [np.copyto(used[name], tensor) for name, tensor in tensors.items()],
                ),
                "copy into fresh memory": (needed, lambda: [tensor.copy() for tensor in tensors.values()]),
                "reconfigure": (needed, reconfigure),
            }
            measure("reconfiguration of 256 MiB", work)


if __name__ == "__main__":
    main()
