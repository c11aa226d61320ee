"""``tenplexfs plan`` and ``reconfigure``: what a new layout costs, and going there."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tenplexfs._pb import control_pb2
from tenplexfs.cli import show
from tenplexfs.cli.client import job_content, to_axes
from tenplexfs.cli.layouts import (
    GlobalOption,
    Known,
    known_of,
    naming,
    read_file,
    read_known,
    read_layout,
    write_text,
)
from tenplexfs.cli.pictures import estimates, show_estimates, show_reasons
from tenplexfs.cli.session import Session, command, parse_mesh, parse_nodes
from tenplexfs.core.build import build_ptc
from tenplexfs.core.derive import derive_layout
from tenplexfs.core.layout import Layout, place_in_order
from tenplexfs.core.placement import place
from tenplexfs.core.planner import Plan
from tenplexfs.core.planner import plan as make_plan
from tenplexfs.core.transfers import list_transfers
from tenplexfs.errors import TimedOutError, UnavailableError, UsageError, error_from_code
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.formats.plan_html import plan_html

__all__ = ["MeshOption", "NodesOption", "check_last", "register", "show_plan", "target_of"]

_MOST_NODES = 12

MeshOption = Annotated[
    str | None,
    typer.Option(
        metavar="tp=4,dp=2", help="Derive the new layout from the old one; other axes keep their size."
    ),
]
NodesOption = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="With --mesh: the nodes, with devices or without: node0:4,node1:4."),
]
DropOption = Annotated[
    list[str] | None, typer.Option(metavar="PATTERN", help="Tensors that the new layout may leave out.")
]


def register(app: typer.Typer) -> None:
    """Adds the commands to ``app``."""
    command(app, "plan")(plan)
    command(app, "reconfigure")(reconfigure)


def plan(
    session: Session,
    *,
    layouts: Annotated[
        list[Path] | None, typer.Argument(metavar="OLD NEW", help="Layout files; with --job: NEW alone.")
    ] = None,
    job: Annotated[
        str | None, typer.Option(metavar="JOB", help="The old layout is what this job has committed.")
    ] = None,
    mesh: MeshOption = None,
    nodes: NodesOption = None,
    drop: DropOption = None,
    operations: Annotated[bool, typer.Option("--operations", help="List every transfer too (JSON).")] = False,
    bandwidth: Annotated[
        list[str] | None,
        typer.Option(metavar="RATE", help="Estimate the time at this speed of each node's link: 100Gbit/s."),
    ] = None,
    shapes: GlobalOption = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with pictures of the plan.")
    ] = None,
) -> None:
    """Show what changing from one layout to another would move. Offline, unless --job is given."""
    files = layouts or []
    estimates({"nodes": {}}, bandwidth or [])  # a rate that is none is refused before anything is computed
    if len(files) != (job is None) + (mesh is None):
        want = ("NEW" if mesh is None else "no file") if job else ("OLD and NEW" if mesh is None else "OLD")
        raise UsageError(f"plan: need {want}{' beside --mesh' if mesh else ''}, got {len(files)} files")
    made: Plan | None = None
    if job is None:
        known = read_known(shapes)
        made = _plan_of(read_layout(files[0], known), files[1:], mesh, nodes, drop or [], known)
        content = dict(made.summary())
        if operations:
            content["transfers"] = list(list_transfers(made))
    else:
        request = control_pb2.PlanRequest(
            job=job, drop=drop or [], operations=operations, **target_of(files, mesh, nodes)
        )
        new = files[-1] if files else None
        with naming(new, lambda: _committed(session, job)), session.connect() as daemon:
            content = json.loads(daemon.plan(request))
            if html is not None or not session.json:
                committed = parse_layout(daemon.job(job).layout_json)
                made = _plan_of(committed, files, mesh, nodes, drop or [])
    found = estimates(content, bandwidth or ([] if session.json else ["100Gbit/s"]))
    if bandwidth:
        content["estimates"] = found
    if html is not None and made is not None:
        names = [
            job or files[0].name,
            *(file.name for file in files[0 if job else 1 :]),
            *([mesh] if mesh else []),
        ]
        write_text(html, plan_html(made, title=" to ".join(names)))
    session.emit("plan", content, lambda: _show_made(content, made, found, html))


def _show_made(
    content: Mapping[str, Any], made: Plan | None, found: Sequence[Mapping[str, Any]], html: Path | None
) -> None:
    show_plan(content)
    if made is not None:
        typer.echo()
        show_reasons(made)
    show_estimates(found)
    if html is not None:
        typer.echo(f"wrote {html}")


def reconfigure(
    session: Session,
    *,
    job: Annotated[str, typer.Argument(help="The job.")],
    layout: Annotated[Path | None, typer.Argument(help="The new layout; or --mesh.")] = None,
    mesh: MeshOption = None,
    nodes: NodesOption = None,
    resources: Annotated[
        str | None,
        typer.Option(
            metavar="A=4,B=4", help="The devices that there are, or none: its parallelizer decides."
        ),
    ] = None,
    drop: DropOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan, and change nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Follow it to the end.")] = True,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.001, help="How long to wait.")
    ] = None,
    generation: Annotated[
        int, typer.Option(min=0, help="Refuse unless this is the job's generation; 0: any.")
    ] = 0,
    request_id: Annotated[
        str | None, typer.Option(metavar="ID", help="The same id is the same transaction.")
    ] = None,
    stop_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How long the job may take to stop.")
    ] = 0,
) -> None:
    """Change the parallelism of a job, in place: stage on every node, then switch all trees at once."""
    if [layout, mesh, resources].count(None) != 2:
        raise UsageError("reconfigure: need a layout file, --mesh or --resources, one of the three")
    if resources is not None and (nodes or drop or dry_run or generation):
        raise UsageError("--resources goes without --nodes, --drop, --dry-run and --generation")
    target = target_of([layout] if layout else [], mesh, nodes) if resources is None else {}
    with naming(layout, lambda: _committed(session, job)), session.connect() as daemon:
        if dry_run:
            content = json.loads(daemon.plan(control_pb2.PlanRequest(job=job, drop=drop or [], **target)))
            session.emit("plan", content, lambda: show_plan(content))
            return
        request = control_pb2.ReconfigureRequest(
            job=job,
            drop=drop or [],
            expected_generation=generation,
            request_id=request_id or uuid.uuid4().hex,
            stop_timeout_s=stop_timeout,
            **target,
        )
        if resources is None:
            steps = daemon.reconfigure(request, timeout)
        else:
            notice = control_pb2.NotifyResourcesRequest(
                job=job,
                nodes=_devices(resources),
                request_id=request.request_id,
                stop_timeout_s=stop_timeout,
            )
            steps = daemon.notify(notice, timeout)
        try:
            last = show.progress(steps, job, quiet=session.json) if wait else next(steps, None)
        except TimedOutError as error:
            where = f"reconfigure {job}: not done after {timeout} s; the daemon goes on"
            raise TimedOutError(
                f"{where} (tenplexfs job show {job})", request_id=request.request_id
            ) from error
        check_last(last, f"reconfigure {job}", is_final=wait)
    assert last is not None
    content = {
        "request_id": request.request_id,
        "phase": last.phase,
        "job": job_content(last.job) if last.HasField("job") else None,
        "plan": json.loads(last.plan.json) if last.plan.json else None,
    }
    session.emit("reconfigure", content, lambda: _show_done(content, job))


def _committed(session: Session, job: str) -> Known:
    with session.connect() as daemon:
        return known_of(build_ptc(parse_layout(daemon.job(job).layout_json)))


def _devices(text: str) -> dict[str, int]:
    """Returns node -> devices of ``node0=4,node1=4``; none of ``none``."""
    found: dict[str, int] = {}
    for item in text.split(",") if text != "none" else ():
        node, equals, devices = item.strip().partition("=")
        if not (node and equals and devices.isdecimal() and int(devices) < 1 << 32) or node in found:
            raise UsageError(
                f"--resources {text!r}: need nodes with devices, each once, as node0=4,node1=4, or none"
            )
        found[node] = int(devices)
    return found


def check_last(last: control_pb2.Progress | None, what: str, *, is_final: bool = True) -> None:
    """Raises what the last message of a transaction says went wrong.

    Raises:
        UnavailableError: The stream ended early.
        TenplexError: The transaction failed.
    """
    if last is not None and last.phase == "failed":
        raise error_from_code("FAILED_PRECONDITION", f"{what}: {last.message}")
    if last is None or (is_final and last.phase != "done"):
        raise UnavailableError(
            f"{what}: the daemon stopped answering; look with tenplexfs status, then ask again"
        )


def target_of(files: list[Path], mesh: str | None, nodes: str | None) -> dict[str, Any]:
    """Returns the fields of a request that say where to go."""
    if nodes is not None and mesh is None:
        raise UsageError("--nodes goes with --mesh; a layout file names its nodes itself")
    return {
        "layout_json": "" if mesh else read_file(files[-1]),
        "mesh": to_axes(parse_mesh(mesh)) if mesh else [],
        "nodes": {node: count or 0 for node, count in parse_nodes(nodes).items()} if nodes else {},
    }


def _plan_of(
    old: Layout,
    files: Sequence[Path],
    mesh: str | None,
    nodes: str | None,
    drop: Sequence[str],
    known: Known | None = None,
) -> Plan:
    """Plans from ``old`` to the one file, or to what the mesh makes of it."""
    held = build_ptc(place_in_order(old))
    if mesh is None:
        if nodes is not None:
            raise UsageError("--nodes goes with --mesh; a layout file names its nodes itself")
        new = read_layout(files[-1], {**known_of(held), **(known or {})})
    else:
        new = derive_layout(old, parse_mesh(mesh), parse_nodes(nodes) if nodes else None)
    return make_plan(held, build_ptc(place(held, new, drop=drop)), drop=drop)


def show_plan(content: Mapping[str, Any]) -> None:
    """Prints a plan for a person."""
    size, nodes, matrix = content["bytes"], content["nodes"], content["matrix"]
    rows = [
        ("needed", "what the nodes must hold"),
        ("kept", "in a file that stays as it is, or holds it already"),
        ("local", "on the node, in another rank's file"),
        ("moved", "over the network"),
        ("moved_lower_bound", "no plan can move less"),
        ("padding", "zeros, never moved"),
    ]
    bold = [
        (name.replace("_", " "), show.bytes_text(size[name]), f"{size[name]:,}", what) for name, what in rows
    ]
    show.table(["", "", "bytes", ""], bold, numbers=(1, 2))
    typer.echo()
    busy = sorted(nodes, key=lambda name: (-nodes[name]["sends"] - nodes[name]["receives"], name))
    show.table(
        ["node", "sends", "receives"],
        [
            (name, show.bytes_text(nodes[name]["sends"]), show.bytes_text(nodes[name]["receives"]))
            for name in sorted(busy[:_MOST_NODES])
        ],
        numbers=(1, 2),
    )
    if len(busy) > _MOST_NODES:
        typer.echo(f"and {len(busy) - _MOST_NODES} nodes that move less")
    typer.echo()
    if size["moved"] and len(nodes) <= _MOST_NODES:
        names = sorted(nodes)
        show.table(
            ["from \\ to", *names],
            [
                (source, *(show.bytes_text(of[target]) if target in of else "-" for target in names))
                for source in names
                if (of := matrix.get(source))
            ],
            numbers=range(1, len(names) + 1),
        )
        typer.echo()
    count = content["operations"]
    typer.echo(f"{count['split']} splits, {count['move']} moves, {count['merge']} merges")


def _show_done(content: Mapping[str, Any], name: str) -> None:
    job, plan = content["job"], content["plan"]
    if job is None:
        typer.echo(f"{name}: {content['phase']} (request {content['request_id']})")
        return
    moved = f"; {show.bytes_text(plan['bytes']['moved'])} moved, no plan can move less" if plan else ""
    mesh = ",".join(f"{axis}={size}" for axis, size in job["mesh"].items())
    if job["message"]:
        moved = f"; {job['state']}: {job['message']}"
    typer.echo(
        f"{name}: generation {job['generation']}, {mesh or 'explicit'}, on {', '.join(job['nodes'])}{moved}"
    )
