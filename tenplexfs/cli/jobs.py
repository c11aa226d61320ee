"""``tenplexfs job ...``, ``import`` and ``verify``: jobs and their state."""

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
from tenplexfs.cli.layouts import GlobalOption, naming, read_file, read_known, read_layout
from tenplexfs.cli.plans import check_last
from tenplexfs.cli.session import Session, command, parse_settings
from tenplexfs.errors import CorruptError
from tenplexfs.formats.layout_json import layout_text

__all__ = ["app", "register", "show_jobs"]

app = typer.Typer(help="Jobs: make, show, list, remove.", no_args_is_help=True)
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job.")]


def register(root: typer.Typer) -> None:
    """Adds the commands that are no part of ``job`` to ``root``."""
    command(root, "import")(import_state)
    command(root, "verify")(verify)


@command(app, "create")
def create(
    session: Session,
    *,
    name: Annotated[str, typer.Argument(metavar="JOB", help="The new job: letters, digits, _ . -")],
    layout: Annotated[Path, typer.Option(help="A layout file.")],
    shapes: GlobalOption = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting, as keep_steps=2.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What it may take of each node's store, as 8GiB.")
    ] = None,
) -> None:
    """Make a job without state: generation 1. Its state comes by import, upload or save."""
    chosen = parse_settings([*(settings or []), *([f"memory={memory}"] if memory else [])])
    with session.connect() as daemon:
        text = read_file(layout) if shapes is None else _filled_in(layout, shapes)
        with naming(layout if shapes is None else None):
            job = daemon.create_job(name, text, json.dumps(chosen) if chosen else "")
    session.emit("job", _full(job), lambda: show_jobs([job]))


def _filled_in(layout: Path, shapes: Path) -> str:
    """Returns the JSON of a layout with the global shapes that it leaves out."""
    return layout_text(read_layout(layout, read_known(shapes))).decode()


@command(app, "set")
def change(
    session: Session,
    *,
    name: JobArgument,
    settings: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE...", help="Settings, as replicas=1; NAME= removes one.")
    ],
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.001, help="How long to wait.")
    ] = None,
) -> None:
    """Change settings of a job: a new generation with the same state, or none when they are so already."""
    chosen = {
        setting: None if value == "" else value
        for setting, value in parse_settings(settings, what="job set").items()
    }
    request = local_pb2.SetJobRequest(job=name, settings_json=json.dumps(chosen), request_id=uuid.uuid4().hex)
    with session.connect() as daemon:
        last = show.progress(daemon.set_job(request, timeout), f"set {name}", quiet=session.json)
    check_last(last, f"set {name}")
    assert last is not None
    content = _full(last.job)
    has = ", ".join(f"{key}={json.dumps(content['settings'].get(key))}" for key in chosen)
    line = f"{name}: {has}, generation {last.job.generation}"
    session.emit("job", content, lambda: typer.echo("\n".join([line, *_notes(last.job)])))


@command(app, "show")
def show_job(session: Session, *, name: JobArgument) -> None:
    """Show a job: its generation, step, mesh and nodes."""
    with session.connect() as daemon:
        job = daemon.job(name)
    session.emit("job", _full(job), lambda: show_jobs([job]))


@command(app, "list")
def list_jobs(session: Session) -> None:
    """List the jobs."""
    with session.connect() as daemon:
        jobs = daemon.jobs()
    session.emit("jobs", {"jobs": [job_content(job) for job in jobs]}, lambda: show_jobs(jobs))


@command(app, "remove")
def remove(session: Session, *, name: JobArgument) -> None:
    """Remove a job and its state, on every node. There is no way back."""
    with session.connect() as daemon:
        job = daemon.remove_job(name)
    line = f"{name}: removed" if job.state else f"{name}: there is no such job"
    session.emit("job", {**job_content(job), "removed": True}, lambda: typer.echo(line))


def import_state(
    session: Session,
    *,
    job: JobArgument,
    source: Annotated[
        Path, typer.Argument(metavar="FILE", help="safetensors: a file, an index, or a directory with one.")
    ],
    step: Annotated[int, typer.Option(min=0, help="The step that the state is of.")] = 0,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Tensors of the file to leave out.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.001, help="How long to wait.")
    ] = None,
) -> None:
    """Give a job its state from safetensors files. Tensors missing on either side are refused, all named."""
    request = local_pb2.ImportRequest(
        job=job, path=str(source.absolute()), step=step, ignore=ignore or [], request_id=uuid.uuid4().hex
    )
    with session.connect() as daemon:
        last = show.progress(daemon.import_state(request, timeout), job, quiet=session.json)
    check_last(last, f"import {job}")
    assert last is not None
    content = {
        "job": job_content(last.job),
        "source": request.path,
        "bytes": last.bytes_done,
        "plan": json.loads(last.plan.json) if last.plan.json else None,
    }
    line = f"{job}: step {step} imported, {show.bytes_text(last.bytes_done)}"
    session.emit("import", content, lambda: typer.echo(line))


def verify(
    session: Session, *, job: Annotated[str, typer.Argument(metavar="JOB", help="One job; else all.")] = ""
) -> None:
    """Read every piece that this node stores again and compare its checksum."""
    bad: list[dict[str, Any]] = []

    def replies() -> Iterator[local_pb2.VerifyReply]:
        for reply in daemon.verify(job):
            bad.extend(
                {"job": one.job, "txid": one.txid, "rank": one.rank, "path": one.path, "message": one.message}
                for one in reply.mismatches
            )
            yield reply

    with session.connect() as daemon:
        last = show.progress(replies(), "verifying", quiet=session.json)
    checked = last.bytes_done if last is not None else 0
    if bad:
        first = bad[0]
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        where = f"job {first['job']} rank {first['rank']} tensor {first['path']}"
        raise CorruptError(f"{where}: {first['message']}{more}", bytes=checked, mismatches=bad)
    content: dict[str, Any] = {"job": job or None, "bytes": checked, "mismatches": []}
    session.emit(
        "verify", content, lambda: typer.echo(f"{show.bytes_text(checked)} read, every checksum right")
    )


def show_jobs(jobs: list[control_pb2.Job]) -> None:
    """Prints ``jobs`` as a table."""
    if not jobs:
        typer.echo("no jobs")
        return
    rows = []
    for job in map(job_content, jobs):
        mesh = ",".join(f"{axis}={size}" for axis, size in job["mesh"].items())
        nodes = " ".join(f"{node}:{','.join(map(str, ranks))}" for node, ranks in job["nodes"].items())
        step = "-" if job["step"] is None else job["step"]
        losses = "-" if job["step"] is None else job["survives_node_losses"]
        rows.append((job["name"], job["state"], job["generation"], step, losses, mesh or "explicit", nodes))
    head = ["job", "state", "generation", "step", "survives losses", "mesh", "nodes"]
    show.table(head, rows, numbers=(2, 3, 4))
    for job in jobs:
        if job.message:
            typer.echo(f"{job.name} is {job.state}: {job.message}")
        for note in _notes(job):
            typer.echo(note)


def _notes(job: control_pb2.Job) -> list[str]:
    """Returns what settings of a job come to, where that is less than they say."""
    wanted, others = json.loads(job.settings_json or "{}").get("replicas", 0), len(job.nodes) - 1
    if wanted <= others or not job.nodes:
        return []
    are = f"are {others + 1} nodes" if others else "is one node"
    return [f"{job.name}: replicas={wanted} comes to {others} for now: there {are}"]


def _full(job: control_pb2.Job) -> dict[str, Any]:
    settings = json.loads(job.settings_json) if job.settings_json else {}
    layout = json.loads(job.layout_json) if job.layout_json else None
    return {**job_content(job), "settings": settings, "layout": layout}
