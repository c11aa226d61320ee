"""Certificates, as files and in handshakes over real sockets."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import grpc
import pytest

from tenplexfs._pb import peer_pb2
from tenplexfs.errors import DeniedError, InvalidError, UnavailableError
from tenplexfs.rpc.certificates import Pair, check_pair, hosts_of, make_authority, make_node
from tenplexfs.rpc.connection import Connection
from tenplexfs.rpc.peer_client import PeerClient
from tenplexfs.rpc.registry_client import LocalRegistry, RemoteRegistry
from tenplexfs.rpc.threads import in_thread
from tenplexfs.rpc.tls import Access, Identity, read_token
from tenplexfs.storage.registry_sqlite import SqliteRegistry
from tests.rpc.fakes import running

NOW = datetime.now(UTC)
OURS, THEIRS = make_authority(NOW), make_authority(NOW)


def identity(authority=OURS, *, trusts=OURS, hosts=("127.0.0.1",), made=NOW, days=10):
    return Identity(trusts.certificate, make_node(authority, "node0", hosts, made, days=days))


async def hello(address, credentials, token=None):
    connection = Connection(address, credentials=credentials, token=token)

    def call(cancel):
        return connection.call("Peer/Hello", peer_pb2.HelloRequest(), deadline_s=5, cancel=cancel)

    try:
        return (await in_thread(call)).node
    finally:
        connection.close()


async def test_two_nodes_of_one_authority_understand_each_other():
    async with running(credentials=identity().server()) as (address, _, _):
        assert await hello(address, identity().channel()) == "node0"
        client = PeerClient({"n": address}, credentials=identity().channel())
        assert (await client.hello("n", peer_pb2.HelloRequest())).node == "node0"
        client.close()


@pytest.mark.parametrize(
    ("server", "match"),
    [
        (identity(THEIRS), "is not signed by the authority that --tls has here"),
        (identity(made=NOW - timedelta(days=20)), "its certificate has expired"),
        (identity(made=NOW + timedelta(days=20)), "is not valid yet: is a clock wrong"),
        (identity(hosts=("10.0.0.1",)), "is for another host"),
        (None, "does not speak TLS, and --tls is given here"),
    ],
)
async def test_a_server_that_is_not_believed(server, match):
    async with running(credentials=server and server.server()) as (address, _, _):
        with pytest.raises(UnavailableError, match=match) as caught:
            await hello(address, identity().channel())
        assert "\n" not in caught.value.message
        assert caught.value.message.startswith(address)


@pytest.mark.parametrize(
    "credentials",
    [
        None,
        grpc.ssl_channel_credentials(OURS.certificate),
        identity(THEIRS).channel(),
        identity(made=NOW - timedelta(days=20)).channel(),
    ],
    ids=["plain", "no certificate", "another authority", "expired"],
)
async def test_a_caller_that_is_not_believed(credentials):
    async with running(credentials=identity().server()) as (address, _, _):
        with pytest.raises(UnavailableError, match="ended the connection at once: it wants TLS"):
            await hello(address, credentials)


async def test_a_token_comes_on_top(tmp_path):
    core = SqliteRegistry(tmp_path / "registry")
    async with running(credentials=identity().server(), token="right", registry=LocalRegistry(core)) as (
        address,
        _,
        _,
    ):
        channel = identity().channel()
        assert await hello(address, channel, "right") == "node0"
        for token in (None, "wrong"):
            with pytest.raises(DeniedError, match="the token is missing or wrong"):
                await hello(address, channel, token)
        connection = Connection(address, credentials=channel, token="wrong")
        with pytest.raises(UnavailableError, match="the token is missing or wrong"):
            await RemoteRegistry(connection, deadline_s=2).heads()
        connection.close()
    core.close()


def files(directory, authority, pair):
    (directory / "ca.pem").write_bytes(authority.certificate)
    (directory / "node0.pem").write_bytes(pair.certificate)
    (directory / "node0.key").write_bytes(pair.key)
    (directory / "node0.key").chmod(0o600)
    return directory


def test_a_key_that_others_may_read_is_refused(tmp_path):
    directory = files(tmp_path, OURS, OTHER)
    (directory / "node0.key").chmod(0o640)
    with pytest.raises(InvalidError, match=r"tls .*node0\.key: others may read it, mode 0640; chmod 600 it"):
        Identity.load(directory, "node0")


def test_an_identity_from_files(tmp_path):
    pair = make_node(OURS, "node0", ["10.0.0.1", "host.example.org", "::1"], NOW, days=10)
    found = Identity.load(files(tmp_path, OURS, pair), "node0")
    assert found.pair == pair
    assert hosts_of(pair.certificate) == ("node0", "host.example.org", "10.0.0.1", "::1")
    assert Access(found).context is not None
    assert Access().channel is Access().server is Access().context is None
    for listen in ("10.0.0.1:1", "host.example.org:1", "[::1]:1", "0.0.0.0:1", "[::]:1"):
        found.check_hosts("node0", {"listen": listen})
    with pytest.raises(
        InvalidError,
        match=r"advertise 10\.0\.0\.2:1: the certificate is for node0, host.example.org, 10.0.0.1, ::1; "
        r".* --node node0=host.example.org,10.0.0.1,::1,10.0.0.2",
    ):
        found.check_hosts("node0", {"listen": "0.0.0.0:1", "advertise": "10.0.0.2:1"})


OTHER = make_node(OURS, "node0", ["h"], NOW, days=10)


@pytest.mark.parametrize(
    ("authority", "pair", "match"),
    [
        (THEIRS, OTHER, "not signed by the authority beside it"),
        (OURS, Pair(OTHER.certificate, OURS.key), "the key is of another certificate"),
        (OURS, Pair(b"rubbish", OTHER.key), "no certificate in PEM"),
        (OURS, Pair(OTHER.certificate, b""), "no private key in PEM"),
        (OURS, make_node(OURS, "node0", ["h"], NOW - timedelta(days=9), days=2), r"expired 2.*--renew"),
        (OURS, make_node(OURS, "node0", ["h"], NOW + timedelta(days=9), days=2), "is a clock wrong"),
    ],
)
def test_files_that_are_wrong_are_named(tmp_path, authority, pair, match):
    with pytest.raises(InvalidError, match=match) as caught:
        Identity.load(files(tmp_path, authority, pair), "node0")
    assert str(tmp_path / "node0.pem") in caught.value.message
    assert "\n" not in caught.value.message


def test_an_authority_that_is_over_is_named():
    made = NOW - timedelta(days=4000)
    old = make_authority(made)
    with pytest.raises(InvalidError, match="n: the authority: expired"):
        check_pair(make_node(old, "n", ["h"], NOW, days=1), old.certificate, NOW, what="n")


def test_missing_files_are_named(tmp_path):
    with pytest.raises(InvalidError, match=r"ca\.pem: No such file.*tls init .* --node node0=HOST"):
        Identity.load(tmp_path, "node0")


@pytest.mark.parametrize(
    ("content", "mode", "match"),
    [
        (b"", 0o600, "need one word"),
        (b"two words", 0o600, "need one word"),
        (b"\xff", 0o600, "need one word"),
        (b"x" * 5000, 0o600, "need one word"),
        (b"word", 0o644, "others may read it, mode 0644; chmod 600"),
    ],
)
def test_tokens_that_are_refused(tmp_path, content, mode, match):
    file = tmp_path / "token"
    file.write_bytes(content)
    file.chmod(mode)
    with pytest.raises(InvalidError, match=match):
        read_token(file)


def test_a_token(tmp_path):
    file = tmp_path / "token"
    file.write_text("a-word\n")
    file.chmod(0o600)
    assert read_token(file) == "a-word"
    with pytest.raises(InvalidError, match="No such file"):
        read_token(tmp_path / "none")
