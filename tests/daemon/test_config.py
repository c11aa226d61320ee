from __future__ import annotations

from pathlib import Path

import pytest

from tenplexfs.daemon.config import EtcdAddress, etcd_address, load_config
from tenplexfs.daemon.settings import parse_size
from tenplexfs.errors import UsageError

NOWHERE = Path("/nowhere/tenplexfs.toml")


def load(environ=None, system_file=NOWHERE, **flags):
    return load_config(
        flags, environ={"XDG_CONFIG_HOME": "/nowhere", **(environ or {})}, system_file=system_file
    )


def test_defaults_need_nothing():
    config = load(node="node0")
    assert config.listen == "127.0.0.1:7070"
    assert config.registry == "node0"
    assert config.memory_bytes > 1 << 20
    assert (config.read_timeout_s, config.retain_s, config.remote_reads) == (60, 600, True)


def test_a_flag_wins_over_the_environment_over_own_file_over_the_systems(tmp_path):
    own = tmp_path / "tenplexfs" / "config.toml"
    own.parent.mkdir()
    own.write_text('memory = "2GiB"\nretain = 5\nread_timeout = 7\nremote_reads = false\n')
    system = tmp_path / "system.toml"
    system.write_text('memory = "3GiB"\nlisten = "127.0.0.1:9"\n')
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "TENPLEXFS_MEMORY": "1GiB", "TENPLEXFS_RETAIN": "6"}
    config = load(environ, system, retain="8", node="n")
    assert config.retain_s == 8
    assert config.memory_bytes == 1 << 30
    assert config.read_timeout_s == 7
    assert not config.remote_reads
    assert config.listen == "127.0.0.1:9"


def test_peers_and_registry():
    config = load(node="a", peer=["b=127.0.0.1:1", "c=127.0.0.1:2"], registry="b")
    assert config.peers == {"b": "127.0.0.1:1", "c": "127.0.0.1:2"}
    assert load({"TENPLEXFS_PEER": "b=h:1, c=h:2"}, node="a", registry="a").peers == {"b": "h:1", "c": "h:2"}


@pytest.mark.parametrize("listen", ["localhost:7070", "127.0.0.2:7070", "127.255.0.1:7070", "[::1]:7070"])
def test_loopback_needs_no_certificate(listen):
    assert load(node="a", listen=listen).listen == listen


def test_a_registry_in_etcd_and_an_address_with_tls():
    config = load(node="a", peer=["b=h:1"], registry="etcds://h:2379,i:2379/x/y")
    address = etcd_address(config.registry)
    assert address == EtcdAddress(("https://h:2379", "https://i:2379"), "x/y")
    assert load(node="a", listen="0.0.0.0:7070", tls="/etc/tpx").tls == Path("/etc/tpx")
    assert load(node="a", listen="0.0.0.0:7070", insecure="on").listen == "0.0.0.0:7070"


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({"peer": ["b=h:1"]}, "registry: with peers"),
        ({"peer": ["b=h:1"], "registry": "z"}, "registry z: neither"),
        ({"peer": ["b"]}, "need NODE=HOST:PORT"),
        ({"peer": ["b=h"]}, "need HOST:PORT"),
        ({"peer": ["a=h:1"]}, "a is this node"),
        ({"peer": ["b=h:1", "b=h:2"], "registry": "a"}, "given twice"),
        ({"node": "a b"}, "node name"),
        ({"listen": "7070"}, "need HOST:PORT"),
        ({"listen": "0.0.0.0:7070"}, "--tls DIR .*--insecure"),
        ({"http": "0.0.0.0:20010"}, "http 0.0.0.0:20010: not loopback.*--insecure"),
        ({"http": "20010"}, "need HOST:PORT"),
        ({"http": "127.0.0.1:7070"}, "give another port"),
        ({"listen": "[::]:7070"}, "not loopback .*--tls DIR .*--insecure"),
        ({"listen": "2130706433:7070"}, "not loopback"),
        ({"listen": "localhost.example.org:7070"}, "not loopback"),
        ({"listen": "::1:7070"}, r"an IPv6 address goes in brackets: \[::1\]:7070"),
        ({"listen": "127.0.0.1:7071", "data_port": "7071"}, "^--data-port 7071: that is the port of listen"),
        ({"registry": "etcd://"}, "need HOST:PORT"),
        ({"registry": "etcd://h"}, "need HOST:PORT"),
        ({"registry": "etcd://h:1,"}, "need HOST:PORT"),
        ({"registry": "etcd://h:1/a b"}, "a plain prefix"),
        ({"registry": "http://h:1"}, "need a node, or etcd://"),
        ({"memory": "lots"}, "need a size"),
        ({"memory": "0"}, "need a size"),
        ({"memory": "101%"}, "need a size"),
        ({"remote_reads": "perhaps"}, "^--remote-reads: need on or off, got 'perhaps'"),
        ({"read_timeout": "-1"}, "need seconds > 0"),
        ({"no_such": "x"}, "no such setting"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(flags, match):
    with pytest.raises(UsageError, match=match) as caught:
        load(**{"node": "a", **flags})
    assert "\n" not in caught.value.message
    assert caught.value.exit_status == 2


def test_what_gave_a_wrong_value_is_named(tmp_path):
    file = tmp_path / "x.toml"
    for flags, environ, text, said in [
        ({"transfer_memory": "lots"}, {}, "", "--transfer-memory 'lots': need a size"),
        ({"listen": "7070"}, {}, "", "--listen '7070': need HOST:PORT"),
        ({"node": "a b"}, {}, "", "--node name 'a b': need"),
        ({}, {"TENPLEXFS_HTTP": "x"}, "", "TENPLEXFS_HTTP 'x': need HOST:PORT"),
        ({}, {"TENPLEXFS_RETAIN": "x"}, "", "TENPLEXFS_RETAIN: need seconds > 0, got 'x'"),
        ({}, {}, 'window = "much"', f"{file}: window 'much': need a size"),
        ({"window": "1GiB"}, {}, "window = 'much'\nretain = [1]", f"{file}: retain: need one value, got [1]"),
    ]:
        file.write_text(text)
        with pytest.raises(UsageError) as caught:
            load(environ, system_file=file, **{"node": "a", **flags})
        assert caught.value.message.startswith(said), caught.value.message


def test_where_tenplexs_clients_are_answered():
    assert load(node="a").http is None
    config = load({"TENPLEXFS_HTTP": "127.0.0.1:20010"}, node="a")
    assert (config.http, config.addresses()["http"]) == ("127.0.0.1:20010", "127.0.0.1:20010")
    assert load(node="a", http="0.0.0.0:20010", tls="/etc/tpx").http == "0.0.0.0:20010"


def test_a_broken_file_is_named(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text("memory = ")
    with pytest.raises(UsageError, match=r"x\.toml"):
        load(system_file=file)


def test_insecure_is_asked_for():
    assert load(node="a", listen="0.0.0.0:7070", insecure="on").insecure


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("8Gi", 8 << 30),
        ("8gib", 8 << 30),
        ("8GB", 8 * 10**9),
        ("8G", 8 * 10**9),
        ("1.5KiB", 1536),
        ("512", 512),
        ("512B", 512),
        ("50%", 500),
        ("12.5 %", 125),
    ],
)
def test_sizes(text, size):
    assert parse_size(text, of_bytes=1000) == size


SLURM = {"SLURM_JOB_NODELIST": "n[01-02],gpu5", "SLURMD_NODENAME": "n02"}


def test_a_slurm_job_says_who_the_others_are():
    config = load(SLURM, join="slurm", listen="0.0.0.0:7000", insecure="on", advertise="10.0.0.2:7000")
    assert (config.node, config.registry, config.join) == ("n02", "n01", None)
    assert config.peers == {"n01": "n01:7000", "gpu5": "gpu5:7000"}
    assert config.advertise == "10.0.0.2:7000"
    assert load(SLURM, join="slurm", registry="etcd://h:2379").registry == "etcd://h:2379"
    assert load(SLURM, join="slurm", node="gpu5").node == "gpu5"


def test_whom_to_ask():
    assert load(node="a", join="seed").join == "seed:7070"
    assert load(node="a", join="seed:7", listen="127.0.0.1:9").join == "seed:7"
    assert load(node="a", join="dns:tpx.default.svc", listen="127.0.0.1:9").join == "dns:tpx.default.svc:9"
    config = load(node="a", join="seed")
    assert (config.registry, config.peers) == ("", {})
    assert load(node="a", join="dns:tpx", registry="n0").registry == "n0"


def test_where_others_reach_this_node():
    assert load(node="a").advertise == "127.0.0.1:7070"
    host, _, port = load(node="a", listen="0.0.0.0:7", insecure="on").advertise.rpartition(":")
    assert host not in ("", "0.0.0.0") and port == "7"


@pytest.mark.parametrize(
    ("environ", "flags", "match"),
    [
        ({}, {"join": "slurm", "node": "a"}, "join slurm: SLURM_JOB_NODELIST is not set"),
        (SLURM, {"join": "slurm", "node": "a"}, r"join slurm: a is not in n\[01-02\],gpu5"),
        ({"SLURM_JOB_NODELIST": "n["}, {"join": "slurm"}, "join slurm: hosts"),
        ({}, {"join": "seed", "peer": ["b=h:1"], "node": "a"}, "give it, or each --peer, not both"),
        ({}, {"join": "dns:", "node": "a"}, "need HOST:PORT"),
        ({}, {"advertise": "here", "node": "a"}, "advertise 'here': need HOST:PORT"),
    ],
)
def test_what_is_wrong_with_a_join_is_said(environ, flags, match):
    with pytest.raises(UsageError, match=match):
        load(environ, **flags)
