"""A node's certificate and token, from files, as gRPC and Python's ssl want them.

A directory of ``tls init`` has ``ca.pem`` and, for each node, ``<node>.pem`` and ``<node>.key``; a node needs
these three alone. ``ca.key``, which signs, stays where it was made.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc

from tenplexfs.errors import InvalidError
from tenplexfs.rpc.certificates import Pair, check_pair, hosts_of

__all__ = ["Access", "Identity", "read_token"]

_WILDCARDS = ("0.0.0.0", "[::]", "::")
_MAX_TOKEN_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this node is to the others.

    Attributes:
        authority: PEM; whoever it signed is trusted.
        pair: This node's own.
    """

    authority: bytes
    pair: Pair

    @classmethod
    def load(cls, directory: Path, node: str, *, now: datetime | None = None) -> Identity:
        """Returns the identity of ``node`` from a directory of ``tls init``, checked.

        Raises:
            InvalidError: A file is missing or wrong.
        """
        authority = _read(directory / "ca.pem", node)
        key = directory / f"{node}.key"
        pair = Pair(_read(directory / f"{node}.pem", node), _read(key, node))
        _check_mode(key, "tls")
        check_pair(pair, authority, now or datetime.now(UTC), what=f"tls {directory / node}.pem")
        return cls(authority, pair)

    def check_hosts(self, node: str, addresses: Mapping[str, str]) -> None:
        """Refuses to be where no caller would believe the certificate.

        Args:
            node: This one.
            addresses: Setting -> ``host:port``.

        Raises:
            InvalidError: The certificate is for other hosts.
        """
        hosts = hosts_of(self.pair.certificate)
        for what, address in addresses.items():
            host = address.rpartition(":")[0]
            if host not in _WILDCARDS and host.strip("[]") not in hosts:
                named = ",".join((*(each for each in hosts if each != node), host))
                raise InvalidError(
                    f"{what} {address}: the certificate is for {', '.join(hosts)}; "
                    f"make it anew with tls init --renew --node {node}={named}"
                )

    def server(self) -> grpc.ServerCredentials:
        """Returns what a server shows, and asks of its callers."""
        return grpc.ssl_server_credentials(
            [(self.pair.key, self.pair.certificate)], self.authority, require_client_auth=True
        )

    def channel(self) -> grpc.ChannelCredentials:
        """Returns what a caller shows, and asks of servers."""
        return grpc.ssl_channel_credentials(self.authority, self.pair.key, self.pair.certificate)

    def context(self, purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH) -> ssl.SSLContext:
        """Returns the same without gRPC; for a server with the purpose ``CLIENT_AUTH``."""
        context = ssl.create_default_context(purpose, cadata=self.authority.decode())
        context.verify_mode = ssl.CERT_REQUIRED
        # Python takes a key from files only; this one is in memory, and lives as long as the call.
        with open(os.memfd_create("tls"), "wb") as file:  # noqa: PTH123
            file.write(self.pair.certificate + self.pair.key)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return context


@dataclass(frozen=True, slots=True)
class Access:
    """What this node shows to others, and asks of them, over TCP; nothing by default."""

    identity: Identity | None = None
    token: str | None = None

    @property
    def server(self) -> grpc.ServerCredentials | None:
        """For a server; None is in the clear."""
        return None if self.identity is None else self.identity.server()

    @property
    def channel(self) -> grpc.ChannelCredentials | None:
        """For a caller; None is in the clear."""
        return None if self.identity is None else self.identity.channel()

    @property
    def context(self) -> ssl.SSLContext | None:
        """For a caller without gRPC; None when there is no certificate."""
        return None if self.identity is None else self.identity.context()

    @property
    def server_context(self) -> ssl.SSLContext | None:
        """For a server without gRPC; None when there is no certificate."""
        return None if self.identity is None else self.identity.context(ssl.Purpose.CLIENT_AUTH)


def read_token(file: Path) -> str:
    """Returns the token in ``file``.

    Raises:
        InvalidError: It cannot be read, is no token, or others may read it.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(_MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise InvalidError(f"token file {file}: {error.strerror}") from error
    token = content.strip()
    if not token or len(content) > _MAX_TOKEN_BYTES or not all(33 <= byte < 127 for byte in token):
        raise InvalidError(f"token file {file}: need one word of printable ASCII, at most 4096 bytes")
    _check_mode(file, "token file")
    return token.decode()


def _check_mode(file: Path, what: str) -> None:
    """Refuses a secret that others than its owner may read.

    Raises:
        InvalidError: Its mode lets them.
    """
    mode = file.stat().st_mode
    if mode & 0o077:
        raise InvalidError(f"{what} {file}: others may read it, mode {mode & 0o777:04o}; chmod 600 it")


def _read(file: Path, node: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidError(
            f"tls {file}: {error.strerror}; make it with tls init {file.parent} --node {node}=HOST"
        ) from error
