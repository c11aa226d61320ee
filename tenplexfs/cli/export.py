"""``tenplexfs export``: a step of a job as safetensors files, for whoever knows nothing of us."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer

from tenplexfs.cli import show
from tenplexfs.cli.session import Session, command
from tenplexfs.client.connection import Place
from tenplexfs.client.regions import RegionOf
from tenplexfs.client.whole import WholeSnapshot
from tenplexfs.core.paths import name_of_path
from tenplexfs.core.ptc import PTC, Tensor
from tenplexfs.core.snapshot import check_job_name, parse_snapshot
from tenplexfs.daemon.settings import parse_size
from tenplexfs.errors import CorruptError, ExistsError, NotFoundError, TenplexError, UsageError
from tenplexfs.formats.model_files import INDEX, SINGLE, ModelFiles, files_of_index, lay_out_files
from tenplexfs.formats.safetensors_file import FileLayout
from tenplexfs.storage.sums import as_bytes
from tenplexfs.storage.targets import Bucket, Directory, NewFile, Target

__all__ = ["register"]

_SUFFIX = ".safetensors"
_OF_FILES = ("format", "tenplexfs")  # what the metadata of a file say beside ties


class _Format(StrEnum):
    SAFETENSORS = "safetensors"


def register(root: typer.Typer) -> None:
    """Adds the command to ``root``."""
    command(root, "export")(export)


def export(
    session: Session,
    *,
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job, or JOB@STEP for a step that is kept.")],
    target: Annotated[
        str, typer.Argument(metavar="DIR|FILE|URL", help="A directory, or a file if it ends in .safetensors.")
    ],
    step: Annotated[int | None, typer.Option(min=0, help="A step that is kept; else the newest.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Whole tensors: the default.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="What this rank holds, instead.")] = None,
    below: Annotated[
        str | None, typer.Option(metavar="PATH", help="Only what is below, named from there, as model.")
    ] = None,
    only: Annotated[str, typer.Option(metavar="PATTERN", help="Only these, as layers.*.weight.")] = "*",
    kind: Annotated[_Format, typer.Option("--format", help="Of the files.")] = _Format.SAFETENSORS,
    shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of each file in a directory, at most; else 5GB.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over what is there.")] = False,
) -> None:
    """Write a step as safetensors files, whole tensors, as Hugging Face's libraries and import read them."""
    if full and rank is not None:
        raise UsageError("export: give --full or --rank, not both")
    name, at = _job(job, step)
    place, file = _target(target)
    if file is not None and shard_size is not None:
        raise UsageError(f"export {target}: --shard-size is for directories, and this names one file")
    with session.connect() as daemon:
        daemon.job(name)  # says what is wrong, if something is
        socket = daemon.socket
    with WholeSnapshot(Place(Path(), name, None, None), step=at, socket=socket) as snapshot:
        chosen = _choose(snapshot.ptc, rank, below, only)
        if not chosen.tensors:
            raise NotFoundError(f"job {name}: no tensor is to be exported: {_wanted(rank, below, only)}")
        size = None if file else _shard_bytes(shard_size)
        files = _lay_out(chosen, f"{name} {snapshot.snapshot}", size, file or SINGLE)
        values = _values(snapshot, rank, below, only)
        content = _content(name, snapshot.snapshot, rank)
        total = sum(layout.size for layout in files.layouts.values())
        with show.bytes_bar(f"export {name}", total, quiet=session.json) as count:
            writing = _Writing(snapshot, rank, chosen.tensors, count)
            new = _new_files(files, values, content, writing.parts)
            _write(place, new, force=force)
    content |= {
        "target": place.path(new[-1].name),
        "files": [{"path": place.path(each.name), "bytes": each.size} for each in new],
        "bytes": sum(each.size for each in new),
        "tensors": len(chosen.tensors),
        "ties": {name_of_path(tied): name_of_path(kept) for tied, kept in chosen.ties.items()},
    }
    line = (
        f"{name}: step {content['step']} exported to {content['target']}, {len(chosen.tensors)} tensors, "
        f"{show.bytes_text(content['bytes'])}"
    )
    session.emit("export", content, lambda: typer.echo(line))


def _job(job: str, step: int | None) -> tuple[str, int | None]:
    name, at, text = job.partition("@")
    check_job_name(name)
    if not at:
        return name, step
    if not text.isdecimal():
        raise UsageError(f"job {job!r}: need JOB or JOB@STEP")
    if step not in (None, int(text)):
        raise UsageError(f"export {job}: --step {step} is another one")
    return name, int(text)


def _target(text: str) -> tuple[Target, str | None]:
    """Returns where files go, and the name of the only one if that is given."""
    if "://" in text and not text.startswith("file://"):
        parent, _, last = text.rstrip("/").rpartition("/")
        return (Bucket(parent), last) if last.endswith(_SUFFIX) else (Bucket(text), None)
    path = Path(text.removeprefix("file://"))
    if path.name.endswith(_SUFFIX) and not path.is_dir():
        return Directory(path.parent.absolute()), path.name
    if path.exists() and not path.is_dir():
        raise UsageError(f"export {text}: is a file; need a directory, or a file that ends in {_SUFFIX}")
    return Directory(path.absolute()), None


def _shard_bytes(text: str | None) -> int:
    return parse_size("5GB" if text is None else text, of_bytes=0, what="--shard-size")


@dataclass(frozen=True)
class _Chosen:
    """What is exported.

    Attributes:
        tensors: Path in the files -> path in the snapshot, dtype, shape.
        ties: Path that is left out -> path of the same tensor that stands for it.
    """

    tensors: Mapping[str, tuple[str, str, tuple[int, ...]]]
    ties: Mapping[str, str]


def _choose(ptc: PTC, rank: int | None, below: str | None, only: str) -> _Chosen:
    tensors: dict[str, tuple[str, str, tuple[int, ...]]] = {}
    ties: dict[str, str] = {}
    stands: dict[object, str] = {}
    paths = ptc.placements if rank is None else ptc.rank_paths(rank)
    # The tensor's own name first, so that the others are tied to it.
    for path in sorted(paths, key=lambda path: (ptc.tensors[path].path != path, path)):
        short = _below(path, below, only)
        if short is None:
            continue
        tensor, placement = ptc.tensors[path], ptc.placements[path]
        cell = None if rank is None else (placement.cells, ptc.cell(rank, placement))
        first = stands.setdefault((tensor.path, cell), short)
        if first != short and name_of_path(short) not in _OF_FILES:
            ties[short] = first
            continue
        shape = tensor.shape if rank is None else ptc.shard(rank, path).local_shape
        tensors[short] = path, tensor.dtype, shape
    return _Chosen(dict(sorted(tensors.items())), ties)


def _below(path: str, below: str | None, only: str) -> str | None:
    """Returns the path from ``below`` on, or None where it is not wanted."""
    if below is not None:
        prefix = below.strip("/").replace(".", "/") + "/"
        if not path.startswith(prefix):
            return None
        path = path.removeprefix(prefix)
    return path if fnmatchcase(path, only) or fnmatchcase(path.replace("/", "."), only) else None


def _wanted(rank: int | None, below: str | None, only: str) -> str:
    given = {"--rank": rank, "--below": below, "--only": None if only == "*" else only}
    return ", ".join(f"{flag} {value}" for flag, value in given.items() if value is not None) or "it has none"


def _lay_out(chosen: _Chosen, origin: str, shard_bytes: int | None, single: str) -> ModelFiles:
    noted = {name_of_path(tied): name_of_path(kept) for tied, kept in chosen.ties.items()}
    kinds = {path: (dtype, shape) for path, (_, dtype, shape) in chosen.tensors.items()}
    return lay_out_files(
        kinds, shard_bytes=shard_bytes, metadata={"tenplexfs": origin, **noted}, single=single
    )


def _values(snapshot: WholeSnapshot, rank: int | None, below: str | None, only: str) -> dict[str, Any]:
    """Returns what is no tensor: what all ranks that have it have alike, and what differs, by rank."""
    of_rank: list[dict[str, Any]] = []
    known: dict[int, dict[str, Any]] = {}
    for leaves in snapshot.leaves():
        if id(leaves) not in known:
            short = ((_below(path, below, only), text) for path, text in leaves.items())
            known[id(leaves)] = {path: json.loads(text) for path, text in short if path is not None}
        of_rank.append(known[id(leaves)])
    if rank is not None:
        return {"values": of_rank[rank], "ranks": {}}
    texts: dict[str, set[str]] = {}
    for values in known.values():
        for path, value in values.items():
            texts.setdefault(path, set()).add(json.dumps(value))
    alike = {path for path, found in texts.items() if len(found) == 1}
    common = {path: value for values in known.values() for path, value in values.items() if path in alike}
    differing = {
        str(number): own
        for number, values in enumerate(of_rank)
        if (own := {path: value for path, value in values.items() if path not in alike})
    }
    return {"values": common, "ranks": differing}


def _content(job: str, snapshot: str, rank: int | None) -> dict[str, Any]:
    known = parse_snapshot(snapshot)
    return {
        "job": job,
        "generation": known.generation,
        "step": known.step,
        "txid": known.txid,
        "rank": rank,
    }


@dataclass(frozen=True)
class _Writing:
    """Reads what goes into the files, and counts it."""

    snapshot: WholeSnapshot
    rank: int | None
    tensors: Mapping[str, tuple[str, str, tuple[int, ...]]]
    count: Callable[[int], None]
    done: dict[str, int] = field(default_factory=dict)

    def parts(self, name: str, layout: FileLayout) -> Iterator[bytes | memoryview]:
        """Yields the bytes of a file."""
        self.done[name] = len(layout.header)
        yield layout.header
        for part in self._data(layout):
            yield part
            self.done[name] += len(part)
            self.count(sum(self.done.values()))
        if self.done[name] != layout.size:
            raise CorruptError(f"{name}: {self.done[name]} bytes came of {layout.size}")

    def _data(self, layout: FileLayout) -> Iterator[memoryview]:
        paths = [self.tensors[path][0] for path in layout.paths]
        if self.rank is None:
            whole = [_whole(self.snapshot.ptc.tensors[path]) for path in paths]
            yield from map(as_bytes, self.snapshot.parts(whole))
        else:
            yield from map(as_bytes, self.snapshot.shards(self.rank, paths))


def _whole(tensor: Tensor) -> RegionOf:
    return RegionOf(tensor.path, (0,) * len(tensor.shape), tensor.shape, tensor.dtype)


def _new_files(
    files: ModelFiles,
    values: Mapping[str, Any],
    content: Mapping[str, Any],
    parts: Callable[[str, FileLayout], Iterator[bytes | memoryview]],
) -> list[NewFile]:
    """Returns the files, that by which the others are found last."""
    new = [
        NewFile(name, layout.size, lambda name=name, layout=layout: parts(name, layout))  # type: ignore[misc]
        for name, layout in files.layouts.items()
    ]
    if values["values"] or values["ranks"]:
        stem = SINGLE if files.index is not None else new[0].name
        text = json.dumps(show.document("values", {**content, **values}), indent=2, ensure_ascii=False)
        new.insert(0, _small(_beside(stem), text.encode() + b"\n"))
    return new if files.index is None else [*new, _small(INDEX, files.index)]


def _beside(name: str) -> str:
    return name.removesuffix(_SUFFIX) + ".values.json"


def _small(name: str, data: bytes) -> NewFile:
    return NewFile(name, len(data), lambda: iter([data]))


def _write(place: Target, new: list[NewFile], *, force: bool) -> None:
    names = [file.name for file in new]
    # Whichever of them we write, readers would find the other ones.
    found = {SINGLE, INDEX, _beside(SINGLE)} if names[-1] in (SINGLE, INDEX) else {_beside(names[-1])}
    there = [name for name in sorted({*names, *found}) if place.has(name)]
    if there and not force:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise ExistsError(f"{place.path(there[0])}{more}: is there already; --force writes over it")
    gone = []
    if INDEX in there and INDEX in found:
        gone = [INDEX, *sorted(_old_shards(place) - set(names))]
    gone += [name for name in there if name not in names and name not in gone]
    # What leads to the others goes before they change, and comes back with them.
    if len(names) > 1 and names[-1] in there and names[-1] not in gone:
        gone.insert(0, names[-1])
    place.write(new, gone)


def _old_shards(place: Target) -> set[str]:
    try:
        return {name for name in files_of_index(place.read(INDEX) or b"") if place.has(name)}
    except TenplexError:
        return set()
