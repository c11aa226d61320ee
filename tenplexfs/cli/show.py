"""What people and machines see: numbers, tables, JSON documents, progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from tenplexfs.errors import TenplexError
from tenplexfs.formats.text import bytes_text

__all__ = [
    "bytes_bar",
    "bytes_text",
    "document",
    "error_document",
    "layout_text",
    "note",
    "print_document",
    "progress",
    "table",
]


class Step(Protocol):
    """What a message of a long call tells about how far it is."""

    @property
    def bytes_done(self) -> int:
        """Bytes that are through."""

    @property
    def bytes_total(self) -> int:
        """Bytes of all of it, or 0 while unknown."""


S = TypeVar("S", bound=Step)


def document(kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``content`` with the format and version that every output for machines carries."""
    return {"format": f"tenplexfs-{kind}", "version": 1, **content}


def error_document(error: TenplexError) -> dict[str, Any]:
    """Returns ``error`` for machines; the code is gRPC's."""
    return {
        "format": "tenplexfs-error",
        "version": 1,
        "error": {"code": error.code, "message": error.message, "details": error.details},
    }


def print_document(content: Mapping[str, Any]) -> None:
    """Prints one JSON document to standard output."""
    sys.stdout.write(json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")


def layout_text(layout: Mapping[str, Any]) -> str:
    """Returns a layout as JSON with one line for each tensor."""
    parts = []
    for name, value in layout.items():
        if name == "tensors" and value:
            lines = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            parts.append(f'  "tensors": {{\n{lines}\n  }}')
        else:
            parts.append(f"  {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def note(text: str) -> None:
    """Prints a line for the person, beside the output."""
    sys.stderr.write(f"{text}\n")


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Collection[int] = ()) -> None:
    """Prints a table to standard output; the columns ``numbers`` are aligned to the right."""
    view = Table(header_style="bold", pad_edge=False, box=None)
    for index, name in enumerate(head):
        view.add_column(name, justify="right" if index in numbers else "left", no_wrap=True)
    for row in rows:
        view.add_row(*(Text(str(cell)) for cell in row))
    Console(width=10_000).print(view)  # a long name is worth a wrapped line, and is never cut


@contextmanager
def _bar() -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(
        *columns, TransferSpeedColumn(), TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        yield bar


@contextmanager
def bytes_bar(title: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Gives what is told the bytes done, of ``total``; a bar shows them if a person watches."""
    if quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    with _bar() as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


def progress(steps: Iterable[S], title: str, *, quiet: bool) -> S | None:
    """Follows a long call to its end, with a bar if a person watches, and returns its last message."""
    last: S | None = None
    if quiet or not sys.stderr.isatty():
        for step in steps:
            last = step
        return last
    with _bar() as bar:
        task = bar.add_task(title, total=None)
        for last in steps:
            phase = getattr(last, "phase", "")
            total = last.bytes_total or None
            bar.update(task, description=phase or title, completed=last.bytes_done, total=total)
    return last
