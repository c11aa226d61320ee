"""A layout from the metadata that `torch.distributed.checkpoint` (DCP) wrote beside its files.

DCP records the chunks of each tensor and the file of each chunk, no ranks: the rank is in the file's name,
``__{rank}_{n}.distcp``. Replicas were dropped at save, so each chunk is on the one rank that wrote it.
"""

from __future__ import annotations

import re
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from tenplexfs.core.held import explicit_layout, local_arrays, refuse_overlap
from tenplexfs.core.layout import ExplicitShard, Layout, Mesh
from tenplexfs.core.paths import path_of_name
from tenplexfs.core.region import Region
from tenplexfs.errors import InvalidError, NotFoundError
from tenplexfs.torch.layout import dtype_name

__all__ = ["layout_of_checkpoint", "layout_of_metadata"]

_FILE = re.compile(r"__(\d+)_\d+\.distcp")


def layout_of_checkpoint(directory: str | Path) -> Layout:
    """Returns the layout of a DCP checkpoint.

    DCP's metadata is a pickle, and its own reader opens it: only for checkpoints that you trust.

    Raises:
        NotFoundError: There is no ``.metadata``.
        InvalidError: As `layout_of_metadata`.
    """
    if not (Path(directory) / ".metadata").is_file():
        raise NotFoundError(f"{directory}: no DCP checkpoint: it has no .metadata")
    return layout_of_metadata(FileSystemReader(directory).read_metadata())


def layout_of_metadata(metadata: Metadata, *, world_size: int | None = None) -> Layout:
    """Returns the layout of what each rank wrote; values that are no tensors are not in it.

    Several chunks of a tensor on one rank are joined along the one dim in which they differ, else raveled one
    after the other, on all ranks alike.

    Args:
        metadata: As DCP's readers give it.
        world_size: Default: the highest rank that wrote a tensor, plus one.

    Raises:
        InvalidError: A chunk has no file of a rank, or the chunks of a tensor do not tile it.
    """
    found: dict[str, tuple[tuple[int, ...], dict[int, ExplicitShard]]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        what, path, shape = f"tensor {name!r}", path_of_name(name), tuple(entry.size)
        held: dict[int, list[Region]] = {}
        for chunk in entry.chunks:
            start = tuple(chunk.offsets)
            box = Region(start, tuple(a + n for a, n in zip(start, chunk.sizes, strict=True)))
            held.setdefault(_owner(what, metadata, MetadataIndex(name, chunk.offsets)), []).append(box)
        refuse_overlap(
            what,
            shape,
            [(box, f"rank {rank}") for rank, boxes in held.items() for box in boxes],
            "the chunks of a checkpoint tile a tensor, except where DCP wrote strided shards as one box",
        )
        found[path] = (shape, local_arrays(held, dtype_name(what, entry.properties.dtype)))
    size = 1 + max((rank for _, shards in found.values() for rank in shards), default=0)
    return explicit_layout(Mesh((("rank", world_size or size),)), found)


def _owner(what: str, metadata: Metadata, index: MetadataIndex) -> int:
    stored = (metadata.storage_data or {}).get(index)
    if stored is None:
        raise InvalidError(f"{what}: chunk at {list(index.offset or ())}: the metadata names no file of it")
    named = _FILE.fullmatch(str(getattr(stored, "relative_path", "")))
    if named is None:
        raise InvalidError(f"{what}: file {stored!r}: need a name like __0_0.distcp, which says the rank")
    return int(named[1])
