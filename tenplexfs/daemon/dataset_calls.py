"""Asking other nodes for indexes and samples, and answering them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import trio
import xxhash

from tenplexfs._pb import dataset_pb2
from tenplexfs.core.snapshot import NodeName
from tenplexfs.errors import CorruptError, InvalidError, NotFoundError
from tenplexfs.rpc.peer_client import PeerClient
from tenplexfs.runtime.datasets import Datasets

__all__ = ["SampleCalls", "SampleService"]

_MESSAGE_BYTES = 1 << 20
_INDEX_DEADLINE_S = 3600.0
_Ints = npt.NDArray[np.int64]


class SampleCalls:
    """Implements `runtime.datasets.SamplePeers`.

    Args:
        endpoints: Asked for the nodes that are known, this one too.
    """

    def __init__(
        self, here: NodeName, client: PeerClient, endpoints: Callable[[], Mapping[NodeName, str]]
    ) -> None:
        self._here = here
        self._client = client
        self._endpoints = endpoints

    def nodes(self) -> Collection[NodeName]:
        """Returns the other nodes that are known."""
        return sorted(self._endpoints().keys() - {self._here})

    async def index(self, node: NodeName, digest: str, write: Callable[[bytes], None]) -> None:
        """Streams the file of an index."""

        def take(reply: dataset_pb2.IndexReply) -> None:
            write(reply.data)

        request = dataset_pb2.IndexRequest(digest=digest)
        await self._client.stream_into(node, "Samples/Index", request, take, deadline_s=_INDEX_DEADLINE_S)

    async def samples(
        self, node: NodeName, digest: str, ids: _Ints, *, read: bool, deadline_s: float
    ) -> tuple[_Ints, memoryview]:
        """Returns which of ``ids`` the node gives, and their bytes."""
        held: list[_Ints] = []
        parts: list[bytes] = []

        def take(reply: dataset_pb2.ReadSamplesReply) -> None:
            if not held:
                held.append(np.frombuffer(reply.held, "<i8").astype(np.int64))
            if xxhash.xxh3_64_intdigest(reply.data) != reply.sum:
                raise CorruptError(f"node {node}: samples of {digest}: the checksum is wrong")
            parts.append(reply.data)

        request = dataset_pb2.ReadSamplesRequest(digest=digest, ids=ids.astype("<i8").tobytes(), read=read)
        await self._client.stream_into(node, "Samples/Read", request, take, deadline_s=deadline_s)
        return held[0] if held else np.empty(0, np.int64), memoryview(b"".join(parts))


class SampleService:
    """Implements `rpc.handlers.SamplesHandler`."""

    def __init__(self, datasets: Datasets) -> None:
        self._datasets = datasets

    async def index(self, request: dataset_pb2.IndexRequest) -> AsyncIterator[dataset_pb2.IndexReply]:
        """Yields the file of an index."""
        if not self._datasets.indexes.has(request.digest):
            raise NotFoundError(f"index {request.digest}: not on this node")
        path = self._datasets.index_file(request.digest)
        size, at = path.stat().st_size, 0
        while at < size:
            data = await trio.to_thread.run_sync(_read, path, at)
            at += len(data)
            yield dataset_pb2.IndexReply(data=data)

    async def read(
        self, request: dataset_pb2.ReadSamplesRequest
    ) -> AsyncIterator[dataset_pb2.ReadSamplesReply]:
        """Yields what this node has of the samples."""
        if len(request.ids) % 8:
            raise InvalidError(f"samples: ids of {len(request.ids)} bytes, need 8 for each")
        ids = np.frombuffer(request.ids, "<i8").astype(np.int64)
        held, data = await self._datasets.held(request.digest, ids, read=request.read)
        first = held.astype("<i8").tobytes()
        for at in range(0, max(len(data), 1), _MESSAGE_BYTES):
            part = bytes(data[at : at + _MESSAGE_BYTES])
            yield dataset_pb2.ReadSamplesReply(held=first, data=part, sum=xxhash.xxh3_64_intdigest(part))
            first = b""


def _read(path: Path, at: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(_MESSAGE_BYTES)
