"""Regions of the tensors of a snapshot, whoever held them: mapped where they are here, else fetched."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tenplexfs.client.connection import Connection, Place, parse_place, patiently, socket_of
from tenplexfs.client.mapping import map_private
from tenplexfs.client.session import remember
from tenplexfs.core.dtypes import dtype_of
from tenplexfs.errors import CorruptError, InvalidError
from tenplexfs.formats.frames import ALIGNMENT, MAX_FDS

__all__ = ["LocalArray", "OpenSnapshot", "RegionOf", "create_job", "cut", "node_of", "place_of_job"]

Array = npt.NDArray[np.generic]

_BATCH_BYTES = 256 << 20  # the daemon refuses more than 1 GiB at once


@dataclass(frozen=True, slots=True)
class RegionOf:
    """A region of a whole tensor.

    Attributes:
        path: Of the tensor.
        start, stop: Global coordinates; stop is not included.
        dtype: Of the tensor.
    """

    path: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent in each dim."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


class LocalArray(NamedTuple):
    """An array of the store of this node.

    Attributes:
        array: Mapped; its bytes come in as they are touched.
        fd: Of its file.
        begin: Where its data begins there.
    """

    array: Array
    fd: int
    begin: int

    def read_into(self, view: Array, target: memoryview) -> None:
        """Reads a contiguous view of the array into ``target``, of the same size.

        Cost: One copy, without the page faults that reading through the map takes.

        Raises:
            CorruptError: The file ends before.
        """
        start = view.__array_interface__["data"][0] - self.array.__array_interface__["data"][0]
        at, done = self.begin + start, 0
        while done < len(target):
            got = os.preadv(self.fd, [target[done:]], at + done)
            if not got:
                raise CorruptError(f"a file of the store ends at byte {at + done}, before its array does")
            done += got


def place_of_job(path: str | os.PathLike[str]) -> Place:
    """Returns what ``<mount>/<job>`` or ``<mount>/<job>@<step>`` names.

    Raises:
        InvalidError: It names something else.
    """
    place = parse_place(path)
    if place.rank is not None:
        raise InvalidError(f"{path}: need <mount>/<job>")
    return place


def node_of(place: Place) -> str:
    """Returns the node whose daemon has the mount."""

    def ask() -> str:
        with Connection(socket_of(place.mount)) as connection:
            return str(connection.ask("hello")["node"])

    return patiently(ask)


def create_job(place: Place, layout_json: bytes) -> None:
    """Makes a job without state.

    Raises:
        InvalidError: The layout is refused.
        ExistsError: There is a job of this name with another layout.
    """

    def ask() -> None:
        with Connection(socket_of(place.mount)) as connection:
            connection.ask("create", job=place.job, layout=layout_json)

    patiently(ask)


class OpenSnapshot:
    """One snapshot, held until `close`; for one thread.

    Args:
        place: The job.
        step: One that is kept; None: the newest.
        snapshot: The one that is wanted; None: any.
        socket: Of the daemon; default: that of the mount.

    Attributes:
        snapshot: Its name.
        node: Whose daemon answers.
        layout_json: Of the snapshot.
        of_rank: Rank -> the number of its document.
        is_closed: Nothing more can be asked.

    Raises:
        NotFoundError: There is no such job or step.
        UnavailableError: The daemon is not there.
    """

    def __init__(
        self, place: Place, *, step: int | None, snapshot: str | None, socket: str | None = None
    ) -> None:
        self._connection = Connection(socket or socket_of(place.mount))
        self.is_closed = False
        try:
            begun = self._connection.ask("regions", job=place.job, step=step, snapshot=snapshot)
        except BaseException:
            self._connection.close()
            raise
        remember(place.mount, place.job, begun["snapshot"])
        self.snapshot: str = begun["snapshot"]
        self.node: str = begun["node"]
        self.layout_json: bytes = begun["layout"]
        self.of_rank: list[int] = begun["documents"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the snapshot; arrays that were given stay."""
        self.is_closed = True
        self._connection.close()

    def hold(self) -> None:
        """Keeps it on all nodes from now on; otherwise that begins with the first `read`."""
        _, fds = self._connection.ask_fds("regions.read", items=[], uses=1)
        for fd in fds:
            os.close(fd)

    def document(self, index: int) -> bytes:
        """Returns the structure of the ranks whose ``of_rank`` is ``index``."""
        found: bytes = self._connection.ask("regions.document", index=index)["document"]
        return found

    def visit(
        self, wanted: Sequence[tuple[tuple[int, str], str, tuple[int, ...]]]
    ) -> Iterator[tuple[tuple[int, str], LocalArray]]:
        """Yields local arrays that are on this node, by their key; each until the next is asked for.

        Args:
            wanted: (rank, path), dtype and local shape of each.
        """
        if not wanted:
            return
        places = self._connection.ask("regions.here", keys=[key for key, _, _ in wanted])["places"]
        in_file: list[list[int]] = [[] for _ in range(1 + max(file for file, _ in places))]
        for i, (file, _) in enumerate(places):
            in_file[file].append(i)
        for first in range(0, len(in_file), MAX_FDS):
            answer, fds = self._connection.ask_fds("regions.files", first=first)
            try:
                for fd, size, numbers in zip(fds, answer["sizes"], in_file[first:], strict=False):
                    data = map_private(fd, size)
                    for i in numbers:
                        (key, dtype, shape), begin = wanted[i], places[i][1]
                        yield key, LocalArray(_array(data, begin, dtype, shape), fd, begin)
            finally:
                for fd in fds:
                    os.close(fd)

    def arrays(
        self, wanted: Sequence[tuple[tuple[int, str], str, tuple[int, ...]]]
    ) -> dict[tuple[int, str], Array]:
        """Returns local arrays that are on this node, as `visit` takes them."""
        return {key: local.array for key, local in self.visit(wanted)}

    def read(
        self, regions: Sequence[RegionOf], *, uses: int, batch_bytes: int = _BATCH_BYTES
    ) -> Iterator[tuple[int, tuple[slice, ...], Array]]:
        """Yields regions of whole tensors, from wherever they are, in parts of no more than a batch.

        Each is the number of its region, where in the region it lies, and what is there.

        Args:
            regions: Of any size.
            uses: How many ranks of this node ask for the very same; they are fetched once.
            batch_bytes: What is asked for at once, at most.
        """
        for batch in _batches(regions, batch_bytes):
            items = [[part.path, part.start, part.stop] for _, part in batch]
            _, fds = self._connection.ask_fds("regions.read", items=items, uses=uses)
            for (i, part), data in zip(batch, _arrays_of(fds, [part for _, part in batch]), strict=True):
                offsets = zip(part.start, part.stop, regions[i].start, strict=True)
                yield i, tuple(slice(a - o, b - o) for a, b, o in offsets), data


def _batches(regions: Sequence[RegionOf], most_bytes: int) -> Iterator[list[tuple[int, RegionOf]]]:
    """Yields what is asked for at once: numbers of regions, and parts of them."""
    batch: list[tuple[int, RegionOf]] = []
    size = 0
    for i, region in enumerate(regions):
        for part in cut(region, most_bytes):
            if batch and size + part.nbytes > most_bytes:
                yield batch
                batch, size = [], 0
            batch.append((i, part))
            size += part.nbytes
    if batch:
        yield batch


def cut(region: RegionOf, most_bytes: int) -> Iterator[RegionOf]:
    """Yields parts of a region of ``most_bytes`` or less, unless one element takes more, in C order.

    >>> [(part.start, part.stop) for part in cut(RegionOf("w", (0, 0), (1, 5), "float32"), 8)]
    [((0, 0), (1, 2)), ((0, 2), (1, 3)), ((0, 3), (1, 5))]
    """
    dim = next((dim for dim, size in enumerate(region.shape) if size > 1), None)
    if dim is None or region.nbytes <= most_bytes:
        yield region
        return
    middle = (region.start[dim] + region.stop[dim]) // 2
    yield from cut(replace(region, stop=(*region.stop[:dim], middle, *region.stop[dim + 1 :])), most_bytes)
    yield from cut(replace(region, start=(*region.start[:dim], middle, *region.start[dim + 1 :])), most_bytes)


def _arrays_of(fds: list[int], regions: Sequence[RegionOf]) -> list[Array]:
    """Returns what a file holds one after the other, each aligned; closes its descriptor."""
    offsets = [0]
    for each in regions:
        offsets.append(offsets[-1] + -(-each.nbytes // ALIGNMENT) * ALIGNMENT)
    try:
        data = map_private(fds[0], offsets[-1])
    finally:
        for fd in fds:
            os.close(fd)
    return [
        _array(data, offset, each.dtype, each.shape)
        for offset, each in zip(offsets[:-1], regions, strict=True)
    ]


def _array(data: npt.NDArray[np.uint8], offset: int, dtype: str, shape: Sequence[int]) -> Array:
    kind = dtype_of(dtype)
    size = math.prod(shape) * kind.itemsize
    return data[offset : offset + size].view(kind).reshape(shape)
