"""What is wrong with a set-up: one finding for each thing that a daemon of this configuration needs.

Nothing here changes anything, and nothing waits long.
"""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import trio
from cryptography import x509
from google.protobuf.message import Message

from tenplexfs._pb import local_pb2, peer_pb2, registry_pb2
from tenplexfs.daemon.config import DEFAULT_ROOT_STORE, Config, etcd_address
from tenplexfs.daemon.joining import join
from tenplexfs.errors import TenplexError, UnavailableError
from tenplexfs.formats.text import bytes_text
from tenplexfs.fuse.hang import hangs
from tenplexfs.fuse.mountpoint import FSTYPE, find_mount
from tenplexfs.rpc.connection import Connection
from tenplexfs.rpc.errors import DOCTOR_SAYS_MORE
from tenplexfs.rpc.etcd_client import Etcd
from tenplexfs.rpc.etcd_registry import EtcdRegistry
from tenplexfs.rpc.tls import Access, Identity, read_token

__all__ = ["Finding", "examine"]

_CALL_S = 3.0
_JOIN_S = 2.0
_SOON_DAYS = 30
_ALERTS = {
    "UNKNOWN_CA": "it does not trust the authority of this node's certificate",
    "CERTIFICATE_EXPIRED": "this node's certificate has expired by its clock",
    "CERTIFICATE_REQUIRED": "it wants a certificate",
    "WRONG_VERSION_NUMBER": "it does not speak TLS, and --tls is given here",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: "fuse", "store", "peer node1", ...
        verdict: "ok", "warning" or "broken".
        message: What was found, and what to do.
    """

    what: str
    verdict: str
    message: str


def examine(config: Config) -> Iterator[Finding]:
    """Yields the findings, in the order in which a daemon would need the things. Blocks."""
    daemon, pid = _daemon(config)
    yield daemon
    if config.mount is not None:
        yield _fuse()
        yield _fusermount(config)
        yield _mount(config.mount, pid)
    yield _store(config, pid)
    yield _memory(config)
    yield _listen("listen", config.listen, config, pid)
    if config.http is not None:
        yield _listen("http", config.http, config, pid)
    access, findings = _access(config)
    yield from findings
    if config.join is not None:
        try:
            config = trio.run(partial(join, config, access, patience_s=_JOIN_S))
            yield Finding("join", "ok", f"{config.join}: knows {', '.join(config.peers) or 'no other node'}")
        except TenplexError as error:
            yield Finding("join", "broken", error.message)
            return
    for node, address in config.peers.items():
        yield _peer(node, address, access)
    yield _registry(config, access, pid)


def _daemon(config: Config) -> tuple[Finding, int | None]:
    path = config.socket.with_name(config.socket.name + ".grpc")
    if not path.exists():
        return Finding("daemon", "ok", f"none runs on {config.socket}"), None
    try:
        reply = _ask(f"unix:{path.absolute()}", "Local/Status", local_pb2.StatusRequest(), Access())
    except TenplexError as error:
        return Finding(
            "daemon", "warning", f"{config.socket} is there, and no daemon answers: {error.message}"
        ), None
    if reply.node != config.node:
        return Finding(
            "daemon",
            "broken",
            f"{config.socket} is that of node {reply.node}, this is {config.node}: give --node {reply.node}, "
            "or the socket of this one",
        ), None
    return Finding("daemon", "ok", f"node {reply.node} runs, pid {reply.pid}"), int(reply.pid)


def _fuse() -> Finding:
    device = Path("/dev/fuse")
    if not device.exists():
        return Finding(
            "fuse", "broken", f"{device} is missing: modprobe fuse, or give the container the device"
        )
    try:
        os.close(os.open(device, os.O_RDWR))
    except OSError as error:
        return Finding(
            "fuse", "broken", f"{device}: {error.strerror}: chmod 666 it, or allow the container the device"
        )
    return Finding("fuse", "ok", f"{device} can be opened")


def _fusermount(config: Config) -> Finding:
    tool = shutil.which("fusermount3")
    if tool is None:
        return Finding("fusermount3", "broken", "is missing: apt-get install fuse3")
    if os.geteuid() and not Path(tool).stat().st_mode & stat.S_ISUID:
        return Finding("fusermount3", "broken", f"{tool} is not setuid root, and this user is not root")
    if os.geteuid() and config.allow_other and "\nuser_allow_other" not in "\n" + _text("/etc/fuse.conf"):
        return Finding("fusermount3", "broken", "--allow-other needs user_allow_other in /etc/fuse.conf")
    return Finding("fusermount3", "ok", tool)


def _mount(path: Path, pid: int | None) -> Finding:
    real = os.path.realpath(path)
    mount = find_mount(real)
    if mount is not None and mount.fstype == FSTYPE:
        if hangs(real):
            return Finding("mount", "broken", f"{real} hangs: tenplexfs doctor --abort frees who waits in it")
        if pid is None:
            return Finding("mount", "ok", f"{real} is left from a dead daemon; serve clears it")
        return Finding("mount", "ok", f"{real} answers")
    if pid is not None:
        return Finding("mount", "broken", f"{real}: the daemon runs and nothing is mounted there")
    try:
        first = next(Path(real).iterdir(), None)
    except FileNotFoundError:
        return Finding("mount", "ok", f"{real} will be made")
    except OSError as error:
        return Finding("mount", "broken", f"{real}: {error.strerror}")
    if first is not None:
        return Finding("mount", "broken", f"{real}: not empty, {first.name!r} is there; name another")
    return Finding("mount", "ok", f"{real} is empty")


def _store(config: Config, pid: int | None) -> Finding:
    path = config.store
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    found = there.stat()
    if there == path.absolute() and found.st_uid != os.geteuid():
        return Finding("store", "broken", f"{path} belongs to uid {found.st_uid}, not to {os.geteuid()}")
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding("store", "broken", f"{there}: this user may not write there; give --store")
    if path == DEFAULT_ROOT_STORE and not path.is_mount():
        return Finding("store", "ok", f"{path} will be mounted, in memory")
    free = shutil.disk_usage(there).free
    if pid is None and free < config.memory_bytes:
        return Finding(
            "store",
            "broken",
            f"{there} has {bytes_text(free)} free of the {bytes_text(config.memory_bytes)} of --memory",
        )
    if not _is_memory(there):
        return Finding("store", "warning", f"{path} is on a disk: slower than memory, and all else is so too")
    return Finding("store", "ok", f"{path}, {bytes_text(free)} free")


def _memory(config: Config) -> Finding:
    lines = dict(line.split(":", 1) for line in _text("/proc/meminfo").splitlines())
    total, free = (1024 * int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    limit = f"--memory is {bytes_text(config.memory_bytes)}"
    if config.memory_bytes > total:
        return Finding("memory", "broken", f"{limit}, the machine has {bytes_text(total)}")
    if config.memory_bytes > free:
        return Finding("memory", "warning", f"{limit}, {bytes_text(free)} are free now")
    return Finding("memory", "ok", f"{limit} of {bytes_text(total)}")


def _listen(what: str, listen: str, config: Config, pid: int | None) -> Finding:
    if pid is not None:
        return Finding(what, "ok", f"{listen}, by the daemon")
    host, _, port = listen.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        for family, _, _, _, address in found:
            socket.create_server(address, family=family).close()
    except OSError as error:
        return Finding(what, "broken", f"{listen}: {error.strerror or error}")
    if config.insecure and config.tls is None:
        return Finding(what, "warning", f"{listen}: anybody who reaches it can change the state")
    return Finding(what, "ok", f"{listen} is free")


def _access(config: Config) -> tuple[Access, list[Finding]]:
    findings, identity, token = [], None, None
    if config.tls is not None:
        try:
            identity = Identity.load(config.tls, config.node)
            identity.check_hosts(config.node, config.addresses())
            findings.append(_lifetime(identity))
        except TenplexError as error:
            findings.append(Finding("certificate", "broken", error.message))
    if config.token_file is not None:
        try:
            token = read_token(config.token_file)
            findings.append(Finding("token", "ok", f"{config.token_file}"))
        except TenplexError as error:
            findings.append(Finding("token", "broken", error.message))
    return Access(identity, token), findings


def _lifetime(identity: Identity) -> Finding:
    end = x509.load_pem_x509_certificate(identity.pair.certificate).not_valid_after_utc
    days = (end - datetime.now(UTC)).days
    text = f"good for {days} days, until {end:%Y-%m-%d}"
    if days < _SOON_DAYS:
        return Finding("certificate", "warning", f"{text}: tls init --renew, then restart the daemon")
    return Finding("certificate", "ok", text)


def _peer(node: str, address: str, access: Access) -> Finding:
    what = f"peer {node}"
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CALL_S) as plain:
            if access.identity is not None:
                _shake_hands(plain, host.strip("[]"), access.identity.context())
    except ssl.SSLCertVerificationError as error:
        return Finding(what, "broken", f"{address}: its certificate: {error.verify_message}")
    except ssl.SSLError as error:
        reason = error.reason or str(error)
        words = next((text for mark, text in _ALERTS.items() if mark in reason), reason)
        return Finding(what, "broken", f"{address}: {words}")
    except TimeoutError:
        return Finding(what, "broken", f"{address}: no answer: is a firewall between?")
    except OSError as error:
        return Finding(what, "broken", f"{address}: {error.strerror or error}: does its daemon run?")
    try:
        reply = _ask(address, "Peer/Hello", peer_pb2.HelloRequest(), access)
    except TenplexError as error:
        return Finding(what, "broken", error.message)
    if reply.node != node:
        return Finding(what, "broken", f"{address} is node {reply.node}: --peer is wrong")
    return Finding(what, "ok", f"{address}, tenplexfs {reply.version}")


def _shake_hands(plain: socket.socket, host: str, context: ssl.SSLContext) -> None:
    """Raises ssl.SSLError when either side refuses; the server's refusal comes with the first bytes."""
    context.set_alpn_protocols(["h2"])
    with context.wrap_socket(plain, server_hostname=host) as secure:
        secure.settimeout(_CALL_S)
        secure.recv(1)


def _registry(config: Config, access: Access, pid: int | None) -> Finding:
    if (address := etcd_address(config.registry)) is not None:

        async def ask() -> int:
            etcd = Etcd(address.endpoints, deadline_s=_CALL_S, tls=access.context)
            try:
                _, heads = await EtcdRegistry(etcd, prefix=address.prefix).heads()
            finally:
                await etcd.aclose()
            return len(heads)

        return _asked("registry", lambda: f"{config.registry}, {trio.run(ask)} jobs")
    if config.registry == config.node:
        is_up = "by the daemon" if pid is not None else "by this node"
        return Finding("registry", "ok", f"served {is_up}")
    peer = next(address for node, address in config.peers.items() if node == config.registry)

    def heads() -> str:
        reply = _ask(peer, "Registry/Heads", registry_pb2.HeadsRequest(), access)
        return f"served by {config.registry}, {len(reply.heads)} jobs"

    return _asked("registry", heads)


def _asked(what: str, ask: Callable[[], str]) -> Finding:
    try:
        return Finding(what, "ok", ask())
    except UnavailableError as error:
        return Finding(what, "broken", f"{error.message}: nothing switches until it answers")
    except TenplexError as error:
        return Finding(what, "broken", error.message)


def _ask(target: str, method: str, request: Message, access: Access) -> Any:  # noqa: ANN401 - its reply
    with closing(Connection(target, credentials=access.channel, token=access.token)) as connection:
        try:
            return connection.call(method, request, deadline_s=_CALL_S)
        except TenplexError as error:
            if access.identity is None and "it wants TLS" in error.message:
                raise UnavailableError(f"{target}: it wants TLS: give --tls DIR") from error
            raise type(error)(error.message.removesuffix(DOCTOR_SAYS_MORE), **error.details) from error


def _is_memory(path: Path) -> bool:
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in _text("/proc/self/mountinfo").splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
    return False


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
