"""What one daemon is: the settings, complete and checked, with their defaults."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tenplexfs.core.hostlist import expand_hostlist
from tenplexfs.core.snapshot import NodeName, check_node_name
from tenplexfs.daemon.settings import Settings, settings_of
from tenplexfs.errors import TenplexError, UsageError

__all__ = [
    "DEFAULT_ROOT_STORE",
    "Config",
    "EtcdAddress",
    "etcd_address",
    "load_config",
]

DEFAULT_ROOT_STORE = Path("/run/tenplexfs/store")

_PREFIX = re.compile(r"[A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)*", re.ASCII)


@dataclass(frozen=True)
class Config:
    """What one daemon is.

    Attributes:
        mount: Where the tree is mounted, or None.
        advertise: ``host:port`` where other nodes reach this one.
        peers: The other nodes and where they listen.
        http: ``host:port`` where Tenplex's clients are answered, or None.
        join: ``host:port`` or ``dns:name:port``, where `daemon.joining` asks for more; None for nobody.
        registry: The node that serves the registry, or an address that `etcd_address` reads; empty while
            only those that are joined know.
        memory_bytes: Limit of the store.
        tls: Directory with this node's certificate.
        token_file: Has what calls over TCP must carry.
    """

    node: NodeName
    mount: Path | None
    listen: str
    peers: Mapping[NodeName, str]
    registry: str
    store: Path
    socket: Path
    memory_bytes: int
    remote_reads: bool = True
    read_timeout_s: float = 60.0
    retain_s: float = 600.0
    spill: Path | None = None
    window_bytes: int = 1 << 30
    transfer_bytes: int = 256 << 20
    data_port: int = 0
    restore_from: str | None = None
    allow_other: bool = False
    tls: Path | None = None
    token_file: Path | None = None
    insecure: bool = False
    advertise: str = ""
    join: str | None = None
    http: str | None = None

    def addresses(self) -> dict[str, str]:
        """Returns where others reach this node, by setting; who joins tells them by ``advertise``."""
        http = {} if self.http is None else {"http": self.http}
        return {"listen": self.listen, **http} | ({} if self.join is None else {"advertise": self.advertise})

    def document(self) -> dict[str, object]:
        """Returns the configuration as ``config.json`` shows it."""
        return {name: str(v) if isinstance(v, Path) else v for name, v in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """An etcd cluster as a registry.

    Attributes:
        endpoints: URL of each member.
        prefix: Of the keys.
    """

    endpoints: tuple[str, ...]
    prefix: str


def etcd_address(registry: str) -> EtcdAddress | None:
    """Returns what ``etcd://host:2379,host2:2379/prefix`` names; None when ``registry`` is a node.

    ``etcds`` speaks TLS, with this node's certificate. The prefix is ``tenplexfs`` when left out.

    >>> etcd_address("etcd://a:2379,b:2379")
    EtcdAddress(endpoints=('http://a:2379', 'http://b:2379'), prefix='tenplexfs')

    Raises:
        UsageError: It is an address, and a wrong one.
    """
    scheme, slashes, rest = registry.partition("://")
    if not slashes:
        return None
    hosts, _, prefix = rest.partition("/")
    if scheme not in ("etcd", "etcds") or not _PREFIX.fullmatch(prefix or "tenplexfs"):
        raise UsageError(f"registry {registry}: need a node, or etcd://HOST:PORT,... with a plain prefix")
    http = "http" if scheme == "etcd" else "https"
    endpoints = tuple(f"{http}://{_address('registry', host)}" for host in hosts.split(","))
    return EtcdAddress(endpoints, prefix or "tenplexfs")


def load_config(
    flags: Mapping[str, str | Sequence[str] | None],
    *,
    environ: Mapping[str, str] | None = None,
    system_file: Path = Path("/etc/tenplexfs/tenplexfs.toml"),
) -> Config:
    """Returns the configuration, complete and checked.

    Args:
        flags: Settings as given on the command line, by the names of `SETTINGS`; what is None was not given.
        environ: The environment; the process's own when left out.
        system_file: Read last.

    Raises:
        UsageError: A setting is unknown or wrong; names it and where it came from.
    """
    environ = os.environ if environ is None else environ
    settings = settings_of(flags, environ, system_file)
    try:
        return _complete(settings, environ)
    except UsageError as error:
        raise UsageError(settings.named_in(error.message)) from error


def _complete(settings: Settings, environ: Mapping[str, str]) -> Config:
    is_root = os.geteuid() == 0
    try:
        node = check_node_name(_node(settings, environ))
    except TenplexError as error:
        raise UsageError(error.message) from error
    runtime = Path("/run/tenplexfs") if is_root else _user_runtime(environ)
    insecure = settings.switch("insecure", default=False)
    tls, token_file = settings.text("tls"), settings.text("token_file")
    is_guarded = tls is not None or insecure
    listen = _listening("listen", settings.text("listen") or "127.0.0.1:7070", is_guarded=is_guarded)
    http = settings.text("http")
    if http is not None and _listening("http", http, is_guarded=is_guarded) == listen:
        raise UsageError(f"http {http}: that is what listen says; give another port")
    peers = _peers(settings.texts("peer"), node)
    registry, join = settings.text("registry"), settings.text("join")
    if join is not None and peers:
        raise UsageError(f"join {join}: give it, or each --peer, not both")
    if join == "slurm":
        join, hosts = None, _slurm_hosts(environ, node)
        port = listen.rpartition(":")[2]
        peers = {host: f"{host}:{port}" for host in hosts if host != node}
        registry = registry or hosts[0]
    elif join is not None:
        join = _join(join, listen)
    if registry is None and peers:
        raise UsageError("registry: with peers, say where it is: --registry NODE, or etcd://HOST:PORT")
    is_etcd = registry is not None and etcd_address(registry) is not None
    if join is None and registry is not None and not is_etcd and registry != node and registry not in peers:
        raise UsageError(
            f"registry {registry}: neither this node, {node}, nor a peer: {', '.join(peers) or 'none'}"
        )
    if is_root:
        store, mount = DEFAULT_ROOT_STORE, Path("/mnt/tenplexfs")
    else:
        store, mount = Path(f"/dev/shm/tenplexfs-{os.geteuid()}/{node}"), runtime / "mount"
    spill = settings.text("spill")
    if spill is not None and not Path(spill).is_dir():
        raise UsageError(f"spill {spill}: no directory; make it, on a disk")
    return Config(
        node=node,
        mount=None if settings.switch("no_mount", default=False) else Path(settings.text("mount") or mount),
        listen=listen,
        peers=peers,
        registry=registry or (node if join is None else ""),
        store=Path(settings.text("store") or store),
        socket=Path(settings.text("socket") or runtime / f"{node}.sock"),
        memory_bytes=settings.size("memory", "25%", of_bytes=_memory_bytes()),
        remote_reads=settings.switch("remote_reads", default=True),
        read_timeout_s=settings.seconds("read_timeout", 60.0),
        retain_s=settings.seconds("retain", 600.0),
        spill=None if spill is None else Path(spill),
        transfer_bytes=settings.size("transfer_memory", "256MiB", of_bytes=_memory_bytes()),
        data_port=_data_port(settings, listen),
        window_bytes=settings.size("window", "1GiB", of_bytes=_memory_bytes()),
        restore_from=_place(settings.text("restore_from")),
        allow_other=settings.switch("allow_other", default=False),
        tls=None if tls is None else Path(tls),
        token_file=None if token_file is None else Path(token_file),
        insecure=insecure,
        advertise=_address("advertise", settings.text("advertise") or _reachable(listen)),
        join=join,
        http=http,
    )


def _data_port(settings: Settings, listen: str) -> int:
    port = settings.port("data_port", default=0)
    if port and str(port) == listen.rpartition(":")[2]:
        raise UsageError(f"data_port {port}: that is the port of listen, {listen}; give another one, or none")
    return port


def _place(text: str | None) -> str | None:
    """Returns where persisted jobs are, as a URL or an absolute path."""
    if text is None:
        return None
    # Imported here: every command reads this module, and should start at once.
    from tenplexfs.storage.places import check_url

    try:
        return check_url(text if "://" in text else str(Path(text).absolute()))
    except TenplexError as error:
        raise UsageError(f"restore_from {error.message}") from error


def _memory_bytes() -> int:
    """Bytes of memory that this process may use: the machine's, or its cgroup's when that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def _user_runtime(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_RUNTIME_DIR") or f"/tmp/tenplexfs-{os.geteuid()}") / "tenplexfs"


def _address(name: str, text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 65536):
        raise UsageError(f"{name} {text!r}: need HOST:PORT")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise UsageError(f"{name} {text!r}: an IPv6 address goes in brackets: [{host}]:{port}")
    return text


def _listening(name: str, text: str, *, is_guarded: bool) -> str:
    address = _address(name, text)
    if not is_guarded and not _is_loopback(address.rpartition(":")[0]):
        raise UsageError(
            f"{name} {address}: not loopback and without TLS: anybody could read and change the state; "
            "give --tls DIR (see tls init), or --insecure to do so all the same"
        )
    return address


def _is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches what listens at ``host``; names but one are not asked for."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _reachable(listen: str) -> str:
    """Returns where others reach what listens at ``listen``: by the host's name where it is every address."""
    host, _, port = listen.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]") else listen


def _node(settings: Settings, environ: Mapping[str, str]) -> str:
    in_slurm = environ.get("SLURMD_NODENAME") if settings.text("join") == "slurm" else None
    return settings.text("node") or in_slurm or socket.gethostname().partition(".")[0]


def _slurm_hosts(environ: Mapping[str, str], node: NodeName) -> list[NodeName]:
    """Returns the nodes of the Slurm job that this process is in."""
    text = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not text:
        raise UsageError("join slurm: SLURM_JOB_NODELIST is not set; start the daemons by srun")
    try:
        hosts = [check_node_name(host) for host in expand_hostlist(text)]
    except TenplexError as error:
        raise UsageError(f"join slurm: {error.message}") from error
    if node not in hosts:
        raise UsageError(
            f"join slurm: {node} is not in {text[:200]}: give the name that it has there, by --node"
        )
    return hosts


def _join(text: str, listen: str) -> str:
    """Returns whom to ask, with a port: that of this node where it has none."""
    name = text.removeprefix("dns:")
    host, _, port = name.rpartition(":")
    if not (host and port.isdecimal()):
        name = f"{name}:{listen.rpartition(':')[2]}"
    _address(f"join {text}: ", name)
    return f"dns:{name}" if text.startswith("dns:") else name


def _peers(texts: Sequence[str], node: NodeName) -> dict[NodeName, str]:
    peers: dict[NodeName, str] = {}
    for text in texts:
        name, equals, address = text.partition("=")
        if not equals:
            raise UsageError(f"peer {text!r}: need NODE=HOST:PORT")
        try:
            peer = check_node_name(name)
        except TenplexError as error:
            raise UsageError(f"peer {text!r}: {error.message}") from error
        if peer == node:
            raise UsageError(f"peer {text!r}: {node} is this node")
        if peer in peers:
            raise UsageError(f"peer {text!r}: {peer} is given twice")
        peers[peer] = _address(f"peer {peer}", address)
    return peers
