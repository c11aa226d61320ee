"""A model as safetensors files, as Hugging Face's libraries find it: one, or numbered ones and an index.

Tensors that are tied stand once; what the other names are is noted beside. Source: huggingface_hub,
`save_torch_state_dict` (names, index, where the note goes); safetensors, `save_model` (the note).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tenplexfs.core.dtypes import itemsize_of
from tenplexfs.core.paths import name_of_path
from tenplexfs.errors import CorruptError, InvalidError
from tenplexfs.formats.safetensors_file import FileLayout, lay_out

__all__ = ["INDEX", "SINGLE", "ModelFiles", "files_of_index", "lay_out_files"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model before their data are there.

    Attributes:
        layouts: Name of each file, and what is in it.
        index: What `INDEX` is to say; None where one file has everything.
    """

    layouts: Mapping[str, FileLayout]
    index: bytes | None


def lay_out_files(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    *,
    shard_bytes: int | None,
    metadata: Mapping[str, str],
    single: str = SINGLE,
) -> ModelFiles:
    """Returns the files of ``tensors``, in their order.

    Args:
        tensors: Path -> name of the element type, shape.
        shard_bytes: What the tensors of a file take at most, unless one alone takes more; None: one file.
        metadata: Of the model: of the only file, else of the index.
        single: Name of the only file.

    Raises:
        InvalidError: The format has no word for a type or a name, or two names would be the same.
    """
    shards = list(_shards(tensors, shard_bytes))
    if len(shards) == 1:
        layout = lay_out(_listed(tensors, tensors), {"format": "pt", **metadata})
        return ModelFiles({single: layout}, None)
    layouts: dict[str, FileLayout] = {}
    files: dict[str, str] = {}
    for number, paths in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        layouts[file] = lay_out(_listed(tensors, paths), {"format": "pt"})
        for path in paths:
            if files.setdefault(name := name_of_path(path), file) != file:
                raise InvalidError(f"two tensors have the name {name!r} as keys joined by dots")
    total = sum(_nbytes(*kind) for kind in tensors.values())
    content = {"metadata": {"total_size": total, **metadata}, "weight_map": dict(sorted(files.items()))}
    return ModelFiles(layouts, json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")


def files_of_index(text: bytes) -> set[str]:
    """Returns the names of the files that an index names.

    >>> files_of_index(b'{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    {'model-00001-of-00001.safetensors'}

    Raises:
        CorruptError: It is no index.
    """
    try:
        names = set(json.loads(text)["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CorruptError(f"no index of safetensors files: {error!r}") from error
    return {name for name in names if isinstance(name, str) and name and "/" not in name}


def _listed(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], paths: Iterable[str]
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    return ((path, *tensors[path]) for path in paths)


def _shards(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], shard_bytes: int | None
) -> Iterator[list[str]]:
    """Yields the paths of one file after the other."""
    paths: list[str] = []
    size = 0
    for path, kind in tensors.items():
        nbytes = _nbytes(*kind)
        if paths and shard_bytes is not None and size + nbytes > shard_bytes:
            yield paths
            paths, size = [], 0
        paths.append(path)
        size += nbytes
    yield paths


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * itemsize_of(dtype)
