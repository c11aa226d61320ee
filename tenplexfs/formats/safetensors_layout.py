"""A layout from the files of a safetensors model, as Hugging Face indexes list them.

Nothing is cut inside of such a file: a tensor is whole in one of them. So a model is one rank that holds
everything, or one rank for each file, in the order of their names.
"""

from __future__ import annotations

from collections.abc import Mapping

from tenplexfs.core.held import explicit_layout, whole_shard
from tenplexfs.core.layout import ExplicitShard, Layout, Mesh, TensorEntry, has_braces
from tenplexfs.errors import InvalidError

__all__ = ["layout_of_files"]

Tensors = Mapping[str, tuple[tuple[int, ...], str]]
"""Tensor path, shape and dtype name."""


def layout_of_files(files: Mapping[str, Tensors], *, rank_per_file: bool) -> Layout:
    """Returns the layout of a model in ``files``.

    >>> one = {"a.safetensors": {"w": ((2, 3), "float32")}, "b.safetensors": {"v": ((4,), "bfloat16")}}
    >>> [entry.on for entry in layout_of_files(one, rank_per_file=True).tensors]
    [((('rank',), (1,)),), ((('rank',), (0,)),)]

    Args:
        files: File name and what its header says.
        rank_per_file: Whether each file is a rank of its own, by the order of names; else all are rank 0.

    Raises:
        InvalidError: A tensor is in two files.
    """
    where: dict[str, str] = {}
    entries: dict[str, TensorEntry] = {}
    explicit: dict[str, tuple[tuple[int, ...], dict[int, ExplicitShard]]] = {}
    for rank, name in enumerate(sorted(files)):
        on = ((("rank",), (rank,)),) if rank_per_file and len(files) > 1 else ()
        for path, (shape, dtype) in files[name].items():
            if path in where:
                raise InvalidError(f"tensor {path!r}: in {where[path]} and in {name}")
            where[path] = name
            if has_braces(path):
                explicit[path] = (shape, {rank if on else 0: whole_shard(shape, dtype)})
            else:
                entries[path] = TensorEntry(path, shape, dtype, on=on)
    mesh = Mesh((("rank", max(len(files) if rank_per_file else 1, 1)),))
    return explicit_layout(mesh, explicit, [entries[path] for path in sorted(entries)])
