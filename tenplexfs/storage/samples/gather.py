"""Many small ranges of one file in one system call: the file is mapped, and the kernel copies out of the map.

A loop of ``preadv`` costs more than the copies where samples are some KiB and the kernel has the file in
memory. Copying from a map in this process would die by SIGBUS where somebody cuts the file; when the kernel
copies, by ``process_vm_readv`` from ourselves, it answers EFAULT.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource

import numpy as np
import numpy.typing as npt

__all__ = ["Gather"]

_RANGES_MAX = 1024  # of one call
_PAUSE = 64

_Ints = npt.NDArray[np.int64]

_call = ctypes.CDLL(None, use_errno=True)["process_vm_readv"]
_call.restype = ctypes.c_ssize_t
_call.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)


class Gather:
    """A file as it is now, mapped. Any thread.

    Args:
        fd: Of the file; used on, not closed.
        size: Of the file, not 0.

    Raises:
        OSError: It cannot be mapped.
    """

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._size = size
        mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        mapped.madvise(mmap.MADV_RANDOM)
        self._bytes = np.frombuffer(mapped, np.uint8)  # keeps the map
        self._rests = 0

    def read(self, begin: _Ints, size: _Ints, at: _Ints, out: memoryview) -> bool:
        """Copies ``size`` bytes from each ``begin`` to each ``at`` of ``out``.

        Returns False where it did not, and somebody has to read by other means: ranges beyond the file, a
        kernel that does not allow it, a file that is not in memory. For those it only asks the disk for all
        ranges at once: through the map each page would be waited for.
        """
        if int((begin + size).max()) > self._size or int(begin.min()) < 0:
            return False
        if self._rests > 0:
            self._rests -= 1
            for start, count in zip(begin.tolist(), size.tolist(), strict=True):
                os.posix_fadvise(self._fd, start, count, os.POSIX_FADV_WILLNEED)
            return False
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
        far, near = np.empty((2, len(begin), 2), np.int64)
        np.add(begin, self._bytes.ctypes.data, out=far[:, 0])
        np.add(at, np.frombuffer(out, np.uint8).ctypes.data, out=near[:, 0])
        far[:, 1] = near[:, 1] = size
        copied, process = 0, os.getpid()
        for first in range(0, len(begin), _RANGES_MAX):
            count = min(_RANGES_MAX, len(begin) - first)
            place = first * near.strides[0]
            copied += _call(process, near.ctypes.data + place, count, far.ctypes.data + place, count, 0)
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt - faults
        # Looked at afterwards: on the last page a map has zeros beyond the end.
        whole = copied == int(size.sum()) and os.fstat(self._fd).st_size >= self._size
        if not whole or faults * 8 > len(begin):
            self._rests = _PAUSE
        return whole
