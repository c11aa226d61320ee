"""All commands together, and the boundary: whatever goes wrong becomes one line and an exit status."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Any

import typer

from tenplexfs.cli import contents, datasets, export, jobs, layouts, node, nodes, plans, registry, show, steps
from tenplexfs.cli.session import JsonOption, Session, SocketOption
from tenplexfs.errors import TenplexError, UsageError

__all__ = ["app", "run"]

app = typer.Typer(
    name="tenplexfs",
    help="Keeps the state of training jobs outside the jobs, and changes their parallelism while they live.",
    epilog="In the base install too: env, wait and run; each has --help.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
node.register(app)
jobs.register(app)
plans.register(app)
contents.register(app)
export.register(app)
steps.register(jobs.app)
app.add_typer(jobs.app, name="job")
app.add_typer(nodes.app, name="node")
app.add_typer(registry.app, name="registry")
app.add_typer(datasets.app, name="dataset")
app.add_typer(layouts.app, name="layout")

# The class of all errors of typer's own parser, which it exports by its children only.
_ParseError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(importlib.metadata.version("tenplexfs"))
        raise typer.Exit


@app.callback()
def _root(
    ctx: typer.Context,
    *,
    socket: SocketOption = None,
    json: JsonOption = False,
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    ctx.obj = Session(socket, json)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit status."""
    try:
        status = app(list(arguments), prog_name="tenplexfs", standalone_mode=False)
        sys.stdout.flush()
    except _ParseError as error:
        text = error.format_message().replace("\n", " ").strip()
        if not text:  # no arguments: the help was shown
            return 2
        where = "tenplexfs" if error.ctx is None else error.ctx.command_path
        return _fail(UsageError(f"{text.rstrip('.')} (see {where} --help)"), arguments)
    except TenplexError as error:
        return _fail(error, arguments)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    return status if isinstance(status, int) else 0


def _fail(error: TenplexError, arguments: Sequence[str]) -> int:
    if "--json" in arguments:
        show.print_document(show.error_document(error))
    else:
        show.note("tenplexfs: " + " ".join(error.message.split("\n")))
    return error.exit_status
