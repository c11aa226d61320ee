"""``tenplexfs inspect`` and ``tenplexfs diff``: what is in the tensors, read through the mount by blocks."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from tenplexfs.cli import show
from tenplexfs.cli.session import Session, command
from tenplexfs.core.dtypes import dtype_of
from tenplexfs.core.statistics import Difference, Statistics
from tenplexfs.errors import NotFoundError, PreconditionError, UnavailableError
from tenplexfs.formats.npy import header_size

__all__ = ["register"]

_BLOCK_BYTES = 4 << 20
_SUFFIX = ".npy"
Block = npt.NDArray[Any]

JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="The job, or JOB@STEP for a step that is kept.")
]
RankOption = Annotated[
    int | None, typer.Option("--rank", help="What this rank holds; left out, the whole tensors.")
]


def register(root: typer.Typer) -> None:
    """Adds the commands to ``root``."""
    command(root, "inspect")(inspect)
    command(root, "diff")(diff)


def inspect(
    session: Session,
    *,
    job: JobArgument,
    pattern: Annotated[str, typer.Argument(help="Of tensors, as layers/*/weight or layers.*.weight.")] = "*",
    rank: RankOption = None,
) -> None:
    """Show shape, type, min, max, mean, and the number of NaNs, infinities and zeros of tensors."""
    rows = []
    with _opened(session, job, rank) as tensors:
        chosen = [path for path in tensors.paths if _matches(path, pattern)]
        if not chosen:
            raise NotFoundError(f"job {job}: no tensor matches {pattern!r}")
        for path in chosen:
            tensor, seen = tensors.open(path), Statistics()
            for block in tensor.blocks():
                seen.add(block)
            rows.append(
                {
                    "path": path,
                    "shape": list(tensor.shape),
                    "dtype": tensor.dtype_name,
                    "min": seen.minimum,
                    "max": seen.maximum,
                    "mean": _plain(seen.mean),
                    "nan": seen.nan,
                    "inf": seen.inf,
                    "zeros": seen.zeros,
                    "count": seen.count,
                }
            )
    head = ["path", "shape", "dtype", "min", "max", "mean", "nan", "inf", "zeros"]
    session.emit(
        "inspect",
        {"job": job, "rank": rank, "tensors": rows},
        lambda: show.table(head, [[_text(row[name]) for name in head] for row in rows], numbers=range(3, 9)),
    )


def diff(
    session: Session,
    *,
    first: Annotated[str, typer.Argument(metavar="JOB[@STEP]", help="A job, or a step that is kept.")],
    second: Annotated[str, typer.Argument(metavar="JOB[@STEP]", help="What to compare it with.")],
    pattern: Annotated[str, typer.Option("--only", metavar="PATTERN", help="Only these tensors.")] = "*",
    rank: RankOption = None,
) -> None:
    """Show which tensors differ between two jobs or steps, and by how much."""
    rows: list[dict[str, Any]] = []
    same = 0
    with _opened(session, first, rank) as old, _opened(session, second, rank) as new:
        for path in sorted({*old.paths, *new.paths}):
            if not _matches(path, pattern):
                continue
            row = _compared(path, old, new)
            same += row is None
            rows += [] if row is None else [row]
    content = {"first": first, "second": second, "rank": rank, "same": same, "tensors": rows}

    def person() -> None:
        head = ["path", "change", "differing", "count", "max_abs", "relative"]
        if rows:
            show.table(head, [[_text(row.get(name)) for name in head] for row in rows], numbers=range(2, 6))
        show.note(f"{same} tensors are the same, {len(rows)} differ")

    session.emit("diff", content, person)


def _compared(path: str, old: _Tensors, new: _Tensors) -> dict[str, Any] | None:
    if path not in old.paths or path not in new.paths:
        return {"path": path, "change": f"only in the {'first' if path in old.paths else 'second'}"}
    a, b = old.open(path), new.open(path)
    if (a.shape, a.dtype_name) != (b.shape, b.dtype_name):
        was, now = (f"{t.dtype_name} {list(t.shape)}" for t in (a, b))
        return {"path": path, "change": f"{was} to {now}"}
    apart = Difference()
    for one, other in zip(a.blocks(), b.blocks(), strict=True):
        apart.add(one, other)
    if not apart.differing:
        return None
    relative = apart.relative if math.isfinite(apart.relative) else None
    return {
        "path": path,
        "change": "values",
        "differing": apart.differing,
        "count": apart.count,
        "max_abs": apart.maximum,
        "relative": relative,
    }


@dataclass(frozen=True)
class _Tensor:
    """An open file of the mount; it is closed when its blocks are read."""

    fd: int
    shape: tuple[int, ...]
    dtype_name: str

    def blocks(self) -> Iterator[Block]:
        """Yields the elements in C order, some MiB at a time."""
        dtype = dtype_of(self.dtype_name)
        count = max(_BLOCK_BYTES // dtype.itemsize, 1)
        try:
            with os.fdopen(self.fd, "rb", buffering=0) as file:
                file.seek(header_size(self.shape, self.dtype_name))
                left = math.prod(self.shape)
                while left:
                    block = np.empty(min(count, left), dtype)
                    view, done = block.view(np.uint8).data, 0
                    while done < len(view):
                        done += file.readinto(view[done:]) or _ended()
                    left -= len(block)
                    yield block
        except OSError as error:
            raise UnavailableError(f"reading the mount: {error.strerror}") from error


def _ended() -> int:
    raise UnavailableError("reading the mount: a file ended early")


@dataclass(frozen=True)
class _Tensors:
    """The tensors below one directory of one snapshot."""

    directory: int
    paths: tuple[str, ...]

    def open(self, path: str) -> _Tensor:
        fd = os.open(path + _SUFFIX, os.O_RDONLY, dir_fd=self.directory)
        return _Tensor(fd, _local_shape(fd), os.getxattr(fd, "user.tenplexfs.dtype").decode())


def _local_shape(fd: int) -> tuple[int, ...]:
    with os.fdopen(os.dup(fd), "rb") as file:
        np.lib.format.read_magic(file)
        shape, _, _ = np.lib.format.read_array_header_1_0(file)
    return tuple(shape)


@contextmanager
def _opened(session: Session, job: str, rank: int | None) -> Iterator[_Tensors]:
    """Opens one snapshot of a job, whatever is committed meanwhile."""
    with session.connect() as daemon:
        mount = daemon.status().mount
    if not mount:
        raise PreconditionError("the daemon serves no mount, and tensors are read through it")
    root = Path(mount) / job
    below = "full" if rank is None else f"model/{rank}"
    try:
        top = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise NotFoundError(f"job {job}: {root} is not there ({error.strerror})") from error
    try:
        directory = os.open(below, os.O_RDONLY | os.O_DIRECTORY, dir_fd=top)
    except OSError as error:
        what = "has no state yet" if rank is None else f"has no rank {rank}"
        raise NotFoundError(f"job {job}: {what}") from error
    finally:
        os.close(top)
    try:
        yield _Tensors(directory, tuple(sorted(_walk(directory))))
    finally:
        os.close(directory)


def _walk(directory: int) -> Iterator[str]:
    for parent, _, names, _ in os.fwalk(".", dir_fd=directory):
        for name in names:
            if name.endswith(_SUFFIX):
                yield str(Path(parent, name)).removesuffix(_SUFFIX)


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path.replace("/", "."), pattern)


def _plain(value: complex | float | None) -> object:
    return [value.real, value.imag] if isinstance(value, complex) else value


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value) if isinstance(value, list) else str(value)
