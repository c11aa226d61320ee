"""What every command shares: the global options, and the one place where errors become lines and statuses."""

from __future__ import annotations

import functools
import inspect
import json as json_format
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from tenplexfs.cli import show
from tenplexfs.cli.client import Daemon, find_socket
from tenplexfs.errors import UsageError

__all__ = ["JsonOption", "Session", "SocketOption", "command", "parse_mesh", "parse_nodes", "parse_settings"]

SocketOption = Annotated[
    str | None,
    typer.Option(
        "--socket",
        metavar="PATH",
        help="Socket of the daemon; else TENPLEXFS_SOCKET, TENPLEXFS_MOUNT, the mount around the directory.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, also for errors.")]


@dataclass(frozen=True, slots=True)
class Session:
    """One run of the command line.

    Attributes:
        socket: As given by ``--socket``.
        json: Whether machines read the output.
    """

    socket: str | None
    json: bool

    def connect(self) -> Daemon:
        """Returns the daemon on this machine.

        Raises:
            UnavailableError: No socket is known, or nobody answers on it.
        """
        return Daemon(find_socket(self.socket))

    def emit(self, kind: str, content: Mapping[str, Any], person: Callable[[], None]) -> None:
        """Prints ``content`` for machines, or calls ``person``, which prints it for one."""
        if self.json:
            show.print_document(show.document(kind, content))
        else:
            person()


def command(
    app: typer.Typer, name: str, *, hidden: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function whose first parameter is the `Session` as the command ``name``.

    The global options may stand before the command and behind it.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(ctx: typer.Context, *, socket: str | None, json: bool, **arguments: object) -> None:
            outer: Session = ctx.find_root().obj
            function(Session(socket or outer.socket, json or outer.json), **arguments)

        hints = typing.get_type_hints(function, include_extras=True)
        own = list(inspect.signature(function).parameters.values())[1:]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
            *(parameter.replace(annotation=hints[parameter.name], kind=keyword) for parameter in own),
            inspect.Parameter("socket", keyword, default=None, annotation=SocketOption),
            inspect.Parameter("json", keyword, default=False, annotation=JsonOption),
        ]
        # typer reads the signature and, for the types, the annotations.
        vars(run).pop("__wrapped__")
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(name, hidden=hidden)(run)
        return function

    return register


def parse_mesh(text: str) -> dict[str, int]:
    """Returns the axes of ``tp=4,dp=2``, in order.

    >>> parse_mesh("tp=4,dp=2")
    {'tp': 4, 'dp': 2}

    Raises:
        UsageError: It is no such list.
    """
    mesh: dict[str, int] = {}
    for item in text.split(","):
        axis, equals, size = item.strip().partition("=")
        if not (axis and equals and size.isdecimal() and int(size)) or axis in mesh:
            raise UsageError(f"--mesh {text!r}: need axes with sizes, each once, as tp=4,dp=2")
        mesh[axis] = int(size)
    return mesh


def parse_nodes(text: str) -> dict[str, int | None]:
    """Returns node -> devices, or None where they are not said, of ``node0:4,node1``.

    >>> parse_nodes("node0:4,node1")
    {'node0': 4, 'node1': None}

    Raises:
        UsageError: It is no such list.
    """
    nodes: dict[str, int | None] = {}
    for item in text.split(","):
        node, colon, devices = item.strip().partition(":")
        if not node or node in nodes or (colon and not (devices.isdecimal() and int(devices))):
            raise UsageError(
                f"--nodes {text!r}: need names, each once, with devices or without, as node0:4,node1:4"
            )
        nodes[node] = int(devices) if colon else None
    return nodes


def parse_settings(items: list[str], *, what: str = "--set") -> dict[str, Any]:
    """Returns the settings of ``keep_steps=2``-like items; values are JSON where they are, else text.

    Args:
        items: As given.
        what: How an error names them.

    Raises:
        UsageError: An item has no ``=``, or begins as JSON and is none.
    """
    settings: dict[str, Any] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not (name and equals):
            raise UsageError(f"{what} {item!r}: need NAME=VALUE")
        try:
            settings[name] = json_format.loads(value)
        except ValueError as error:
            if value.startswith(("{", "[", '"')):
                raise UsageError(f"{what} {item!r}: no valid JSON: {error}") from error
            settings[name] = value
    return settings
