"""A persisted step: a directory of safetensors files, and last of all the manifest that makes it one.

``<to>/<job>/<step>.<generation>.<txid>/`` holds ``layout.json``, ``values.msgpack``, ``model/<rank>-<part>``
``.safetensors`` and ``manifest.json``. Each distinct local array stands once, under the first rank that holds
it. What the format of safetensors has no type for stands as its bytes; the manifest has the real type. Every
file is summed in blocks, so that a part of it can be checked that was read alone.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from tenplexfs.core.snapshot import JobName, SnapshotId, TxId
from tenplexfs.errors import CorruptError, InvalidError

__all__ = [
    "BLOCK_BYTES",
    "INDEXES",
    "LAYOUT",
    "MANIFEST",
    "VALUES",
    "Checkpoint",
    "CheckpointFile",
    "Local",
    "decode_files",
    "directory_name",
    "encode_files",
    "snapshot_of_directory",
]

BLOCK_BYTES = 1 << 20
INDEXES = "indexes"
"""Where the indexes of datasets are, beside the directories of steps."""
MANIFEST, LAYOUT, VALUES = "manifest.json", "layout.json", "values.msgpack"

_FORMAT, _VERSION = "tenplexfs-checkpoint", 1
_DIRECTORY = re.compile(r"([0-9]{12,18})\.([1-9][0-9]{0,17})\.([0-9a-f]{16})")


def directory_name(snapshot: SnapshotId) -> str:
    """Returns the name of a step's directory; by name they are in the order of steps.

    >>> directory_name(SnapshotId(2, 150, TxId("00000000000000ab")))
    '000000000150.2.00000000000000ab'
    """
    return f"{snapshot.step:012d}.{snapshot.generation}.{snapshot.txid}"


def snapshot_of_directory(name: str) -> SnapshotId | None:
    """Returns the snapshot that `directory_name` made ``name`` of, or None where it is something else."""
    found = _DIRECTORY.fullmatch(name)
    return None if found is None else SnapshotId(int(found[2]), int(found[1]), TxId(found[3]))


@dataclass(frozen=True, slots=True)
class Local:
    """A local array in a file.

    Attributes:
        rank: The first one that holds it.
        path: As shown there.
        dtype: Name of its element type.
        shape: Local shape.
        begin: Where its bytes begin in the file.
    """

    rank: int
    path: str
    dtype: str
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file of a step.

    Attributes:
        name: Below the directory of the step.
        nbytes: Of the whole file.
        locals: What is in it; without arrays that have no elements.
        sums: xxh3_64 of each block of `BLOCK_BYTES`, the last one shorter.
    """

    name: str
    nbytes: int
    locals: tuple[Local, ...]
    sums: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.sums) != -(-self.nbytes // BLOCK_BYTES):
            raise CorruptError(f"{self.name}: {len(self.sums)} sums for {self.nbytes} bytes")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What the manifest of a step says.

    Attributes:
        settings_json: Of the job, with the cursors of the step.
        layout_sum: xxh3_64 of ``layout.json``.
        values_sum: Of ``values.msgpack``.
    """

    job: JobName
    snapshot: SnapshotId
    created_ns: int
    settings_json: bytes
    layout_sum: int
    values_sum: int
    files: tuple[CheckpointFile, ...]

    def encode(self) -> bytes:
        """Returns the manifest."""
        body = {
            "job": self.job,
            "generation": self.snapshot.generation,
            "step": self.snapshot.step,
            "txid": self.snapshot.txid,
            "created_ns": self.created_ns,
            "settings": json.loads(self.settings_json or b"{}"),
            "block_bytes": BLOCK_BYTES,
            "layout_xxh3_64": f"{self.layout_sum:016x}",
            "values_xxh3_64": f"{self.values_sum:016x}",
            "files": _to_json(self.files),
        }
        content = {"format": _FORMAT, "version": _VERSION, "xxh3_64": _sum(body), "checkpoint": body}
        return json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Checkpoint:
        """Returns what `encode` made ``data`` of.

        Raises:
            CorruptError: Nothing.
            InvalidError: It is of another version.
        """
        try:
            content = json.loads(data)
            if (content["format"], content["version"]) != (_FORMAT, _VERSION):
                raise InvalidError(
                    f"{MANIFEST}: format {content['format']!r} version {content['version']!r}, "
                    f"this program reads {_FORMAT!r} version {_VERSION}"
                )
            body = content["checkpoint"]
            if content["xxh3_64"] != _sum(body) or body["block_bytes"] != BLOCK_BYTES:
                raise CorruptError(f"{MANIFEST}: checksum {_sum(body)}, should be {content['xxh3_64']}")
            return cls(
                JobName(body["job"]),
                SnapshotId(body["generation"], body["step"], TxId(body["txid"])),
                body["created_ns"],
                json.dumps(body["settings"], sort_keys=True).encode(),
                int(body["layout_xxh3_64"], 16),
                int(body["values_xxh3_64"], 16),
                _from_json(body["files"]),
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptError(f"{MANIFEST}: {error!r}") from error


def encode_files(files: Iterable[CheckpointFile]) -> bytes:
    """Returns ``files`` as bytes, for another node."""
    return json.dumps(_to_json(files)).encode()


def decode_files(data: bytes) -> tuple[CheckpointFile, ...]:
    """Returns what `encode_files` made ``data`` of.

    Raises:
        CorruptError: Nothing.
    """
    try:
        return _from_json(json.loads(data))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError(f"files of a persisted step: {error!r}") from error


def _to_json(files: Iterable[CheckpointFile]) -> list[dict[str, Any]]:
    return [
        {
            "name": file.name,
            "bytes": file.nbytes,
            "arrays": [[each.rank, each.path, each.dtype, each.shape, each.begin] for each in file.locals],
            "sums": base64.b64encode(np.array(file.sums, "<u8").tobytes()).decode(),
        }
        for file in files
    ]


def _from_json(files: Sequence[dict[str, Any]]) -> tuple[CheckpointFile, ...]:
    return tuple(
        CheckpointFile(
            file["name"],
            file["bytes"],
            tuple(
                Local(rank, path, dtype, tuple(shape), begin)
                for rank, path, dtype, shape, begin in file["arrays"]
            ),
            tuple(np.frombuffer(base64.b64decode(file["sums"]), "<u8").tolist()),
        )
        for file in files
    )


def _sum(body: object) -> str:
    return f"{xxhash.xxh3_64_intdigest(json.dumps(body, sort_keys=True).encode()):016x}"
