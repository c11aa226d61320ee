"""``tenplexfs serve``, ``status``, ``unmount`` and what else is about the daemon of this node."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Annotated

import typer

from tenplexfs.cli import show, tls
from tenplexfs.cli.client import Daemon, job_content
from tenplexfs.cli.doctor import doctor
from tenplexfs.cli.jobs import show_jobs
from tenplexfs.cli.session import Session, command
from tenplexfs.cli.settings import Flags, with_settings
from tenplexfs.daemon.config import load_config
from tenplexfs.errors import NotFoundError, TenplexError, TimedOutError, UnavailableError

__all__ = ["register"]

_POLL_S = 0.05


def register(app: typer.Typer) -> None:
    """Adds the commands to ``app``."""
    command(app, "serve")(with_settings(serve))
    command(app, "mount", hidden=True)(with_settings(serve))
    command(app, "doctor")(with_settings(doctor))
    app.add_typer(tls.app, name="tls")
    command(app, "status")(status)
    command(app, "unmount")(unmount)


def serve(session: Session, flags: Flags) -> None:
    """Run the daemon of this node, in the foreground. `mount` is the same.

    Every flag may also stand in the environment, as TENPLEXFS_<FLAG>, or in a configuration file.
    """
    config = load_config(flags)
    # Imported here: nothing else needs the daemon, and a command should start at once.
    from tenplexfs.daemon.app import run

    if run(config):
        raise typer.Exit(1)


def status(session: Session) -> None:
    """Show the daemon of this node, its store and its jobs."""
    with session.connect() as daemon:
        reply = daemon.status()
    content = json.loads(reply.json) if reply.json else {}
    content |= {
        "node": reply.node,
        "pid": reply.pid,
        "mount": reply.mount or None,
        "listen": reply.listen,
        "store": {
            **content.get("store", {}),
            "used_bytes": reply.store_used_bytes,
            "limit_bytes": reply.store_limit_bytes,
        },
        "jobs": [job_content(job) for job in reply.jobs],
        "tenplexfs": reply.version,
    }
    content.pop("format", None)
    content.pop("version", None)

    def person() -> None:
        used, limit = show.bytes_text(reply.store_used_bytes), show.bytes_text(reply.store_limit_bytes)
        typer.echo(f"node {reply.node}, tenplexfs {reply.version}, pid {reply.pid}")
        typer.echo(
            f"mount {reply.mount or 'none'}, listens on {reply.listen or 'nothing'}, store {used} of {limit}"
        )
        show_jobs(list(reply.jobs))

    session.emit("status", content, person)


def unmount(
    session: Session,
    *,
    mount: Annotated[Path | None, typer.Argument(help="The mount point; else the one of the daemon.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="How long to wait.")] = 30.0,
) -> None:
    """End the daemon and take its mount away. The store stays: serve shows it again."""
    socket = _endpoint(mount) if mount is not None and session.socket is None else session.socket
    if socket is None and mount is not None:
        _clear(mount)
        session.emit(
            "unmount",
            {"mount": str(mount), "pid": None},
            lambda: typer.echo(f"{mount}: dead mount taken away"),
        )
        return
    with Session(socket, session.json).connect() as daemon:
        reply = daemon.status()
        _stop(daemon)
    deadline = time.monotonic() + timeout
    while _is_alive(reply.pid) or (reply.mount and _mounted(reply.mount)):
        if time.monotonic() > deadline:
            raise TimedOutError(
                f"unmount: the daemon, pid {reply.pid}, still ends after {timeout} s", pid=reply.pid
            )
        time.sleep(_POLL_S)
    content = {"mount": reply.mount or None, "pid": reply.pid, "node": reply.node}
    session.emit("unmount", content, lambda: typer.echo(f"node {reply.node}: unmounted, the store stays"))


def _stop(daemon: Daemon) -> None:
    try:
        daemon.stop()
    except UnavailableError:
        return  # it ended before it answered


def _endpoint(mount: Path) -> str | None:
    """Returns the socket of the daemon of ``mount``, or None when the mount is dead.

    Raises:
        NotFoundError: Nothing of ours is mounted there.
    """
    if not _mounted(str(mount.absolute())):
        raise NotFoundError(f"{mount}: no tenplexfs is mounted there")
    try:
        return (mount / ".tenplexfs" / "endpoint").read_text().strip().removeprefix("unix:")
    except OSError:
        return None


def _mounted(mount: str) -> bool:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape").encode("latin-1").decode()
        if point == mount and after.startswith("fuse.tenplexfs "):
            return True
    return False


def _is_alive(pid: int) -> bool:
    """Says whether the process runs; one that ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _clear(mount: Path) -> None:
    tool = "fusermount3" if os.geteuid() else "umount"
    flags = ["-u", "-z"] if os.geteuid() else ["-l"]
    result = subprocess.run([tool, *flags, str(mount)], capture_output=True, text=True, check=False)
    if result.returncode:
        raise TenplexError(f"{mount}: {result.stderr.strip()}")
