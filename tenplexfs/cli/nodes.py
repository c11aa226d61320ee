"""``tenplexfs node ...``: which nodes there are, and moving jobs off one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tenplexfs._pb import control_pb2, members_pb2
from tenplexfs.cli import show
from tenplexfs.cli.client import job_content
from tenplexfs.cli.session import Session, command
from tenplexfs.errors import PreconditionError, TimedOutError, UnavailableError, UsageError

__all__ = ["app"]

app = typer.Typer(help="Nodes: list, drain, forget.", no_args_is_help=True)
NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="The node.")]

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_GRACE_S = 600.0  # what was begun is not left half-way: the daemon goes on after the deadline


@command(app, "list")
def list_nodes(session: Session) -> None:
    """List the nodes: which live, what they have, and what only they have."""
    with session.connect() as daemon:
        reply: members_pb2.ListNodesReply = daemon.nodes()
    nodes = [_content(node) for node in reply.nodes]
    content = {"nodes": nodes, "registry_away": reply.registry_away or None}

    def person() -> None:
        rows = []
        for node in nodes:
            ranks = " ".join(f"{job}:{','.join(map(str, held))}" for job, held in node["ranks"].items())
            sole = sum(node["sole_bytes"].values())
            role = "registry" if node["registry"] else ""
            rows.append(
                (node["name"], node["state"], node["endpoint"], ranks or "-", show.bytes_text(sole), role)
            )
        show.table(["node", "state", "endpoint", "ranks", "only here", ""], rows, numbers=(4,))
        if reply.registry_away:
            typer.echo(f"which nodes live is as last heard: the registry is away: {reply.registry_away}")

    session.emit("nodes", content, person)


@command(app, "drain")
def drain(
    session: Session,
    *,
    node: NodeArgument,
    deadline: Annotated[
        str, typer.Option(metavar="TIME", help="How long the node still lives, as 90s, 2m or 1h.")
    ] = "90s",
) -> None:
    """Move all jobs off a node. Ranks stop at an agreed step; late ones are not waited for.

    Then what only the node has of the newest complete step is moved first.
    """
    seconds = _seconds(deadline)
    jobs: dict[str, dict[str, Any]] = {}
    last: control_pb2.Progress | None = None
    with session.connect() as daemon:
        try:
            for message in daemon.drain(node, seconds, seconds + _GRACE_S):
                last = message.progress
                if message.job and last.phase in ("done", "failed"):
                    jobs[message.job] = {
                        "outcome": last.phase,
                        "message": last.message or None,
                        "job": job_content(last.job) if last.HasField("job") else None,
                    }
        except TimedOutError as error:
            raise TimedOutError(
                f"node drain {node}: not done; the daemon goes on (tenplexfs node list)"
            ) from error
    if last is None:
        raise UnavailableError(f"node drain {node}: the daemon stopped answering; ask again")
    failed = {name: each["message"] for name, each in jobs.items() if each["outcome"] == "failed"}
    if last.phase == "failed" or failed:
        why = "; ".join(
            f"job {name}: {message.removeprefix(f'job {name}: ')}" for name, message in failed.items()
        )
        raise PreconditionError(f"node drain {node}: {last.message}{': ' if why else ''}{why}", jobs=jobs)

    def person() -> None:
        for name, each in jobs.items():
            held = each["job"]
            state = f"{held['state']}, on {', '.join(held['nodes'])}" if held else each["outcome"]
            typer.echo(f"{name}: {state}{': ' + each['message'] if each['message'] else ''}")
        typer.echo(last.message)

    session.emit("drain", {"node": node, "message": last.message, "jobs": jobs}, person)


@command(app, "forget")
def forget(session: Session, *, node: NodeArgument) -> None:
    """Drop a node that is gone from what the daemons know. One that lives, or has ranks, is refused."""
    with session.connect() as daemon:
        daemon.forget(node)
    session.emit("forget", {"node": node}, lambda: typer.echo(f"{node}: forgotten"))


def _content(node: members_pb2.Node) -> dict[str, Any]:
    return {
        "name": node.name,
        "state": node.state,
        "endpoint": node.endpoint or None,
        "incarnation": node.incarnation or None,
        "version": node.version or None,
        "registry": node.registry,
        "ranks": {job: list(node.ranks[job].ranks) for job in sorted(node.ranks)},
        "sole_bytes": {job: node.sole_bytes[job] for job in sorted(node.sole_bytes)},
    }


def _seconds(text: str) -> float:
    unit = _UNITS.get(text[-1:])
    try:
        seconds = float(text[:-1]) * unit if unit is not None else float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 24 * 3600:
        raise UsageError(f"--deadline {text!r}: need a time as 90s, 2m or 1h, at most a day")
    return seconds
