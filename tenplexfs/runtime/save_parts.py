"""What is checked of a save: tensors against the layout, replicas and tied tensors against each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from tenplexfs.core.ptc import PTC, Shard
from tenplexfs.core.snapshot import JobName
from tenplexfs.errors import CorruptError, InvalidError
from tenplexfs.storage.arrangement import Arrangement, arrange
from tenplexfs.storage.store import Key, RankFiles, SaveIngest

__all__ = [
    "RankPlan",
    "Sums",
    "Tensors",
    "check_sums",
    "decode_sums",
    "encode_sums",
    "join_replicas",
    "plan_rank",
]

Sums = Mapping[tuple[str, bytes], tuple[int, tuple[int, ...]]]
"""Canonical path and signature of a shard -> a rank that holds it, and the sums of its pieces."""

_NAMED = 20


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a rank, column by column.

    Attributes:
        paths: Of each.
        kinds: Distinct dtypes and local shapes.
        of: Of each, the number of its kind.
        ties: Path -> path of the one with the same storage.
    """

    paths: Sequence[str]
    kinds: Sequence[tuple[str, tuple[int, ...]]]
    of: Sequence[int]
    ties: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Where the tensors of a rank go: the same for each save of the same tensors of the same layout.

    Attributes:
        ptc: Of the layout.
        rank: Whose.
        tensors: As the rank gave them.
        arrangement: Their files.
        names: Slot, canonical path with signature of the shard, and path as shown, of each key of each slot.
        places: File and offset of the header of each tensor, int64; file -1 where it is tied with another.
        slots: Slot of each tensor.
    """

    ptc: PTC
    rank: int
    tensors: Tensors
    arrangement: Arrangement
    names: Sequence[tuple[int, tuple[str, bytes], str]]
    places: bytes
    slots: Sequence[int]

    def fits(self, ptc: PTC, rank: int, tensors: Tensors) -> bool:
        """Returns whether it is the plan for that too."""
        return self.ptc is ptc and self.rank == rank and self.tensors == tensors


def plan_rank(ptc: PTC, job: JobName, rank: int, tensors: Tensors) -> RankPlan:
    """Returns where the tensors of a rank go.

    Raises:
        InvalidError: They are not those of the layout on that rank; names each, with what is wanted.

    Cost: About 15 us a tensor.
    """
    _check_tensors(ptc, job, rank, tensors)
    shards = {path: ptc.shard(rank, path) for path in tensors.paths}
    slots: dict[str, list[Key]] = {}
    for path in tensors.paths:
        slots.setdefault(_written_as(ptc, tensors.ties, shards, path), []).append((rank, path))
    arrangement = arrange(
        [(tuple(keys), shards[path], ptc.tensors[path].dtype) for path, keys in slots.items()]
    )
    names = []
    for number, slot in enumerate(arrangement.slots):
        for _, path in slot.keys:
            placement = ptc.placements[path]
            signature = ptc.tables[placement.cells].signatures[ptc.cell(rank, placement)]
            names.append((number, (placement.tensor.path, signature), path))
    # By path, so that it does not depend on the rank's order which of several is kept.
    names.sort(key=lambda name: name[2])
    at = {path: (slot.file, slot.offset) for path, slot in zip(slots, arrangement.slots, strict=True)}
    places = np.array([at.get(path, (-1, 0)) for path in tensors.paths], np.int64)
    number_of = {path: number for number, slot in enumerate(arrangement.slots) for _, path in slot.keys}
    numbers = [number_of[path] for path in tensors.paths]
    return RankPlan(ptc, rank, tensors, arrangement, names, places.tobytes(), numbers)


def _check_tensors(ptc: PTC, job: JobName, rank: int, tensors: Tensors) -> None:
    given = {path: tensors.kinds[kind] for path, kind in zip(tensors.paths, tensors.of, strict=True)}
    paths = ptc.rank_paths(rank)
    wrong = [f"{path}: the layout has none on this rank" for path in given.keys() - set(paths)]
    for path in paths:
        wanted = ptc.tensors[path].dtype, ptc.shard(rank, path).local_shape
        if path not in given:
            wrong.append(f"{path}: wanted {wanted[0]} {list(wanted[1])}, is missing")
        elif given[path] != wanted:
            dtype, shape = given[path]
            wrong.append(f"{path}: wanted {wanted[0]} {list(wanted[1])}, got {dtype} {list(shape)}")
    if len(given) != len(tensors.paths):
        wrong.append("a path is given twice")
    if wrong:
        more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise InvalidError(
            f"job {job}, rank {rank}: {len(wrong)} tensors do not fit the layout: "
            + "; ".join(sorted(wrong)[:_NAMED])
            + more,
            tensors=sorted(wrong),
        )


def _written_as(ptc: PTC, ties: Mapping[str, str], shards: Mapping[str, Shard], path: str) -> str:
    """Returns the path under which a tensor is written: its own, or that of the one it is tied to."""
    first = ties.get(path)
    if first is None or first in ties:
        return path
    same = shards[first] == shards[path] and ptc.tensors[first].dtype == ptc.tensors[path].dtype
    return first if same else path


def join_replicas(ingest: SaveIngest, ranks: Iterable[tuple[RankPlan, RankFiles]]) -> Sums:
    """Keeps equal replicas, and tied tensors, of this node once; returns the sums of each distinct shard.

    Raises:
        InvalidError: Two differ; names tensor and ranks.
    """
    known: dict[tuple[str, bytes], tuple[int, tuple[int, ...]]] = {}
    firsts: dict[tuple[str, bytes], tuple[RankFiles, int]] = {}
    groups: dict[tuple[str, bytes], list[tuple[RankFiles, int]]] = {}
    for plan, files in sorted(ranks, key=lambda each: each[0].rank):
        sums = files.sums
        for number, what, path in plan.names:
            first = known.setdefault(what, (plan.rank, sums[number]))
            if first[1] != sums[number]:
                raise _differ(what[0], path, first[0], plan.rank)
            held = firsts.setdefault(what, (files, number))
            if held[0] is not files or held[1] != number:
                groups.setdefault(what, [held]).append((files, number))
    ingest.join(groups.values())
    return known


def check_sums(parts: Iterable[Sums]) -> None:
    """Refuses replicas on several nodes that differ.

    Raises:
        InvalidError: Names tensor and ranks.
    """
    known: dict[tuple[str, bytes], tuple[int, tuple[int, ...]]] = {}
    for part in parts:
        for what, (rank, sums) in part.items():
            first = known.setdefault(what, (rank, sums))
            if first[1] != sums:
                raise _differ(what[0], what[0], first[0], rank)


def encode_sums(sums: Sums) -> bytes:
    """Returns ``sums`` as bytes, for another node."""
    return msgspec.msgpack.encode([(*what, *found) for what, found in sums.items()])


def decode_sums(data: bytes) -> Sums:
    """Returns what `encode_sums` made ``data`` of.

    Raises:
        CorruptError: Nothing.
    """
    try:
        rows = msgspec.msgpack.decode(data, type=list[tuple[str, bytes, int, tuple[int, ...]]])
    except msgspec.DecodeError as error:
        raise CorruptError(f"sums of a save: {error}") from error
    return {(path, signature): (rank, sums) for path, signature, rank, sums in rows}


def _differ(tensor: str, path: str, first: int, rank: int) -> InvalidError:
    name = tensor if tensor == path else f"{tensor}, as {path}"
    ranks = f"ranks {first} and {rank} hold" if first != rank else f"rank {rank} holds tied names of"
    return InvalidError(f"tensor {name}: {ranks} the same part, and their bytes differ")
