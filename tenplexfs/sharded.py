"""What adapters of frameworks do with a job, in numpy alone: read regions of it, save as some of its ranks.

The layout is read here, so that the process needs msgspec beside the client's own packages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from tenplexfs.client.connection import Place, patiently
from tenplexfs.client.jobs import env
from tenplexfs.client.regions import OpenSnapshot, RegionOf
from tenplexfs.client.saving import Save, save
from tenplexfs.client.sources import Part, Sources
from tenplexfs.core.build import build_ptc
from tenplexfs.core.dtypes import dtype_of
from tenplexfs.core.ptc import PTC, Piece, Shard
from tenplexfs.core.region import Region
from tenplexfs.errors import InvalidError, NotFoundError, PreconditionError, UnavailableError
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.formats.leaves import Leaf, decode_leaf
from tenplexfs.formats.structure import read_document, unflatten, walk

__all__ = [
    "TENSOR",
    "OpenJob",
    "check_held",
    "check_shard",
    "committed",
    "laid_out",
    "save_ranks",
    "wanted_snapshot",
]

Array: TypeAlias = npt.NDArray[np.generic]

TENSOR = object()
"""What stands for a tensor among values."""

_NAMED = 10
_RECONFIGURE = "reconfigure it first (tenplexfs reconfigure), or save into another job"


class OpenJob:
    """One snapshot of a job, held until `close`; for one thread.

    Attributes:
        snapshot: Its name.
        node: Whose daemon answers.
        ptc: How the snapshot is laid out.

    Raises:
        NotFoundError: There is no such job or step.
        UnavailableError: The daemon is not there.
    """

    def __init__(self, place: Place, *, step: int | None, snapshot: str | None) -> None:
        self._opened = OpenSnapshot(place, step=step, snapshot=snapshot)
        self._leaves: dict[int, dict[str, Leaf]] = {}
        try:
            self.ptc: PTC = laid_out(self._opened.layout_json)
        except BaseException:
            self._opened.close()
            raise
        self.snapshot = self._opened.snapshot
        self.node = self._opened.node
        self._job = place.job
        self._sources = Sources(self.ptc, self.node)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the snapshot; arrays that were given stay."""
        self._opened.close()

    def leaf(self, path: str, rank: int, *, allow_pickle: bool = False) -> object:
        """Returns a value that is no tensor: that of ``rank``, else the first that another rank has.

        Args:
            path: Of the value.
            rank: Of the new run; of an old one of fewer ranks, that modulo their number is meant.
            allow_pickle: Whether what was saved with pickle is made again.

        Raises:
            NotFoundError: No rank has it.
        """
        numbers = self._opened.of_rank
        for number in dict.fromkeys([numbers[rank % len(numbers)], *numbers]):
            if number not in self._leaves:
                root = read_document(self._opened.document(number))
                self._leaves[number] = {node[1]: node[2] for node in walk(root) if node[0] == "l"}
            if path in self._leaves[number]:
                return decode_leaf(self._leaves[number][path], allow_pickle=allow_pickle)
        raise NotFoundError(f"job {self._job}: {path}: no rank has saved such a value")

    def states(self, rank: int, *, allow_pickle: bool = False) -> Iterator[Any]:
        """Yields what each rank has saved, that of ``rank`` first, with `TENSOR` in place of each tensor.

        Args:
            rank: As for `leaf`.
            allow_pickle: Whether what was saved with pickle is made again.
        """
        numbers = self._opened.of_rank
        for number in dict.fromkeys([numbers[rank % len(numbers)], *numbers]):
            yield unflatten(self._opened.document(number), lambda _: TENSOR, allow_pickle=allow_pickle)

    def check(self, wanted: Mapping[str, tuple[Sequence[int], str]]) -> None:
        """Refuses tensors that the snapshot has not, all at once.

        Args:
            wanted: Path -> global shape and dtype.

        Raises:
            InvalidError: Names each, with what is there and what was asked for.
        """
        wrong = []
        for path, (shape, dtype) in wanted.items():
            tensor = self.ptc.tensors.get(path)
            if tensor is None:
                wrong.append(f"{path}: is not there")
            elif (tensor.shape, tensor.dtype) != (tuple(shape), dtype):
                wrong.append(
                    f"{path}: is {tensor.dtype} {list(tensor.shape)}, asked for {dtype} {list(shape)}"
                )
        if wrong:
            more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
            raise InvalidError(
                f"job {self._job}, {self.snapshot}: {len(wrong)} tensors cannot be loaded: "
                f"{'; '.join(wrong[:_NAMED])}{more}"
            )

    def read(self, regions: Sequence[tuple[str, Region]]) -> list[Array]:
        """Returns regions of tensors as arrays, which may be views of mapped files and of any strides.

        Args:
            regions: Path, and region in global coordinates.
        """
        named = [(self.ptc.tensors[path], region) for path, region in regions]
        wanted = [RegionOf(tensor.path, r.start, r.stop, tensor.dtype) for tensor, r in named]
        parts = [list(self._sources.parts(each)) for each in wanted]
        local = {
            part.key: (part.key, part.dtype, part.local_shape)
            for found in parts
            for part in found
            if part.key is not None
        }
        arrays = self._opened.arrays(list(local.values()))
        out: list[Array] = []
        away: dict[RegionOf, list[Array]] = {}
        for region, found in zip(wanted, parts, strict=True):
            if len(found) == 1 and found[0].key is not None:
                out.append(found[0].of(arrays[found[0].key]))
                continue
            made = np.empty(region.shape, dtype_of(region.dtype))
            _fill(made, found, arrays, away)
            out.append(made)
        targets = list(away.values())
        for i, inner, data in self._opened.read(list(away), uses=1):
            for target in targets[i]:
                _view(target, inner)[...] = data
        return out


def _fill(
    target: Array,
    parts: Iterable[Part],
    arrays: Mapping[tuple[int, str], Array],
    away: dict[RegionOf, list[Array]],
) -> None:
    """Copies what is on this node into ``target``; notes in ``away`` what is not, and where it goes."""
    for part in parts:
        place = _view(target, part.target)
        if part.key is not None:
            place[...] = part.of(arrays[part.key])
            continue
        path, start, stop = part.remote
        away.setdefault(RegionOf(path, start, stop, part.dtype), []).append(place)


def _view(array: Array, slices: Iterable[slice]) -> Array:
    place: Any = (..., *slices)
    view: Array = array[place]  # without the dots, one of no dims would be a copy
    return view


def wanted_snapshot(place: Place, step: int | None, snapshot: str | None) -> tuple[int | None, str | None]:
    """Returns the step and the snapshot that a load is to open.

    Args:
        place: ``<mount>/<job>``, or ``<mount>/<job>@<step>``.
        step: A kept one; default the newest.
        snapshot: The one that is wanted; default ``TENPLEXFS_SNAPSHOT``, unless a step is asked for.

    Raises:
        InvalidError: The path says another step.
    """
    if place.step is not None and step not in (None, place.step):
        raise InvalidError(f"{place.job}@{place.step}: step {step}: the path says another one")
    step = place.step if place.step is not None else step
    return step, snapshot or (os.environ.get("TENPLEXFS_SNAPSHOT") if step is None else None)


def committed(place: Place, world_size: int) -> PTC | None:
    """Returns how a job is laid out, or None where there is no such job.

    Raises:
        PreconditionError: It is laid out for another number of ranks than ``world_size``.
    """
    root = place.mount / place.job
    try:
        known = int(env(root)["world_size"])
    except NotFoundError:
        return None
    if known != world_size:
        raise PreconditionError(
            f"job {place.job}: is laid out for {known} ranks, this run has {world_size}: {_RECONFIGURE}"
        )

    def read() -> bytes:
        try:
            return (root / "layout.json").read_bytes()
        except OSError as error:
            raise UnavailableError(f"{root}: its layout cannot be read: {error.strerror}") from error

    return laid_out(patiently(read))


@lru_cache(maxsize=4)
def laid_out(layout_json: bytes) -> PTC:
    """Returns what ranks hold by a layout; worked out once, as each step that is saved asks for it.

    Raises:
        InvalidError: The layout does not hold.
    """
    return build_ptc(parse_layout(layout_json))


def check_held(job: str, ptc: PTC, held: Mapping[int, Mapping[str, Shard]]) -> None:
    """Refuses what ranks hold if it is not what the layout of the job says, though shapes may be the same.

    Args:
        job: Its name.
        ptc: Of the job.
        held: Rank -> path -> what it holds.

    Raises:
        PreconditionError: Names the first tensor that differs.
    """
    for rank, shards in held.items():
        paths = set(ptc.rank_paths(rank))
        for path in sorted(paths ^ shards.keys()):
            where = "the run" if path in paths else "its layout"
            raise PreconditionError(f"job {job}: {path} on rank {rank}: {where} has none; {_RECONFIGURE}")
        seen: set[tuple[int, int]] = set()  # thousands of tensors are held in a few ways
        for path, shard in shards.items():
            which = id(ptc.shard(rank, path)), id(shard)
            if which not in seen:
                check_shard(job, ptc, rank, path, shard)
                seen.add(which)


def check_shard(job: str, ptc: PTC, rank: int, path: str, shard: Shard) -> None:
    """Refuses what a rank holds of a tensor if it is not what the layout says; as `check_held`."""
    known = ptc.shard(rank, path)
    if not _is_same(known, shard):
        raise PreconditionError(
            f"job {job}: {path} on rank {rank}: is {_shown(known)} in its layout, "
            f"{_shown(shard)} in this run; {_RECONFIGURE}"
        )


def _is_same(a: Shard, b: Shard) -> bool:
    """Returns whether two shards put the same elements in the same places, in however many pieces."""
    if a == b:
        return True
    volumes = [sum(piece.region.volume for piece in shard.pieces) for shard in (a, b)]
    if a.local_shape != b.local_shape or a.flat or b.flat or volumes[0] != volumes[1]:
        return False
    return all(_origin(p) == _origin(q) or not _overlap(p, q) for p in a.pieces for q in b.pieces)


def _origin(piece: Piece) -> tuple[int, ...]:
    return tuple(start - at for start, at in zip(piece.region.start, piece.at, strict=True))


def _overlap(p: Piece, q: Piece) -> bool:
    sides = zip(p.at, p.region.shape, q.at, q.region.shape, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in sides)


def _shown(shard: Shard) -> str:
    return (
        f"{list(shard.local_shape)} of {' '.join(str(each.region) for each in shard.pieces[:4]) or 'nothing'}"
    )


def save_ranks(
    place: Place,
    states: Mapping[int, object],
    agree: Callable[[Callable[[], None]], object],
    *,
    step: int,
    run: str,
    snapshot: str | None = None,
    consumed: int | None = None,
    allow_pickle: bool = False,
) -> None:
    """Saves the states of some ranks as their part of a step; returns once the step is committed.

    Args:
        place: ``<mount>/<job>``.
        states: Rank -> its state, of local arrays.
        agree: Does what it is given, and raises where that failed on any process; without it the others would
            wait in vain for the ranks of the one that failed.
        step: Must be past the newest one that is committed.
        run: What all that save this step together have in common, and nobody else has.
        snapshot: As for `tenplexfs.save`.
        consumed: As for `tenplexfs.save`.
        allow_pickle: As for `tenplexfs.save`.

    Raises:
        TenplexError: Some rank failed; the step before stays.
    """
    begun: list[Save] = []

    def begin() -> None:
        for rank, state in states.items():
            begun.append(
                save(
                    state,
                    place.mount / place.job / "model" / str(rank),
                    step=step,
                    wait=False,
                    run=run,
                    snapshot=snapshot,
                    consumed=consumed,
                    allow_pickle=allow_pickle,
                )
            )

    try:
        agree(begin)
        for each in begun:
            each.wait()
    except BaseException:
        for each in begun:
            each.abandon()
        raise
