"""``POST /upload``: tensors, values, archives of them, and the step that they are."""

from __future__ import annotations

import math
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from typing import NamedTuple

from tenplexfs.core.dtypes import itemsize_of
from tenplexfs.core.snapshot import JobName
from tenplexfs.errors import InvalidError, PreconditionError, TooLargeError
from tenplexfs.formats.tenplex_files import TENSOR
from tenplexfs.formats.tenplex_request import Place, parse_array, parse_meta, parse_place, parse_step
from tenplexfs.http.message import Body, Request, Response, read_all, text
from tenplexfs.http.tar import members
from tenplexfs.runtime.incoming import Incoming
from tenplexfs.runtime.upload import MAX_VALUE_BYTES, Received, Upload

__all__ = ["Uploads"]

_PIECE_BYTES = 1 << 18  # stays in the cache between the socket and the file
_MAX_STEP_BYTES = 64
_META = f"{TENSOR}.meta"

Array = tuple[str, tuple[int, ...]]


class Uploads:
    """Answers ``/upload``."""

    def __init__(self, incoming: Incoming) -> None:
        self._incoming = incoming

    async def __call__(self, request: Request) -> Response:
        """Takes what comes.

        Raises:
            TenplexError: It is refused; nothing of it stays.
        """
        if request.content_type == "application/x-tar":
            return await self._archive(request)
        place = parse_place(request.parameter("path"))
        if place.section == "iter":
            step = parse_step(await request.content(place.text, _MAX_STEP_BYTES))
            return text(200, await self._incoming.done(place.job, step))
        array = None
        if request.content_type == "x-tensor":
            array = parse_array(request.parameter("dtype"), request.query.get("dims", ""))
        async with self._upload(place) as upload:
            await _take(upload, place.name, request.body, array, replace=request.replaces)
        return text(200, "")

    def _upload(self, place: Place) -> AbstractAsyncContextManager[Upload]:
        if place.section != "save":
            self._incoming.base(place.job)
            raise PreconditionError(
                f"{place.text}: what is committed never changes; upload to /job/{place.job}/save/<rank>/..."
            )
        if place.rank is None or not place.name:
            raise InvalidError(f"{place.text}: need /job/{place.job}/save/<rank>/<name of a file>")
        return self._incoming.upload(place.job, place.rank)

    async def _archive(self, request: Request) -> Response:
        """Takes all files of an archive, or none."""
        async with AsyncExitStack() as stack:
            taken: list[_Taken] = []
            try:
                step = await self._members(request, stack, taken)
            except BaseException:
                for each in reversed(taken):
                    each.upload.put_back(each.name, each.before)
                raise
        return text(200, "" if step is None else await self._incoming.done(*step))

    async def _members(
        self, request: Request, stack: AsyncExitStack, taken: list[_Taken]
    ) -> tuple[JobName, int] | None:
        """Takes the files, says which, and returns the step that one of them says."""
        prefix, step = request.query.get("prefix", ""), None
        uploads: dict[tuple[JobName, int | None], Upload] = {}
        async with aclosing(members(request.body, may_be_absolute=not prefix)) as files:
            async for file in files:
                place = parse_place(f"{prefix}/{file.name}")
                if place.section == "iter":
                    step = place.job, parse_step(await read_all(file, place.text, _MAX_STEP_BYTES))
                    continue
                who = place.job, place.rank
                if who not in uploads:
                    uploads[who] = await stack.enter_async_context(self._upload(place))
                before = uploads[who].files.get(place.name)
                await _take(uploads[who], place.name, file, None, replace=request.replaces)
                taken.append(_Taken(uploads[who], place.name, before))
        return step


class _Taken(NamedTuple):
    """What an archive brought, and what was there before."""

    upload: Upload
    name: str
    before: Received | None


async def _take(upload: Upload, name: str, body: Body, array: Array | None, *, replace: bool) -> None:
    """Takes a file of a rank; ``array`` is dtype and shape, where they were said."""
    if name.endswith(_META):  # beside a tensor's file; the layout says the same
        said = parse_meta(await read_all(body, name, _MAX_STEP_BYTES * 64))
        _check(upload, name.removesuffix(".meta"), said)
        return
    if array is None and not name.endswith(TENSOR):
        _check_size(name, body, MAX_VALUE_BYTES)
        upload.check_new(name, replace=replace)
        upload.put(name, await read_all(body, name, MAX_VALUE_BYTES), replace=replace)
        return
    if upload.shape_of(name) is not None or array is None:
        if array is not None:
            _check(upload, name, array)
        await _write(upload, name, body, replace=replace)
        return
    dtype, shape = array
    nbytes = math.prod(shape) * itemsize_of(dtype)
    if nbytes > MAX_VALUE_BYTES:
        raise TooLargeError(f"{name}: {nbytes} bytes, and the layout has no such tensor")
    upload.check_array(name, replace=replace)
    data = await read_all(body, name, nbytes)
    if len(data) != nbytes:
        raise InvalidError(f"{name}: {len(data)} bytes came, {dtype} {list(shape)} has {nbytes}")
    upload.put_array(name, dtype, shape, data, replace=replace)


async def _write(upload: Upload, name: str, body: Body, *, replace: bool) -> None:
    """Takes a tensor of the layout."""
    block = memoryview(bytearray(_PIECE_BYTES))
    known = upload.shape_of(name)
    if known is not None and body.size is not None:
        nbytes = math.prod(known[2]) * itemsize_of(known[1])
        if body.size != nbytes:
            raise InvalidError(f"{name}: {body.size} bytes, {known[1]} {list(known[2])} has {nbytes}")
    async with upload.tensor(name, replace=replace) as writer:
        while count := await body.read_into(block):
            writer.write(block[:count])


def _check(upload: Upload, name: str, said: Array) -> None:
    known = upload.shape_of(name)
    if known is not None and known[1:] != said:
        raise InvalidError(
            f"job {upload.job}, rank {upload.rank}: {known[0]}: wanted {known[1]} {list(known[2])}, "
            f"got {said[0]} {list(said[1])}"
        )


def _check_size(name: str, body: Body, limit_bytes: int) -> None:
    if (body.size or 0) > limit_bytes:
        raise TooLargeError(f"{name}: {body.size} bytes, at most {limit_bytes}")
