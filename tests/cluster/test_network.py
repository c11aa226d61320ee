"""The network of the benchmarks: links of a rate, and hosts that are far from each other."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.mount,
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK),
        reason="hosts are made by root, and /dev/fuse is not there without",
    ),
]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MBIT_PER_S, DELAY_MS, STATE_BYTES = 200, 5.0, 40_000_000
RECORDED = 1.25  # of the bound, for so little state
CONNECT = """
import socket, statistics, sys, time
times = []
for _ in range(21):
    begin = time.perf_counter()
    socket.create_connection((sys.argv[1], 7070)).close()
    times.append(time.perf_counter() - begin)
print(statistics.median(times))
"""


def test_a_reconfiguration_between_hosts_that_are_far_apart(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = importlib.import_module("bench_network")
    new = ([0, 1], {"tp": 2})
    with bench.daemons(2, MBIT_PER_S, STATE_BYTES, DELAY_MS, mount=True) as cluster:
        cluster.start_with(([0], {}))
        connect = [*cluster.net.inside(0), sys.executable, "-c", CONNECT, cluster.net.address(1)]
        trip_s = float(subprocess.run(connect, capture_output=True, check=True, timeout=30).stdout)
        assert 2 * DELAY_MS <= 1000 * trip_s <= 3 * DELAY_MS, cluster.net.delayed_by

        moved, bound_s = cluster.plan(new)
        assert moved == cluster.nbytes // 2
        assert bound_s == pytest.approx(8 * moved / (1e6 * MBIT_PER_S))
        seconds, wire_bytes = cluster.reconfigure(new)
        assert bound_s <= seconds <= 2 * RECORDED * bound_s
        assert moved <= wire_bytes <= 1.03 * moved

        for rank, mount in enumerate(cluster.mounts):
            for path, tensor in cluster.tensors.items():
                found = np.load(mount / "bench" / "model" / str(rank) / f"{path}.npy")
                assert found.tobytes() == np.split(tensor, 2)[rank].tobytes(), (rank, path)
