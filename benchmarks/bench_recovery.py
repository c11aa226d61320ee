"""Lost nodes: going on from copies on the others, against reloading a persisted step and 50 steps again.

The case of Tenplex's figure 13: (tp 4, pp 2, dp 2) on four nodes, of which one, two, three are lost (SIGKILL,
store deleted). All daemons are on this machine; a fifth has the registry and no rank. The clock starts when
the registry has missed the lost nodes, which takes up to 10 s more, and stops when every new rank has loaded
and touched its state.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import MIB, Node, cluster, run, write_safetensors

import tenplexfs
from tenplexfs._pb import control_pb2, local_pb2
from tenplexfs.cli.client import Daemon

LAYERS, ROWS, COLUMNS = 8, 2048, 2048
NAMES = [f"node{n}" for n in range(4)]
LOST_STEPS = 50
CASES = {
    (1,): {"node0": 8, "node2": 4, "node3": 4},
    (0, 3): {"node1": 8, "node2": 8},
    (0, 1, 2): {"node3": 16},
}


def layout() -> dict[str, Any]:
    weight = {
        "shape": [ROWS, COLUMNS],
        "dtype": "float32",
        "count": {"i": LAYERS},
        "shard": [{"axis": "tp", "dim": 1}],
        "on": {"pp": {"by": "i", "owner": [i * 2 // LAYERS for i in range(LAYERS)]}},
    }
    return {
        "format": "tenplexfs-layout",
        "version": 1,
        "mesh": {"pp": 2, "dp": 2, "tp": 4},
        "nodes": {name: list(range(4 * n, 4 * n + 4)) for n, name in enumerate(NAMES)},
        "tensors": {
            "layers/{i}/w": weight,
            "adam/layers/{i}/w": {"like": "layers/{i}/w", "then": [{"axis": "dp", "dim": 0}]},
        },
    }


def until(what: Any) -> None:  # noqa: ANN401 - called
    deadline = time.monotonic() + 60
    while not what():
        if time.monotonic() > deadline:
            raise SystemExit("waited for a minute")
        time.sleep(0.05)


def status(node: Node, job: str = "gpt") -> dict[str, Any]:
    return json.loads((node.mount / f".tenplexfs/jobs/{job}/status.json").read_text())


def touch(node: Node, job: str) -> int:
    """Loads every rank at ``node``, as training processes there would, and reads all of it."""
    ranks = json.loads((node.mount / job / "job.json").read_text())["nodes"].get(node.name, [])
    total = 0
    for rank in ranks:
        for array in _leaves(tenplexfs.load(node.mount / job / "model" / str(rank))):
            array.reshape(-1).view(np.uint8)[::4096].sum()
            total += array.nbytes
    return total


def _leaves(state: Any) -> list[np.ndarray]:  # noqa: ANN401 - nested
    if isinstance(state, dict):
        return [leaf for each in state.values() for leaf in _leaves(each)]
    return [state] if isinstance(state, np.ndarray) else []


class Case:
    """Four nodes with a job."""

    def __init__(self, registry: Node, nodes: Sequence[Node], place: Path) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.daemon = Daemon(str(registry.socket))
        self.registry = registry
        self.place = place

    def lose(self, gone: Sequence[int]) -> None:
        """Kills nodes with their stores; returns when they are missed."""
        for number in gone:
            node = self.nodes[NAMES[number]]
            node.process.kill()
            node.process.wait()
            shutil.rmtree(node.store)
        names = {NAMES[number] for number in gone}
        until(lambda: names.isdisjoint(self.living()))

    def living(self) -> set[str]:
        """Returns the nodes that the registry says are alive."""
        listed = run("node", "list", "--socket", self.registry.socket)["nodes"]
        return {each["name"] for each in listed if each["state"] == "living"}

    def come_back(self, gone: Sequence[int]) -> None:
        """Starts nodes again, empty."""
        for number in gone:
            node = self.nodes[NAMES[number]]
            subprocess.run(["umount", "-l", node.mount], check=False, capture_output=True)
            node.process = subprocess.Popen(
                node.process.args,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        for number in gone:
            self.nodes[NAMES[number]].wait()

    def reconfigure(self, **how: Any) -> str:  # noqa: ANN401 - fields
        """Returns the longest message on the way."""
        steps = list(self.daemon.reconfigure(control_pb2.ReconfigureRequest(job="gpt", **how), 120))
        if steps[-1].phase != "done":
            raise SystemExit(f"the reconfiguration failed: {steps[-1].message}")
        return max((step.message for step in steps), key=len)

    def recover(self, nodes: dict[str, int]) -> float:
        """Returns the seconds until the job goes on from copies on what is left."""
        begin = time.perf_counter()
        message = self.reconfigure(mesh=_axes(sum(nodes.values())), nodes=nodes)
        for name in nodes:
            touch(self.nodes[name], "gpt")
        took = time.perf_counter() - begin
        assert "copies" in message or "replicas" in message, message
        return took

    def reload(self, nodes: dict[str, int]) -> float:
        """What is done without copies: the job is made again of the last persisted step."""
        request = local_pb2.RestoreRequest(
            job="again", url=str(self.place / "gpt"), mesh=_axes(sum(nodes.values())), nodes=nodes
        )
        begin = time.perf_counter()
        steps = list(self.daemon.restore(request, 120))
        for name in nodes:
            touch(self.nodes[name], "again")
        took = time.perf_counter() - begin
        assert steps[-1].phase == "done"
        self.daemon.remove_job("again")
        return took


def _axes(ranks: int) -> list[control_pb2.Axis]:
    sizes = {"pp": 2, "dp": ranks // 8, "tp": 4}
    return [control_pb2.Axis(name=name, size=size) for name, size in sizes.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lost", type=int, choices=(1, 2, 3), help="only so many; else each")
    parser.add_argument("--step-s", type=float, default=1.0, help="assumed time of a training step")
    asked = parser.parse_args()
    random = np.random.default_rng(0)
    names = [f"{kind}layers.{i}.w" for i in range(LAYERS) for kind in ("", "adam.")]
    state = {name: random.random((ROWS, COLUMNS), np.float32) for name in names}
    nbytes = sum(array.nbytes for array in state.values())
    with cluster(["registry", *NAMES]) as nodes:
        base = nodes[0].socket.parent
        write_safetensors(base / "model.safetensors", state)
        (base / "layout.json").write_text(json.dumps(layout()))
        case = Case(nodes[0], nodes[1:], base / "persisted")
        persist = json.dumps({"to": str(case.place), "every": 1000, "keep": 1})
        sets = ["--set", "replicas=3", "--set", f"persist={persist}", "--set", "keep_steps=1"]
        run("job", "create", "gpt", "--layout", base / "layout.json", *sets, "--socket", nodes[0].socket)
        run("import", "gpt", base / "model.safetensors", "--socket", nodes[0].socket)
        until(lambda: status(nodes[1])["persist"]["last_step"] == 0)
        size = nbytes // MIB
        print(f"(tp 4, pp 2, dp 2) on 4 nodes, {size} MiB of weights and optimizer, {asked.rounds} rounds")
        for gone, left in CASES.items():
            if asked.lost not in (None, len(gone)):
                continue
            times: dict[str, list[float]] = {"copies": [], "reload": []}
            for _ in range(asked.rounds):
                until(lambda: all(status(node)["survives_node_losses"] == 3 for node in nodes[1:]))
                case.lose(gone)
                times["copies"].append(case.recover(left))
                times["reload"].append(case.reload(left))
                case.come_back(gone)
                case.reconfigure(layout_json=(base / "layout.json").read_text())
            copies, reload = (statistics.median(each) for each in times.values())
            again = reload + LOST_STEPS * asked.step_s
            print(
                f"  {len(gone)} lost   copies {copies:6.2f} s   reload {reload:6.2f} s"
                f"   and {LOST_STEPS} steps of {asked.step_s:g} s again {again:6.2f} s"
                f"   ratio {copies / again:.3f}"
            )
        case.daemon.__exit__(None, None, None)


if __name__ == "__main__":
    main()
