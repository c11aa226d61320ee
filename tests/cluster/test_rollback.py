"""Rollback of real daemons: the state and the samples of an earlier step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

import tenplexfs
from tenplexfs._pb import control_pb2
from tenplexfs.core.order import Order
from tenplexfs.errors import InvalidError
from tenplexfs.rpc.connection import Connection
from tests.cluster.daemons import Daemons
from tests.runtime.cluster import write_safetensors

pytestmark = [pytest.mark.cluster, pytest.mark.mount]

LAYOUT = {
    "format": "tenplexfs-layout",
    "version": 1,
    "mesh": {"dp": 2},
    "nodes": {"node0": [0], "node1": [1]},
    "tensors": {"w": {"shape": [4, 6], "dtype": "float32", "shard": [{"axis": "dp", "dim": 0}]}},
    "dataset": {"axis": "dp", "global_batch": 4},
}


@pytest.fixture
def two(tmp_path) -> Iterator[Daemons]:
    with Daemons(tmp_path, 2) as daemons:
        yield daemons


def whole(step: int) -> np.ndarray:
    return np.arange(24, dtype=np.float32).reshape(4, 6) + 100 * step


def save(daemons: Daemons, step: int) -> None:
    paths = [node.mount / "gpt/model" / str(rank) for rank, node in enumerate(daemons.nodes)]
    saves = []
    for rank, path in enumerate(paths):
        state = tenplexfs.load(path)
        state["w"] = whole(step)[2 * rank : 2 * rank + 2]
        state["lr"] = step / 8
        saves.append(tenplexfs.save(state, path, step=step, wait=False))
    for each in saves:
        each.wait()


def test_back_with_the_samples_of_that_step_and_some_of_them_skipped(two, tmp_path):
    first, second = two.nodes
    (tmp_path / "layout.json").write_text(json.dumps(LAYOUT))
    np.save(tmp_path / "rows.npy", np.arange(40, dtype=np.int64))
    write_safetensors(tmp_path / "model.safetensors", {"w": whole(0)})
    first.ok("job", "create", "gpt", "--layout", str(tmp_path / "layout.json"), "--set", "keep_steps=3")
    first.ok("import", "gpt", str(tmp_path / "model.safetensors"))
    source = str(tmp_path / "rows.npy")
    first.ok("dataset", "add", "gpt", "train", "--source", source, "--seed", "5")
    order = [int(sample) for sample in Order(40, 5, 0).span(0, 40)]
    for step in (1, 2, 3):
        save(two, step)
    steps = second.ok("job", "history", "gpt")["steps"]
    assert [(each["step"], each["current"]) for each in steps] == [(3, True), (2, False), (1, False)]

    def roll_back(**asked: int) -> control_pb2.Job:
        request = control_pb2.RollbackRequest(job="gpt", request_id="r1", **asked)
        with closing(Connection(f"127.0.0.1:{two.ports['node1']}")) as scheduler:
            return list(scheduler.stream("Control/Rollback", request, deadline_s=60))[-1].job

    made = roll_back(step=1, skip_samples=10)
    assert (made.step, made.generation) == (1, 3)
    assert roll_back(step=1, skip_samples=10).txid == made.txid
    with pytest.raises(InvalidError, match="request 'r1' was made before and asked for something else"):
        roll_back(step=1, skip_samples=11)
    for node in two.nodes:
        assert node.job()["datasets"]["train"]["consumed"] == 14
        assert np.load(node.mount / "gpt/full/w.npy").tobytes() == whole(1).tobytes()
        for rank in (0, 1):
            found = np.load(node.mount / f"gpt/dataset/train/0/{rank}/order.npy").tolist()
            wanted = [order[at : at + 4][2 * rank : 2 * rank + 2] for at in range(14, 38, 4)]
            assert found == [sample for batch in wanted for sample in batch]
    assert tenplexfs.load(second.mount / "gpt/model/1")["lr"] == 1 / 8
    save(two, 2)  # goes on from there
    assert first.job()["datasets"]["train"]["consumed"] == 18
    assert [each["step"] for each in first.ok("job", "history", "gpt")["steps"]] == [2, 1]

    status, content, _ = first.run("job", "rollback", "gpt", "--step", "3")
    assert (status, content["error"]["message"]) == (1, "job gpt: step 3 is not kept; kept steps: 1, 2")
    status, content, _ = first.run("job", "rollback", "none", "--step", "3")
    assert (status, content["error"]["code"]) == (1, "NOT_FOUND")
    assert first.job()["generation"] == 3
