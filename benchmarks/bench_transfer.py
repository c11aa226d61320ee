"""A peer's transfer of sub-tensor ranges into a store, against one plain TCP stream in Python.

The sender is a daemon in a process of its own. The receiver does what a daemon does that stages a snapshot:
takes room in its store, lets the stream land, and gives all back. Both make the checksums of every byte.
"""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import trio
from harness import MIB, cluster, measure, record, run, write_layout, write_safetensors

from tenplexfs.core.node_part import Target
from tenplexfs.core.ptc import Shard
from tenplexfs.core.snapshot import JobName, NodeName, SnapshotId, TxId
from tenplexfs.rpc.memory import keep_freed_memory
from tenplexfs.rpc.peer_client import PeerClient
from tenplexfs.rpc.ranges import Scatter
from tenplexfs.runtime.landing import Fetch, Landing, Reporter, Sums
from tenplexfs.runtime.protocols import Ranges
from tenplexfs.storage.store import Store, Wanted

SHAPE = (256 * MIB // 4 // 1024, 1024)
PIECES = 20_000
SENDER = f"""
import os, socket
data = memoryview(os.urandom({MIB}) * 256)  # as much as is sent: one MiB again and again stays in the cache
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        with server.accept()[0] as peer:
            for at in range(0, len(data), {MIB}):
                peer.sendall(data[at : at + {MIB}])
"""


def plain_tcp(port: int, into: memoryview) -> None:
    with socket.create_connection(("127.0.0.1", port)) as peer:
        at = 0
        while at < len(into):
            at += peer.recv_into(into[at:])


def tcp_into_file(port: int, path: Path) -> None:
    """Receives into the map of a fresh file, whose room is taken first, as a store must."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.posix_fallocate(descriptor, 0, 256 * MIB)
    with mmap.mmap(descriptor, 256 * MIB) as mapped, memoryview(mapped) as view:
        plain_tcp(port, view)
    os.close(descriptor)
    path.unlink()


class Receiver:
    """Fetches boxes of the tensor ``w`` into fresh arrays of a store; `keeps` says to return copies."""

    keeps = False

    def __init__(self, client: PeerClient, store: Store, txid: str) -> None:
        self.client, self.store, self.txid = client, store, TxId(txid)

    def fetch(self, shape: tuple[int, int], source: np.ndarray, target: np.ndarray) -> np.ndarray | None:
        """Lets the boxes ``source`` land as the boxes ``target`` of an array of ``shape``."""
        with self.store.ingest(JobName("in"), SnapshotId(1, 0, TxId("in")), b"", 1) as ingest:
            key = (0, "w")
            ingest.reserve([Wanted((key,), shape, "float32")])
            array = ingest.array(key)
            wanted = Target("w", (key,), Shard(shape, ()), "float32", None, (), ())
            item = Fetch(NodeName("node0"), Ranges(0, "w", 4, source), wanted, array, target)
            trio.run(self._land, Landing(ingest, [item], Scatter, REPORTER, Sums(ingest)), item)
            return array.copy() if self.keeps else None

    async def _land(self, landing: Landing, item: Fetch) -> None:
        REPORTER.begin(landing.nbytes)
        await self.client.fetch(
            NodeName("node0"), JobName("bench"), self.txid, [item.ranges], landing.write, deadline_s=60
        )
        landing.check(NodeName("node0"))


REPORTER = Reporter(lambda done, total: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="directory of transfer.csv")
    arguments = parser.parse_args()
    keep_freed_memory()
    tensor = np.random.default_rng(0).random(SHAPE, np.float32)
    used = np.ones(SHAPE, np.float32)
    whole = np.array([[[0, 0], SHAPE]], np.int64)
    half = np.array([[[0, 256], [SHAPE[0], 768]]], np.int64)
    rows = np.arange(PIECES)
    pieces = np.array([[3 * rows, 0 * rows], [3 * rows + 1, 0 * rows + 1024]]).transpose(2, 0, 1)
    packed = np.array([[rows, 0 * rows], [rows + 1, 0 * rows + 1024]]).transpose(2, 0, 1)
    sender = subprocess.Popen([sys.executable, "-c", SENDER], stdout=subprocess.PIPE, text=True)
    with cluster(("node0",), mount=False) as (node,), sender:
        base, memory = node.socket.parent, node.store.parent
        write_safetensors(base / "model.safetensors", {"w": tensor})
        layout = write_layout(base / "layout.json", {"w": SHAPE}, {"node0": [0]}, 0)
        run("job", "create", "bench", "--layout", layout, "--socket", node.socket)
        run("import", "bench", base / "model.safetensors", "--socket", node.socket)
        txid = run("job", "show", "bench", "--socket", node.socket)["txid"]
        client = PeerClient({NodeName("node0"): node.address})
        store = Store.open(memory / "receiver", node="node1", limit_bytes=1 << 30)
        receiver = Receiver(client, store, txid)
        port = int(sender.stdout.readline())
        work = {
            "whole": (SHAPE, whole, whole),
            "columns": ((SHAPE[0], 512), half, half - [0, 256]),
            "pieces": ((PIECES, 1024), pieces, packed),
        }
        sizes = {name: 4 * shape[0] * shape[1] for name, (shape, _, _) in work.items()}
        fetches = {name: (sizes[name], lambda name=name: receiver.fetch(*work[name])) for name in work}
        try:
            rows = measure(
                "256 MiB over loopback",
                {
                    "TCP into a fresh file in memory": (
                        used.nbytes,
                        lambda: tcp_into_file(port, memory / "plain"),
                    ),
                    "TCP into memory used before": (
                        used.nbytes,
                        lambda: plain_tcp(port, memoryview(used).cast("B")),
                    ),
                    "peer, whole, into a store": fetches["whole"],
                },
                targets={"peer, whole, into a store": 0.65},
            )
            rows += measure(
                "what is asked for, into a store",
                {
                    "whole, 256 MiB": fetches["whole"],
                    "half of the columns, 128 MiB": fetches["columns"],
                    f"{PIECES:,} pieces of 4 KiB": fetches["pieces"],
                },
                targets={"half of the columns, 128 MiB": 0.8, f"{PIECES:,} pieces of 4 KiB": 0.5},
            )
            receiver.keeps = True
            wanted = {"whole": tensor, "columns": tensor[:, 256:768], "pieces": tensor[: 3 * PIECES : 3]}
            if not all(np.array_equal(receiver.fetch(*work[name]), wanted[name]) for name in work):
                raise SystemExit("the bytes that came are not those of the tensor")
            if arguments.output is not None:
                record(arguments.output / "transfer.csv", rows)
        finally:
            client.close()
            store.close()
            sender.kill()


if __name__ == "__main__":
    main()
