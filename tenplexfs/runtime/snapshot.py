"""A snapshot as this node sees it: documents, the arrays that are here, and where the others are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tenplexfs.core.ptc import PTC, Holder, Shard
from tenplexfs.core.region import Region
from tenplexfs.core.snapshot import JobName, NodeName, SnapshotId
from tenplexfs.errors import NotFoundError
from tenplexfs.formats import npy
from tenplexfs.formats.ptc_json import ptc_document
from tenplexfs.formats.structure import leaf_files, nested_document
from tenplexfs.formats.values import unpack
from tenplexfs.runtime.dataset_parts import dataset_parts
from tenplexfs.runtime.dataset_view import DatasetView
from tenplexfs.runtime.fetching import Fetcher
from tenplexfs.runtime.protocols import FileContent
from tenplexfs.runtime.reading import FullTensor, LocalFile, RemoteShard
from tenplexfs.runtime.tree import Tree

__all__ = ["LocalArrays", "NoArrays", "Snapshot", "job_document", "rank_nodes"]


_NO_LEAVES: Mapping[str, bytes] = MappingProxyType({})


class LocalArrays(Protocol):
    """The arrays of one snapshot that this node stores. Thread-safe."""

    def array(self, rank: int, path: str) -> npt.NDArray[np.generic] | None:
        """Returns the read-only array of ``path`` (as shown) on ``rank``, or None when it is not here."""
        ...

    def file(self, rank: int, path: str) -> memoryview | None:
        """Returns the same as a whole .npy file."""
        ...

    def release(self) -> None:
        """Lets go; what was given stays valid."""
        ...


class NoArrays:
    """The arrays of a snapshot of which this node holds nothing."""

    def array(self, rank: int, path: str) -> npt.NDArray[np.generic] | None:
        """Returns None."""
        return None

    def file(self, rank: int, path: str) -> memoryview | None:
        """Returns None."""
        return None

    def release(self) -> None:
        """Nothing to let go of."""


def rank_nodes(ptc: PTC) -> Mapping[int, NodeName]:
    """Returns the node of each rank."""
    return MappingProxyType({rank: NodeName(node) for node, ranks in ptc.nodes.items() for rank in ranks})


def job_document(
    job: JobName,
    snapshot: SnapshotId,
    ptc: PTC,
    layout_digest: str,
    datasets: Sequence[DatasetView] = (),
) -> dict[str, object]:
    """Returns what ``job.json`` says: all that the snapshot fixes."""
    return {
        "format": "tenplexfs-job",
        "version": 1,
        "name": job,
        "generation": snapshot.generation,
        "step": snapshot.step,
        "txid": snapshot.txid,
        "mesh": [{"name": name, "size": size} for name, size in ptc.layout.mesh.axes],
        "nodes": {node: list(ranks) for node, ranks in ptc.nodes.items()},
        "layout_digest": layout_digest,
        **({"datasets": {each.state.name: each.cursor.to_json() for each in datasets}} if datasets else {}),
    }


class Snapshot:
    """Implements `runtime.protocols.SnapshotView`."""

    def __init__(
        self,
        *,
        job: JobName,
        snapshot: SnapshotId,
        layout_json: bytes,
        layout_digest: str,
        ptc: PTC,
        created_ns: int,
        arrays: LocalArrays,
        fetcher: Fetcher,
        values: bytes = b"",
        datasets: Sequence[DatasetView] = (),
    ) -> None:
        self.job = job
        self.id = snapshot
        self.layout_json = layout_json
        self.layout_digest = layout_digest
        self.ptc = ptc
        self.created_ns = created_ns
        self.arrays = arrays
        self.fetcher = fetcher
        self.values = values
        self._structures: Mapping[int, bytes] | None = None
        self._leaves: dict[int, Mapping[str, bytes]] = {}
        self.datasets = datasets

    def parts(self, base: Callable[[int], int]) -> Mapping[int, tuple[bytes, Tree]]:
        """Returns ``dataset`` and ``tenplex``, where the job has datasets."""
        return dataset_parts(self.job, self.datasets, self.created_ns, base)

    def structure(self, rank: int) -> bytes:
        """Returns the structure of what ``rank`` holds, as it was saved or, else, as its paths tell.

        Raises:
            NotFoundError: There is no such rank.
        """
        paths = self.ptc.rank_paths(rank)
        if self._structures is None:
            self._structures = unpack(self.values).documents
        if (found := self._structures.get(rank)) is not None:
            return found
        return nested_document(paths, {path: self.ptc.tensors[path].path for path in paths})

    def leaves(self, rank: int) -> Mapping[str, bytes]:
        """Returns the files of leaves that are no tensors: path -> JSON; one object for equal ranks."""
        if not self.values:
            return _NO_LEAVES
        document = self.structure(rank)
        found = self._leaves.get(id(document))
        if found is None:
            found = self._leaves[id(document)] = leaf_files(document)
        return found

    def document(self, name: str) -> bytes:
        """Returns ``job.json``, ``layout.json`` or ``ptc/<rank>.json``; the same bytes at each call.

        Raises:
            NotFoundError: There is no such document.
        """
        if name == "layout.json":
            return self.layout_json
        if name == "job.json":
            return _encode(job_document(self.job, self.id, self.ptc, self.layout_digest, self.datasets))
        stem = name.removeprefix("ptc/").removesuffix(".json")
        if name == f"ptc/{stem}.json" and stem.isdecimal() and int(stem) < self.ptc.world_size:
            return _encode(ptc_document(self.ptc, int(stem)))
        raise NotFoundError(f"job {self.job}: no document {name!r}")

    def open_shard(self, rank: int, path: str) -> FileContent:
        """Opens the .npy of ``path`` (as shown) on ``rank``; here, when any rank here holds the same.

        Raises:
            NotFoundError: The rank holds no such tensor.
        """
        view = self.arrays.file(rank, path)
        if view is not None:
            return LocalFile(view)
        shard = self.ptc.shard(rank, path)
        tensor = self.ptc.tensors[path]
        header = npy.header(shard.local_shape, tensor.dtype)
        if 0 in shard.local_shape:
            return LocalFile(memoryview(header))
        holder = next(each for each in self.ptc.holders(path) if (rank, path) in each.keys)
        return self._stored(holder) or RemoteShard(self.fetcher, header, holder, tensor.itemsize)

    def open_full(self, path: str) -> FileContent:
        """Opens the .npy of the whole tensor ``path`` (as shown).

        Raises:
            NotFoundError: There is no such tensor.
        """
        holders = self.ptc.holders(path)
        tensor = self.ptc.tensors[path]
        whole = next((holder for holder in holders if _is_whole(holder.shard, tensor.shape)), None)
        header = npy.header(tensor.shape, tensor.dtype)
        here = self._stored(whole) if whole is not None else None
        return here or FullTensor(self.fetcher, header, tensor, holders, self.arrays)

    def _stored(self, holder: Holder) -> LocalFile | None:
        views = (self.arrays.file(rank, path) for rank, path in holder.keys)
        view = next((each for each in views if each is not None), None)
        return None if view is None else LocalFile(view)


def _is_whole(shard: Shard, shape: tuple[int, ...]) -> bool:
    whole = Region((0,) * len(shape), shape)
    return shard.local_shape == shape and len(shard.pieces) == 1 and shard.pieces[0].region == whole


def _encode(document: object) -> bytes:
    return json.dumps(document, ensure_ascii=False, indent=1).encode() + b"\n"
