"""Two and three daemons as processes, with their mounts."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tenplexfs.core.build import build_ptc
from tenplexfs.formats.layout_json import parse_layout
from tests.cluster.daemons import Daemon, Daemons, check, is_mounted, until
from tests.runtime.cluster import layout_json, tensors_of, write_safetensors

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.mount,
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse is not there"),
]

WHOLE = tensors_of(build_ptc(parse_layout(layout_json())))
FILES = {"layout.json": layout_json(), "other.json": layout_json(nodes={"node0": [0, 3], "node1": [1, 2]})}


def prepare(base: Path, **tensors: np.ndarray) -> None:
    for name, text in FILES.items():
        (base / name).write_bytes(text)
    given = {**WHOLE, **tensors}
    write_safetensors(base / "model.safetensors", {path.replace("/", "."): a for path, a in given.items()})


def load(daemons: Daemons) -> None:
    prepare(daemons.base)
    first = daemons.nodes[0]
    first.ok("job", "create", "gpt", "--layout", str(daemons.base / "layout.json"))
    first.ok("import", "gpt", str(daemons.base / "model.safetensors"), "--step", "7")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Daemons]:
    with Daemons(tmp_path, 2) as daemons:
        yield daemons


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Daemons]:
    with Daemons(tmp_path, 3) as daemons:
        yield daemons


def test_import_and_reconfigure_over_three_nodes(three):
    load(three)
    for node in three.nodes:
        assert node.job()["step"] == 7
        assert check(node.mount, "gpt", WHOLE) > 20
    steps = [
        (2, ["--mesh", "pp=1,tp=4", "--nodes", "node0,node1,node2:2"]),
        (0, ["--mesh", "pp=4,tp=1", "--nodes", "node2:4"]),
        (1, [str(three.base / "other.json")]),
    ]
    for number, (by, target) in enumerate(steps):
        result = three.nodes[by].ok("reconfigure", "gpt", *target)
        assert three.nodes[0].job()["generation"] == number + 2, result
        for node in three.nodes:
            assert check(node.mount, "gpt", WHOLE) > 20
    three.nodes[1].ok("job", "remove", "gpt")
    for node in three.nodes:
        assert [entry.name for entry in node.mount.iterdir()] == [".tenplexfs"]
        until(lambda node=node: node.ok("status")["store"]["used_bytes"] == 0)


def test_readers_never_see_a_mixture_and_never_an_error_while_it_switches(two):
    load(two)
    stop = threading.Event()
    failures: list[str] = []
    reads = [0]

    def read(node: Daemon) -> None:
        last = 0
        try:
            while not stop.is_set():
                job = os.open(node.mount / "gpt", os.O_RDONLY | os.O_DIRECTORY)
                try:
                    generation = _read_at(job, "job.json")["generation"]
                    ptc = build_ptc(parse_layout(json.dumps(_read_at(job, "layout.json"))))
                    assert generation >= last
                    last = generation
                    rank = reads[0] % 4
                    for path in ptc.rank_paths(rank)[:6]:
                        file = os.open(f"model/{rank}/{path}.npy", os.O_RDONLY, dir_fd=job)
                        with os.fdopen(file, "rb") as opened:
                            found = np.load(opened)
                        assert found.shape == ptc.shard(rank, path).local_shape, (generation, rank, path)
                    reads[0] += 1
                except OSError as error:
                    assert error.errno == errno.ESTALE, error  # freed, and said so
                finally:
                    os.close(job)
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=read, args=(node,)) for node in two.nodes for _ in range(2)]
    for thread in threads:
        thread.start()
    for mesh in ("pp=1,tp=4", "pp=4,tp=1", "pp=2,tp=2", "pp=1,tp=4"):
        two.nodes[1].ok("reconfigure", "gpt", "--mesh", mesh)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert reads[0] > 4
    check(two.nodes[0].mount, "gpt", WHOLE)


def _read_at(directory: int, name: str) -> dict[str, object]:
    with os.fdopen(os.open(name, os.O_RDONLY, dir_fd=directory), "rb") as file:
        return json.load(file)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_daemon_comes_back_with_the_same_bytes(two, victim):
    load(two)
    node = two.nodes[victim]
    before = node.job()
    node.kill()
    node.start()
    node.wait()
    until(lambda: (node.mount / "gpt" / "job.json").exists())
    assert node.job() == before
    assert check(node.mount, "gpt", WHOLE) > 20
    assert check(two.nodes[1 - victim].mount, "gpt", WHOLE) > 20
    two.nodes[1].ok("reconfigure", "gpt", "--mesh", "pp=1,tp=4")
    assert check(node.mount, "gpt", WHOLE) > 20


def test_open_files_keep_their_bytes_and_the_daemon_ends_in_time(two):
    load(two)
    node = two.nodes[0]
    file = node.mount / "gpt" / "model" / "0" / "layers" / "0" / "w.npy"
    mapped = np.load(file, mmap_mode="r")
    before = mapped.tobytes()
    node.ok("reconfigure", "gpt", "--mesh", "pp=1,tp=4")
    assert mapped.tobytes() == before
    assert np.load(file).shape != mapped.shape
    with file.open("rb"):
        assert node.stop() < 5
    assert not is_mounted(node.mount)


def test_a_job_is_made_again_at_once_though_files_of_the_one_before_are_open(two):
    load(two)
    first, second = two.nodes
    rank = second.job()["nodes"]["node1"][0]
    with next((second.mount / "gpt" / "model" / str(rank)).rglob("*.npy")).open("rb") as open_file:
        was = open_file.read(4096)
        for _ in range(3):
            first.ok("job", "remove", "gpt")
            second.ok("job", "create", "gpt", "--layout", str(two.base / "other.json"))
        second.ok("import", "gpt", str(two.base / "model.safetensors"), "--step", "1")
        open_file.seek(0)
        assert open_file.read(4096) == was
    for node in two.nodes:
        check(node.mount, "gpt", WHOLE)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["reconfigure", "gpt", "no-node.json"], 1, "node9"),
        (["reconfigure", "gpt", "no-axis.json"], 1, "unknown axis 'zz'"),
        (["reconfigure", "gpt", "no-cover.json"], 1, "no rank holds"),
        (["reconfigure", "gpt", "no-json.json"], 1, "JSON"),
        (["reconfigure", "gpt", "--mesh", "pp=2,tp=3", "--nodes", "node0:6"], 1, "does not divide"),
        (["reconfigure", "nope", "--mesh", "pp=1"], 1, "job nope: no such job"),
        (["job", "show", "nope"], 1, "job nope: no such job"),
        (["job", "create", "a b", "--layout", "layout.json"], 1, "job name"),
        (["job", "create", "gpt", "--layout", "other.json"], 1, "another layout"),
        (["job", "create", "new", "--layout", "layout.json", "--set", "x=1"], 1, "setting 'x': unknown"),
        (["import", "gpt", "cut.safetensors", "--step", "1"], 1, "cut.safetensors"),
        (["import", "gpt", "absent.safetensors", "--step", "1"], 1, "absent.safetensors"),
        (["import", "gpt", "extra.safetensors", "--step", "1"], 1, "extra is not in the layout"),
    ],
)
def test_what_is_bad_is_refused_in_one_line_and_changes_nothing(loaded, arguments, status, says):
    node, base = loaded.nodes[0], loaded.base
    before = node.ok("job", "show", "gpt")
    arguments = [str(base / part) if part.endswith((".json", ".safetensors")) else part for part in arguments]
    code, content, error = node.run(*arguments)
    assert code == status, (content, error)
    message = content["error"]["message"]
    assert "\n" not in message
    assert re.search(says, message), message
    assert node.ok("job", "show", "gpt") == before


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> Iterator[Daemons]:
    base = tmp_path_factory.mktemp("loaded")
    with Daemons(base, 2) as daemons:
        load(daemons)
        half = json.loads(layout_json())
        half["tensors"]["layers/{i}/w"]["shard"] = [{"axis": "tp", "dim": 1}]
        half["tensors"]["layers/{i}/w"]["on"]["tp"] = 0
        axis = json.loads(layout_json())
        axis["tensors"]["emb"]["shard"][0]["axis"] = "zz"
        (base / "no-cover.json").write_text(json.dumps(half))
        (base / "no-axis.json").write_text(json.dumps(axis))
        (base / "no-node.json").write_bytes(layout_json(nodes={"node0": [0, 1], "node9": [2, 3]}))
        (base / "no-json.json").write_text('{"mesh": ')
        data = (base / "model.safetensors").read_bytes()
        (base / "cut.safetensors").write_bytes(data[:-5])
        write_safetensors(
            base / "extra.safetensors",
            {**{k.replace("/", "."): a for k, a in WHOLE.items()}, "extra": WHOLE["norm"]},
        )
        yield daemons


def test_the_control_directory_tells_the_state(loaded):
    control = loaded.nodes[1].mount / ".tenplexfs"
    status = json.loads((control / "status.json").read_text())
    assert status["node"] == "node1"
    assert status["jobs"]["gpt"]["state"] == "ready"
    assert json.loads((control / "jobs" / "gpt" / "status.json").read_text())["step"] == 7
    assert (control / "jobs" / "gpt" / "stop").read_text() == "-\n"
    assert json.loads((control / "config.json").read_text())["listen"] == f"127.0.0.1:{loaded.ports['node1']}"
    assert (control / "endpoint").read_text().strip() == str(loaded.nodes[1].socket)
    assert 'tenplexfs_jobs{state="ready"} 1.0' in (control / "metrics").read_text()
    assert (control / "version").read_text().strip()


def test_what_is_in_use_is_refused(loaded, tmp_path):
    node = loaded.nodes[0]
    ports = {"solo": loaded.ports["node0"]}
    assert "in use" in Daemon(tmp_path, "solo", ports).refused()
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = {"solo": server.getsockname()[1]}
    assert f"process {node.process.pid}" in Daemon(tmp_path, "solo", ports, store=str(node.store)).refused()
    assert "mount" in Daemon(tmp_path, "solo", ports, mount=str(node.mount)).refused()
    assert "socket" in Daemon(tmp_path, "solo", ports, socket=str(node.socket)).refused()
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    assert "full" in Daemon(tmp_path, "solo", ports, mount=str(full)).refused()
    assert check(node.mount, "gpt", WHOLE) > 20


def test_a_lone_daemon_needs_no_registry(tmp_path):
    prepare(tmp_path)
    (tmp_path / "one.json").write_bytes(layout_json(nodes={"node0": [0, 1, 2, 3]}))
    with Daemons(tmp_path, 1) as one:
        node = one.nodes[0]
        node.ok("job", "create", "gpt", "--layout", str(tmp_path / "one.json"))
        node.ok("import", "gpt", str(tmp_path / "model.safetensors"), "--step", "0")
        assert check(node.mount, "gpt", WHOLE) > 20
        node.ok("unmount")
        until(lambda: node.process.poll() is not None)
        assert node.process.returncode == 0
        assert not is_mounted(node.mount)
