"""Reads the headers of a safetensors model for its layout."""

from __future__ import annotations

import json
from pathlib import Path

from tenplexfs.core.layout import Layout
from tenplexfs.formats.safetensors_layout import layout_of_files
from tenplexfs.storage.safetensors_source import SafetensorsSource

__all__ = ["layout_of_model"]

_INDEX = "model.safetensors.index.json"


def layout_of_model(path: Path, *, rank_per_file: bool = False) -> Layout:
    """Returns the layout of a ``.safetensors`` file, an index file, or a directory with a usual name.

    Args:
        path: What `SafetensorsSource.open` takes.
        rank_per_file: Whether each file of the index is a rank of its own, by the order of names.

    Raises:
        NotFoundError, InvalidError, CorruptError: As `SafetensorsSource.open`; or a tensor is in two files.
    """
    whole = SafetensorsSource.open(path)  # index and files are checked against each other
    index = path / _INDEX if path.is_dir() else path
    if not rank_per_file or index.suffix != ".json" or not index.is_file():
        return layout_of_files({path.name: whole.tensors}, rank_per_file=False)
    names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    files = {name: SafetensorsSource.open(index.parent / name).tensors for name in names}
    return layout_of_files(files, rank_per_file=True)
