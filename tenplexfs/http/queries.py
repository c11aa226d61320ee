"""``GET /query``: listings, files, tensors and parts of them, committed or coming in."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import trio

from tenplexfs.core.dtypes import dtype_name
from tenplexfs.core.region import flat_boxes
from tenplexfs.core.snapshot import JobName, TxId
from tenplexfs.errors import InvalidError, NotFoundError
from tenplexfs.formats.tenplex_files import TENSOR, File, TensorFile, files_of, is_below
from tenplexfs.formats.tenplex_request import Bounds, Place, dims_text, dtype_word, parse_place, parse_range
from tenplexfs.http.message import Request, Response, Stream, text
from tenplexfs.runtime.incoming import Incoming
from tenplexfs.runtime.member import Member
from tenplexfs.runtime.shard_range import ShardRange, cut, gather
from tenplexfs.runtime.snapshot import Snapshot
from tenplexfs.runtime.upload import Received

__all__ = ["Queries"]

_KEPT = 32  # ranks whose names are kept, for their files are asked for one by one
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Names:
    """The files of a rank, and what they are asked for by.

    Attributes:
        by_stem: Path without what says the type, or up to the first dot -> name.
    """

    files: Mapping[str, File]
    by_stem: Mapping[str, str]


class Queries:
    """Answers ``/query``."""

    def __init__(self, member: Member, incoming: Incoming) -> None:
        self._member = member
        self._incoming = incoming
        self._known: OrderedDict[tuple[JobName, TxId, int], _Names] = OrderedDict()

    async def __call__(self, request: Request) -> Response:
        """Returns what is asked for.

        Raises:
            NotFoundError: There is nothing of that path.
            InvalidError: The path or the range is none.
            TenplexError: The bytes are on another node, and cannot be had.
        """
        place = parse_place(request.parameter("path"))
        if request.content_type == "x-dir":
            return await self._list(place)
        if place.section == "iter":
            return text(200, str(self._state(place.job).id.step), dtype="text")
        if place.rank is None or not place.name:
            raise NotFoundError(f"{place.text}: is a directory; Content-Type: x-dir lists it")
        words = request.query.get("range")
        bounds = None if words is None else parse_range(words)
        as_tensor = request.content_type == "x-tensor" or bounds is not None
        if place.section == "save":
            return self._uploaded(place, bounds or (), as_tensor=as_tensor)
        return await self._committed(place, bounds or (), as_tensor=as_tensor)

    # Listings.

    async def _list(self, place: Place) -> Response:
        found: list[str] = []
        if place.section in ("", "save"):
            found += await self._uploaded_names(place)
        if place.section == "load" and place.rank is not None and not place.name:
            await self._incoming.started(place.job)
        if place.section in ("", "load"):
            found += await self._committed_names(place)
        if place.section in ("", "iter") and self._has_state(place.job):
            found.append(Place(place.job, "iter").text)
        if not found:
            if place.section == "save" and place.rank is not None and not place.name:
                await self._incoming.listed(place.job, place.rank)
            self._incoming.base(place.job)
            raise NotFoundError(f"{place.text}: nothing is there")
        return text(200, "\n".join(sorted(found)), dtype="txt")

    async def _uploaded_names(self, place: Place) -> list[str]:
        found = []
        for rank, upload in self._incoming.found(place.job).items():
            if place.rank in (None, rank):
                names = [name for name in upload.files if is_below(name, place.name)]
                found += [Place(place.job, "save", rank, name).text for name in names]
                if place.rank == rank and not place.name and names:
                    await self._incoming.listed(place.job, rank)
        return found

    async def _committed_names(self, place: Place) -> list[str]:
        if not self._has_state(place.job):
            return []
        view, found = self._state(place.job), []
        for rank in view.ptc.ranks() if place.rank is None else (place.rank,):
            names = await self._names(view, rank)
            found += [
                Place(place.job, "load", rank, name).text
                for name in names.files
                if is_below(name, place.name)
            ]
        return found

    # Files.

    def _uploaded(self, place: Place, bounds: Bounds, *, as_tensor: bool) -> Response:
        upload = self._incoming.found(place.job).get(place.rank or 0)
        if upload is None:
            raise NotFoundError(f"{place.text}: no such file; nothing was uploaded")
        name = _find(place, upload.files, _stems(upload.files))
        received = upload.files[name]
        if isinstance(received.value, TensorFile) or received.array is not None:
            return _array(name, upload.array(name), bounds)
        upload.check()
        return _file(place, name, received.data, as_tensor=as_tensor)

    async def _committed(self, place: Place, bounds: Bounds, *, as_tensor: bool) -> Response:
        view, rank = self._state(place.job), place.rank or 0
        names = await self._names(view, rank)
        name = _find(place, names.files, names.by_stem)
        file = names.files[name]
        if file.tensor is not None:
            part = ShardRange(view, rank, file.tensor, bounds)
            return Response(
                200,
                Stream(part.nbytes, part.blocks(), part.close),
                _tensor_headers(name, part.dtype, part.shape),
            )
        if file.dtype:
            array = Received("", None, file.data, (file.dtype, file.shape)).as_array()
            return _array(name, array, bounds)
        return _file(place, name, file.data, as_tensor=as_tensor)

    def _has_state(self, job: JobName) -> bool:
        shown = self._member.shown().get(job)
        return shown is not None and shown.head.snapshot.step is not None

    def _state(self, job: JobName) -> Snapshot:
        view = self._member.view(job)
        if view.id.step is None:
            raise NotFoundError(f"job {job}: has no state yet")
        return view

    async def _names(self, view: Snapshot, rank: int) -> _Names:
        """Returns the files of a rank of a snapshot."""
        if not rank < view.ptc.world_size:
            raise NotFoundError(f"job {view.job}: no rank {rank}: it has {view.ptc.world_size}")
        key = view.job, view.id.txid, rank
        found = self._known.get(key)
        if found is None:
            found = await trio.to_thread.run_sync(lambda: _names_of(files_of(view.structure(rank))))
        self._known[key] = found
        self._known.move_to_end(key)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return found


def _names_of(files: Mapping[str, File]) -> _Names:
    return _Names(files, _stems(files))


def _stems(names: Mapping[str, object]) -> dict[str, str]:
    """Returns by which paths files are found beside their own."""
    found: dict[str, str] = {}
    by_dot: dict[str, str] = {}
    for name in sorted(names):
        parent, slash, last = name.rpartition("/")
        stem = last.removesuffix(TENSOR) if last.endswith(TENSOR) else last.rpartition(".")[0]
        if stem:
            found.setdefault(f"{parent}{slash}{stem}", name)
        by_dot.setdefault(f"{parent}{slash}{last.partition('.')[0]}", name)
    return {**by_dot, **found}


def _find(place: Place, files: Mapping[str, object], by_stem: Mapping[str, str]) -> str:
    if place.name in files:
        return place.name
    found = by_stem.get(place.name)
    if found is None:
        is_directory = any(is_below(name, place.name) for name in files)
        what = "is a directory; Content-Type: x-dir lists it" if is_directory else "no such file"
        raise NotFoundError(f"{place.text}: {what}")
    return found


def _file(place: Place, name: str, data: bytes, *, as_tensor: bool) -> Response:
    if as_tensor:
        raise InvalidError(f"{place.text}: {name} is no tensor")
    return Response(200, data, {"dtype": _extension(name), "content-type": "application/octet-stream"})


def _array(name: str, array: npt.NDArray[np.generic], bounds: Bounds) -> Response:
    start, shape = cut(name, array.shape, bounds)
    count, itemsize = math.prod(shape), array.dtype.itemsize

    async def blocks() -> AsyncGenerator[memoryview]:
        step = max(1, _BLOCK_BYTES // itemsize)
        for first in range(0, count, step):
            await trio.lowlevel.checkpoint()
            yield gather(array, flat_boxes(shape, first, min(first + step, count)) + start).data

    headers = _tensor_headers(name, dtype_name(array.dtype), shape)
    return Response(200, Stream(count * itemsize, blocks(), lambda: None), headers)


def _tensor_headers(name: str, dtype: str, shape: Sequence[int]) -> dict[str, str]:
    return {
        "x-tensor-dtype": dtype_word(dtype),
        "x-tensor-dims": dims_text(shape),
        "dtype": _extension(name),
        "content-type": "application/octet-stream",
    }


def _extension(name: str) -> str:
    """Returns what follows the first dot of the last part of a path."""
    return name.rpartition("/")[2].partition(".")[2] or "text"
