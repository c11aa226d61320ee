"""What is checked of a save: tensors against the layout, replicas and tied tensors against each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from tenplexfs.core.ptc import PTC
from tenplexfs.errors import CorruptError, InvalidError
from tenplexfs.storage.store import Key, SaveIngest

if TYPE_CHECKING:
    from tenplexfs.runtime.attempts import SaveRequest

__all__ = [
    "Sums",
    "check_sums",
    "check_tensors",
    "decode_sums",
    "encode_sums",
    "join_replicas",
    "key_of",
]

Sums = Mapping[tuple[str, bytes], tuple[int, tuple[int, ...]]]
"""Canonical path and signature of a shard -> a rank that holds it, and the sums of its pieces."""

_NAMED = 20


def check_tensors(ptc: PTC, request: SaveRequest) -> None:
    """Refuses a state whose tensors are not those of the layout on that rank.

    Raises:
        InvalidError: Names each tensor, with what is wanted and what was given.
    """
    given = {path: (dtype, shape) for path, dtype, shape in request.tensors}
    paths = ptc.rank_paths(request.rank)
    wrong = [f"{path}: the layout has none on this rank" for path in given.keys() - set(paths)]
    for path in paths:
        dtype, shape = ptc.tensors[path].dtype, ptc.shard(request.rank, path).local_shape
        if path not in given:
            wrong.append(f"{path}: wanted {dtype} {list(shape)}, is missing")
        elif given[path] != (dtype, shape):
            got_dtype, got_shape = given[path]
            wrong.append(f"{path}: wanted {dtype} {list(shape)}, got {got_dtype} {list(got_shape)}")
    if len(given) != len(request.tensors):
        wrong.append("a path is given twice")
    if wrong:
        more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise InvalidError(
            f"job {request.job}, rank {request.rank}: {len(wrong)} tensors do not fit the layout: "
            + "; ".join(sorted(wrong)[:_NAMED])
            + more,
            tensors=sorted(wrong),
        )


def key_of(ptc: PTC, request: SaveRequest, path: str) -> Key | None:
    """Returns under which key a tensor is written, or None where it is written with the one it is tied to."""
    first = request.ties.get(path)
    own = request.rank, path
    if first is None or first not in ptc.tensors or first in request.ties:
        return own
    same = ptc.shard(request.rank, first) == ptc.shard(*own)
    return None if same and ptc.tensors[first].dtype == ptc.tensors[path].dtype else own


def join_replicas(ptc: PTC, ingest: SaveIngest, sums: Mapping[Key, tuple[int, ...]]) -> Sums:
    """Keeps equal replicas, and tied tensors, of this node once; returns the sums of each distinct shard.

    Raises:
        InvalidError: Two differ; names tensor and ranks.
    """
    known: dict[tuple[str, bytes], tuple[int, tuple[int, ...]]] = {}
    groups: dict[tuple[str, bytes], list[Key]] = {}
    for key in sorted(sums):
        rank, path = key
        placement = ptc.placements[path]
        signature = ptc.tables[placement.cells].signatures[ptc.cell(rank, placement)]
        what = placement.tensor.path, signature
        first = known.setdefault(what, (rank, sums[key]))
        if first[1] != sums[key]:
            raise _differ(placement.tensor.path, path, first[0], rank)
        groups.setdefault(what, []).append(key)
    ingest.join(keys for keys in groups.values() if len(keys) > 1)
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
