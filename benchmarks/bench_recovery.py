"""Lost nodes: going on from copies on the others, against reloading a persisted step and 50 steps again.

    python benchmarks/bench_recovery.py --output /tmp/recovery

The case of Tenplex (SOSP 2024, figure 12): (tp 4, pp 2, dp 2) on four nodes, of which one, two, three are
lost (SIGKILL, store deleted). All daemons are on this machine; a fifth has the registry and no rank. Each
round loses them twice. Once a scheduler asks for a layout of the others at once; the clock starts at the
kill. Once it asks when the registry has missed them; that clock starts when it asks. Both stop when every
new rank has loaded and touched its state. Against it stands what is done without copies: the job is made
again of the last persisted step, loaded as well, and the steps since then are run again, at an assumed
second each.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import MIB, Node, cluster, run, write_safetensors
from matplotlib.figure import Figure

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
PARTS = ("notice", "stage", "commit", "load")
TARGET_S = 60.0  # a dead node costs a minute at most
TARGET_RATIO = 0.05  # of the other way: what Tenplex reports, where data-parallel replicas are left


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
        time.sleep(0.02)


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


@dataclass
class Round:
    """Seconds of one round.

    Attributes:
        killed: From the kill, by what it went into: `PARTS`.
        missed: From the request, made when the registry had missed the nodes.
        lease: From the kill until it had.
        reload: What the other way takes, without the steps.
    """

    killed: dict[str, float]
    missed: float
    lease: float
    reload: float


class Case:
    """Four nodes with a job."""

    def __init__(self, registry: Node, nodes: Sequence[Node], place: Path) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.daemon = Daemon(str(registry.socket))
        self.place = place

    def lose(self, gone: Sequence[int]) -> float:
        """Kills nodes with their stores; returns when."""
        nodes = [self.nodes[NAMES[number]] for number in gone]
        begin = time.perf_counter()
        for node in nodes:
            node.process.kill()
        for node in nodes:
            node.process.wait()
            shutil.rmtree(node.store)
        return begin

    def until_missed(self, gone: Sequence[int]) -> None:
        """Returns when the registry says that nodes do not live."""
        names = {NAMES[number] for number in gone}
        until(lambda: names.isdisjoint(n.name for n in self.daemon.nodes().nodes if n.state == "living"))

    def come_back(self, gone: Sequence[int]) -> None:
        """Starts nodes again, empty; the job is as it was."""
        for number in gone:
            self.nodes[NAMES[number]].start()
        for number in gone:
            self.nodes[NAMES[number]].wait()
        self.ask(layout_json=json.dumps(layout()))
        until(lambda: all(status(node)["survives_node_losses"] == 3 for node in self.nodes.values()))

    def ask(self, **how: Any) -> dict[str, float]:  # noqa: ANN401 - fields
        """Reconfigures; returns when each phase began, and "message", the longest one on the way."""
        began: dict[str, float] = {}
        message = ""
        for step in self.daemon.reconfigure(control_pb2.ReconfigureRequest(job="gpt", **how), 120):
            began.setdefault(step.phase, time.perf_counter())
            message = max(message, step.message, key=len)
        if "done" not in began:
            raise SystemExit(f"the reconfiguration failed: {message}")
        self.message = message
        return began

    def recover(self, nodes: dict[str, int], begin: float) -> dict[str, float]:
        """Lets the job go on from copies on what is left; returns the seconds since ``begin``, by parts."""
        began = self.ask(mesh=_axes(sum(nodes.values())), nodes=nodes)
        assert "copies" in self.message or "replicas" in self.message, self.message
        for name in nodes:
            touch(self.nodes[name], "gpt")
        ends = [began["staging"], began["committing"], began["done"], time.perf_counter()]
        return dict(zip(PARTS, np.diff([begin, *ends]).tolist(), strict=True))

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

    def round(self, gone: Sequence[int], left: dict[str, int]) -> Round:
        """Loses nodes twice."""
        killed = self.recover(left, self.lose(gone))
        self.come_back(gone)
        begin = self.lose(gone)
        self.until_missed(gone)
        lease = time.perf_counter() - begin
        missed = sum(self.recover(left, time.perf_counter()).values())
        reload = self.reload(left)
        self.come_back(gone)
        return Round(killed, missed, lease, reload)


def _axes(ranks: int) -> list[control_pb2.Axis]:
    sizes = {"pp": 2, "dp": ranks // 8, "tp": 4}
    return [control_pb2.Axis(name=name, size=size) for name, size in sizes.items()]


def summary(rounds: Sequence[Round], step_s: float) -> dict[str, Any]:
    """Returns medians in seconds, and the ratio of both ways."""
    parts = {part: statistics.median(each.killed[part] for each in rounds) for part in PARTS}
    killed = [sum(each.killed.values()) for each in rounds]
    again = statistics.median(each.reload for each in rounds) + LOST_STEPS * step_s
    return {
        "from_kill_s": statistics.median(killed),
        "from_kill_least_s": min(killed),
        "from_kill_most_s": max(killed),
        **{f"{part}_s": value for part, value in parts.items()},
        "from_missed_s": statistics.median(each.missed for each in rounds),
        "lease_s": statistics.median(each.lease for each in rounds),
        "reload_s": statistics.median(each.reload for each in rounds),
        "reload_and_steps_s": again,
        "ratio": statistics.median(killed) / again,
    }


def tell(lost: int, found: Mapping[str, Any]) -> None:
    """Prints the figures of one case beside their targets."""
    parts = ", ".join(f"{part} {found[f'{part}_s']:.2f}" for part in PARTS)
    print(
        f"  {lost} lost   from the kill {found['from_kill_s']:5.2f} s "
        f"({found['from_kill_least_s']:.2f} to {found['from_kill_most_s']:.2f}; <= {TARGET_S:g}): {parts}\n"
        f"           from the request, once they were missed ({found['lease_s']:.1f} s): "
        f"{found['from_missed_s']:5.2f} s\n"
        f"           reload {found['reload_s']:5.2f} s, with {LOST_STEPS} steps again "
        f"{found['reload_and_steps_s']:6.2f} s: ratio {found['ratio']:.3f} (<= {TARGET_RATIO})",
        flush=True,
    )


def draw(file: Path, cases: Mapping[int, Mapping[str, Any]]) -> None:
    """Plots where the time from the kill goes, and both ways beside each other."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    split, both = figure.subplots(1, 2)
    at, names = np.arange(len(cases)), [f"{lost} of 4" for lost in cases]
    low = np.zeros(len(cases))
    for number, part in enumerate(PARTS):
        values = np.array([each[f"{part}_s"] for each in cases.values()])
        split.bar(at, values, bottom=low, width=0.6, color=f"C{number}", label=part)
        low += values
    split.set(xticks=at, xticklabels=names, ylabel="seconds", title="From the kill until all is loaded")
    split.legend(fontsize="small", ncols=2)
    split.set_ylim(top=1.3 * float(low.max()))
    for turn, (name, key) in enumerate(
        (
            ("from the kill", "from_kill_s"),
            ("from the request, once missed", "from_missed_s"),
            ("reload", "reload_s"),
            (f"reload and {LOST_STEPS} steps", "reload_and_steps_s"),
        )
    ):
        values = [each[key] for each in cases.values()]
        both.bar(at + 0.2 * (turn - 1.5), values, width=0.2, color=f"C{turn + len(PARTS)}", label=name)
    both.axhline(TARGET_S, color="gray", lw=0.8, ls=":")
    both.set(xticks=at, xticklabels=names, yscale="log", ylabel="seconds", title="Against a persisted step")
    both.set_ylim(bottom=0.5, top=600)
    both.legend(fontsize="small", ncols=2)
    figure.savefig(file, dpi=90)


def write(output: Path, cases: Mapping[int, Mapping[str, Any]], rounds: Mapping[int, list[Round]]) -> None:
    """Writes figures and rounds as JSON, figures as CSV, and the plot."""
    output.mkdir(parents=True, exist_ok=True)
    figures = [{"lost": lost, **found} for lost, found in cases.items()]
    raw = {lost: [vars(each) for each in found] for lost, found in rounds.items()}
    (output / "recovery.json").write_text(json.dumps({"figures": figures, "rounds": raw}, indent=1) + "\n")
    with (output / "recovery.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, figures[0].keys(), lineterminator="\n")
        table.writeheader()
        for each in figures:
            table.writerow({k: round(v, 4) for k, v in each.items()})
    draw(output / "recovery.png", cases)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lost", type=int, choices=(1, 2, 3), help="only so many; else each")
    parser.add_argument("--step-s", type=float, default=1.0, help="assumed time of a training step")
    parser.add_argument("--output", type=Path, help="directory of recovery.json, .csv and .png")
    asked = parser.parse_args()
    random = np.random.default_rng(0)
    names = [f"{kind}layers.{i}.w" for i in range(LAYERS) for kind in ("", "adam.")]
    state = {name: random.random((ROWS, COLUMNS), np.float32) for name in names}
    size = sum(array.nbytes for array in state.values()) // MIB
    cases: dict[int, dict[str, Any]] = {}
    rounds: dict[int, list[Round]] = {}
    with cluster(["registry", *NAMES]) as nodes:
        base = nodes[0].socket.parent
        write_safetensors(base / "model.safetensors", state)
        del state
        (base / "layout.json").write_text(json.dumps(layout()))
        case = Case(nodes[0], nodes[1:], base / "persisted")
        persist = json.dumps({"to": str(case.place), "every": 1000, "keep": 1})
        sets = ["--set", "replicas=3", "--set", f"persist={persist}", "--set", "keep_steps=1"]
        run("job", "create", "gpt", "--layout", base / "layout.json", *sets, "--socket", nodes[0].socket)
        run("import", "gpt", base / "model.safetensors", "--socket", nodes[0].socket)
        until(lambda: status(nodes[1])["persist"]["last_step"] == 0)
        until(lambda: all(status(node)["survives_node_losses"] == 3 for node in nodes[1:]))
        of = f"{size} MiB of weights and optimizer"
        print(f"(tp 4, pp 2, dp 2) on 4 nodes, {of}, medians of {asked.rounds} rounds")
        for gone, left in CASES.items():
            lost = len(gone)
            if asked.lost in (None, lost):
                rounds[lost] = [case.round(gone, left) for _ in range(asked.rounds)]
                cases[lost] = summary(rounds[lost], asked.step_s)
                tell(lost, cases[lost])
        case.daemon.__exit__(None, None, None)
    if asked.output is not None:
        write(asked.output, cases, rounds)


if __name__ == "__main__":
    main()
