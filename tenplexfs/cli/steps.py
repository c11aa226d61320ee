"""``tenplexfs job rollback``, ``restore`` and ``history``: the steps that a job can go back to."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tenplexfs._pb import control_pb2, local_pb2
from tenplexfs.cli import show
from tenplexfs.cli.client import job_content
from tenplexfs.cli.plans import MeshOption, NodesOption, check_last, target_of
from tenplexfs.cli.session import Session, command
from tenplexfs.errors import UsageError

__all__ = ["register"]

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job.")]
TimeoutOption = Annotated[float | None, typer.Option(metavar="SECONDS", min=0.001, help="How long to wait.")]


def register(app: typer.Typer) -> None:
    """Adds the commands to ``app``, which is ``job``."""
    command(app, "rollback")(rollback)
    command(app, "restore")(restore)
    command(app, "history")(history)


def rollback(
    session: Session,
    *,
    name: JobArgument,
    step: Annotated[int, typer.Option(min=0, help="A step that `job history` lists.")],
    skip_samples: Annotated[
        int, typer.Option(metavar="K", min=0, help="Leave out so many samples after that step.")
    ] = 0,
    timeout: TimeoutOption = None,
) -> None:
    """Go back to an earlier step: its state and its place in the dataset, as a new generation."""
    request = control_pb2.RollbackRequest(
        job=name, step=step, skip_samples=skip_samples, request_id=uuid.uuid4().hex
    )
    with session.connect() as daemon:
        last = _follow(daemon.rollback(request, timeout), session, f"rollback {name}")
    _done(session, "rollback", last, f"{name}: back at step {step}", skipped_samples=skip_samples)


def restore(
    session: Session,
    *,
    name: JobArgument,
    source: Annotated[
        str, typer.Option("--from", metavar="URL", help="Where steps were persisted: a directory, s3://...")
    ],
    step: Annotated[int | None, typer.Option(min=0, help="Which step; else the newest.")] = None,
    layout: Annotated[Path | None, typer.Option(help="A layout file, where the job is not there.")] = None,
    mesh: MeshOption = None,
    nodes: NodesOption = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Whatever nodes still have of the job, and its layout, go.")
    ] = False,
    timeout: TimeoutOption = None,
) -> None:
    """Make a job of a persisted step, or give it that state: each node reads what it needs, in any layout."""
    if layout is not None and mesh is not None:
        raise UsageError("restore: give a layout file or --mesh, not both")
    place = source if "://" in source else str(Path(source).absolute())
    target = target_of([layout] if layout else [], mesh, nodes) if layout or mesh or nodes else {}
    request = local_pb2.RestoreRequest(
        job=name, url=place, request_id=uuid.uuid4().hex, replace=replace, **target
    )
    if step is not None:
        request.step = step
    with session.connect() as daemon:
        last = _follow(daemon.restore(request, timeout), session, f"restore {name}")
    _done(session, "restore", last, f"{name}: restored at step {last.job.step}", source=place)


def history(session: Session, *, name: JobArgument) -> None:
    """List the steps of a job that are kept, and those that are persisted."""
    with session.connect() as daemon:
        content = json.loads(daemon.history(name))
    session.emit("history", content, lambda: _show(content))


def _follow(steps: Iterator[control_pb2.Progress], session: Session, what: str) -> control_pb2.Progress:
    last = show.progress(steps, what, quiet=session.json)
    check_last(last, what)
    assert last is not None
    return last


def _done(session: Session, kind: str, last: control_pb2.Progress, line: str, **more: object) -> None:
    content = {
        "job": job_content(last.job),
        "bytes": last.bytes_done,
        "plan": json.loads(last.plan.json) if last.plan.json else None,
        **more,
    }
    said = f"{line}, generation {last.job.generation}, {show.bytes_text(last.bytes_done)} moved"
    session.emit(kind, content, lambda: typer.echo(said))


def _show(content: dict[str, Any]) -> None:
    steps = content["steps"]
    if not steps:
        typer.echo("no state yet")
        return
    rows = [
        (
            each["step"],
            each["generation"],
            "now" if each["current"] else "yes" if each["kept"] else "-",
            each["persisted"] or "-",
        )
        for each in steps
    ]
    show.table(["step", "generation", "kept", "persisted"], rows, numbers=(0, 1))
    if content["message"]:
        show.note(f"persisted steps cannot be listed: {content['message']}")
