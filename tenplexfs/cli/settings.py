"""A flag for every setting of the daemon, for the commands that take them all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from tenplexfs.cli.session import Session
from tenplexfs.daemon.settings import SETTINGS

__all__ = ["Flags", "with_settings"]

Flags = Mapping[str, str | list[str] | None]
"""Settings as given on the command line, as `load_config` takes them."""

_SWITCHES = ("no_mount", "allow_other", "insecure")
_METAVARS = {
    "node": "NAME",
    "mount": "DIR",
    "listen": "HOST:PORT",
    "advertise": "HOST:PORT",
    "http": "HOST:PORT",
    "peer": "NODE=HOST:PORT",
    "join": "HOST[:PORT]|dns:NAME|slurm",
    "registry": "NODE|etcd://HOST:PORT,...",
    "store": "DIR",
    "memory": "SIZE",
    "remote_reads": "on|off",
    "read_timeout": "SECONDS",
    "retain": "SECONDS",
    "tls": "DIR",
    "token_file": "FILE",
}


def with_settings(function: Callable[..., None]) -> Callable[..., None]:
    """Returns ``function`` as a command that has a flag for each setting.

    Args:
        function: Its first parameters are the `Session` and the `Flags`; it may have options of its own.
    """

    def run(session: Session, **arguments: Any) -> None:  # noqa: ANN401 - typer's
        flags: dict[str, str | list[str] | None] = {"socket": session.socket}
        for name in _parameters():
            given = arguments.pop(name)
            flags[name] = ("on" if given else None) if name in _SWITCHES else given or None
        function(session, flags, **arguments)

    own = list(inspect.signature(function, eval_str=True).parameters.values())
    run.__doc__ = function.__doc__
    parameters = [own[0], *_parameters().values(), *own[2:]]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters() -> dict[str, inspect.Parameter]:
    return {name: _parameter(name, text) for name, text in SETTINGS.items() if name != "socket"}


def _parameter(name: str, text: str) -> inspect.Parameter:
    if name in _SWITCHES:
        kind: Any = Annotated[bool, typer.Option(f"--{name.replace('_', '-')}", help=text)]
        default: object = False
    else:
        base: Any = list[str] | None if name == "peer" else str | None
        kind, default = Annotated[base, typer.Option(metavar=_METAVARS.get(name, "VALUE"), help=text)], None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
