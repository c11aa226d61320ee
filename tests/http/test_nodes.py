"""Tenplex's clients and several daemons: ranks of other nodes, TLS, a token."""

from __future__ import annotations

import http.client
import json
import ssl
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tenplexfs.client.connection import Connection
from tests.cluster.daemons import Daemons, until
from tests.http.tenplex import Server, listed, same
from tests.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.mount]

LAYOUT = {
    "format": "tenplexfs-layout",
    "version": 1,
    "mesh": {"tp": 3},
    "nodes": {"node0": [0], "node1": [1, 2]},
    "tensors": {"w": {"shape": [6, 1 << 17], "dtype": "float32", "shard": [{"axis": "tp", "dim": 0}]}},
}


def state_of(rank: int, step: int) -> dict[str, object]:
    whole = np.random.default_rng(step).random((6, 1 << 17), np.float32)
    return {"w": whole[2 * rank : 2 * rank + 2], "step": step, "rank": rank}


def test_each_node_takes_its_ranks_and_shows_all(tmp_path):
    ports = [free_port(), free_port()]
    daemons = Daemons(tmp_path, 2, memory="128MiB")
    for daemon, port in zip(daemons.nodes, ports, strict=True):
        daemon.arguments += ["--http", f"127.0.0.1:{port}"]
    with daemons:
        a, b = daemons.nodes
        with Connection(str(a.socket)) as connection:
            connection.ask("create", job="gpt", layout=json.dumps(LAYOUT).encode())
        servers = [Server(port) for port in ports]
        here = {0: servers[0], 1: servers[1], 2: servers[1]}
        until(lambda: (b.mount / "gpt").exists())
        status, line = servers[0].put("/job/gpt/save/1/x.int", "1")
        assert (status, line) == (409, b"job gpt: rank 1 is on node node1, this is node0; upload it there")

        def save(step: int) -> None:
            with ThreadPoolExecutor(3) as pool:
                lines = list(pool.map(lambda r: here[r].save(state_of(r, step), "gpt", step, r), here))
            assert any("is committed" in line for line in lines), lines

        lines = [here[rank].save(state_of(rank, 1), "gpt", 1, rank) for rank in here]
        assert [line.partition(": ")[2].partition(",")[0] for line in lines] == [
            "the ranks of node node0 are there; waits for other nodes",
            "waits: rank 2: nothing was uploaded",
            "is committed",
        ]
        save(2)
        # any node shows any rank; what is not here is fetched
        for server in servers:
            for rank in (0, 1, 2):
                state, step = server.load("gpt", rank)
                assert step == 2 and same(state, listed(state_of(rank, 2)))
        part = servers[0].tensor("/job/gpt/load/2/w.numpy.ndarray", range="1:,1000:100000")
        assert same(part, np.ascontiguousarray(state_of(2, 2)["w"][1:, 1000:100000]))
        assert servers[0].request("GET", "/peers")[2].decode().split(",") == [
            f"127.0.0.1:{port}" for port in daemons.ports.values()
        ]
        # what is coming in does not outlive its daemon, what is committed does
        servers[1].bring({"step": 3}, "/job/gpt/save/1")
        b.kill()
        status, _, line = servers[0].query("/job/gpt/load/2/w.numpy.ndarray", "x-tensor", range="0:0")
        assert (status, line) == (200, b"")
        b.start()
        b.wait()
        until(lambda: (b.mount / "gpt").exists())
        assert servers[1].listing("/job/gpt/save") is None
        assert same(servers[1].load("gpt", 2)[0], listed(state_of(2, 2)))
        save(3)


def test_tls_and_a_token_are_asked_for(tmp_path):
    port = free_port()
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("secret\n")
    daemons = Daemons(tmp_path, 1, http=f"127.0.0.1:{port}", tls=str(tmp_path / "tls"), token_file=str(token))
    (node,) = daemons.nodes
    node.ok("tls", "init", str(tmp_path / "tls"), "--node", "node0=127.0.0.1")
    with daemons:
        context = ssl.create_default_context(cafile=str(tmp_path / "tls/ca.pem"))
        with pytest.raises(OSError):
            ask(port, context, "secret")  # it wants a certificate
        with pytest.raises((OSError, http.client.HTTPException)):
            Server(port).request("GET", "/peers")
        context.load_cert_chain(tmp_path / "tls/node0.pem", tmp_path / "tls/node0.key")
        assert ask(port, context, "wrong")[0] == 401
        status, line = ask(port, context, "secret")
        assert (status, line) == (200, node.arguments[5].encode())


def ask(port: int, context: ssl.SSLContext, token: str) -> tuple[int, bytes]:
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
    try:
        connection.request("GET", "/peers", headers={"authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
