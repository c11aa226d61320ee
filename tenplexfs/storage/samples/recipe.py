"""From what a person names, files and a kind, to an index in a file. Runs in a process of its own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tenplexfs.errors import InvalidError
from tenplexfs.storage.samples.build import Built, IndexBuilder, write_index
from tenplexfs.storage.samples.objects import Limits, ObjectReader
from tenplexfs.storage.samples.reader import LocalReader, RangeReader
from tenplexfs.storage.samples.routes import RoutedReader

__all__ = ["KINDS", "BuiltFile", "Recipe", "build_index", "file_digest", "make_reader"]

KINDS = ("npy", "npz", "records", "megatron", "tenplex", "files")
_PARALLEL = 64
# Less than a read waits: what else came with a sample that fails is there in time.
_REQUEST_S = 15.0
_DEADLINE_S = 30.0
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Recipe:
    """What a dataset is made of.

    Attributes:
        sources: Absolute paths, directories, globs or URLs, in order.
        kind: One of `KINDS`; empty: by the names of the files.
        members: Samples are the arrays in ``.npz`` files, not the files.
        record_bytes: Of each record, for records.
        skip_bytes: Before the first record of a file.
        dtype: Of the elements of a record, as numpy names it; empty: bytes.
        shape: Of a record.
        sequence_length: Of Megatron's samples in tokens; 0: a document is a sample.
    """

    sources: tuple[str, ...]
    kind: str = ""
    members: bool = False
    record_bytes: int = 0
    skip_bytes: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    sequence_length: int = 0


@dataclass(frozen=True)
class BuiltFile:
    """An index that was built, and what is odd about it; see `Built`."""

    path: Path
    digest: str
    index_bytes: int
    kind: str
    count: int
    files: int
    shape: tuple[int, ...] | None
    short: tuple[str, ...]
    overlapping_count: int
    empty_count: int


def make_reader() -> RangeReader:
    """Returns what reads paths and URLs; stores are configured by the environment (``AWS_...``)."""
    limits = Limits(parallel=_PARALLEL, request_s=_REQUEST_S, deadline_s=_DEADLINE_S)
    return RoutedReader(LocalReader(), ObjectReader(limits=limits))


def build_index(recipe: Recipe, directory: Path, progress: Path) -> BuiltFile:
    """Builds, checks and writes the index of a dataset below ``directory``.

    Args:
        recipe: What it is made of.
        directory: Where the file is put, under the name of its digest.
        progress: A file that says ``<files done> <files in all>``, replaced as it goes.

    Raises:
        InvalidError, NotFoundError, CorruptError: Names the file that is wrong.
    """

    def report(done: int, total: int) -> None:
        aside = progress.with_suffix(".next")
        aside.write_text(f"{done} {total}")
        aside.replace(progress)

    reader = make_reader()
    try:
        built = _build(recipe, reader, report)
    finally:
        reader.close()
    aside = directory / f".new-{os.getpid()}"
    try:
        write_index(built.index, aside)
        digest = file_digest(aside)
        path = directory / digest
        aside.chmod(0o400)
        aside.rename(path)
    finally:
        with suppress(FileNotFoundError):
            aside.unlink()
    return BuiltFile(
        path=path,
        digest=digest,
        index_bytes=path.stat().st_size,
        kind=built.index.kind,
        count=built.index.count,
        files=built.index.file_count,
        shape=built.index.shape,
        short=built.short,
        overlapping_count=built.overlapping_count,
        empty_count=built.empty_count,
    )


def file_digest(path: Path) -> str:
    """Returns the name of an index: 32 hex digits of its bytes."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _build(recipe: Recipe, reader: RangeReader, report: Callable[[int, int], None]) -> Built:
    if not recipe.sources:
        raise InvalidError("dataset: no source given")
    if recipe.kind == "megatron":
        return _megatron(recipe, reader, report)
    files = [file for source in recipe.sources for file in reader.find(source)]
    kind = recipe.kind or _kind_of(files)
    builder = IndexBuilder(reader, report)
    if kind == "npy":
        return builder.npy(files)
    if kind == "npz":
        return builder.members(files) if recipe.members else builder.files(files)
    if kind == "files":
        return builder.files(files)
    if kind == "records":
        return builder.records(
            files,
            record_bytes=recipe.record_bytes,
            skip_bytes=recipe.skip_bytes,
            dtype=np.dtype(recipe.dtype) if recipe.dtype else None,
            shape=recipe.shape or None,
        )
    if kind == "tenplex":
        if len(files) != 1:
            raise InvalidError(f"tenplex: need one index file, got {len(files)}")
        return builder.tenplex(files[0])
    if kind == "megatron":
        return _megatron(recipe, reader, report)
    raise InvalidError(f"kind {kind!r}: need one of {', '.join(KINDS)}")


def _megatron(recipe: Recipe, reader: RangeReader, report: Callable[[int, int], None]) -> Built:
    prefixes: list[str] = []
    for source in recipe.sources:
        stem = source.removesuffix(".bin").removesuffix(".idx")
        found = reader.find(f"{stem}.idx" if "://" in source or Path(f"{stem}.idx").exists() else source)
        prefixes += [file.removesuffix(".idx") for file in found if file.endswith(".idx")]
    if not prefixes:
        raise InvalidError(f"megatron: no .idx file at {', '.join(recipe.sources)}")
    builder = IndexBuilder(reader, report)
    return builder.megatron(prefixes, sequence_length=recipe.sequence_length or None)


def _kind_of(files: Sequence[str]) -> str:
    """Returns the kind that the names of the files tell; a directory of anything is `files`."""
    ends = {file.rpartition("/")[2].rpartition(".")[2].lower() for file in files}
    if ends <= {"bin", "idx"} and "idx" in ends:
        return "megatron"
    return next(iter(ends)) if ends in ({"npy"}, {"npz"}) else "files"
