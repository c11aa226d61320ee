"""What a process knows of the jobs it works for: the snapshot each was loaded from, and its own name."""

from __future__ import annotations

import atexit
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tenplexfs.client.connection import Connection

__all__ = ["kept", "loaded_from", "process_name", "remember", "run_name"]

# The one state of the client. A forked child inherits what its parent loaded, and has a name of its own.
_loaded: dict[tuple[str, str], str] = {}
_names: dict[int, str] = {}
_kept: dict[str, Connection] = {}


def _let_go() -> None:
    while _kept:
        _kept.popitem()[1].close()


os.register_at_fork(after_in_child=_let_go)
atexit.register(_let_go)


@contextmanager
def kept(name: str, make: Callable[[], Connection]) -> Iterator[Connection]:
    """Gives the connection of this process under ``name``, made where there is none; errors close it."""
    connection = _kept.pop(name, None) or make()
    try:
        yield connection
    except BaseException:
        connection.close()
        raise
    if _kept.setdefault(name, connection) is not connection:  # of another thread
        connection.close()


def remember(mount: Path, job: str, snapshot: str) -> None:
    """Takes note of what ``job`` was loaded from, or saved as."""
    _loaded[str(mount), job] = snapshot


def loaded_from(mount: Path, job: str) -> str | None:
    """Returns the snapshot of ``TENPLEXFS_SNAPSHOT``, else what this process last loaded, else None."""
    return os.environ.get("TENPLEXFS_SNAPSHOT") or _loaded.get((str(mount), job))


def process_name() -> str:
    """Returns a name that no other process has or will have."""
    pid = os.getpid()
    if pid not in _names:
        _names.clear()
        _names[pid] = f"{pid}-{secrets.token_hex(4)}"
    return _names[pid]


def run_name() -> str:
    """Returns what the ranks of one run have in common, as far as the launcher tells."""
    parts = (os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))
    return ".".join(parts)
