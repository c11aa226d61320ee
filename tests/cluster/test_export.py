"""`tenplexfs export` of real daemons, against safetensors' own reader and against `import`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import obstore
import pytest
from obstore.store import S3Store

import tenplexfs
from tenplexfs.cli.app import run
from tenplexfs.client.connection import Place
from tenplexfs.client.regions import RegionOf
from tenplexfs.client.whole import WholeSnapshot
from tenplexfs.core.build import build_ptc
from tenplexfs.core.paths import path_of_name
from tenplexfs.formats.layout_json import parse_layout
from tests.cluster.daemons import COMMAND, Daemon, Daemons, until
from tests.cluster.test_daemons import WHOLE, load
from tests.cluster.test_persist import moto
from tests.ports import free_port
from tests.runtime.cluster import write_safetensors
from tests.states import shard_of

safetensors = pytest.importorskip("safetensors")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.mount,
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse is not there"),
]

DTYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64, "I8": np.int8}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    with Daemons(tmp_path_factory.mktemp("export"), 2, memory="512MiB") as daemons:
        load(daemons)
        yield daemons


def read_all(*files: Path) -> dict[str, np.ndarray]:
    """What the library finds in files, by path; bfloat16 too, which its numpy side does not know."""
    found = {}
    for file in files:
        with file.open("rb") as opened:
            for name, entry in safetensors.deserialize(opened.read()):
                array = np.frombuffer(bytes(entry["data"]), DTYPES[entry["dtype"]]).reshape(entry["shape"])
                found[path_of_name(name)] = array
    return found


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert sorted(found) == sorted(wanted)
    for path, array in wanted.items():
        assert (found[path].dtype, found[path].shape) == (array.dtype, array.shape), path
        assert found[path].tobytes() == array.tobytes(), path


def metadata_of(file: Path) -> dict[str, str]:
    with safetensors.safe_open(file, "numpy") as opened:
        return opened.metadata()


def test_whole_tensors_as_one_file_and_as_many_come_back_through_import(two, tmp_path):
    a, b = two.nodes
    said = b.ok("export", "gpt", str(tmp_path / "one"))
    file = tmp_path / "one" / "model.safetensors"
    assert (said["format"], said["version"]) == ("tenplexfs-export", 1)
    assert (said["generation"], said["step"], said["rank"], said["tensors"]) == (1, 7, None, len(WHOLE))
    assert said["files"] == [{"path": str(file), "bytes": file.stat().st_size}]
    assert (said["target"], said["bytes"], said["ties"]) == (str(file), file.stat().st_size, {"head": "emb"})
    assert [each.name for each in (tmp_path / "one").iterdir()] == [file.name]
    same(read_all(file), WHOLE)
    origin = f"gpt 1:7:{said['txid']}"
    assert metadata_of(file) == {"format": "pt", "head": "emb", "tenplexfs": origin}

    said = a.ok("export", "gpt", str(tmp_path / "many"), "--shard-size", "300B")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    shards = [tmp_path / "many" / name for name in sorted(set(index["weight_map"].values()))]
    assert [each["path"] for each in said["files"]] == [*map(str, shards), said["target"]]
    assert index["metadata"] == {
        "total_size": sum(each.nbytes for each in WHOLE.values()),
        "head": "emb",
        "tenplexfs": origin,
    }
    assert all(sum(each.nbytes for each in read_all(file).values()) <= 300 for file in shards)
    same(read_all(*shards), WHOLE)
    assert metadata_of(shards[0]) == {"format": "pt"}

    for name in ("one", "many"):
        job = f"from-{name}"
        b.ok("job", "create", job, "--layout", str(two.base / "layout.json"))
        b.ok("import", job, str(tmp_path / name), "--step", "7")
        compared = a.ok("diff", "gpt", job)
        assert (compared["same"], compared["tensors"]) == (len(WHOLE) + 1, [])
        b.ok("job", "remove", job)
    assert a.ok("verify")["mismatches"] == []


def test_parts_of_it(two, tmp_path):
    node = two.nodes[0]
    ptc = build_ptc(parse_layout((two.base / "layout.json").read_bytes()))
    for rank in ptc.ranks():
        file = tmp_path / f"{rank}.safetensors"
        said = node.ok("export", "gpt", str(file), "--rank", str(rank))
        assert (said["rank"], said["ties"]) == (rank, {})
        held = {
            path: shard_of(ptc, rank, path, WHOLE[ptc.tensors[path].path]) for path in ptc.rank_paths(rank)
        }
        same(read_all(file), held)
    layers = {path.removeprefix("adam/"): array for path, array in WHOLE.items() if path.startswith("adam/")}
    node.ok("export", "gpt@7", str(tmp_path / "adam.safetensors"), "--below", "adam")
    same(read_all(tmp_path / "adam.safetensors"), layers)
    node.ok("export", "gpt", str(tmp_path / "l.safetensors"), "--only", "layers.*", "--full", "--step", "7")
    same(read_all(tmp_path / "l.safetensors"), layers_of(WHOLE))


def layers_of(whole: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {path: array for path, array in whole.items() if path.startswith("layers/")}


@pytest.fixture(scope="module")
def empty(two: Daemons) -> Daemon:
    two.nodes[1].ok("job", "create", "empty", "--layout", str(two.base / "layout.json"))
    return two.nodes[1]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["nope", "x"], 1, "job nope: no such job"),
        (["empty", "x"], 1, "job empty: has no state yet"),
        (["gpt@8", "x"], 1, "step 8 is not here"),
        (["gpt@x", "x"], 2, "job 'gpt@x': need JOB or JOB@STEP"),
        (["gpt@7", "x", "--step", "8"], 2, "--step 8 is another one"),
        (["gpt", "x", "--rank", "4"], 1, "no rank 4: the job has ranks 0 to 3"),
        (["gpt", "x", "--rank", "0", "--full"], 2, "give --full or --rank, not both"),
        (["gpt", "x", "--below", "emb"], 1, "no tensor is to be exported: --below emb"),
        (["gpt", "x", "--shard-size", "5XB"], 2, "--shard-size '5XB': need a size as"),
        (["gpt", "x.safetensors", "--shard-size", "5GB"], 2, "this names one file"),
        (["gpt", "x", "--format", "zip"], 2, "'zip'"),
        (["gpt", "/dev/null"], 2, "/dev/null: is a file"),
        (["gpt", "/proc/x/y"], 1, "/proc/x/y: No such file or directory"),
        (["gpt", "ftp://host/x"], 1, "'ftp://host/x': need an absolute path, or s3://"),
    ],
)
def test_what_is_wrong_is_one_line_and_writes_nothing(
    empty, tmp_path, monkeypatch, capsys, arguments, status, said
):
    monkeypatch.chdir(tmp_path)
    assert run(["--socket", str(empty.socket), "export", *arguments]) == status
    out, error = capsys.readouterr()
    assert (out, len(error.splitlines()), said in error) == ("", 1, True), error
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_stays_unless_forced_and_nothing_old_is_left_beside_it(two, tmp_path):
    node = two.nodes[0]
    node.ok("export", "gpt", str(tmp_path), "--shard-size", "300B")
    (tmp_path / "model.values.json").write_text("of before")
    (tmp_path / "config.json").write_text("{}")
    before = sorted(tmp_path.iterdir())
    status, content, _ = node.run("export", "gpt", str(tmp_path))
    assert (status, content["error"]["code"]) == (1, "ALREADY_EXISTS")
    assert "is there already; --force writes over it" in content["error"]["message"]
    assert sorted(tmp_path.iterdir()) == before
    node.ok("export", "gpt", str(tmp_path), "--force")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    node.ok("export", "gpt", str(tmp_path), "--shard-size", "600B", "--force")
    names = {each.name for each in tmp_path.iterdir()} - {"config.json", "model.safetensors.index.json"}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert names == set(index["weight_map"].values())
    same(read_all(*(tmp_path / name for name in names)), WHOLE)


def test_leaves_that_are_no_tensors_stand_beside(two, tmp_path):
    layout = {
        "format": "tenplexfs-layout",
        "version": 1,
        "mesh": {"dp": 2},
        "nodes": {"node0": [0], "node1": [1]},
        "tensors": {"model/w": {"shape": [4], "dtype": "float64"}, "b": {"shape": [2], "dtype": "int8"}},
    }
    (two.base / "leaves.json").write_text(json.dumps(layout))
    two.nodes[0].ok("job", "create", "leaves", "--layout", str(two.base / "leaves.json"))
    tensors = {"model": {"w": np.arange(4.0), "n": 1}, "b": np.ones(2, np.int8)}
    saves = [
        tenplexfs.save(
            {**tensors, "step": 3, "at": {"lr": 0.5, "n": None, "z": 1j}, "seed": rank},
            node.mount / "leaves" / "model" / str(rank),
            step=3,
            wait=False,
        )
        for rank, node in enumerate(two.nodes)
    ]
    for save in saves:
        save.wait()
    node = two.nodes[1]
    node.ok("export", "leaves", str(tmp_path / "a.safetensors"))
    beside = json.loads((tmp_path / "a.values.json").read_text())
    assert (beside["format"], beside["version"], beside["step"]) == ("tenplexfs-values", 1, 3)
    shown = json.loads((node.mount / "leaves/model/0/at/z.json").read_text())
    assert beside["values"] == {"step": 3, "at/lr": 0.5, "at/n": None, "at/z": shown, "model/n": 1}
    assert beside["ranks"] == {"0": {"seed": 0}, "1": {"seed": 1}}
    node.ok("export", "leaves", str(tmp_path / "m"), "--below", "model", "--rank", "1")
    assert json.loads((tmp_path / "m" / "model.values.json").read_text())["values"] == {"n": 1}
    same(read_all(tmp_path / "m" / "model.safetensors"), {"w": np.arange(4.0)})
    node.ok("export", "leaves", str(tmp_path / "m"), "--only", "b", "--force")
    assert [each.name for each in (tmp_path / "m").iterdir()] == ["model.safetensors"]


BIG = {"w": {"shape": [8, 1 << 20], "dtype": "float32", "shard": [{"axis": "tp", "dim": 0}]}}


def big(two: Daemons, job: str, node: Daemon) -> np.ndarray:
    """Makes a job of 32 MiB, half of it on each node."""
    layout = {"format": "tenplexfs-layout", "version": 1, "mesh": {"tp": 2}, "tensors": BIG}
    (two.base / "big.json").write_text(json.dumps({**layout, "nodes": {"node0": [0], "node1": [1]}}))
    whole = np.random.default_rng(len(job)).standard_normal((8, 1 << 20), np.float32)
    write_safetensors(two.base / f"{job}.safetensors", {"w": whole})
    node.ok("job", "create", job, "--layout", str(two.base / "big.json"), "--set", "keep_steps=1")
    node.ok("import", job, str(two.base / f"{job}.safetensors"), "--step", "1")
    return whole


def test_one_snapshot_is_read_though_the_job_switches_and_the_daemon_is_started_again(two):
    a, b = two.nodes
    whole = big(two, "switching", a)
    region = RegionOf("w", (0, 0), (8, 1 << 20), "float32")
    with WholeSnapshot(Place(Path(), "switching", None, None), step=None, socket=str(a.socket)) as snapshot:
        parts = snapshot.parts([region])
        found = [next(parts).tobytes()]
        write_safetensors(two.base / "zeros.safetensors", {"w": np.zeros_like(whole)})
        for step in (2, 3):
            b.ok("import", "switching", str(two.base / "zeros.safetensors"), "--step", str(step))
            b.ok(
                "reconfigure",
                "switching",
                "--mesh",
                f"tp={step % 2 + 1}",
                "--nodes",
                f"node{step % 2}:{step % 2 + 1}",
            )
        found += [part.tobytes() for part in parts]
    assert b"".join(found) == whole.tobytes()
    assert not np.load(a.mount / "switching" / "full" / "w.npy").any()
    b.ok("job", "remove", "switching")

    whole = big(two, "again", a)
    with WholeSnapshot(Place(Path(), "again", None, None), step=None, socket=str(a.socket)) as snapshot:
        parts = snapshot.parts([region])
        found = [next(parts).tobytes()]
        a.kill()
        a.start()
        found += [part.tobytes() for part in parts]
    a.wait()
    assert b"".join(found) == whole.tobytes()


def test_a_killed_export_leaves_nothing_that_looks_whole(two, tmp_path):
    node = two.nodes[1]
    whole = big(two, "killed", node)
    command = [*COMMAND, "--socket", str(node.socket), "export", "killed"]
    for turn in range(3):
        target = tmp_path / f"{turn}.safetensors"
        aside = tmp_path / f".{target.name}.partial"
        with subprocess.Popen([*command, str(target)]) as process:
            until(lambda aside=aside, size=turn << 23: aside.exists() and aside.stat().st_size > size)
            process.kill()
        if target.exists():  # it was faster
            same(read_all(target), {"w": whole})
            continue
        assert process.returncode == -signal.SIGKILL
        assert subprocess.run([*command, str(target)]).returncode == 0
        same(read_all(target), {"w": whole})
        assert not aside.exists()


def test_an_object_store_takes_it(two, tmp_path, monkeypatch):
    port = free_port()
    secret: dict[str, Any] = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }
    endpoint = {"AWS_ENDPOINT": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true"}
    for name, value in (secret | endpoint).items():
        monkeypatch.setenv(name, value)
    node = two.nodes[0]
    with moto(port):
        said = node.ok("export", "gpt", "s3://bucket/runs/7", "--shard-size", "600B")
        assert said["target"] == "s3://bucket/runs/7/model.safetensors.index.json"
        node.ok("export", "gpt", "s3://bucket/one.safetensors")
        assert node.run("export", "gpt", "s3://bucket/one.safetensors")[0] == 1
        store = S3Store("bucket", client_options={"allow_http": True})
        for each in [*said["files"], {"path": "s3://bucket/one.safetensors"}]:
            key = each["path"].removeprefix("s3://bucket/")
            (tmp_path / Path(key).name).write_bytes(obstore.get(store, key).bytes())
    same(read_all(tmp_path / "one.safetensors"), WHOLE)
    same(read_all(*tmp_path.glob("model-*")), WHOLE)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {each.name for each in tmp_path.glob("model-*")}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_it(two, tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_model
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    node = two.nodes[0]
    wanted = {
        "emb": torch.from_numpy(WHOLE["emb"].view(np.int32).copy()),
        "norm": torch.from_numpy(WHOLE["norm"].view(np.int64).copy()),
    }
    for name, size in (("one", "5GB"), ("many", "300B")):
        node.ok("export", "gpt", str(tmp_path / name), "--shard-size", size)
        state = {"emb": torch.zeros(10, 6), "norm": torch.zeros((), dtype=torch.float64)}
        checkpoint.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / name)))
        assert torch.equal(state["emb"].view(torch.int32), wanted["emb"])
        assert torch.equal(state["norm"].view(torch.int64), wanted["norm"])
    node.ok("export", "gpt", str(tmp_path / "tied.safetensors"), "--only", "[eh]*")
    model = torch.nn.Module()
    model.emb = model.head = torch.nn.Parameter(torch.zeros(10, 6))
    assert load_model(model, tmp_path / "tied.safetensors") == (set(), [])
    assert torch.equal(model.head.detach().view(torch.int32), wanted["emb"])
