"""Files that come in over HTTP, and steps that they become."""

from __future__ import annotations

import io
import json
import socket
import tarfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import quote

import numpy as np
import pytest

from tenplexfs.core.build import build_ptc
from tenplexfs.formats.layout_json import parse_layout
from tests.cluster.daemons import check, until
from tests.http.jobs import FILES, LAYOUT, ONE, state_of
from tests.http.tenplex import listed, same
from tests.runtime.cluster import LAYOUT as EVERY_KIND
from tests.states import shard_of, tensors_of

pytestmark = [pytest.mark.cluster, pytest.mark.mount]


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


def test_shards_of_every_kind(node):
    """Padded, flat, tied, of any type, in stages; the oracle cuts whole tensors element by element."""
    layout = {**EVERY_KIND, "nodes": {"node0": [0, 1, 2, 3]}}
    name = node.job(layout)
    ptc = build_ptc(parse_layout(json.dumps(layout)))
    whole = tensors_of(ptc, 1)
    shards = {
        (rank, path): shard_of(ptc, rank, path, whole[ptc.tensors[path].path])
        for rank in ptc.ranks()
        for path in ptc.rank_paths(rank)
    }
    for (rank, path), shard in shards.items():
        status, line = node.http.put_tensor(f"/job/{name}/save/{rank}/{path}.numpy.ndarray", shard)
        assert status == 200, (path, line)
    assert "is committed" in node.http.done(name, 1)
    assert check(node.daemon.mount, name, whole) > len(shards)
    for (rank, path), shard in shards.items():
        found = node.http.tensor(f"/job/{name}/load/{rank}/{path}.numpy.ndarray")
        assert (found.shape, found.tobytes()) == (shard.shape, shard.tobytes())
    assert node.daemon.ok("verify")["mismatches"] == []


def test_many_clients_upload_at_once_in_bounded_memory(node):
    layout = {**ONE, "mesh": {"tp": 32}, "nodes": {"node0": list(range(32))}}
    layout["tensors"] = {
        "w": {"shape": [32, 1 << 20], "dtype": "uint16", "shard": [{"axis": "tp", "dim": 0}]}
    }
    name = node.job(layout)
    rows = np.random.default_rng(0).integers(0, 1 << 16, (32, 1, 1 << 20), np.uint16)

    def bring(rank: int) -> int:
        return node.http.put_tensor(f"/job/{name}/save/{rank}/w.numpy.ndarray", rows[rank])[0]

    before = node.resident()
    with ThreadPoolExecutor(32) as pool:
        assert set(pool.map(bring, range(32))) == {200}
    assert node.resident() - before < 32 << 20  # what came is 64 MiB
    assert "is committed" in node.http.done(name, 1)
    assert all(same(node.http.tensor(f"/job/{name}/load/{rank}/w"), rows[rank]) for rank in (0, 17, 31))


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
