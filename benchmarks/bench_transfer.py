"""A peer's transfer of sub-tensor ranges, against one plain TCP stream in Python."""

from __future__ import annotations

import socket
import subprocess
import sys

import numpy as np
import trio
from harness import MIB, cluster, measure, run, write_layout, write_safetensors

from tenplexfs.rpc.peer_client import PeerClient
from tenplexfs.rpc.ranges import Scatter
from tenplexfs.runtime.protocols import Ranges

SHAPE = (256 * MIB // 4 // 1024, 1024)
SENDER = f"""
import socket
data = memoryview(bytes({MIB}))
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        with server.accept()[0] as peer:
            for _ in range(256):
                peer.sendall(data)
"""


def plain_tcp(port: int, into: memoryview) -> None:
    with socket.create_connection(("127.0.0.1", port)) as peer:
        at = 0
        while at < len(into):
            at += peer.recv_into(into[at:])


def main() -> None:
    tensor = np.random.default_rng(0).random(SHAPE, np.float32)
    whole, columns = np.zeros(SHAPE, np.float32), np.zeros((SHAPE[0], SHAPE[1] // 2), np.float32)
    sender = subprocess.Popen([sys.executable, "-c", SENDER], stdout=subprocess.PIPE, text=True)
    with cluster(("node0",), mount=False) as (node,), sender:
        base = node.socket.parent
        write_safetensors(base / "model.safetensors", {"w": tensor})
        layout = write_layout(base / "layout.json", {"w": SHAPE}, {"node0": [0]}, 0)
        run("job", "create", "bench", "--layout", layout, "--socket", node.socket)
        run("import", "bench", base / "model.safetensors", "--socket", node.socket)
        txid = run("job", "show", "bench", "--socket", node.socket)["txid"]
        client = PeerClient({"node0": node.address})

        async def fetch(target: np.ndarray, begin: int) -> None:
            boxes = np.array([[[0, begin], [SHAPE[0], begin + target.shape[1]]]], np.int64)
            scatter = Scatter([(target, boxes - [0, begin])])
            ranges = [Ranges(0, "w", 4, boxes)]
            await client.fetch("node0", "bench", txid, ranges, scatter.write, deadline_s=60)

        port = int(sender.stdout.readline())
        try:
            measure(
                "transfer of 256 MiB, or half of it, over loopback",
                {
                    "plain TCP": (whole.nbytes, lambda: plain_tcp(port, memoryview(whole).cast("B"))),
                    "peer, whole rows": (whole.nbytes, lambda: trio.run(fetch, whole, 0)),
                    "peer, half of the columns": (columns.nbytes, lambda: trio.run(fetch, columns, 512)),
                },
            )
            trio.run(fetch, whole, 0)
            if not (np.array_equal(whole, tensor) and np.array_equal(columns, tensor[:, 512:])):
                raise SystemExit("the bytes that came are not those of the tensor")
        finally:
            client.close()
            sender.kill()


if __name__ == "__main__":
    main()
