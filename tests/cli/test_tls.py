from __future__ import annotations

import stat

import pytest

from tenplexfs.errors import ExistsError
from tenplexfs.rpc.certificates import hosts_of
from tenplexfs.rpc.tls import Identity


def test_init_makes_what_serve_takes(cli, tmp_path):
    made = cli("tls", "init", "pki", "--node", "node0=10.0.0.1,node0.lan,node1=10.0.0.2", "--json")
    assert made.json["nodes"] == {"node0": ["10.0.0.1", "node0.lan"], "node1": ["10.0.0.2"]}
    pki = tmp_path / "pki"
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in pki.iterdir()}
    names = ("ca", "node0", "node1")
    assert modes == {f"{n}.pem": 0o644 for n in names} | {f"{n}.key": 0o600 for n in names}
    assert stat.S_IMODE(pki.stat().st_mode) == 0o700
    for node in ("node0", "node1"):
        Identity.load(pki, node)
    assert hosts_of((pki / "node0.pem").read_bytes()) == ("node0", "node0.lan", "10.0.0.1")


def test_nodes_are_added_and_made_anew(cli, tmp_path):
    pki = tmp_path / "pki"
    assert cli("tls", "init", pki, "--node", "a=h").status == 0
    authority, first = (pki / "ca.pem").read_bytes(), (pki / "a.pem").read_bytes()
    text = cli("tls", "init", pki, "--node", "b=h", "--node", "c=h", "--days", 3)
    assert "b: copy" in text.out
    assert "keep" in text.out
    refused = cli("tls", "init", pki, "--node", "a=h")
    assert (refused.status, "a: there already; --renew" in refused.err) == (ExistsError.exit_status, True)
    assert (pki / "a.pem").read_bytes() == first
    assert cli("tls", "init", pki, "--node", "a=other", "--renew").status == 0
    assert (pki / "ca.pem").read_bytes() == authority
    assert hosts_of((pki / "a.pem").read_bytes()) == ("a", "other")
    Identity.load(pki, "b")
    (pki / "ca.key").unlink()
    assert "ca.key is missing" in cli("tls", "init", pki, "--node", "d=h").err


def test_an_authority_whose_certificate_is_lost_is_not_made_anew(cli, tmp_path):
    pki = tmp_path / "pki"
    assert cli("tls", "init", pki, "--node", "a=h").status == 0
    key = (pki / "ca.key").read_bytes()
    (pki / "ca.pem").unlink()
    refused = cli("tls", "init", pki, "--node", "b=h")
    assert (refused.status, "ca.pem is missing, its key is there" in refused.err) == (
        ExistsError.exit_status,
        True,
    )
    assert (pki / "ca.key").read_bytes() == key


@pytest.mark.parametrize(
    "node", ["a", "a=", "=h", "h,a=h", "a=h,a=i", "ca=h", "a b=h", "a=h!", "a=h,", "../a=h"]
)
def test_bad_nodes_are_refused(cli, node):
    refused = cli("tls", "init", "pki", "--node", node)
    assert refused.status in (1, 2)
    assert len(refused.err.splitlines()) == 1
