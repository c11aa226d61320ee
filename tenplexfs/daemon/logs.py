"""The log: one line an event on stderr, as ``2026-01-31T12:00:00.123Z WARNING storage.store: text``."""

from __future__ import annotations

import logging
import sys
import time

__all__ = ["setup_logs"]


class _OneLine(logging.Formatter):
    """Formats a record, its traceback included, as one line."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        name = record.name.removeprefix("tenplexfs.")
        line = f"{when}.{int(record.msecs):03d}Z {record.levelname} {name}: {record.getMessage()}"
        if record.exc_info:
            line += " | " + self.formatException(record.exc_info)
        return line.replace("\n", " | ")


def setup_logs(level: int = logging.INFO) -> None:
    """Sends the log of the whole process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # It logs every request, and the registry in etcd is asked all the time.
    logging.getLogger("httpx").setLevel(logging.WARNING)
