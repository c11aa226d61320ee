"""``tenplexfs env``, ``wait`` and ``run``: what a launcher needs, in the base install."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tenplexfs.errors import InvalidError, NotFoundError, TenplexError, UnavailableError, UsageError

__all__ = ["Parser", "fail", "find_mount", "locate", "of_base_install", "run"]

_COMMANDS = ("env", "run", "wait")
_VERSION = 1


class Parser(argparse.ArgumentParser):
    """Raises what is wrong."""

    def error(self, message: str) -> NoReturn:  # noqa: D102
        raise UsageError(f"{message} (see {self.prog} --help)")


def of_base_install(arguments: Sequence[str]) -> list[str] | None:
    """Returns ``arguments`` with the command first if it is one of ours, else None.

    >>> of_base_install(["--socket", "a.sock", "env", "gpt"])
    ['env', '--socket', 'a.sock', 'gpt']
    >>> of_base_install(["status"])
    """
    at = 0
    while at < len(arguments) and arguments[at].startswith("--"):
        if arguments[at] != "--json" and not arguments[at].startswith("--socket"):
            return None
        at += 2 if arguments[at] == "--socket" else 1
    if at >= len(arguments) or arguments[at] not in _COMMANDS:
        return None
    return [arguments[at], *arguments[:at], *arguments[at + 1 :]]


def run(arguments: Sequence[str]) -> int:
    """Runs one of these commands; returns its exit status."""
    name, *rest = arguments
    if name == "run":
        from tenplexfs.client.launch import main

        return main(rest)
    text = " ".join(rest)  # also where it cannot be parsed
    as_json = any(flag in text for flag in ("--json", "--format json", "--format=json"))
    try:
        given = _parser(name).parse_args(rest)
        as_json = given.as_json or given.format == "json"
        found = _env(given) if name == "env" else _wait(given)
    except SystemExit as end:  # the help was shown
        return int(end.code or 0)
    except TenplexError as error:
        return fail(error, as_json=as_json)
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(_json("env", found) if as_json else _shell(found))
    return 0


def _parser(name: str) -> Parser:
    texts = {
        "env": "Print what to start a job's processes with, as variables to eval or as JSON.",
        "wait": "Wait for a job; print what to start its processes with.",
    }
    parser = Parser(prog=f"tenplexfs {name}", description=texts[name])
    parser.add_argument("job", metavar="JOB", help="its name, or <mount>/<job>")
    parser.add_argument(
        "--socket",
        help="of the daemon; else TENPLEXFS_SOCKET, TENPLEXFS_MOUNT, the mount around the directory",
    )
    parser.add_argument("--format", choices=("shell", "json"), default="shell", help="of the output (shell)")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON, also for errors")
    if name == "wait":
        parser.add_argument(
            "--for",
            action="append",
            dest="wanted",
            metavar="WHAT=VALUE",
            help="state=ready, generation=N or step=N (at least), several by commas or again (state=ready)",
        )
        parser.add_argument("--timeout", type=float, metavar="SECONDS", help="exit with 124 after so long")
    return parser


def _env(given: argparse.Namespace) -> dict[str, Any]:
    from tenplexfs.client.jobs import env

    path, socket = locate(given.job, given.socket)
    return env(path, socket=socket, patience_s=0)


def _wait(given: argparse.Namespace) -> dict[str, Any]:
    from tenplexfs.client.jobs import env, wait

    wanted: dict[str, Any] = {"state": None}
    for item in ",".join(given.wanted or ["state=ready"]).split(","):
        name, equals, value = item.partition("=")
        if not equals or name not in ("state", "generation", "step"):
            raise UsageError(f"--for {item!r}: need state=ready, generation=N or step=N")
        if name != "state" and not value.isdecimal():
            raise UsageError(f"--for {item!r}: need a number")
        wanted[name] = value if name == "state" else int(value)
    if given.timeout is not None and not given.timeout >= 0:
        raise UsageError(f"--timeout {given.timeout:g}: need seconds")
    path, socket = locate(given.job, given.socket)
    try:
        env(path, socket=socket, patience_s=0)
    except NotFoundError as error:
        sys.stderr.write(f"tenplexfs wait: {error.message} yet; waiting for it\n")
    except UnavailableError:  # it is waited for as well
        pass
    return wait(path, socket=socket, timeout_s=given.timeout, **wanted)


def locate(job: str, socket: str | None = None) -> tuple[Path, str | None]:
    """Returns ``<mount>/<job>`` and None, or the job's name and the socket of the daemon.

    Args:
        job: Its name, or its path.
        socket: As given.

    Raises:
        InvalidError: It is no name of a job.
        UnavailableError: No daemon is known.
    """
    path = Path(job)
    if not job or path.name in ("", ".."):
        raise InvalidError(f"job {job!r}: need its name, or <mount>/<job>")
    if socket or ("/" not in job and (socket := os.environ.get("TENPLEXFS_SOCKET"))):
        return Path(path.name), socket
    if "/" in job:
        return path.absolute(), None
    return find_mount() / job, None


def find_mount(option: str = "--socket") -> Path:
    """Returns ``TENPLEXFS_MOUNT``, else the mount around the working directory.

    Args:
        option: What the caller may be given instead.

    Raises:
        UnavailableError: There is none.
    """
    if named := os.environ.get("TENPLEXFS_MOUNT"):
        return Path(named).absolute()
    for parent in (Path.cwd(), *Path.cwd().parents):
        if (parent / ".tenplexfs" / "endpoint").is_file():
            return parent
    raise UnavailableError(f"which daemon? give {option}, set TENPLEXFS_MOUNT, or stand in a mount")


def _shell(found: Mapping[str, Any]) -> str:
    loads = found["step"] is not None
    values = {
        "JOB": found["job"],
        "MOUNT": found["mount"],
        "STATE": found["state"],
        "GENERATION": found["generation"],
        "STEP": found["step"],
        "SNAPSHOT": found["snapshot"] if loads else None,
        "MESH": ",".join(f"{axis}={size}" for axis, size in found["mesh"].items()),
        "WORLD_SIZE": found["world_size"],
        "RANKS": ",".join(map(str, found["ranks"])),
        "NPROC": len(found["ranks"]),
        "NNODES": sum(1 for ranks in found["nodes"].values() if ranks),
    }
    return "".join(
        f"unset TENPLEXFS_{name}\n"
        if value is None
        else f"export TENPLEXFS_{name}={shlex.quote(str(value))}\n"
        for name, value in values.items()
    )


def _json(kind: str, content: Mapping[str, Any]) -> str:
    document = {"format": f"tenplexfs-{kind}", "version": _VERSION, **content}
    return json.dumps(document, indent=2, ensure_ascii=False, default=str) + "\n"


def fail(error: TenplexError, *, as_json: bool, command: str = "tenplexfs") -> int:
    """Says what went wrong; returns the exit status."""
    if as_json:
        content = {"code": error.code, "message": error.message, "details": error.details}
        sys.stdout.write(_json("error", {"error": content}))
    else:
        sys.stderr.write(f"{command}: {error.message}\n")
    return error.exit_status
