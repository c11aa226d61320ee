"""Tenplex's clients against real daemons: every kind of request, every refusal, and what must never be."""

from __future__ import annotations

import io
import json
import socket
import tarfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from urllib.parse import quote, urlencode

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tenplexfs
from tenplexfs.client.connection import Connection
from tests.cluster.daemons import Daemon, Daemons, free_port, until
from tests.http.tenplex import Pickle, Server, listed, same

pytestmark = [pytest.mark.cluster, pytest.mark.mount]

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


bfloat16 = np.dtype(__import__("ml_dtypes").bfloat16)
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


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    port = free_port()
    base = tmp_path_factory.mktemp("http")
    with Daemons(base, 1, memory="192MiB", http=f"127.0.0.1:{port}") as daemons:
        made = Node(daemons.nodes[0], Server(port))
        yield made
        assert "Traceback" not in made.daemon.log.read_text()


@pytest.fixture(scope="module")
def job(node):
    """A job at step 3, saved as Tenplex does."""
    name = node.job({**LAYOUT, "nodes": {"node0": [0, 1]}})
    for step in (1, 2, 3):
        assert (
            node.http.save(state_of(0, step), name, step, 0)
            == f"step {step}: waits: rank 1: nothing was uploaded"
        )
        assert f"step {step}: is committed, 1:{step}:" in node.http.save(state_of(1, step), name, step, 1)
    return name


def test_a_state_comes_back_as_tenplex_saved_it(node, job):
    for rank in (0, 1):
        state, step = node.http.load(job, rank)
        assert step == 3
        assert same(state, listed(state_of(rank, 3)))
    assert node.http.listing(f"/job/{job}/save/0") is None
    everything = node.http.listing(f"/job/{job}")
    assert everything == sorted(
        [
            f"/job/{job}/iter",
            *(name for rank in (0, 1) for name in node.http.listing(f"/job/{job}/load/{rank}")),
        ]
    )
    assert node.http.listing(f"/job/{job}/load/1/optimizer/state") == [
        f"/job/{job}/load/1/optimizer/state/0/m.numpy.ndarray"
    ]


def test_the_mount_and_the_library_show_the_same(node, job):
    root = node.daemon.mount / job
    assert node.daemon.job(job)["step"] == 3
    for rank in (0, 1):
        assert same(np.load(root / "model" / str(rank) / "big.npy"), state_of(rank, 3)["big"])
    leaf = json.loads((root / "model/1/optimizer/param_groups/0/betas.json").read_text())
    assert leaf == [0.9, 0.95]
    assert node.daemon.ok("verify")["mismatches"] == []
    assert json.loads((node.daemon.mount / ".tenplexfs/status.json").read_text())["http"] == (
        f"127.0.0.1:{node.http.port}"
    )
    with pytest.raises(tenplexfs.errors.InvalidError, match="allow_pickle"):
        tenplexfs.load(root / "model/1")


def test_what_the_library_saved_is_there_over_http(node):
    name = node.job({**ONE, "nodes": {"node0": [0]}})
    array = np.arange(60, dtype=np.int16).reshape(4, 3, 5)
    tenplexfs.save(
        {"w": array, "b": (1, [2.5, "x"], {"k": None}), "raw": b"\0"},
        node.daemon.mount / name / "model/0",
        step=4,
    )
    base = f"/job/{name}/load/0"
    assert node.http.listing(base) == sorted(
        f"{base}/{each}"
        for each in (
            "b/0.int",
            "b/1/0.float",
            "b/1/1.str",
            "b/1/dir.meta",
            "b/2/k.none",
            "b/dir.meta",
            "raw",
            "w.numpy.ndarray",
        )
    )
    assert same(node.http.tensor(f"{base}/w.numpy.ndarray"), array)
    assert node.http.query(f"{base}/raw")[2] == b"\0"
    # and goes on over HTTP: steps go up, whoever saves them
    status, line = node.http.put(f"/job/{name}/iter", "4")
    assert (status, line) == (200, b"step 4: is the newest")
    assert "is committed" in node.http.save({"w": array + 1}, name, 5, 0)
    assert same(np.load(node.daemon.mount / name / "model/0/w.npy"), array + 1)


BOUNDS = st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans(), st.booleans())


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["model/layers.0.w", "big", "optimizer/state/0/m", "scalar", "empty"]),
    st.lists(BOUNDS, max_size=2),
    st.booleans(),
)
def test_ranges_are_numpys_slices(node, job, name, bounds, brackets):
    whole = node_state(name)
    bounds = [
        (min(a, b, size), min(max(a, b), size), low, high)
        for (a, b, low, high), size in zip(bounds, whole.shape, strict=False)
    ]
    words = ",".join(f"{'' if low else a}:{'' if high else b}" for a, b, low, high in bounds)
    slices = tuple(slice(None if low else a, None if high else b) for a, b, low, high in bounds)
    path = f"/job/{job}/load/1/{name}.numpy.ndarray"
    wanted = np.ascontiguousarray(whole[slices]).reshape(whole[slices].shape)
    found = node.http.tensor(path, range=f"[{words}]" if brackets else words)
    assert same(found.view(bfloat16) if whole.dtype == bfloat16 else found, wanted)


def node_state(name: str) -> np.ndarray:
    found: object = state_of(1, 3)
    for part in name.split("/"):
        found = found[int(part) if part.isdecimal() else part]
    return found


def test_large_ranges_come_in_pieces(node, job):
    for words, slices in (("17:,100:400", np.s_[17:, 100:400]), (":,3:", np.s_[:, 3:]), ("", np.s_[:])):
        found = node.http.tensor(f"/job/{job}/load/1/big.numpy.ndarray", range=words)
        assert same(found, np.ascontiguousarray(state_of(1, 3)["big"][slices]))


def test_files_are_found_by_their_names(node, job):
    base = f"/job/{job}/load/1"
    for path, kind, data in (
        ("iteration", "int", b"3"),
        ("iteration.int", "int", b"3"),
        ("optimizer/param_groups/dir", "meta", b"list\n1"),
        ("optimizer/param_groups/0/fused", "none", b"None"),
        ("args", "argparse.Namespace", b"a pickle of rank 1"),
        ("text", "str", "grün\n2".encode()),
    ):
        status, headers, found = node.http.query(f"{base}/{path}")
        assert (status, headers["dtype"], found) == (200, kind, data)
    # without x-tensor: a range gives a tensor, no range its bytes as a file
    whole = state_of(1, 3)["model"]["layers.0.w"]
    _, headers, data = node.http.query(f"{base}/model/layers.0.w.numpy.ndarray", range=":2")
    assert (headers["x-tensor-dims"], headers["x-tensor-dtype"], data) == ("2,6", "f32", whole[:2].tobytes())
    assert node.http.query(f"{base}/model/layers.0.w")[2] == whole.tobytes()
    assert node.http.query(f"/job/{job}/iter")[1]["dtype"] == "text"


@pytest.mark.parametrize(
    ("method", "target", "kind", "body", "status"),
    [
        ("GET", "/nothing", "", "", 404),
        ("POST", "/query?path=/job/JOB/iter", "", "", 405),
        ("GET", "/upload?path=x", "", "", 405),
        ("PUT", "/upload?path=x", "", "x", 405),
        ("POST", "/delete?path=/job/JOB/save/0", "", "", 405),
        ("DELETE", "/peers", "", "", 405),
        ("GET", "/query", "", "", 400),
        ("GET", "/query?path=/job/nosuch/iter", "", "", 404),
        ("GET", "/query?path=/job/nosuch/load/0", "x-dir", "", 404),
        ("GET", "/query?path=/job/.x/load/0", "x-dir", "", 400),
        ("GET", "/query?path=/etc/passwd", "", "", 404),
        ("GET", "/query?path=/job/JOB/load/0/../../x", "", "", 400),
        ("GET", "/query?path=/job/JOB/load/7/w", "", "", 404),
        ("GET", "/query?path=/job/JOB/load/0/w", "", "", 404),
        ("GET", "/query?path=/job/JOB/load/0/optimizer", "", "", 404),
        ("GET", "/query?path=/job/JOB/load/0", "", "", 404),
        ("GET", "/query?path=/job/JOB/load/0/nothing", "x-dir", "", 404),
        ("GET", "/query?path=/job/JOB/save/0/big.numpy.ndarray", "x-tensor", "", 404),
        ("GET", "/query?path=/job/JOB/load/0/iteration", "x-tensor", "", 400),
        ("GET", "/query?path=/job/JOB/load/0/big&range=0:9999", "x-tensor", "", 400),
        ("GET", "/query?path=/job/JOB/load/0/big&range=3:2", "x-tensor", "", 400),
        ("GET", "/query?path=/job/JOB/load/0/big&range=:,:,:", "x-tensor", "", 400),
        ("GET", "/query?path=/job/JOB/load/0/big&range=x", "x-tensor", "", 400),
        ("POST", "/upload", "", "x", 400),
        ("POST", "/upload?path=/job/nosuch/save/0/a.int", "", "1", 404),
        ("POST", "/upload?path=/job/JOB/save/9/a.int", "", "1", 404),
        ("POST", "/upload?path=/job/JOB/save/0", "", "1", 400),
        ("POST", "/upload?path=/job/JOB/save/0/../../x.int", "", "1", 400),
        ("POST", "/upload?path=/job/JOB/load/0/a.int", "", "1", 409),
        ("POST", "/upload?path=/other/a.int", "", "1", 404),
        ("POST", "/upload?path=/job/JOB/save/0/a.int", "", "one", 400),
        ("POST", "/upload?path=/job/JOB/save/0/l/dir.meta", "", "list", 400),
        ("POST", "/upload?path=/job/JOB/save/0/big.numpy.ndarray", "x-tensor", "", 400),
        (
            "POST",
            "/upload?path=/job/JOB/save/0/big.numpy.ndarray&dtype=f32&dims=600,512",
            "x-tensor",
            "",
            400,
        ),
        (
            "POST",
            "/upload?path=/job/JOB/save/0/big.numpy.ndarray&dtype=f64&dims=600,1024",
            "x-tensor",
            "",
            400,
        ),
        (
            "POST",
            "/upload?path=/job/JOB/save/0/big.numpy.ndarray&dtype=f64&dims=600,512",
            "x-tensor",
            "x",
            400,
        ),
        (
            "POST",
            "/upload?path=/job/JOB/save/0/other.numpy.ndarray&dtype=f64&dims=1",
            "x-tensor",
            "12345678",
            400,
        ),
        (
            "POST",
            "/upload?path=/job/JOB/save/0/rng.numpy.ndarray&dtype=f64&dims=2",
            "x-tensor",
            "12345678",
            400,
        ),
        (
            "POST",
            "/upload?path=/job/JOB/save/0/rng.numpy.ndarray&dtype=f64&dims=9999999",
            "x-tensor",
            "",
            413,
        ),
        ("POST", "/upload?path=/job/JOB/save/0/x.int&path=/job/JOB/save/0/y.int", "", "z", 400),
        ("POST", "/upload?path=/job/JOB/iter", "", "three", 400),
        ("POST", "/upload?path=/job/JOB/iter", "", "4", 409),
        ("POST", "/upload?path=/job/JOB/iter", "", "2", 409),
        ("POST", "/upload?path=/job/JOB/iter", "", "1" * 100, 413),
        ("DELETE", "/delete", "", "", 400),
        ("DELETE", "/delete?path=/job/JOB/save/1", "", "", 404),
        ("DELETE", "/delete?path=/job/JOB/save", "", "", 404),
        ("DELETE", "/delete?path=/job/JOB/load/0", "", "", 409),
        ("DELETE", "/delete?path=/job/JOB", "", "", 409),
        ("DELETE", "/delete?path=/job/nosuch", "", "", 404),
        ("POST", "/peers", "", "x", 400),
        ("POST", "/peers", "", "10.0.0.9:1", 409),
    ],
)
def test_refusals_are_a_line_and_change_nothing(node, job, method, target, kind, body, status):
    headers = {"content_type": kind} if kind else {}
    found, _, line = node.http.request(method, target.replace("JOB", job), body or None, **headers)
    assert found == status, line
    assert line and b"\n" not in line
    assert node.daemon.job(job)["step"] == 3
    assert node.http.listing(f"/job/{job}/save") is None
    assert node.http.delete(f"/job/{job}/save")[0] == 404


WORDS = st.text(max_size=12) | st.sampled_from(
    ["", "0", "1", "save", "load", "iter", "job", "..", ".", "/", "//", "%", "%2f", "\0", "\n", "é" * 200,
     "a" * 5000, "dir.meta", "big.numpy.ndarray", "x.numpy.ndarray.meta", "x.int", "[", ":", "9:", "O"]
)  # fmt: skip
PATHS = st.one_of(
    WORDS,
    st.builds(lambda job, rest: f"/job/{job}/{rest}", st.sampled_from(["JOB", "x", ""]), WORDS),
    st.builds(
        lambda section, rank, name: f"/job/JOB/{section}/{rank}/{name}",
        st.sampled_from(["save", "load"]),
        st.sampled_from(["0", "1", "2", "x", "99999999999999999999"]),
        WORDS,
    ),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(
        ["GET /query", "POST /upload", "DELETE /delete", "POST /peers", "PATCH /query", "GET /x"]
    ),
    st.fixed_dictionaries(
        {}, optional={"path": PATHS, "range": WORDS, "dtype": WORDS, "dims": WORDS, "prefix": PATHS}
    ),
    st.sampled_from(["", "x-tensor", "x-dir", "application/x-tar", "text/plain"]),
    st.binary(max_size=2000) | st.sampled_from([b"1", b"list\n2", b"None"]),
    st.booleans(),
)
def test_whatever_is_asked_gets_an_answer(node, job, what, query, kind, body, replace):
    method, path = what.split()
    fields = {name: value.replace("JOB", job) for name, value in query.items()}
    target = f"{path}?{urlencode(fields, errors='surrogatepass')}"
    headers = {"content_type": kind, "x_replace": str(replace)}
    status, _, line = node.http.request(method, target, body if method == "POST" else None, **headers)
    assert status in (200, 400, 404, 405, 409, 413, 431), line
    assert status == 200 or (line and b"\n" not in line)
    assert node.daemon.job(job)["step"] == 3


def test_peers_are_those_that_are_known(node):
    _, known = node.http.ok("GET", "/peers")
    assert known == f"127.0.0.1:{node.daemon.arguments[5].rpartition(':')[2]}".encode()
    assert node.http.ok("POST", "/peers", known)[1] == b""


def test_uploads_are_listed_read_replaced_and_deleted(node):
    name = node.job({**LAYOUT, "nodes": {"node0": [0, 1]}})
    http, base = node.http, f"/job/{name}/save/0"
    state = state_of(0, 1)
    http.bring(state, base)
    assert len(http.listing(base)) == FILES
    assert same(
        http.tensor(f"{base}/big.numpy.ndarray", range=":,5:9"), np.ascontiguousarray(state["big"][:, 5:9])
    )
    assert same(http.tensor(f"{base}/rng_state/0/np_rng_state/1"), state["rng_state"][0]["np_rng_state"][1])
    assert http.query(f"{base}/iteration")[2] == b"1"
    # what is there is not replaced by chance
    assert http.put(f"{base}/iteration.int", "2")[0] == 409
    assert http.put_tensor(f"{base}/scalar.numpy.ndarray", np.array(9))[0] == 409
    assert http.put_tensor(f"{base}/scalar", np.array(9))[0] == 409
    assert http.put(f"{base}/iteration.int", "2", replace=True)[0] == 200
    assert http.put_tensor(f"{base}/scalar.numpy.ndarray", np.array(9), x_replace="true")[0] == 200
    assert (http.query(f"{base}/iteration")[2], int(http.tensor(f"{base}/scalar"))) == (b"2", 9)
    # one tensor under two names is none
    clash = f"{base}/model/layers/0/w.numpy.ndarray"
    assert http.put_tensor(clash, state["model"]["layers.0.w"])[0] == 409
    assert http.delete(f"{base}/optimizer/param_groups") == (200, b"9 4\n")
    assert http.delete(f"{base}/iteration.int") == (200, b"1 0\n")
    assert http.delete(f"{base}/iteration.int")[0] == 404
    assert http.delete(base) == (200, b"%d 9\n" % (FILES - 10))
    assert http.listing(base) is None


def test_a_rank_that_is_not_whole_is_not_saved(node):
    name = node.job({**LAYOUT, "nodes": {"node0": [0, 1]}})
    http = node.http
    http.bring(state_of(0, 1), f"/job/{name}/save/0")
    http.bring({**state_of(1, 1), "big": None}, f"/job/{name}/save/1")
    http.delete(f"/job/{name}/save/0/scalar.numpy.ndarray")
    status, line = http.put(f"/job/{name}/iter", "1")
    assert status == 409 and b"rank 0: 1 tensors are missing: scalar" in line
    assert http.put_tensor(f"/job/{name}/save/0/scalar.numpy.ndarray", np.array(1))[0] == 200
    # who uploads for all ranks says so once, and may be told that it was too early
    assert b"rank 1: 1 tensors are missing: big" in http.put(f"/job/{name}/iter", "1")[1]
    assert http.put_tensor(f"/job/{name}/save/1/big.numpy.ndarray", state_of(1, 1)["big"])[0] == 200
    status, line = http.put(f"/job/{name}/iter", "1")
    assert status == 409 and b"is there with another type" in line
    assert http.delete(f"/job/{name}/save/1/big.none")[0] == 200
    assert http.put(f"/job/{name}/save/1/list/dir.meta", "list\n2")[0] == 200
    assert http.put(f"/job/{name}/save/1/list/0.int", "1")[0] == 200
    status, line = http.put(f"/job/{name}/iter", "1")
    assert status == 409 and b"says 2 items, item 1 is missing" in line
    assert http.put(f"/job/{name}/save/1/list/1.int", "1")[0] == 200
    status, line = http.put(f"/job/{name}/iter", "2")
    assert status == 409 and b"another rank said step 1" in line
    assert http.query(f"/job/{name}/iter")[0] == 404
    assert "is committed" in http.done(name, 1)


def test_replicas_that_differ_are_refused_and_the_step_is_given_up(node):
    name = node.job({**LAYOUT, "nodes": {"node0": [0, 1]}})
    http = node.http
    http.bring(state_of(0, 1), f"/job/{name}/save/0")
    http.bring({**state_of(1, 1), "scalar": np.array(7)}, f"/job/{name}/save/1")
    status, line = http.put(f"/job/{name}/iter", "1")
    assert status == 400 and b"scalar: ranks 0 and 1 hold the same part, and their bytes differ" in line
    assert http.listing(f"/job/{name}/save") is None
    for rank in (0, 1):
        http.save(state_of(rank, 1), name, 1, rank)
    assert node.daemon.job(name)["step"] == 1


def test_an_upload_that_breaks_off_leaves_nothing(node):
    name = node.job({**LAYOUT, "nodes": {"node0": [0, 1]}})
    path = f"/job/{name}/save/0"
    node.http.bring({"iteration": 1}, path)
    big = state_of(0, 1)["big"]
    head = f"POST /upload?path={path}/big.numpy.ndarray&dtype=f64&dims=600,512 HTTP/1.1\r\nhost: x\r\n"
    for framing, body in (
        (f"content-type: x-tensor\r\ncontent-length: {big.nbytes}\r\n\r\n", big.tobytes()[:-1]),
        ("content-type: x-tensor\r\ntransfer-encoding: chunked\r\n\r\n", b"10000\r\n" + bytes(1 << 16)),
    ):
        with socket.create_connection(("127.0.0.1", node.http.port)) as connection:
            connection.sendall((head + framing).encode() + body)
            # it is there neither while it comes, nor to be saved or deleted, nor afterwards
            until(lambda: b"still coming" in node.http.put(f"/job/{name}/iter", "1")[1])
            assert node.http.query(f"{path}/big.numpy.ndarray", "x-tensor")[0] == 404
            assert node.http.delete(path)[0] == 409
        until(lambda: node.http.delete(path)[0] == 200)
        node.http.bring({"iteration": 1}, path)
        assert node.http.listing(path) == [f"{path}/iteration.int"]


def test_what_a_run_left_is_no_part_of_the_next(node):
    name = node.job({**LAYOUT, "nodes": {"node0": [0, 1]}})
    http = node.http
    # A run that ends before rank 1 is done; all of its tensors are there, and not all values.
    http.save(state_of(0, 1), name, 1, 0)
    assert http.listing(f"/job/{name}/save/1") is None
    http.bring({**state_of(1, 1), "rng_state": []}, f"/job/{name}/save/1")
    # The next one: that rank 0 was done before counts no more.
    for rank in (0, 1):
        assert http.listing(f"/job/{name}/save/{rank}")
        assert http.delete(f"/job/{name}/save/{rank}")[0] == 200
        http.bring(state_of(rank, 1), f"/job/{name}/save/{rank}")
    assert http.done(name, 1) == "step 1: waits: 1 more of its ranks are to say that they are done"
    assert "is committed" in http.done(name, 1)
    assert same(http.load(name, 1)[0], listed(state_of(1, 1)))


def test_all_ranks_at_once_each_for_itself(node):
    layout = {**LAYOUT, "mesh": {"tp": 2, "dp": 4}, "nodes": {"node0": list(range(8))}}
    name = node.job(layout)

    def save(rank: int, step: int) -> str:
        state = {**state_of(rank // 4, step), "rank": rank}
        return node.http.save(state, name, step, rank)

    with ThreadPoolExecutor(8) as pool:
        for step in (1, 2):
            lines = list(pool.map(partial(save, step=step), range(8)))
            assert sum("is committed" in line for line in lines) == 1, lines
    for rank in (0, 7):
        assert same(node.http.load(name, rank)[0], listed({**state_of(rank // 4, 2), "rank": rank}))


def tar_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for file, data in files.items():
            info = tarfile.TarInfo(file)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def upload_tar(node, data: bytes, prefix: str = "", **headers: str) -> tuple[int, bytes]:
    target = f"/upload?prefix={quote(prefix)}"
    status, _, line = node.http.request("POST", target, data, content_type="application/x-tar", **headers)
    return status, line


def test_a_step_as_an_archive(node):
    name = node.job({**ONE, "nodes": {"node0": [0]}})
    array = np.arange(60, dtype=np.int16).reshape(4, 3, 5)
    files = {
        "save/0/w.numpy.ndarray.meta": b"i16\n3\n4\n3\n5\n",
        "save/0/w.numpy.ndarray": array.tobytes(),
        "save/0/p/dir.meta": b"list\n1",
        "save/0/p/0.float": b"0.5",
        "iter": b"1",
    }
    # All of it or nothing.
    for wrong in (
        {"save/0/../x.int": b"1"},
        {"save/0/x.int": b"x"},
        {"save/0/w.numpy.ndarray.meta": b"i16\n1\n60\n"},
        {"save/3/x.int": b"1"},
        {"other": b""},
    ):
        status, line = upload_tar(node, tar_of({"save/0/p/0.float": b"1.5", **wrong}), f"/job/{name}")
        assert status in (400, 404) and line
        assert node.http.listing(f"/job/{name}/save") is None
    short = {**files, "save/0/w.numpy.ndarray": array.tobytes()[:-2]}
    assert upload_tar(node, tar_of(short), f"/job/{name}")[0] == 400
    status, line = upload_tar(node, tar_of(files), f"/job/{name}")
    assert status == 200 and b"is committed" in line
    assert same(node.http.tensor(f"/job/{name}/load/0/w.numpy.ndarray"), array)
    # as mlfs's client sends single files: no prefix, an absolute name
    assert upload_tar(node, tar_of({f"/job/{name}/save/0/p.float": b"1.5"})) == (200, b"")
    assert upload_tar(node, tar_of({f"job/{name}/save/0/p.float": b"2.5"}))[0] == 409
    assert upload_tar(node, tar_of({f"job/{name}/save/0/p.float": b"2.5"}), x_replace="true") == (200, b"")
    assert node.http.query(f"/job/{name}/save/0/p")[2] == b"2.5"
    failing = {f"job/{name}/save/0/p.float": b"3.5", f"job/{name}/save/0/q.int": b"x"}
    assert upload_tar(node, tar_of(failing), x_replace="true")[0] == 400
    assert node.http.query(f"/job/{name}/save/0/p")[2] == b"2.5"


def test_no_room_is_said_before_anything_comes(node):
    name = node.job({**ONE, "tensors": {"w": {"shape": [1 << 30], "dtype": "int8"}}, "nodes": {"node0": [0]}})
    status, line = node.http.put(f"/job/{name}/save/0/a.int", "1")
    assert status == 507 and b"needed" in line
    limited = node.job(
        {**ONE, "tensors": {"w": {"shape": [8 << 20], "dtype": "int8"}}, "nodes": {"node0": [0]}},
        memory="4MiB",
    )
    assert node.http.put(f"/job/{limited}/save/0/a.int", "1")[0] == 507


def test_values_have_a_limit(node):
    name = node.job({**ONE, "nodes": {"node0": [0]}})
    base = f"/job/{name}/save/0"
    assert node.http.put(f"{base}/a.str", b"x" * ((16 << 20) + 1))[0] == 413
    for n in range(3):
        assert node.http.put(f"{base}/{n}.str", b"x" * (16 << 20))[0] == 200
    status, line = node.http.put(f"{base}/3.str", b"x")
    assert status == 413 and b"belongs into the layout" in line
    assert node.http.delete(base) == (200, b"3 1\n")


def test_many_clients_read_at_once_in_bounded_memory(node, job):
    def resident() -> int:
        text = Path(f"/proc/{node.daemon.process.pid}/status").read_text()
        (line,) = [line for line in text.splitlines() if line.startswith("RssAnon")]
        return int(line.split()[1]) << 10

    wanted = state_of(1, 3)["big"].tobytes()

    def read(_: int) -> bool:
        return node.http.query(f"/job/{job}/load/1/big.numpy.ndarray", "x-tensor")[2] == wanted

    before = resident()
    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(read, range(96)))
    assert resident() - before < 48 << 20  # what was asked for is 230 MB


def test_a_reconfiguration_in_the_middle_is_noticed(node):
    name = node.job({**LAYOUT, "nodes": {"node0": [0, 1]}})
    http = node.http
    for rank in (0, 1):
        http.save(state_of(rank, 1), name, 1, rank)
    http.bring({"iteration": 2}, f"/job/{name}/save/0")
    node.daemon.ok("reconfigure", name, "--mesh", "tp=1")
    status, line = http.put(f"/job/{name}/save/0/a.int", "1")
    assert status == 409 and b"delete it, and upload it again" in line
    assert http.put(f"/job/{name}/save/1/a.int", "1")[0] == 404
    assert http.delete(f"/job/{name}/save/0")[0] == 200
    whole = np.concatenate([state_of(rank, 1)["big"] for rank in (0, 1)], axis=1)
    assert same(http.tensor(f"/job/{name}/load/0/big.numpy.ndarray"), whole)
