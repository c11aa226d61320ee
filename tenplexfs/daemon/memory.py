"""The store of a daemon, and the memory that it is in."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tenplexfs.daemon.config import DEFAULT_ROOT_STORE, Config
from tenplexfs.errors import PreconditionError
from tenplexfs.storage.store import Store

__all__ = ["opened_store"]


@contextmanager
def opened_store(config: Config) -> Iterator[Store]:
    """Opens the store of a daemon, and closes it."""
    if config.store == DEFAULT_ROOT_STORE:
        _mount_memory(config.store)
    store = Store.open(config.store, node=config.node, limit_bytes=config.memory_bytes)
    try:
        yield store
    finally:
        store.close()


def _mount_memory(path: Path) -> None:
    """Makes the default store of root: a file system in memory of its own, which outlives the daemon.

    In huge pages where the kernel has them: filling fresh ones takes a fifth of the time. It takes none for
    what is smaller than one.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.is_mount():
        return
    for huge in (",huge=within_size", ""):
        options = f"mode=0700,size=100%{huge}"
        command = ["mount", "-t", "tmpfs", "-o", options, "tenplexfs-store", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not done.returncode:
            break
    else:
        raise PreconditionError(
            f"store {path}: a memory file system cannot be mounted ({done.stderr.strip()}); give --store"
        )
