"""Files mapped copy-on-write without a descriptor each: Python's mmap keeps one, of which there are few."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["map_private"]


class _Mapping:
    """The memory of one map, which ends with the last array over it."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
        }
        weakref.finalize(self, _libc().munmap, address, size).atexit = False


@cache
def _libc() -> Any:  # noqa: ANN401
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


def map_private(fd: int, size: int) -> npt.NDArray[np.uint8]:
    """Returns the first ``size`` bytes of a file as writable memory of this process; the file stays as it is.

    The descriptor may be closed at once.

    Raises:
        OSError: It cannot be mapped.
    """
    if size == 0:
        return np.empty(0, np.uint8)
    address = _libc().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {size} bytes: {os.strerror(number)}")
    return np.asarray(_Mapping(address, size))
