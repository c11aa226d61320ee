"""``tenplexfs tls init``: the certificates of a cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tenplexfs.cli.session import Session, command
from tenplexfs.core.snapshot import check_node_name
from tenplexfs.errors import ExistsError, TenplexError, UsageError

if TYPE_CHECKING:
    from tenplexfs.rpc.certificates import Pair

__all__ = ["app"]

app = typer.Typer(name="tls", help="Make the certificates of a cluster.", no_args_is_help=True)

_AUTHORITY = "ca"


def init(
    session: Session,
    *,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where they are, or will be.")],
    node: Annotated[
        list[str],
        typer.Option(metavar="NAME=HOST,...", help="A node, and the hosts by which others reach it."),
    ],
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long the nodes' ones are good.")] = 365,
    renew: Annotated[
        bool, typer.Option("--renew", help="Make those of nodes that have one anew; the authority stays.")
    ] = False,
) -> None:
    """Make an authority and a certificate for each node; with an authority that is there, add nodes.

    A node needs three files of DIR: ca.pem, NAME.pem and NAME.key. Keep ca.key, which signs, off the nodes.
    """
    from tenplexfs.rpc.certificates import make_node  # here: other commands start without cryptography

    nodes = _parse_nodes(node)
    there = [name for name in nodes if (directory / f"{name}.pem").exists()]
    if there and not renew:
        raise ExistsError(f"{directory}: {', '.join(there)}: there already; --renew makes it anew")
    now = datetime.now(UTC)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = _authority(directory, now)
        for name, hosts in nodes.items():
            _write(directory, name, make_node(authority, name, hosts, now, days=days))
    except OSError as error:
        raise TenplexError(f"{error.filename or directory}: {error.strerror}") from error
    content = {"directory": str(directory), "nodes": {name: list(hosts) for name, hosts in nodes.items()}}

    def person() -> None:
        for name in nodes:
            typer.echo(f"{name}: copy {directory}/ca.pem, {name}.pem and {name}.key; serve --tls DIR")
        typer.echo(f"keep {directory}/ca.key to yourself: who has it can make nodes")

    session.emit("tls", content, person)


def _parse_nodes(items: Sequence[str]) -> dict[str, list[str]]:
    """Returns node -> hosts of ``node0=10.0.0.1,alias,node1=10.0.0.2``-like items."""
    nodes: dict[str, list[str]] = {}
    last = ""
    for part in (part.strip() for item in items for part in item.split(",")):
        name, equals, host = part.partition("=")
        if equals:
            last = check_node_name(name)
            if last in nodes or last == _AUTHORITY:
                raise UsageError(f"--node {part!r}: {last} is given twice, or is the authority's name")
            nodes[last] = []
        if not (host or (not equals and part)) or not last:
            raise UsageError(f"--node {part!r}: need NAME=HOST,..., as node0=10.0.0.1,node0.example.org")
        nodes[last].append(host or part)
    return nodes


def _authority(directory: Path, now: datetime) -> Pair:
    from tenplexfs.rpc.certificates import Pair, check_pair, make_authority

    certificate, key = directory / f"{_AUTHORITY}.pem", directory / f"{_AUTHORITY}.key"
    if not certificate.exists():
        if key.exists():
            raise ExistsError(
                f"{certificate} is missing, its key is there: bring it back, or name another DIR"
            )
        authority = make_authority(now)
        _write(directory, _AUTHORITY, authority)
        return authority
    if not key.exists():
        raise ExistsError(f"{key} is missing: certificates can be added only where the authority was made")
    authority = Pair(certificate.read_bytes(), key.read_bytes())
    check_pair(authority, authority.certificate, now, what=f"{certificate}")
    return authority


def _write(directory: Path, name: str, pair: Pair) -> None:
    """Writes both, the key first: a certificate that is there has its key."""
    for suffix, content, mode in (("key", pair.key, 0o600), ("pem", pair.certificate, 0o644)):
        aside = directory / f".{name}.{suffix}"
        aside.unlink(missing_ok=True)
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:  # noqa: PTH123
            file.write(content)
        aside.replace(directory / f"{name}.{suffix}")


command(app, "init")(init)


@app.callback()
def _group() -> None:
    """Keeps the name of the one command."""
