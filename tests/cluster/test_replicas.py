"""The case of the paper, (tp 4, pp 2, dp 2) on four nodes: what comes back when one, two, three are lost."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenplexfs
from tenplexfs._pb import control_pb2
from tenplexfs.rpc.connection import Connection
from tests.cluster.daemons import Daemon, Daemons, check, until
from tests.runtime.cluster import write_safetensors

pytestmark = [pytest.mark.cluster, pytest.mark.mount]

ROWS, COLUMNS = 64, 96
FROZEN = 1 << 20
MESH = {"pp": 2, "dp": 2, "tp": 4}


def layout() -> dict[str, Any]:
    """Each node has a stage and a replica; the optimizer is cut over data parallelism, too."""
    return {
        "format": "tenplexfs-layout",
        "version": 1,
        "mesh": MESH,
        "nodes": {f"node{n}": list(range(4 * n, 4 * n + 4)) for n in range(4)},
        "tensors": {
            "layers/{i}/w": {
                "shape": [ROWS, COLUMNS],
                "dtype": "float32",
                "count": {"i": 4},
                "shard": [{"axis": "tp", "dim": 1}],
                "on": {"pp": {"by": "i", "owner": [0, 0, 1, 1]}},
            },
            "adam/layers/{i}/w": {"like": "layers/{i}/w", "then": [{"axis": "dp", "dim": 0}]},
            "frozen": {
                "shape": [FROZEN // 4],
                "dtype": "float32",
                "shard": [{"axis": ["pp", "dp", "tp"], "dim": 0}],
            },
        },
        "dataset": {"axis": "dp", "global_batch": 8},
    }


def whole(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    names = [f"{kind}layers/{i}/w" for i in range(4) for kind in ("", "adam/")]
    made = {name: rng.standard_normal((ROWS, COLUMNS)).astype(np.float32) for name in names}
    return {**made, "frozen": np.arange(FROZEN // 4, dtype=np.float32)}


def held(rank: int, step: int) -> dict[str, np.ndarray]:
    pp, dp, tp = rank // 8, rank // 4 % 2, rank % 4
    state = whole(step)
    columns, rows = (
        slice(tp * COLUMNS // 4, (tp + 1) * COLUMNS // 4),
        slice(dp * ROWS // 2, (dp + 1) * ROWS // 2),
    )
    mine = {"frozen": state["frozen"].reshape(16, -1)[rank]}
    for i in (2 * pp, 2 * pp + 1):
        mine[f"layers/{i}/w"] = state[f"layers/{i}/w"][:, columns]
        mine[f"adam/layers/{i}/w"] = state[f"adam/layers/{i}/w"][rows, columns]
    return mine


class Four(Daemons):
    """Four nodes; the last one has the registry and no rank, as it would be elsewhere."""

    def __init__(self, base: Path, **flags: str) -> None:
        super().__init__(base, 5, registry="node4", memory="64MiB", **flags)

    def make(self, *settings: str) -> None:
        first = self.nodes[0]
        (self.base / "layout.json").write_text(json.dumps(layout()))
        write_safetensors(
            self.base / "model.safetensors", {name.replace("/", "."): a for name, a in whole(0).items()}
        )
        chosen = [part for each in settings for part in ("--set", each)]
        first.ok("job", "create", "gpt", "--layout", str(self.base / "layout.json"), *chosen)
        first.ok("import", "gpt", str(self.base / "model.safetensors"))

    def save(self, step: int) -> None:
        saves = []
        for rank in range(16):
            path = self.nodes[rank // 4].mount / "gpt/model" / str(rank)
            tenplexfs.load(path)
            flat = {name.replace("/", "."): array for name, array in held(rank, step).items()}
            saves.append(tenplexfs.save({**flat, "lr": step / 8}, path, step=step, wait=False))
        for each in saves:
            each.wait()

    def lose(self, *numbers: int) -> None:
        for number in numbers:
            self.nodes[number].kill()
            shutil.rmtree(self.nodes[number].store)

    def come_back(self, *numbers: int) -> None:
        """Nodes that were lost are there again, empty, and the job is as it was."""
        for number in numbers:
            self.nodes[number].start()
        for number in numbers:
            self.nodes[number].wait()
        self.reconfigure(str(self.base / "layout.json"))

    def reconfigure(self, *how: str) -> str:
        """Asks the node without ranks; returns what it said on the way."""
        request = control_pb2.ReconfigureRequest(job="gpt", request_id=uuid.uuid4().hex)
        if how[0] == "--mesh":
            axes = (axis.split("=") for axis in how[1].split(","))
            request.mesh.extend(control_pb2.Axis(name=name, size=int(size)) for name, size in axes)
            request.nodes.update(
                {node: int(n) for node, n in (each.split(":") for each in how[3].split(","))}
            )
        else:
            request.layout_json = Path(how[0]).read_text()
        with closing(Connection(f"unix:{self.nodes[4].socket}.grpc")) as connection:
            steps = list(connection.stream("Control/Reconfigure", request, deadline_s=60))
        assert steps[-1].phase == "done", steps
        return max((step.message for step in steps), key=len)

    def check(self, step: int, left: Sequence[int]) -> None:
        for number in left:
            job = self.nodes[number].job()
            assert (job["step"], job["datasets"]["train"]["consumed"]) == (step, 8 * step)
            assert tenplexfs.load(self.nodes[number].mount / "gpt/model/0")["lr"] == step / 8
        check(self.nodes[left[0]].mount, "gpt", whole(step))

    def status(self, number: int = 4) -> dict[str, Any]:
        return json.loads((self.nodes[number].mount / ".tenplexfs/jobs/gpt/status.json").read_text())

    def until_survives(self, losses: int, nodes: Sequence[int] = (0, 1, 2, 3)) -> None:
        until(
            lambda: [self.status(number)["survives_node_losses"] for number in nodes] == [losses] * len(nodes)
        )


def log_bytes(node: Daemon) -> list[int]:
    """The bytes of each set of copies, as the daemon logged them before it said that it has the set."""
    lines = node.log.read_text().splitlines()
    at = [i for i, line in enumerate(lines) if "has copies of" in line]
    staged = [[line for line in lines[:i] if "bytes staged" in line][-1] for i in at]
    return [int(line.split(" arrays, ")[1].split(" bytes")[0]) for line in staged]


def test_what_one_two_and_three_nodes_had_comes_back(tmp_path):
    """One and two nodes are lost to copies; the third time only the persisted step is left."""
    place = tmp_path / "persisted"
    with Four(tmp_path) as four:
        np.save(tmp_path / "rows.npy", np.arange(4000, dtype=np.int64))
        four.make("replicas=2", f'persist={{"to": "{place}", "every": 2, "keep": 1}}')
        four.nodes[0].ok("dataset", "add", "gpt", "train", "--source", str(tmp_path / "rows.npy"))
        for step in (1, 2, 3):
            four.save(step)
        four.until_survives(2)
        for number in range(4):
            assert four.status(number)["replicas"] == {
                "wanted": 2,
                "comes_to": 2,
                "of": [f"node{(number - turn) % 4}" for turn in (1, 2)],
                "step": 3,
                "is_complete": True,
                "failure": None,
            }
        # Nobody replicates the optimizer; weights of a stage come once, or are here; frozen ones stay.
        stage = ROWS * COLUMNS * 4
        assert [log_bytes(node)[-1] for node in four.nodes[:4]] == [2 * stage + 2 * stage] * 4
        assert [log_bytes(node)[0] for node in four.nodes[:4]] == [4 * stage + FROZEN // 2] * 4

        nodes = ["--nodes", "node0:4,node2:2,node3:2"]
        four.lose(1)
        assert "from copies on" in four.reconfigure("--mesh", "dp=1", *nodes)
        four.check(3, (0, 2, 3))
        four.until_survives(2, (0, 2, 3))

        four.come_back(1)
        four.save(4)
        four.save(5)
        four.until_survives(2)
        four.lose(0, 3)
        assert "from copies on" in four.reconfigure("--mesh", "dp=1", "--nodes", "node1:4,node2:4")
        four.check(5, (1, 2))
        four.until_survives(1, (1, 2))

        four.come_back(0, 3)
        four.save(6)
        until(lambda: four.status(0)["persist"]["last_step"] == 6)
        four.save(7)
        four.until_survives(2)
        four.lose(0, 1, 2)
        message = four.reconfigure("--mesh", "dp=1,pp=1", "--nodes", "node3:4")
        assert f"back at step 6, persisted at {place}/gpt/" in message
        four.check(6, (3,))
        assert four.nodes[3].ok("job", "history", "gpt")["steps"][0]["step"] == 6
