"""Reconfigurations where the links are the limit: several hosts on one machine, at the rate of a link.

For each: the time of `reconfigure` beside the bound, the most that any node sends or receives divided by the
rate of its link; the same through one node (everything is gathered on node0, then handed out: the paper's
baseline); and the bytes that the interfaces count beside the plan's. Needs root, ip and tc.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from harness import write_safetensors
from network import Network, network

from tenplexfs._pb import control_pb2, local_pb2
from tenplexfs.cli.client import Daemon

LAYERS = 16
COLUMNS = 1024
READY_S = 60.0
MESH = {"pp": 1, "dp": 1, "tp": 1}


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


@dataclass(frozen=True)
class Case:
    """One reconfiguration: nodes and degrees before and after."""

    name: str
    old: tuple[list[int], Mapping[str, int]]
    new: tuple[list[int], Mapping[str, int]]


CASES = (
    Case("redeployment, tp 2 to other hosts", ([0, 1], {"tp": 2}), ([2, 3], {"tp": 2})),
    Case("tp 2 to 4", ([0, 1], {"tp": 2}), ([0, 1, 2, 3], {"tp": 4})),
    Case("pp 2 to 4", ([0, 1], {"pp": 2}), ([0, 1, 2, 3], {"pp": 4})),
    Case("dp 1 to 2, tp 2", ([0, 1], {"tp": 2}), ([0, 1, 2, 3], {"tp": 2, "dp": 2})),
)
REPLICAS = tuple(Case(f"dp 1 to {n}", ([0], {}), (list(range(n)), {"dp": n})) for n in (2, 4, 8))


class Cluster:
    """A daemon on each host, asked through node0's socket."""

    def __init__(self, net: Network, base: Path, rows: int, mbit_per_s: int) -> None:
        self._net = net
        self._rows = rows
        self._mbit_per_s = mbit_per_s
        self._daemon = Daemon(str(base / "node0.sock"))
        self._file = base / "model.safetensors"
        rng = np.random.default_rng(0)
        tensors = {f"layers.{i}.w": rng.random((rows, COLUMNS), np.float32) for i in range(LAYERS)}
        write_safetensors(self._file, tensors)
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())

    def start_with(self, nodes: list[int], degrees: Mapping[str, int]) -> None:
        """Makes the job, with its state, in the time that takes without limits."""
        self._net.limit(None)
        if any(job.name == "bench" for job in self._daemon.jobs()):
            self._daemon.remove_job("bench")
        self._daemon.create_job("bench", layout(self._rows, nodes, **degrees), "{}")
        request = local_pb2.ImportRequest(job="bench", path=str(self._file))
        _finish(self._daemon.import_state(request, None))
        self._net.limit(self._mbit_per_s)

    def plan(self, nodes: list[int], degrees: Mapping[str, int]) -> tuple[int, float]:
        """Returns the bytes that a reconfiguration moves, and the least time it can take."""
        request = control_pb2.PlanRequest(job="bench", layout_json=layout(self._rows, nodes, **degrees))
        plan = json.loads(self._daemon.plan(request))
        most = max(max(node["sends"], node["receives"]) for node in plan["nodes"].values())
        return plan["bytes"]["moved"], most * 8 / (self._mbit_per_s * 1e6)

    def reconfigure(self, nodes: list[int], degrees: Mapping[str, int]) -> tuple[float, int]:
        """Returns how long it took, and the bytes that all hosts received meanwhile."""
        before = sum(self._net.received())
        begin = time.perf_counter()
        text = layout(self._rows, nodes, **degrees)
        _finish(self._daemon.reconfigure(control_pb2.ReconfigureRequest(job="bench", layout_json=text), None))
        return time.perf_counter() - begin, sum(self._net.received()) - before


def _finish(steps: Iterator[control_pb2.Progress]) -> None:
    if [step.phase for step in steps][-1] != "done":
        raise SystemExit("it did not end well")


def measure(cluster: Cluster, case: Case, *, central: bool) -> tuple[float, float]:
    """Prints one line; returns the time and the bound, in seconds."""
    cluster.start_with(*case.old)
    moved, bound_s = cluster.plan(*case.new)
    ours_s, wire = cluster.reconfigure(*case.new)
    line = f"  {case.name:34} bound {bound_s:6.2f} s   ours {ours_s:6.2f} s   ratio {ours_s / bound_s:5.2f}"
    line += f"   wire / plan {wire / moved:6.3f}"
    if central:
        cluster.start_with(*case.old)
        gathered_s, _ = cluster.reconfigure([0], {})
        handed_out_s, _ = cluster.reconfigure(*case.new)
        whole_s = gathered_s + handed_out_s
        line += f"   through one node {whole_s:6.2f} s, {whole_s / ours_s:4.1f} times ours"
    print(line, flush=True)
    return ours_s, bound_s


@contextmanager
def daemons(count: int, mbit_per_s: int, nbytes: int) -> Iterator[Cluster]:
    """Gives a cluster with state of about ``nbytes``; all of it is gone afterwards."""
    names = [f"node{n}" for n in range(count)]
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tenplexfs-", dir="/dev/shm")))
        net = stack.enter_context(network(names))
        for number, name in enumerate(names):
            command = [*net.inside(number), sys.executable, "-m", "tenplexfs", "serve", "--no-mount"]
            command += ["--node", name, "--listen", f"{net.address(number)}:7070", "--insecure"]
            command += ["--registry", "node0", "--memory", "50%"]
            command += ["--store", str(base / f"{name}.store"), "--socket", str(base / f"{name}.sock")]
            for other, peer in enumerate(names):
                command += [] if other == number else ["--peer", f"{peer}={net.address(other)}:7070"]
            with (base / f"{name}.log").open("wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(_stop, process)
        for name in names:
            _await(base, name)
        yield Cluster(net, base, nbytes // (LAYERS * COLUMNS * 4) // 8 * 8, mbit_per_s)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="200,1000", help="Mbit/s of each link, each way")
    parser.add_argument("--seconds", type=float, default=8.0, help="state = what a link carries in that time")
    parser.add_argument("--replicas", action="store_true", help="only data parallelism 1 -> 2, 4, 8")
    parser.add_argument("--no-central", action="store_true", help="leave the baseline out")
    arguments = parser.parse_args()
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise SystemExit(f"{', '.join(missing)}: missing; install iproute2")
    for rate in () if arguments.replicas else map(int, arguments.rates.split(",")):
        nbytes = int(arguments.seconds * rate * 1e6 / 8)
        with daemons(4, rate, nbytes) as cluster:
            print(f"\n4 hosts, links of {rate} Mbit/s, state of {cluster.nbytes / 1e6:.0f} MB")
            for case in CASES:
                measure(cluster, case, central=not arguments.no_central)
    rate = int(arguments.rates.partition(",")[0])
    with daemons(8, rate, int(arguments.seconds / 2 * rate * 1e6 / 8)) as cluster:
        print(f"\nreplicas on as many hosts, links of {rate} Mbit/s, state of {cluster.nbytes / 1e6:.0f} MB")
        times = [measure(cluster, case, central=False)[0] for case in REPLICAS]
        print(f"  time for 8 / time for 2: {times[2] / times[0]:.2f}")


if __name__ == "__main__":
    main()
