"""What transfers hold in memory, by the kernel's numbers, beside the bytes of the store."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.daemons import Daemons
from tests.runtime.cluster import write_safetensors

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.mount,
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse is not there"),
]

MIB = 1 << 20
LIMIT = 32 * MIB
COUNT = 12


def layout(node: str) -> str:
    entry = {"shape": [2048, 2048], "dtype": "float32", "count": {"i": COUNT}}
    return json.dumps(
        {
            "format": "tenplexfs-layout",
            "version": 1,
            "mesh": {"dp": 1},
            "nodes": {node: [0]},
            "tensors": {"w/{i}": entry},
        }
    )


def anonymous_bytes(pid: int) -> int:
    """Returns what is the process's own; files of the store that it maps are counted apart by the kernel."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def test_sender_and_receiver_stay_within_the_setting(tmp_path):
    for node in ("node0", "node1"):
        (tmp_path / f"{node}.json").write_text(layout(node))
    rng = np.random.default_rng(0)
    whole = {f"w.{i}": rng.random((2048, 2048), np.float32) for i in range(COUNT)}
    write_safetensors(tmp_path / "m.safetensors", whole)
    with Daemons(tmp_path, 2, memory="512MiB", transfer_memory="32MiB") as two:
        first = two.nodes[0]
        first.ok("job", "create", "gpt", "--layout", str(tmp_path / "node0.json"))
        first.ok("import", "gpt", str(tmp_path / "m.safetensors"), "--step", "0")
        pids = [node.process.pid for node in two.nodes if node.process is not None]
        before, most = [anonymous_bytes(pid) for pid in pids], [0, 0]
        has_ended = threading.Event()

        def look() -> None:
            while not has_ended.wait(0.005):
                for k, pid in enumerate(pids):
                    most[k] = max(most[k], anonymous_bytes(pid) - before[k])

        watcher = threading.Thread(target=look)
        watcher.start()
        first.ok("reconfigure", "gpt", str(tmp_path / "node1.json"))
        has_ended.set()
        watcher.join()
        assert COUNT * 16 * MIB == 6 * LIMIT, "far more than the limit went over the wire"
        assert max(most) < LIMIT, most
        assert json.loads((first.mount / ".tenplexfs" / "config.json").read_text())["transfer_bytes"] == LIMIT
