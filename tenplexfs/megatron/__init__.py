"""Megatron-Core: `save` and `load` of sharded state dicts, and their layouts; it is never imported.

Its objects are known by their attributes. `save`, `load` and `load_common` need torch, the rest does not.
"""

from typing import TYPE_CHECKING

from tenplexfs.megatron.layout import ObjectShard, Part, layout_of_ranks, objects_of_ranks, parts_of

if TYPE_CHECKING:
    from tenplexfs.megatron.checkpoint import load, load_common, save

__all__ = [
    "ObjectShard",
    "Part",
    "layout_of_ranks",
    "load",
    "load_common",
    "objects_of_ranks",
    "parts_of",
    "save",
]


def __getattr__(name: str) -> object:
    if name not in ("load", "load_common", "save"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tenplexfs.megatron import checkpoint

    return getattr(checkpoint, name)
