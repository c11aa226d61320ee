"""Loading a rank's state: arrays map the daemon's files copy-on-write, nothing is copied until written."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tenplexfs.client.arrays import to_torch
from tenplexfs.client.connection import Connection, parse_place, patiently, socket_of
from tenplexfs.client.mapping import map_private
from tenplexfs.client.session import remember
from tenplexfs.core.dtypes import dtype_of
from tenplexfs.errors import CorruptError, InvalidError, NotFoundError
from tenplexfs.formats.frames import ALIGNMENT, MAX_FDS
from tenplexfs.formats.structure import unflatten

__all__ = ["load", "read"]

Array = npt.NDArray[np.generic]

_COPIED_BYTES = 64 << 10


def load(
    path: str | os.PathLike[str],
    *,
    framework: Literal["numpy", "torch"] = "numpy",
    allow_pickle: bool = False,
    snapshot: str | None = None,
) -> Any:  # noqa: ANN401
    """Returns the state of one rank, of one snapshot, structured as it was saved.

    The arrays are writable; what is written stays in this process.

    Args:
        path: ``<mount>/<job>/model/<rank>``, or ``<mount>/<job>@<step>/model/<rank>``.
        framework: Whose tensors are wanted.
        allow_pickle: Whether objects that were saved with pickle are made again.
        snapshot: The one that is wanted; default ``TENPLEXFS_SNAPSHOT`` if that is set, else the newest.

    Raises:
        NotFoundError: No such job, step or rank; or the structure names a tensor that is not there.
        InvalidError: An object needs pickle.
        UnavailableError: The daemon stayed away.

    Cost: About 20 us a tensor, whatever its size; the bytes come in as they are touched.
    """
    place = parse_place(path)
    if place.rank is None:
        raise InvalidError(f"load {path}: need <mount>/<job>/model/<rank>")
    if framework not in ("numpy", "torch"):
        raise InvalidError(f"load: framework {framework!r}: need 'numpy' or 'torch'")
    wanted = snapshot or (os.environ.get("TENPLEXFS_SNAPSHOT") if place.step is None else None)

    def ask() -> tuple[dict[str, Any], dict[str, Array]]:
        with Connection(socket_of(place.mount)) as connection:
            begun = connection.ask("load", job=place.job, rank=place.rank, step=place.step, snapshot=wanted)
            return begun, _fetch(connection, begun)

    begun, arrays = patiently(ask)
    remember(place.mount, place.job, begun["snapshot"])

    def tensor(tensor_path: str) -> object:
        array = arrays.get(tensor_path)
        if array is None:
            raise NotFoundError(f"load {path}: tensor {tensor_path} is missing: rank {place.rank} has none")
        return array if framework == "numpy" else to_torch(array)

    return unflatten(begun["document"], tensor, allow_pickle=allow_pickle)


def read(file: str | os.PathLike[str]) -> Array:
    """Returns the array of a ``.npy`` file of the tree, of its real dtype, which may have no npy code.

    Raises:
        CorruptError: The file is not what its attribute says.
    """
    array: Array = np.load(file, allow_pickle=False)
    try:
        name = os.getxattr(file, "user.tenplexfs.dtype").decode()
    except OSError:  # copied elsewhere
        return array
    dtype = dtype_of(name)
    if array.dtype.itemsize != dtype.itemsize:
        raise CorruptError(f"{Path(file)}: elements of {array.dtype.itemsize} bytes, dtype {name}")
    return array.view(dtype)


def _fetch(connection: Connection, begun: dict[str, Any]) -> dict[str, Array]:
    """Returns the arrays of all paths; big ones that share a file share the memory."""
    files: list[npt.NDArray[np.uint8]] = []
    for first in range(0, begun["files"], MAX_FDS):
        answer, fds = connection.ask_fds("load.files", first=first)
        try:
            files += [map_private(fd, size) for fd, size in zip(fds, answer["sizes"], strict=True)]
        finally:
            for fd in fds:
                os.close(fd)
    kinds = [_Kind(dtype, shape) for dtype, shape in begun["kinds"]]
    of = [kinds[number] for number in np.frombuffer(begun["of"], np.uint32).tolist()]
    places = np.frombuffer(begun["places"], np.int64).reshape(-1, 2).tolist()
    arrays: dict[str, Array] = {}
    small: list[tuple[str, _Kind]] = []
    for path, kind, (file, offset) in zip(begun["paths"], of, places, strict=True):
        if file < 0:
            small.append((path, kind))
        else:
            arrays[path] = kind.within(files[file], offset)
    at = 0
    while at < len(small):
        answer = connection.ask("load.data", first=at)
        data, offset = np.frombuffer(bytearray(answer["data"]), np.uint8), 0
        for path, kind in small[at : at + answer["count"]]:
            arrays[path] = kind.within(data, offset)
            offset += -(-kind.nbytes // ALIGNMENT) * ALIGNMENT
        at += answer["count"]
    return arrays


class _Kind:
    """A dtype and a shape."""

    def __init__(self, dtype: str, shape: list[int]) -> None:
        self.dtype = dtype_of(dtype)
        self.shape = tuple(shape)
        self.nbytes = math.prod(shape) * self.dtype.itemsize

    def within(self, data: npt.NDArray[np.uint8], offset: int) -> Array:
        """Returns an array over ``data``; a copy where it is small, lest it keeps all of a segment mapped."""
        array: Array = np.ndarray(self.shape, self.dtype, data.data, offset)
        return array.copy() if self.nbytes < _COPIED_BYTES else array
