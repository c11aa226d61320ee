"""The manifest of a store: which snapshots it has, and where in which file each local array lies.

A msgpack map with a checksum over its body. Each snapshot is encoded once, when it is sealed; its bytes are
carried along unchanged, so that a commit or a drop encodes nothing but flags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import msgspec
import xxhash

from tenplexfs.core.region import Region
from tenplexfs.core.snapshot import JobName, SnapshotId, TxId
from tenplexfs.errors import CorruptError, InvalidError

__all__ = ["ArrayRef", "Manifest", "StoredSnapshot", "decode", "decode_snapshot", "encode", "encode_snapshot"]

_FORMAT = "tenplexfs-manifest"
_VERSION = 1
_T = TypeVar("_T")
_Boxes: TypeAlias = list[tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """Where a local array lies: a whole ``.npy``, header first.

    Attributes:
        file: Name of the file, relative to the store.
        offset: Where the header begins in it, a multiple of 64.
        header_bytes: Size of the header.
        nbytes: Size of the data behind it.
        shape: Local shape.
        dtype: Name of the element type.
        sums: xxh3_64 of the C-order bytes of each piece.
        boxes: Where each piece lies, in local coordinates; of one dim, in the raveled array, where the dims
            of the array and of the tensor differ.
    """

    file: str
    offset: int
    header_bytes: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    sums: tuple[int, ...]
    boxes: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A node's part of a snapshot.

    Attributes:
        job: Name of the job.
        id: The snapshot.
        committed: False while it is staged.
        layout_json: The layout as it was given.
        created_ns: When it was made, since 1970.
        arrays: (rank, tensor path as shown) -> where the array lies; several may share one.
        settings_json: The settings of the job, or nothing.
        values: What the ranks hold beside tensors, as `formats.values` packs it, or nothing.
        fence: Of the lock under which it was staged.
    """

    job: JobName
    id: SnapshotId
    committed: bool
    layout_json: bytes
    created_ns: int
    arrays: Mapping[tuple[int, str], ArrayRef]
    settings_json: bytes = b""
    values: bytes = b""
    fence: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest says.

    Attributes:
        node: The node whose store it is.
        incarnation: Changes when the store begins anew, empty.
        snapshots: Committed or not, and the bytes of `encode_snapshot`; in the order of sealing.
    """

    node: str
    incarnation: str
    snapshots: tuple[tuple[bool, bytes], ...]


class _Ref(msgspec.Struct, array_like=True):
    file: int
    offset: int
    header_bytes: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: int
    sums: tuple[int, ...]
    boxes: _Boxes | None  # None: one that is the whole array
    ranks: dict[str, list[int]]  # path -> ranks


class _Snapshot(msgspec.Struct):
    job: str
    generation: int
    step: int | None
    txid: str
    layout_json: bytes
    created_ns: int
    files: list[str]
    dtypes: list[str]
    arrays: list[_Ref]
    settings_json: bytes
    values: bytes = b""
    fence: int = 0


class _Manifest(msgspec.Struct):
    node: str
    incarnation: str
    snapshots: list[tuple[bool, bytes]]


class _Envelope(msgspec.Struct):
    format: str
    version: int
    xxh3_64: int
    body: bytes


def encode(manifest: Manifest) -> bytes:
    """Returns the bytes of ``manifest``."""
    body = msgspec.msgpack.encode(_Manifest(manifest.node, manifest.incarnation, list(manifest.snapshots)))
    return msgspec.msgpack.encode(_Envelope(_FORMAT, _VERSION, xxhash.xxh3_64_intdigest(body), body))


def decode(data: bytes) -> Manifest:
    """Returns the manifest that `encode` made ``data`` of.

    Raises:
        CorruptError: The checksum or the structure is wrong.
        InvalidError: It is of another version.
    """
    envelope = _decode(data, _Envelope)
    if envelope.format != _FORMAT or envelope.version != _VERSION:
        raise InvalidError(
            f"manifest: format {envelope.format!r} version {envelope.version}, "
            f"this program reads {_FORMAT!r} version {_VERSION}"
        )
    if (got := xxhash.xxh3_64_intdigest(envelope.body)) != envelope.xxh3_64:
        raise CorruptError(f"manifest: checksum {got:016x}, should be {envelope.xxh3_64:016x}")
    body = _decode(envelope.body, _Manifest)
    return Manifest(body.node, body.incarnation, tuple(body.snapshots))


def encode_snapshot(stored: StoredSnapshot) -> bytes:
    """Returns the bytes of ``stored``, without `committed`.

    Cost: About 2 us an array.
    """
    files: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    refs: dict[int, _Ref] = {}
    boxes: dict[tuple[int, tuple[int, ...]], _Boxes | None] = {}  # arrays that are cut alike share them
    for (rank, path), ref in stored.arrays.items():
        packed = refs.get(id(ref))
        if packed is None:
            file = files.setdefault(ref.file, len(files))
            dtype = dtypes.setdefault(ref.dtype, len(dtypes))
            cut = id(ref.boxes), ref.shape
            if cut not in boxes:
                boxes[cut] = _pack(ref)
            refs[id(ref)] = packed = _Ref(
                file, ref.offset, ref.header_bytes, ref.nbytes, ref.shape, dtype, ref.sums, boxes[cut], {}
            )
        packed.ranks.setdefault(path, []).append(rank)
    return msgspec.msgpack.encode(
        _Snapshot(
            stored.job,
            stored.id.generation,
            stored.id.step,
            stored.id.txid,
            stored.layout_json,
            stored.created_ns,
            list(files),
            list(dtypes),
            list(refs.values()),
            stored.settings_json,
            stored.values,
            stored.fence,
        )
    )


def decode_snapshot(data: bytes, *, committed: bool) -> StoredSnapshot:
    """Returns the snapshot that `encode_snapshot` made ``data`` of.

    Raises:
        CorruptError: The structure is wrong.
    """
    packed = _decode(data, _Snapshot)
    arrays: dict[tuple[int, str], ArrayRef] = {}
    try:
        for item in packed.arrays:
            ref = ArrayRef(
                packed.files[item.file],
                item.offset,
                item.header_bytes,
                item.nbytes,
                item.shape,
                packed.dtypes[item.dtype],
                item.sums,
                _whole(item.shape) if item.boxes is None else tuple(Region(*box) for box in item.boxes),
            )
            for path, ranks in item.ranks.items():
                arrays.update(((rank, path), ref) for rank in ranks)
        snapshot = SnapshotId(packed.generation, packed.step, TxId(packed.txid))
    except (IndexError, InvalidError) as error:
        raise CorruptError(f"manifest: job {packed.job}, txid {packed.txid}: {error}") from error
    return StoredSnapshot(
        JobName(packed.job),
        snapshot,
        committed,
        packed.layout_json,
        packed.created_ns,
        arrays,
        packed.settings_json,
        packed.values,
        packed.fence,
    )


def _whole(shape: Sequence[int]) -> tuple[Region, ...]:
    return (Region((0,) * len(shape), tuple(shape)),)


def _pack(ref: ArrayRef) -> _Boxes | None:
    boxes = [(box.start, box.stop) for box in ref.boxes]
    return None if len(boxes) == 1 and boxes[0][1] == ref.shape and not any(boxes[0][0]) else boxes


def _decode(data: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptError(f"manifest: {error}") from error
