"""Reconfigurations where links are the limit: hosts on one machine, with links of a given rate and delay.

For each: the time of `reconfigure` beside the bound, the most that any node sends or receives divided by the
rate of its link; the same through one node (`central`: everything is gathered on node0, then handed out: the
paper's baseline); and the bytes that the interfaces count beside the plan's. Needs root, ip and tc.

    python benchmarks/bench_network.py --output docs             all of it, eight minutes
    python benchmarks/bench_network.py --rates 200 --delay 10    one rate, 10 ms from host to host
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from harness import record, write_safetensors
from matplotlib.figure import Figure
from network import Network, network

from tenplexfs._pb import control_pb2, local_pb2
from tenplexfs.cli.client import Daemon

LAYERS = 16
COLUMNS = 1024
READY_S = 60.0
MESH = {"pp": 1, "dp": 1, "tp": 1}
ALL = ((200, 0.0, True), (500, 0.0, True), (1000, 0.0, False), (500, 1.0, False), (500, 10.0, False))
"""Mbit/s, ms from host to host, and whether everything is moved through one node as well."""
CENTRAL = (sys.executable, str(Path(__file__).with_name("central.py")))
MOST, MOST_WIRE, MOST_GROWTH = 1.15, 1.03, 1.3


def layout(rows: int, nodes: list[int], **degrees: int) -> str:
    """Returns a layout of `LAYERS` matrices of ``rows`` on one rank a node; the planner places the ranks."""
    pp = degrees.get("pp", 1)
    entry = {
        "shape": [rows, COLUMNS],
        "dtype": "float32",
        "count": {"i": LAYERS},
        "shard": [{"axis": "tp", "dim": 0}],
        "on": {"pp": {"by": "i", "owner": [i * pp // LAYERS for i in range(LAYERS)]}},
    }
    return json.dumps(
        {
            "format": "tenplexfs-layout",
            "version": 1,
            "mesh": {**MESH, **degrees},
            "nodes": {f"node{n}": 1 for n in nodes},
            "tensors": {"layers/{i}/w": entry},
        }
    )


Place = tuple[list[int], Mapping[str, int]]
"""Nodes, and degrees of parallelism."""


@dataclass(frozen=True)
class Case:
    """One reconfiguration.

    Attributes:
        least: How many times as long everything through one node has to take, by the paper.
    """

    name: str
    old: Place
    new: Place
    least: float | None = None


CASES = (
    Case("redeployment, tp 2 to other hosts", ([0, 1], {"tp": 2}), ([2, 3], {"tp": 2}), 2.0),
    Case("tp 2 to 4", ([0, 1], {"tp": 2}), ([0, 1, 2, 3], {"tp": 4}), 3.5),
    Case("pp 2 to 4", ([0, 1], {"pp": 2}), ([0, 1, 2, 3], {"pp": 4}), 3.5),
    Case("dp 1 to 2, tp 2", ([0, 1], {"tp": 2}), ([0, 1, 2, 3], {"tp": 2, "dp": 2}), 3.5),
)
REPLICAS = tuple(Case(f"dp 1 to {n}", ([0], {}), (list(range(n)), {"dp": n})) for n in (2, 4, 8))


class Cluster:
    """A daemon on each host, asked through node0's socket, with one job.

    Attributes:
        mounts: Of each host, as they are seen from here: the hosts' own file systems are theirs.
    """

    def __init__(self, net: Network, base: Path, mounts: Sequence[Path], rows: int, mbit_per_s: int) -> None:
        self.net = net
        self.base = base
        self.mounts = mounts
        self.mbit_per_s = mbit_per_s
        self._rows = rows
        self._daemon = Daemon(str(base / "node0.sock"))
        rng = np.random.default_rng(0)
        self.tensors = {f"layers/{i}/w": rng.random((rows, COLUMNS), np.float32) for i in range(LAYERS)}
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def start_with(self, place: Place) -> None:
        """Lays the job out as it begins, in the time that takes at no limit; the first call makes it."""
        self.net.limit(None)
        if self._daemon.jobs():
            self.reconfigure(place)
        else:
            self._daemon.create_job("bench", self._layout(place), "{}")
            file = self.base / "model.safetensors"
            write_safetensors(file, {path.replace("/", "."): each for path, each in self.tensors.items()})
            _finish(self._daemon.import_state(local_pb2.ImportRequest(job="bench", path=str(file)), None))
            file.unlink()
        self.net.limit(self.mbit_per_s)

    def plan(self, place: Place) -> tuple[int, float]:
        """Returns the bytes that a reconfiguration moves, and the least time it can take."""
        request = control_pb2.PlanRequest(job="bench", layout_json=self._layout(place))
        plan = json.loads(self._daemon.plan(request))
        most = max(max(node["sends"], node["receives"]) for node in plan["nodes"].values())
        return plan["bytes"]["moved"], most * 8 / (self.mbit_per_s * 1e6)

    def reconfigure(self, place: Place) -> tuple[float, int]:
        """Returns how long it took, and the bytes that all hosts received meanwhile."""
        before = sum(self.net.received())
        begin = time.perf_counter()
        request = control_pb2.ReconfigureRequest(job="bench", layout_json=self._layout(place))
        _finish(self._daemon.reconfigure(request, None))
        return time.perf_counter() - begin, sum(self.net.received()) - before

    def through_one_node(self, old: Place, new: Place) -> float:
        """Returns how long the same takes where node0 gathers what the others hold, and hands it all out."""
        held, needed = (",".join(f"{a}={n}" for a, n in self._shares(place).items()) for place in (old, new))
        others = range(1, self.net.count)
        with ExitStack() as stack:
            for host in others:
                serve = [*self.net.inside(host), *CENTRAL, "serve"]
                process = stack.enter_context(subprocess.Popen(serve, stdout=subprocess.PIPE))
                stack.callback(process.kill)
                process.stdout.readline()
            move = [*self.net.inside(0), *CENTRAL, "move", held, needed]
            return float(subprocess.run(move, capture_output=True, check=True, text=True).stdout)

    def _shares(self, place: Place) -> dict[str, int]:
        """Returns the bytes of each host but the first, by address: one rank on each."""
        nodes, degrees = place
        share = self.nbytes // (degrees.get("tp", 1) * degrees.get("pp", 1))
        return {self.net.address(node): share for node in nodes if node}

    def _layout(self, place: Place) -> str:
        return layout(self._rows, place[0], **place[1])


def _finish(steps: Iterator[control_pb2.Progress]) -> None:
    if [step.phase for step in steps][-1] != "done":
        raise SystemExit("it did not end well")


def measure(cluster: Cluster, case: Case, rounds: int, *, central: bool) -> dict[str, object]:
    """Prints one line; returns it as a row for `record`. Times are medians."""
    times, wires = [], []
    for _ in range(rounds):
        cluster.start_with(case.old)
        moved, bound_s = cluster.plan(case.new)
        seconds, wire = cluster.reconfigure(case.new)
        times.append(seconds)
        wires.append(wire / moved)
    ours_s, spread = statistics.median(times), f"({min(times) / bound_s:.2f} to {max(times) / bound_s:.2f})"
    line = f"  {case.name:34}{bound_s:6.2f} s{ours_s:7.2f} s   {ours_s / bound_s:5.2f} {spread:15}"
    line += f"   {statistics.median(wires):.3f}"
    one_node_s = None
    if central:
        cluster.start_with(case.old)
        one_node_s = cluster.through_one_node(case.old, case.new)
        line += f"   {one_node_s:6.2f} s, {one_node_s / ours_s:4.1f} times ours     >= {case.least}"
    print(line, flush=True)
    return {
        "name": case.name,
        "mbit_per_s": cluster.mbit_per_s,
        "delay_ms": cluster.net.delay_ms,
        "state_bytes": cluster.nbytes,
        "bound_s": bound_s,
        "ours_s": ours_s,
        "lowest_s": min(times),
        "highest_s": max(times),
        "wire_to_plan": statistics.median(wires),
        "through_one_node_s": one_node_s,
        "target_one_node_to_ours": case.least,
    }


@contextmanager
def daemons(
    count: int, mbit_per_s: int, nbytes: int, delay_ms: float = 0.0, *, mount: bool = False
) -> Iterator[Cluster]:
    """Gives a cluster with state of about ``nbytes``; all of it is gone afterwards."""
    names = [f"node{n}" for n in range(count)]
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tenplexfs-", dir="/dev/shm")))
        # As the daemon does for its default store.
        huge = ("mount", "-t", "tmpfs", "-o", "size=100%,huge=within_size", "tenplexfs-store", base)
        if not subprocess.run(huge, capture_output=True, check=False).returncode:
            stack.callback(subprocess.run, ["umount", "-l", base], check=False)
        net, mounts = stack.enter_context(network(names, delay_ms)), []
        for number, name in enumerate(names):
            command = [*net.inside(number), sys.executable, "-m", "tenplexfs", "serve"]
            command += ["--mount", str(base / f"{name}.mnt")] if mount else ["--no-mount"]
            command += ["--node", name, "--listen", f"{net.address(number)}:7070", "--insecure"]
            command += ["--registry", "node0", "--memory", "50%"]
            command += ["--store", str(base / f"{name}.store"), "--socket", str(base / f"{name}.sock")]
            for other, peer in enumerate(names):
                command += [] if other == number else ["--peer", f"{peer}={net.address(other)}:7070"]
            with (base / f"{name}.log").open("wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(_stop, process)
            mounts.append(Path(f"/proc/{process.pid}/root{base}/{name}.mnt"))
        for name in names:
            _await(base, name)
        yield Cluster(net, base, mounts, nbytes // (LAYERS * COLUMNS * 4) // 8 * 8, mbit_per_s)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    process.wait()


def _await(base: Path, name: str) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if (base / f"{name}.sock.grpc").exists():
            with Daemon(str(base / f"{name}.sock")) as daemon:
                daemon.status()
            return
        time.sleep(0.05)
    raise SystemExit(f"{name} did not start:\n{(base / f'{name}.log').read_text()}")


def draw(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Plots times of changes beside their bounds, and how they grow with the number of replicas."""
    replicas = [row for row in rows if row["target_one_node_to_ours"] is None]
    changes = [row for row in rows if row not in replicas]
    settings = sorted({(row["delay_ms"], row["mbit_per_s"]) for row in changes})
    names = [case.name.replace(", ", ",\n") for case in CASES]
    figure = Figure(figsize=(8, 7.5), layout="constrained")
    above, below = figure.subplots(2, height_ratios=(3, 2))
    width = 0.8 / max(1, len(settings))
    for number, (delay_ms, rate) in enumerate(settings):
        mine = [row for row in changes if (row["delay_ms"], row["mbit_per_s"]) == (delay_ms, rate)]
        at = np.array([[case.name for case in CASES].index(row["name"]) for row in mine])
        at = at - 0.4 + (number + 0.5) * width
        label = f"{rate} Mbit/s" + (f", {delay_ms:g} ms each way" if delay_ms else "")
        above.bar(
            at, [row["ours_s"] / row["bound_s"] for row in mine], width, color=f"C{number}", label=label
        )
        through = [(x, row["through_one_node_s"]) for x, row in zip(at, mine, strict=True)]
        if some := [(x, s / row["bound_s"]) for (x, s), row in zip(through, mine, strict=True) if s]:
            above.plot(*zip(*some, strict=True), "D", color=f"C{number}", mec="black", ms=6)
    above.plot([], [], "D", color="white", mec="black", label="the same through one node")
    above.axhline(1, color="black", lw=0.8)
    above.axhline(MOST, color="gray", lw=0.8, ls=":")
    above.set_yscale("log")
    above.set_yticks([1, 1.15, 2, 3, 4, 5], ["1", "1.15", "2", "3", "4", "5"])
    above.minorticks_off()
    above.set_ylim(0.95, 6)
    above.set_xticks(range(len(names)), names)
    above.set(ylabel="time / what the links allow", title="Reconfigurations where links are the limit")
    above.legend(fontsize="small")
    counts = [int(str(row["name"]).split()[-1]) for row in replicas]
    if counts:
        first_s = replicas[0]["ours_s"]
        below.plot(counts, [row["ours_s"] for row in replicas], "o-", label="passed on from node to node")
        below.plot(
            counts, [first_s * (n - 1) for n in counts], "--", color="gray", label="one after the other"
        )
        below.axhline(replicas[0]["bound_s"], color="black", lw=0.8, label="what the links allow")
        below.set(xlabel="replicas, on as many hosts", ylabel="seconds", xticks=counts, ylim=0)
        below.legend(fontsize="small")
    figure.savefig(file, dpi=90)


def changes(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Measures all changes at the rates and delays that were asked for."""
    plan: Sequence[tuple[int, float, bool]] = ALL
    if arguments.rates or arguments.delay is not None:
        rates = map(int, (arguments.rates or "200,500").split(","))
        plan = [(rate, arguments.delay or 0.0, True) for rate in rates]
    for rate, delay_ms, through_one in plan:
        central = through_one and not arguments.no_central
        with daemons(4, rate, int(arguments.seconds * rate * 1e6 / 8), delay_ms) as cluster:
            print(f"\n4 hosts, links of {rate} Mbit/s, {cluster.net.delayed_by}, {said(cluster)}")
            heads = f"ratio <= {MOST}          wire / plan <= {MOST_WIRE}"
            print(f"  {'':36}bound    ours   {heads}" + "   through one node" * central)
            for case in CASES:
                yield measure(cluster, case, arguments.rounds, central=central)


def replicas(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Measures how data parallelism grows to 2, 4, 8, half as much state as a link carries in the time."""
    rate = int((arguments.rates or "200").split(",")[0])
    nbytes = int(arguments.seconds / 2 * rate * 1e6 / 8)
    with daemons(8, rate, nbytes, arguments.delay or 0.0) as cluster:
        print(
            f"\nreplicas on as many hosts, links of {rate} Mbit/s, {cluster.net.delayed_by}, {said(cluster)}"
        )
        rows = [measure(cluster, case, arguments.rounds, central=False) for case in REPLICAS]
    print(f"  time for 8 / time for 2: {rows[2]['ours_s'] / rows[0]['ours_s']:.2f}     <= {MOST_GROWTH}")
    yield from rows


def said(cluster: Cluster) -> str:
    """Returns what else counts."""
    return f"TCP {cluster.net.congestion_control}, state of {cluster.nbytes / 1e6:.0f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", help="Mbit/s of each link, each way; default 200,500,1000")
    parser.add_argument(
        "--delay",
        type=float,
        metavar="MS",
        help="from host to host, one way; default 0, and 1 and 10 at 500 Mbit/s",
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="state = what a link carries in that time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replicas", action="store_true", help="only data parallelism 1 -> 2, 4, 8")
    parser.add_argument("--no-central", action="store_true", help="leave the baseline out")
    parser.add_argument("--output", type=Path, help="directory of network.csv and network.png")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # all is taken away first
    rows = [] if arguments.replicas else [*changes(arguments)]
    rows += replicas(arguments)
    if arguments.output is not None:
        record(arguments.output / "network.csv", rows)
        draw(arguments.output / "network.png", rows)


if __name__ == "__main__":
    main()
