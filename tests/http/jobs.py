"""What the jobs of these tests hold, and the daemon that has them."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import ml_dtypes
import numpy as np

from tenplexfs.client.connection import Connection
from tests.cluster.daemons import Daemon
from tests.http.tenplex import Pickle, Server

LAYOUT = {
    "format": "tenplexfs-layout",
    "version": 1,
    "mesh": {"tp": 2},
    "tensors": {
        "model/layers/{i}/w": {
            "shape": [8, 6],
            "dtype": "float32",
            "count": {"i": 2},
            "shard": [{"axis": "tp", "dim": 0}],
        },
        "big": {"shape": [600, 1024], "dtype": "float64", "shard": [{"axis": "tp", "dim": 1}]},
        "optimizer/state/0/m": {"shape": [3], "dtype": "bfloat16"},
        "scalar": {"shape": [], "dtype": "int64"},
        "empty": {"shape": [0, 3], "dtype": "int8"},
    },
}
ONE = {
    "tensors": {"w": {"shape": [4, 3, 5], "dtype": "int16"}},
    "mesh": {"tp": 1},
    "format": "tenplexfs-layout",
    "version": 1,
}


FILES = 25
"""Of a rank."""


def state_of(rank: int, step: int) -> dict[object, object]:
    """What a rank has at a step: of the kinds that Megatron-LM's checkpoints have."""
    rng = np.random.default_rng(step)
    whole = [rng.random((8, 6), np.float32) for _ in range(2)]
    big = rng.random((600, 1024))
    return {
        "args": Pickle(b"a pickle of rank %d" % rank),
        "iteration": step,
        "model": {f"layers.{i}.w": each[4 * rank : 4 * rank + 4] for i, each in enumerate(whole)},
        "big": big[:, 512 * rank : 512 * rank + 512],
        "optimizer": {
            "state": {0: {"m": np.frombuffer(rng.bytes(6), bfloat16)}},
            "param_groups": [{"lr": 1e-5 * step, "betas": (0.9, 0.95), "params": [0, 1], "fused": None}],
        },
        "scalar": np.array(step),
        "empty": np.empty((0, 3), np.int8),
        "flags": {"a b&c=d%": True, "ü": False},
        "text": "grün\n2",
        "rng_state": [{"np_rng_state": ("MT19937", np.arange(624, dtype=np.uint32) + rank, 7)}],
    }


bfloat16 = np.dtype(ml_dtypes.bfloat16)
_JOBS = count()


class Node:
    """A daemon, and what its HTTP is asked."""

    def __init__(self, daemon: Daemon, http: Server) -> None:
        self.daemon = daemon
        self.http = http

    def job(self, layout: dict[str, object], **settings_: str) -> str:
        """Makes a job; returns its name."""
        name = f"job{next(_JOBS)}"
        if settings_:
            file = self.daemon.store.parent / f"{name}.json"
            file.write_text(json.dumps(layout))
            more = [part for key, value in settings_.items() for part in ("--set", f"{key}={value}")]
            self.daemon.ok("job", "create", name, "--layout", str(file), *more)
        else:  # without a process
            with Connection(str(self.daemon.socket)) as connection:
                connection.ask("create", job=name, layout=json.dumps(layout).encode())
        return name

    def resident(self) -> int:
        """Returns the bytes of memory that the daemon has for itself."""
        assert self.daemon.process is not None
        text = Path(f"/proc/{self.daemon.process.pid}/status").read_text()
        (line,) = [line for line in text.splitlines() if line.startswith("RssAnon")]
        return int(line.split()[1]) << 10
