"""What requests of Tenplex's clients say: paths, types, shapes, ranges."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tenplexfs.core.dtypes import check_shape, dtype_of
from tenplexfs.core.snapshot import JobName, check_job_name
from tenplexfs.errors import InvalidError, NotFoundError

__all__ = [
    "Bounds",
    "Place",
    "dims_text",
    "dtype_word",
    "parse_array",
    "parse_meta",
    "parse_place",
    "parse_range",
    "parse_step",
]

Bounds = Sequence[tuple[int | None, int | None]]
"""Start and stop of each dim; None is open."""

_WORDS = {
    f"{short}{bits}": f"{kind}{bits}"
    for short, kind, sizes in (("f", "float", (16, 32, 64)), ("i", "int", (8, 16, 32, 64)))
    for bits in sizes
} | {f"u{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)}
_NAMES = {name: word for word, name in _WORDS.items()}
_BOUND = re.compile(r"\s*([0-9]{0,18})\s*:\s*([0-9]{0,18})\s*", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_USE = "need /job/<job>/save/<rank>/..., /job/<job>/load/<rank>/... or /job/<job>/iter"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a path leads.

    Attributes:
        section: "save", "load", "iter", or "" for the job itself.
        rank: None for all.
        name: Of a file or directory of the rank; "" for all of it.
    """

    job: JobName
    section: str = ""
    rank: int | None = None
    name: str = ""

    @property
    def text(self) -> str:
        """The path again."""
        rank = None if self.rank is None else str(self.rank)
        return "/" + "/".join(part for part in ("job", self.job, self.section, rank, self.name) if part)


def parse_place(path: str) -> Place:
    """Returns where ``path`` leads; slashes count once.

    >>> parse_place("job/gpt//save/0/layers.0/w.numpy.ndarray")
    Place(job='gpt', section='save', rank=0, name='layers.0/w.numpy.ndarray')

    Raises:
        InvalidError: A part of it is no name.
        NotFoundError: There are no such paths.
    """
    parts = [part for part in path.split("/") if part]
    if any(part in (".", "..") or "\0" in part for part in parts):
        raise InvalidError(f"path {path[:200]!r}: '.', '..' and NUL are no names")
    match parts:
        case ["job", str(job)]:
            return Place(check_job_name(job))
        case ["job", str(job), "iter"]:
            return Place(check_job_name(job), "iter")
        case ["job", str(job), "save" | "load" as section]:
            return Place(check_job_name(job), section)
        case ["job", str(job), "save" | "load" as section, str(rank), *names] if _NUMBER.fullmatch(rank):
            return Place(check_job_name(job), section, int(rank), "/".join(names))
    raise NotFoundError(f"path {path[:200]!r}: {_USE}")


def parse_range(text: str) -> Bounds:
    """Returns the bounds that a range says, for the first dims; brackets are optional.

    >>> parse_range("[:,2:4]"), parse_range("1:")
    ([(None, None), (2, 4)], [(1, None)])

    Raises:
        InvalidError: It is none.
    """
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
    bounds: list[tuple[int | None, int | None]] = []
    for part in inner.split(",") if inner.strip() else ():
        found = _BOUND.fullmatch(part)
        if found is None:
            raise InvalidError(f"range {text[:100]!r}: need START:STOP for each dim, as in [:,2:4]")
        bounds.append((int(found[1]) if found[1] else None, int(found[2]) if found[2] else None))
    return bounds


def parse_array(dtype: str, dims: str) -> tuple[str, tuple[int, ...]]:
    """Returns the name of a dtype and a shape; no dims are those of a scalar.

    >>> parse_array("f32", "4,2"), parse_array("bfloat16", "")
    (('float32', (4, 2)), ('bfloat16', ()))

    Raises:
        InvalidError: There is no such dtype, or it is no shape.
    """
    name = _WORDS.get(dtype, dtype)
    dtype_of(name)
    parts = [part.strip() for part in dims.split(",")] if dims.strip() else []
    if not all(map(_NUMBER.fullmatch, parts)):
        raise InvalidError(f"dims {dims[:100]!r}: need sizes, as in 4,2")
    shape = tuple(map(int, parts))
    check_shape("dims", shape, name)
    return name, shape


def parse_meta(data: bytes) -> tuple[str, tuple[int, ...]]:
    """Returns dtype and shape from the file that mlfs keeps beside that of a tensor.

    Raises:
        InvalidError: It is none.
    """
    words = data.decode(errors="replace").split()
    if len(words) < 2 or words[1] != str(len(words) - 2):
        raise InvalidError(
            f"meta {data[:100]!r}: need dtype, the number of dims, and their sizes, line by line"
        )
    return parse_array(words[0], ",".join(words[2:]))


def parse_step(data: bytes) -> int:
    """Returns the step that ``iter`` is set to.

    Raises:
        InvalidError: It is none.
    """
    text = data.strip()
    if not text.isdigit() or len(text) > 18:
        raise InvalidError(f"iter {data[:40]!r}: need a step, a whole number >= 0")
    return int(text)


def dtype_word(name: str) -> str:
    """Returns what Tenplex calls a dtype; others keep their name."""
    return _NAMES.get(name, name)


def dims_text(shape: Sequence[int]) -> str:
    """Returns a shape as it is written."""
    return ",".join(map(str, shape))
