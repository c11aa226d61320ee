"""What is committed, asked for over HTTP."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tenplexfs
from tests.http.jobs import ONE, bfloat16, state_of
from tests.http.tenplex import listed, same

pytestmark = [pytest.mark.cluster, pytest.mark.mount]


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


def test_peers_are_those_that_are_known(node):
    _, known = node.http.ok("GET", "/peers")
    assert known == f"127.0.0.1:{node.daemon.arguments[5].rpartition(':')[2]}".encode()
    assert node.http.ok("POST", "/peers", known)[1] == b""


def test_many_clients_read_at_once_in_bounded_memory(node, job):
    wanted = state_of(1, 3)["big"].tobytes()

    def read(_: int) -> bool:
        return node.http.query(f"/job/{job}/load/1/big.numpy.ndarray", "x-tensor")[2] == wanted

    before = node.resident()
    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(read, range(96)))
    assert node.resident() - before < 48 << 20  # what was asked for is 230 MB
