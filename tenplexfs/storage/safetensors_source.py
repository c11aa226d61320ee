"""Tensors of safetensors files on disk, mapped: nothing is read until it is used."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from tenplexfs.core.dtypes import dtype_of
from tenplexfs.core.paths import path_of_name
from tenplexfs.errors import CorruptError, InvalidError, NotFoundError, TenplexError
from tenplexfs.formats.safetensors import Entry, parse

__all__ = ["SafetensorsSource"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class SafetensorsSource:
    """The tensors of a file, or of the files that an index names, as the arrays of rank 0.

    An `ArraySource`. The files stay mapped as long as the source or an array of it lives; they must not be
    shortened meanwhile.

    Attributes:
        tensors: Tensor path -> shape and dtype name, in the order of names.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    _found: Mapping[str, tuple[mmap.mmap, Entry]]

    @classmethod
    def open(cls, path: Path) -> SafetensorsSource:
        """Opens a ``.safetensors`` file, an index file, or a directory with one of the usual names.

        Raises:
            NotFoundError: There is no such file.
            InvalidError, CorruptError: What is there is no valid model; the message names file and tensor.
        """
        found: dict[str, tuple[mmap.mmap, Entry]] = {}
        try:
            for file, wanted in _files(path):
                found.update(_open(file, wanted))
        except FileNotFoundError as error:
            raise NotFoundError(f"{error.filename}: no such file") from error
        except OSError as error:
            raise InvalidError(f"{error.filename or path}: {error.strerror}") from error
        ordered = {name: found[name] for name in sorted(found)}
        tensors = {name: (entry.shape, entry.dtype) for name, (_, entry) in ordered.items()}
        return cls(MappingProxyType(tensors), MappingProxyType(ordered))

    def array(self, rank: int, path: str) -> npt.NDArray[np.generic] | None:
        """Returns the whole tensor ``path``, read-only, for rank 0; else None. It may be unaligned."""
        if rank != 0 or path not in self._found:
            return None
        mapped, entry = self._found[path]
        return np.ndarray(entry.shape, dtype_of(entry.dtype), buffer=mapped, offset=entry.begin)


def _files(path: Path) -> list[tuple[Path, frozenset[str] | None]]:
    """Returns each file and the names it must hold (None: any)."""
    if path.is_dir():
        present = [path / name for name in (_INDEX, _SINGLE) if (path / name).is_file()]
        if not present:
            raise NotFoundError(f"{path}: holds neither {_INDEX} nor {_SINGLE}; name the file itself")
        path = present[0]
    if path.suffix != ".json":
        return [(path, None)]
    try:
        index = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidError(f"{path}: no valid JSON: {error}") from error
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not files:
        raise InvalidError(f"{path}: need an object with a weight_map of names to files")
    names: dict[str, set[str]] = {}
    for name, file in files.items():
        # By the text, not resolved: caches of models are directories of symbolic links.
        if (
            not isinstance(file, str)
            or not file
            or "\0" in file
            or PurePosixPath(file).name != file
            or file == ".."
        ):
            raise InvalidError(f"{path}: tensor {name!r}: file {file!r} is not in the directory of the index")
        names.setdefault(file, set()).add(name)
    return [(path.parent / file, frozenset(wanted)) for file, wanted in sorted(names.items())]


def _open(file: Path, wanted: frozenset[str] | None) -> dict[str, tuple[mmap.mmap, Entry]]:
    with file.open("rb") as opened:
        if opened.seek(0, 2) == 0:
            raise CorruptError(f"{file}: no safetensors file: 0 bytes")
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        entries = parse(memoryview(mapped))
        found = {path_of_name(name): (mapped, entry) for name, entry in entries.items()}
    except TenplexError as error:
        raise type(error)(f"{file}: {error.message}", **error.details) from error
    if wanted is not None and (odd := sorted(wanted ^ entries.keys())):
        which = [f"{name!r} ({'index' if name in wanted else 'file'} only)" for name in odd[:8]]
        raise InvalidError(f"{file}: index and file differ in {len(odd)} tensors: {', '.join(which)}")
    return found
