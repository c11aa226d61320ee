"""A snapshot in memory, for tests of the tree and the mount: the arrays are made from a number."""

from __future__ import annotations

import json

import numpy as np
import trio

from tenplexfs.core.build import build_ptc
from tenplexfs.core.dtypes import dtype_of
from tenplexfs.core.layout import ByIndex, Cut, Layout, Mesh, TensorEntry
from tenplexfs.core.ptc import PTC
from tenplexfs.core.snapshot import JobName
from tenplexfs.errors import TimedOutError
from tenplexfs.formats.npy import header
from tenplexfs.runtime.tree import BytesContent

CREATED_NS = 1_700_000_000_123_456_789


def small_ptc(tp: int = 2, *, extra: tuple[TensorEntry, ...] = ()) -> PTC:
    """Two stages of a model with a tie, an uneven cut, a 0-d, an empty and a bfloat16 tensor."""
    cut_rows, cut_columns = Cut(("tp",), 0, "ceil"), Cut(("tp",), 1)
    first, last = ((("pp",), (0,)),), ((("pp",), (1,)),)
    by_stage = ((("pp",), ByIndex("i", ((0,), (0,), (1,), (1,)))),)
    entries = (
        TensorEntry("embedding/weight", (7, 6), "float32", (cut_rows,), first),
        TensorEntry("layers/{i}/w", (4, 8), "bfloat16", (cut_columns,), by_stage, count=(("i", 4),)),
        TensorEntry("layers/{i}/b", (0, 3), "int8", (), by_stage, count=(("i", 4),)),
        TensorEntry("scale", (), "float64"),
        TensorEntry("head", (7, 6), "float32", (cut_rows,), last, alias="embedding/weight"),
        *extra,
    )
    return build_ptc(Layout(Mesh((("pp", 2), ("tp", tp))), entries))


def whole(ptc: PTC, path: str, version: int) -> np.ndarray:
    """The tensor ``path`` in snapshot ``version``."""
    tensor = ptc.tensors[path]
    values = np.arange(int(np.prod(tensor.shape))) % 50 + version
    return values.reshape(tensor.shape).astype(dtype_of(tensor.dtype))


def local(ptc: PTC, rank: int, path: str, version: int) -> np.ndarray:
    """What ``rank`` holds of it."""
    shard = ptc.shard(rank, path)
    array = np.zeros(shard.local_shape, dtype_of(ptc.tensors[path].dtype))
    for piece in shard.pieces:
        start, stop = piece.region.start, piece.region.stop
        target = tuple(slice(at, at + b - a) for at, a, b in zip(piece.at, start, stop, strict=True))
        source = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
        array[target] = whole(ptc, path, version)[source]
    return array


def npy(array: np.ndarray, dtype: str) -> bytes:
    return header(array.shape, dtype) + array.tobytes()


class RemoteContent(BytesContent):
    """Bytes that come when ``gate`` opens; without a gate they fail."""

    def __init__(self, data: bytes, gate: trio.Event | None) -> None:
        super().__init__(data)
        self._gate = gate

    def read(self, offset: int, size: int) -> memoryview | None:
        return super().read(offset, size) if self._gate is not None and self._gate.is_set() else None

    async def read_wait(self, offset: int, size: int) -> memoryview:
        if self._gate is None:
            raise TimedOutError("node1 did not answer in 60 s")
        await self._gate.wait()
        return super().read(offset, size)


HUGE = TensorEntry("huge", (5 << 30,), "uint8")


class HugeContent:
    """5 GiB that nobody holds: byte i of the data is i % 251."""

    def __init__(self) -> None:
        self._header = header(HUGE.shape, "uint8")
        self.size = len(self._header) + HUGE.shape[0]

    def read(self, offset: int, size: int) -> bytes:
        at = np.arange(offset, min(offset + size, self.size)) - len(self._header)
        data = (at % 251).astype(np.uint8).tobytes()
        return self._header[offset : offset + size] + data[max(len(self._header) - offset, 0) :]

    async def read_wait(self, offset: int, size: int) -> bytes:
        return self.read(offset, size)

    def close(self) -> None:
        pass


class MemoryView:
    """All arrays are ``version`` + something; rank ``remote_rank`` is elsewhere."""

    def __init__(
        self, job: str, version: int, ptc: PTC, *, remote_rank: int = -1, gate: trio.Event | None = None
    ) -> None:
        self.job = JobName(job)
        self.created_ns = CREATED_NS + version
        self.ptc = ptc
        self.version = version
        self._remote_rank = remote_rank
        self._gate = gate

    def document(self, name: str) -> bytes:
        return json.dumps({"name": name, "version": self.version}).encode()

    def open_shard(self, rank: int, path: str) -> BytesContent | HugeContent:
        if path == HUGE.key:
            return HugeContent()
        data = npy(local(self.ptc, rank, path, self.version), self.ptc.tensors[path].dtype)
        return RemoteContent(data, self._gate) if rank == self._remote_rank else BytesContent(data)

    def open_full(self, path: str) -> BytesContent:
        return BytesContent(npy(whole(self.ptc, path, self.version), self.ptc.tensors[path].dtype))
