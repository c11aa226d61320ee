"""What ``.tenplexfs`` shows of a daemon."""

from __future__ import annotations

import json
from collections.abc import Callable

from tenplexfs.daemon.clients import Clients
from tenplexfs.daemon.config import Config
from tenplexfs.daemon.view import VERSION, View
from tenplexfs.runtime.namespace import Control

__all__ = ["control_files"]


def control_files(config: Config, view: Callable[[], View], clients: Callable[[], Clients]) -> Control:
    """Returns what ``.tenplexfs`` shows; ``view`` and ``clients`` are asked at each open."""
    return Control(
        files={
            "version": f"{VERSION}\n".encode,
            "endpoint": f"{config.socket.absolute()}\n".encode,
            "status.json": lambda: _document(view().status()),
            "config.json": lambda: _document(
                {"format": "tenplexfs-config", "version": 1, **config.document()}
            ),
            "metrics": lambda: view().metrics(),
        },
        jobs=lambda: view().job_names(),
        job_files={
            "status.json": lambda job: _document(view().job_status(job)),
            "stop": lambda job: clients().stop_text(job),
        },
    )


def _document(content: object) -> bytes:
    return json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n"
