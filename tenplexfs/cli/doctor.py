"""``tenplexfs doctor``: what is wrong with this node, and what to do about it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from tenplexfs.cli.session import Session
from tenplexfs.cli.settings import Flags
from tenplexfs.daemon.config import load_config
from tenplexfs.errors import PreconditionError, UsageError

__all__ = ["doctor"]


def doctor(
    session: Session,
    flags: Flags,
    *,
    abort: Annotated[
        bool, typer.Option("--abort", help="Free a mount that hangs: what waits in it fails.")
    ] = False,
) -> None:
    """Look at all that the daemon needs, and say what is broken and how to mend it; changes nothing.

    Takes the flags of serve, its environment and files. Exits with 1 when something is broken.
    """
    config = load_config(flags)
    if abort:
        _abort(session, None if config.mount is None else os.path.realpath(config.mount))
        return
    from tenplexfs.daemon.doctor import examine

    findings = []
    for finding in examine(config):
        findings.append(finding)
        if not session.json:
            typer.echo(f"{finding.verdict:8} {finding.what}: {finding.message}")
    broken = sum(finding.verdict == "broken" for finding in findings)
    content = {
        "node": config.node,
        "broken": broken,
        "findings": [
            {"what": each.what, "verdict": each.verdict, "message": each.message} for each in findings
        ],
    }
    session.emit("doctor", content, lambda: None)
    if broken:
        raise typer.Exit(1)


def _abort(session: Session, mount: str | None) -> None:
    from tenplexfs.fuse.hang import abort, hangs

    if mount is None:
        raise UsageError("doctor --abort: there is no mount with --no-mount")
    if not hangs(mount):
        raise PreconditionError(f"{mount}: answers, or is dead: tenplexfs unmount {mount} takes it away")
    abort(mount)
    session.emit("doctor", {"aborted": mount}, lambda: typer.echo(f"{mount}: freed and taken away"))
