"""Daemons that speak TLS, and what those hear that are not let in."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tenplexfs.rpc.certificates import Pair, make_node
from tests.cluster.daemons import COMMAND, Daemon, Daemons, check, until
from tests.cluster.test_daemons import WHOLE, load
from tests.etcd import EtcdServer

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.mount,
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse is not there"),
]

NODES = "node0=127.0.0.1,node1=127.0.0.1,node2=127.0.0.1"


def pki(directory: Path, nodes: str = NODES) -> str:
    subprocess.run(
        [*COMMAND, "tls", "init", str(directory), "--node", nodes], check=True, capture_output=True
    )
    return str(directory)


def token(file: Path, word: str) -> str:
    file.write_text(word)
    file.chmod(0o600)
    return str(file)


def verdicts(node: Daemon, *arguments: str) -> dict[str, tuple[str, str]]:
    _, content, _ = node.run("doctor", *node.arguments, *arguments)
    return {each["what"]: (each["verdict"], each["message"]) for each in content["findings"]}


def test_daemons_with_tls_and_a_token(tmp_path):
    tls, word = pki(tmp_path / "pki"), token(tmp_path / "token", "secret")
    with Daemons(tmp_path, 2, tls=tls, token_file=word) as two:
        load(two)
        two.nodes[1].ok("reconfigure", "gpt", "--mesh", "pp=1,tp=4")
        for node in two.nodes:
            assert check(node.mount, "gpt", WHOLE) > 20
            assert {verdict for verdict, _ in verdicts(node).values()} <= {"ok", "warning"}

        # others, who stand in for node1 beside node0
        two.nodes[1].kill()
        strangers = {
            "not signed by the authority that --tls has here": {"tls": pki(tmp_path / "other")},
            "the token is missing or wrong": {"tls": tls, "token_file": token(tmp_path / "wrong", "wrong")},
        }
        for number, (words, flags) in enumerate(strangers.items()):
            (tmp_path / str(number)).mkdir()
            stranger = Daemon(tmp_path / str(number), "node1", two.ports, **flags)
            try:
                stranger.start()
                stranger.wait()
                until(lambda stranger=stranger, words=words: words in away(stranger))
                assert words in verdicts(stranger)["registry"][1]
                assert "Handshake" not in stranger.log.read_text()
            finally:
                stranger.clean()
        assert two.nodes[0].job()["generation"] == 2
        assert "Handshake" not in two.nodes[0].log.read_text()


def away(node: Daemon) -> str:
    return node.ok("status")["registry"]["away"] or ""


def test_what_a_daemon_with_bad_files_says(tmp_path):
    tls = Path(pki(tmp_path / "pki", "node0=127.0.0.1"))
    ports = {"node0": 1}
    authority = Pair((tls / "ca.pem").read_bytes(), (tls / "ca.key").read_bytes())
    long_ago = datetime.now(UTC) - timedelta(days=30)
    expired = make_node(authority, "node0", ["127.0.0.1"], long_ago, days=1)
    (tls / "node0.pem").write_bytes(expired.certificate)
    (tls / "node0.key").write_bytes(expired.key)
    node = Daemon(tmp_path, "node0", ports, tls=str(tls))
    assert "expired" in node.refused()
    assert "tls init --renew" in node.refused()
    assert verdicts(node)["certificate"][0] == "broken"
    missing = Daemon(tmp_path, "node0", ports, tls=str(tmp_path))
    assert "ca.pem: No such file" in missing.refused()
    (tmp_path / "token").write_text("word")
    (tmp_path / "token").chmod(0o644)
    assert (
        "others may read it" in Daemon(tmp_path, "node0", ports, token_file=str(tmp_path / "token")).refused()
    )


def test_the_doctor_names_what_is_wrong_with_peers(tmp_path):
    tls = pki(tmp_path / "pki")
    with Daemons(tmp_path, 2, tls=tls) as two:
        first, second = two.nodes
        assert first.run("doctor", *first.arguments)[0] == 0
        plain = [a for a in first.arguments if a not in ("--tls", tls)]
        _, content, _ = first.run("doctor", *plain)
        found = {each["what"]: each for each in content["findings"]}
        assert "it wants TLS" in found["peer node1"]["message"]
        # node1 of another authority
        second.kill()
        other = pki(tmp_path / "other")
        (tmp_path / "x").mkdir()
        stranger = Daemon(tmp_path / "x", "node1", two.ports, tls=other)
        stranger.start()
        try:
            until(lambda: "certificate" in verdicts(first)["peer node1"][1])
            assert verdicts(first)["peer node1"][0] == "broken"
        finally:
            stranger.clean()
        until(lambda: "does its daemon run?" in verdicts(first)["peer node1"][1])
        # an address with another node behind it
        address = first.arguments[first.arguments.index("--peer") + 1]
        wrong = f"node1={first.arguments[first.arguments.index('--listen') + 1]}"
        mistaken = [wrong if a == address else a for a in first.arguments]
        _, content, _ = first.run("doctor", *mistaken)
        found = {each["what"]: each for each in content["findings"]}
        assert "is node node0: --peer is wrong" in found["peer node1"]["message"]


def test_etcd_over_tls(tmp_path):
    tls = pki(tmp_path / "pki", f"{NODES},etcd=127.0.0.1")
    flags = [
        f"--cert-file={tls}/etcd.pem",
        f"--key-file={tls}/etcd.key",
        f"--trusted-ca-file={tls}/ca.pem",
        "--client-cert-auth=true",
    ]
    (tmp_path / "etcd").mkdir()
    etcd = EtcdServer(tmp_path / "etcd", *flags, scheme="https")
    etcd.start(wait=False)
    registry = etcd.url.replace("https://", "etcds://")
    try:
        with Daemons(tmp_path, 1, tls=tls, registry=registry) as one:
            until(lambda: not one.nodes[0].ok("status")["registry"]["away"])
            load_one(one)
            assert verdicts(one.nodes[0])["registry"] == ("ok", f"{registry}, 1 jobs")
    finally:
        etcd.kill()


def load_one(daemons: Daemons) -> None:
    from tests.cluster.test_daemons import prepare
    from tests.runtime.cluster import layout_json

    prepare(daemons.base)
    layout = daemons.base / "one.json"
    layout.write_bytes(layout_json(nodes={"node0": [0, 1, 2, 3]}))
    daemons.nodes[0].ok("job", "create", "gpt", "--layout", str(layout))


def test_a_hung_mount_is_freed(tmp_path):
    with Daemons(tmp_path, 1) as one:
        node = one.nodes[0]
        refused = node.run("doctor", *node.arguments, "--abort")
        assert refused[0] == 1
        assert "answers" in refused[1]["error"]["message"]
        node.freeze()
        reader = subprocess.Popen(["ls", "-lR", f"{node.mount}/.tenplexfs"], stderr=subprocess.DEVNULL)
        broken = verdicts(node)
        assert "hangs: tenplexfs doctor --abort" in broken["mount"][1]
        assert node.ok("doctor", *node.arguments, "--abort")["aborted"] == str(node.mount)
        assert reader.wait(10) != 0
        node.kill()
        node.start()
        node.wait()


def test_a_store_hears_of_no_other_clusters_registry(tmp_path):
    with Daemons(tmp_path, 1) as one:
        (node,) = one.nodes
        load_one(one)
        node.ok("import", "gpt", str(tmp_path / "model.safetensors"))
        named = node.store / "cluster"
        until(named.exists)
        node.stop()
        named.write_text("f" * 16)
        node.start()
        node.wait()
        until(lambda: "of another cluster (ffff" in (node.ok("status")["registry"]["away"] or ""))
        assert node.run("job", "remove", "gpt")[0] == 3
        check(node.mount, "gpt", WHOLE)
