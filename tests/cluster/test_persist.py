"""Steps that are persisted: read by safetensors' reader, given back at other layouts, through kills."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from obstore.store import S3Store

import tenplexfs
from tenplexfs.client.session import run_name
from tenplexfs.core.snapshot import JobName
from tenplexfs.formats import manifest
from tenplexfs.runtime.attempts import save_txid
from tests.cluster.daemons import Daemon, Daemons, check, until
from tests.ports import free_port
from tests.runtime.cluster import write_safetensors

safe = pytest.importorskip("safetensors.numpy")
pytestmark = [pytest.mark.cluster, pytest.mark.mount]

SHAPE = (512, 1032)


def layout(nodes: dict[str, list[int]] | None = None) -> dict[str, Any]:
    return {
        "format": "tenplexfs-layout",
        "version": 1,
        "mesh": {"dp": 2, "tp": 2},
        "nodes": nodes or {"node0": [0, 1], "node1": [2, 3]},
        "tensors": {
            "w": {"shape": SHAPE, "dtype": "float32", "shard": [{"axis": "tp", "dim": 1}]},
            "m": {"shape": SHAPE, "dtype": "float64", "shard": [{"axis": ["tp", "dp"], "dim": 0}]},
            "b": {"shape": [7], "dtype": "int8"},
        },
        "dataset": {"axis": "dp", "global_batch": 4},
    }


def whole(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        "w": rng.standard_normal(SHAPE).astype(np.float32),
        "m": rng.standard_normal(SHAPE),
        "b": rng.integers(-128, 128, 7).astype(np.int8),
    }


def held(rank: int, step: int) -> dict[str, np.ndarray]:
    dp, tp = divmod(rank, 2)
    state = whole(step)
    half, quarter = SHAPE[1] // 2, SHAPE[0] // 4
    row = (tp * 2 + dp) * quarter
    return {
        "w": state["w"][:, tp * half : (tp + 1) * half],
        "m": state["m"][row : row + quarter],
        "b": state["b"],
    }


class Job:
    def __init__(self, daemons: Daemons, persist: dict[str, Any], **settings: object) -> None:
        self.daemons = daemons
        self.first = daemons.nodes[0]
        base = daemons.base
        (base / "layout.json").write_text(json.dumps(layout()))
        chosen = [f"--set={name}={json.dumps(value)}" for name, value in settings.items()]
        created = ["--layout", str(base / "layout.json"), "--set", f"persist={json.dumps(persist)}", *chosen]
        self.first.ok("job", "create", "gpt", *created)

    def load(self, step: int) -> None:
        write_safetensors(self.daemons.base / "model.safetensors", whole(step))
        self.first.ok("import", "gpt", str(self.daemons.base / "model.safetensors"), "--step", str(step))

    def save(self, step: int) -> None:
        nodes = self.first.job()["nodes"]
        where = {rank: node for node in self.daemons.nodes for rank in nodes.get(node.name, ())}
        saves = []
        for rank, node in sorted(where.items()):
            path = node.mount / "gpt/model" / str(rank)
            tenplexfs.load(path)
            state = {**held(rank, step), "lr": step / 8, "rank": rank}
            saves.append(tenplexfs.save(state, path, step=step, wait=False))
        for each in saves:
            each.wait()

    def status(self, node: Daemon | None = None) -> dict[str, Any]:
        file = (node or self.first).mount / ".tenplexfs/jobs/gpt/status.json"
        return json.loads(file.read_text())["persist"]

    def until_persisted(self, step: int) -> None:
        until(lambda: all(self.status(node)["last_step"] == step for node in self.daemons.nodes))


def persisted(place: Path) -> dict[int, Path]:
    """The steps in a directory, by what is there and nothing else."""
    return {int(each.parent.name.split(".")[0]): each.parent for each in place.glob("*/manifest.json")}


def assembled(step: Path) -> dict[str, np.ndarray]:
    """The whole tensors of a persisted step: its files by safetensors' reader, put together by hand."""
    found: dict[tuple[int, str], np.ndarray] = {}
    for file in sorted((step / "model").iterdir()):
        rank = int(file.name.split("-")[0])
        found.update({(rank, name): array for name, array in safe.load_file(file).items()})
    assert sorted(found) == [(0, "b"), (0, "m"), (0, "w"), (1, "m"), (1, "w"), (2, "m"), (3, "m")]
    return {
        "w": np.concatenate([found[0, "w"], found[1, "w"]], axis=1),
        "m": np.concatenate([found[0, "m"], found[2, "m"], found[1, "m"], found[3, "m"]]),
        "b": found[0, "b"],
    }


def same(found: dict[str, np.ndarray], step: int) -> None:
    for name, array in whole(step).items():
        assert found[name].tobytes() == array.tobytes(), name


@pytest.fixture
def two(tmp_path) -> Iterator[Daemons]:
    with Daemons(tmp_path, 2, memory="256MiB") as daemons:
        yield daemons


def test_steps_are_persisted_pruned_gone_back_to_and_restored_elsewhere(two, tmp_path):
    place = tmp_path / "läufe hier"
    job = Job(two, {"to": str(place), "every": 10, "keep": 2}, keep_steps=1)
    job.load(0)
    np.save(tmp_path / "rows.npy", np.arange(4000, dtype=np.int64))
    job.first.ok("dataset", "add", "gpt", "train", "--source", str(tmp_path / "rows.npy"))
    job.until_persisted(0)
    for step in (4, 10, 15, 22):
        job.save(step)
        if step % 10 < 5 and step > 4:
            job.until_persisted(step)
    until(lambda: sorted(persisted(place / "gpt")) == [10, 22])
    found = persisted(place / "gpt")
    same(assembled(found[10]), 10)
    same(assembled(found[22]), 22)
    status = job.status(two.nodes[1])
    assert (status["by"], status["last_step"], status["failure"]) == ("node0", 22, None)
    steps = job.first.ok("job", "history", "gpt")["steps"]
    assert [(each["step"], each["kept"], bool(each["persisted"])) for each in steps] == [
        (22, True, True),
        (10, False, True),
    ]

    # back to a step that only the directory has, at another layout, with its samples
    job.first.ok("reconfigure", "gpt", "--mesh", "dp=1,tp=4")
    made = job.first.ok("job", "rollback", "gpt", "--step", "10", "--skip-samples", "8")
    assert made["plan"]["bytes"]["moved"] > 0
    for node in two.nodes:
        assert (node.job()["step"], node.job()["mesh"][1]["size"]) == (10, 4)
        assert node.job()["datasets"]["train"]["consumed"] == 48
        check(node.mount, "gpt", whole(10))
    assert tenplexfs.load(job.first.mount / "gpt/model/0")["lr"] == 10 / 8
    job.first.ok("job", "remove", "gpt")
    assert sorted(persisted(place / "gpt")) == [10, 22]

    # another cluster, one node, knows nothing but the directory
    (tmp_path / "other").mkdir()
    with Daemons(tmp_path / "other", 1, memory="256MiB") as others:
        (lone,) = others.nodes
        status, content, _ = lone.run("job", "restore", "gpt", "--from", str(place))
        assert (status, "no such node is known" in content["error"]["message"]) == (1, True), content
        spread = ["--mesh", "dp=2,tp=1", "--nodes", "node0:2"]
        lone.ok("job", "restore", "gpt", "--from", str(place), "--step", "10", *spread)
        check(lone.mount, "gpt", whole(10))
        assert lone.job()["datasets"]["train"]["consumed"] == 40
        assert np.load(lone.mount / "gpt/dataset/train/0/0/order.npy").shape == (1980,)
        lone.ok("job", "restore", "gpt", "--from", str(place / "gpt"))
        check(lone.mount, "gpt", whole(22))
        assert lone.job()["generation"] == 2
        for arguments, said in (
            (["--from", str(place), "--step", "11"], "step 11 of job gpt is not there; persisted: 10, 22"),
            (["--from", str(place), *spread], "is there, with a layout"),
            (["--from", str(tmp_path / "nothing")], "no persisted step of job gpt"),
            (["--from", "ftp://x/y"], "need an absolute path, or s3://"),
        ):
            status, content, _ = lone.run("job", "restore", "gpt", *arguments)
            assert (status, said in content["error"]["message"]) == (1, True), content

        # a byte that changed is found before anything is shown
        file = next((persisted(place / "gpt")[22] / "model").glob("00001*"))
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        status, content, _ = lone.run("job", "restore", "gpt", "--from", str(place))
        assert (status, "checksum" in content["error"]["message"]) == (1, True), content
        assert lone.job()["generation"] == 2
        check(lone.mount, "gpt", whole(22))


def test_a_persist_that_fails_is_tried_again_and_goes_on_after_a_kill(two, tmp_path):
    place = tmp_path / "place"
    job = Job(two, {"to": str(place), "every": 1, "keep": 2})
    job.load(0)
    job.until_persisted(0)
    job.save(1)
    job.until_persisted(1)
    # Where a file of node1 should be is something else; the txid of a save follows from its step and run.
    blob = manifest.decode(two.nodes[0].store.joinpath("manifest.msgpack").read_bytes()).snapshots[-1][1]
    stored = manifest.decode_snapshot(blob, committed=True)
    txid = save_txid(JobName("gpt"), stored.settings_json, stored.id.generation, 2, run_name())
    obstacle = place / f"gpt/000000000002.1.{txid}/model/00002-0.safetensors"
    (obstacle / "in the way").mkdir(parents=True)
    job.save(2)
    until(lambda: "00002-0.safetensors" in (job.status()["failure"] or ""))
    status = job.status()
    assert (status["last_step"], status["by"]) == (1, "node0")
    check(two.nodes[1].mount, "gpt", whole(2))  # which holds nobody up
    (first,) = obstacle.parent.glob("00000-*")
    time_ns = first.stat().st_mtime_ns
    for node in two.nodes:
        node.kill()
    shutil.rmtree(obstacle)
    for node in two.nodes:
        node.start()
    for node in two.nodes:
        node.wait()
    until(lambda: 2 in persisted(place / "gpt"))
    job.until_persisted(2)
    same(assembled(persisted(place / "gpt")[2]), 2)
    assert first.stat().st_mtime_ns == time_ns  # what was there was not sent again
    until(lambda: sorted(persisted(place / "gpt")) == [1, 2])


@contextmanager
def moto(port: int) -> Iterator[str]:
    """An S3 server with an empty bucket."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as process:
        endpoint = f"http://127.0.0.1:{port}"

        def made() -> bool:
            request = urllib.request.Request(f"{endpoint}/bucket", method="PUT")
            try:
                urllib.request.urlopen(request, timeout=10).close()
            except OSError:
                return False
            return True

        try:
            until(made)
            yield endpoint
        finally:
            process.kill()


def test_an_object_store_that_goes_away_and_jobs_that_are_made_of_it_at_the_start(tmp_path, monkeypatch):
    port = free_port()
    secret = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    for name, value in {
        **secret,
        "AWS_ENDPOINT": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    with Daemons(tmp_path, 2, memory="256MiB") as daemons:
        job = Job(daemons, {"to": "s3://bucket/runs", "every": 1, "keep": 2})
        with moto(port):
            job.load(3)
            job.until_persisted(3)
        job.save(4)
        until(lambda: job.status()["failure"] is not None)
        check(daemons.nodes[1].mount, "gpt", whole(4))
        for node in daemons.nodes:
            assert node.ok("job", "show", "gpt")["state"] == "ready"
        with moto(port):  # another one: nothing is there
            job.until_persisted(4)
            store = S3Store("bucket", client_options={"allow_http": True})
            found = [entry["path"] for part in obstore.list(store, "runs") for entry in part]
            (name,) = (each for each in found if each.endswith("/00003-0.safetensors"))
            data = obstore.get(store, name).bytes()
            assert safe.load(bytes(data))["m"].tobytes() == held(3, 4)["m"].tobytes()
            for node in daemons.nodes:
                node.kill()
                shutil.rmtree(node.store)
            (tmp_path / "new").mkdir()
            with Daemons(tmp_path / "new", 2, memory="256MiB", restore_from="s3://bucket/runs") as others:
                first, second = others.nodes
                until(lambda: (second.mount / "gpt/full/w.npy").exists())
                check(second.mount, "gpt", whole(4))
                assert (first.job()["step"], first.job()["generation"]) == (4, 1)
                assert tenplexfs.load(second.mount / "gpt/model/3")["rank"] == 3
                assert first.ok("job", "show", "gpt")["settings"]["persist"]["to"] == "s3://bucket/runs"


def test_a_job_that_all_its_nodes_have_lost_is_restored_in_its_place(two, tmp_path):
    place = tmp_path / "place"
    job = Job(two, {"to": str(place), "every": 1, "keep": 2}, keep_steps=1)
    job.load(3)
    job.until_persisted(3)
    generation = job.first.job()["generation"]
    restore = ["job", "restore", "gpt", "--from", str(place)]
    spread = ["--mesh", "dp=2,tp=1", "--nodes", "node0:1,node1:1"]
    # node1 begins anew; node0, which has the registry too, keeps its part: the job is given its step as ever
    second = two.nodes[1]
    second.kill()
    shutil.rmtree(second.store)
    status, content, _ = job.first.run(*restore)
    said = "node1 is lost, the other nodes have their part: reconfigure it without, or take the persisted"
    assert (status, said in content["error"]["message"]) == (1, True), content
    second.start()
    second.wait()
    status, content, _ = job.first.run(*restore, *spread)
    assert (status, "is there, with a layout" in content["error"]["message"]) == (1, True), content
    job.first.ok(*restore)
    assert job.first.job()["generation"] == generation + 1
    check(second.mount, "gpt", whole(3))

    # whatever is left, in another layout
    made = job.first.ok(*restore, *spread, "--replace")["job"]
    assert (made["generation"], made["step"], made["mesh"]) == (generation + 2, 3, {"dp": 2, "tp": 1})
    check(second.mount, "gpt", whole(3))

    # both begin anew; the registry has its file
    for node in two.nodes:
        node.kill()
        for each in node.store.iterdir():
            if each.name != "registry":
                shutil.rmtree(each) if each.is_dir() else each.unlink()
    for node in two.nodes:
        node.start()
    for node in two.nodes:
        node.wait()
    made = job.first.ok(*restore)["job"]
    assert (made["generation"], made["step"], made["mesh"]) == (generation + 3, 3, {"dp": 2, "tp": 2})
    for node in two.nodes:
        until(lambda node=node: (node.mount / "gpt/full/w.npy").exists())
        check(node.mount, "gpt", whole(3))
    job.save(4)
    job.until_persisted(4)
