"""``tenplexfs registry ...``: what to do when the registry was lost, or is another one."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from tenplexfs.cli import show
from tenplexfs.cli.session import Session, command

__all__ = ["app"]

app = typer.Typer(help="The registry: rebuild a lost one, or fill another one.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """With one command only, typer would make it the group."""


@command(app, "rebuild")
def rebuild(
    session: Session,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Write it; else it is only shown.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also when nodes are missing that may have something newer.")
    ] = False,
) -> None:
    """Make the heads of a registry of what the nodes store: it was lost, or is another one, or an old backup.

    For each job the newest snapshot that some node has as committed, and of which every piece is there on the
    nodes that answer. What the registry knows, and is no older than that, is left alone.
    """
    with session.connect() as daemon:
        content = json.loads(daemon.rebuild_registry(write=yes, force=force))
    session.emit("registry-rebuild", content, lambda: _show(content))


def _show(content: dict[str, Any]) -> None:
    if content["silent"]:
        show.note(f"no answer from: {', '.join(content['silent'])}")
    if not content["jobs"]:
        typer.echo("the nodes store no job")
        return
    rows = [
        (
            job["name"],
            "-" if job["generation"] is None else job["generation"],
            "-" if job["step"] is None else job["step"],
            ", ".join(job["nodes"]) or "nothing is whole",
            ", ".join(job["missing"]) or "-",
            "; ".join(job["newer"]) or "-",
        )
        for job in content["jobs"]
    ]
    show.table(["job", "generation", "step", "nodes", "missing", "newer, not whole"], rows, numbers=(1, 2))
    typer.echo("written" if content["written"] else "nothing is written yet: --yes writes it")
