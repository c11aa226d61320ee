"""The call that carries bytes, /tenplexfs.v1.Ranges/Fetch: one msgpack request, a stream of raw messages.

The stream is groups of `GROUP_COUNT` messages of bytes (the last group may be shorter), each followed by one
message with the xxh3_64 of each of them, little-endian. So the receiver checks before it hands over, the
sender adds nothing to the bytes, which would be a copy, and at most a group is held back. The receiver knows
the length of the stream, so it knows where it ends.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from tenplexfs.core.snapshot import JobName, TxId, check_job_name
from tenplexfs.errors import CorruptError, InvalidError
from tenplexfs.rpc.messages import check_txid
from tenplexfs.rpc.ranges import MESSAGE_BYTES
from tenplexfs.runtime.protocols import Ranges

__all__ = [
    "FETCH",
    "GROUP_COUNT",
    "MAX_ENCODED_BYTES",
    "MAX_REQUEST_BYTES",
    "FetchRequest",
    "checked",
    "split",
    "with_sums",
]

FETCH = "/tenplexfs.v1.Ranges/Fetch"
GROUP_COUNT = 4
MAX_REQUEST_BYTES = 16 << 20
"""Half a million boxes of two dims: more are asked for in several calls."""
_PART_BYTES = 64
MAX_ENCODED_BYTES = MAX_REQUEST_BYTES + 4096


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Which bytes are wanted.

    Attributes:
        job: The job.
        txid: Names its snapshot.
        start: Bytes of the stream that the asker has already.
        ranges: In the order of the stream.
        message_bytes: No message is longer.
    """

    job: JobName
    txid: TxId
    start: int
    ranges: tuple[Ranges, ...]
    message_bytes: int = MESSAGE_BYTES

    @property
    def nbytes(self) -> int:
        """Length of the whole stream, from byte 0."""
        return sum(int(part.nbytes.sum()) for part in self.ranges)

    def encode(self) -> bytes:
        """Returns the request as `decode` reads it."""
        parts = [
            _Part(r.rank, r.path, r.itemsize, len(r.boxes), r.boxes.shape[2], _packed(r.boxes))
            for r in self.ranges
        ]
        return msgspec.msgpack.encode(_Request(self.job, self.txid, self.start, parts, self.message_bytes))

    @classmethod
    def decode(cls, data: bytes) -> FetchRequest:
        """Returns the request that ``data`` is.

        Raises:
            InvalidError: It is not one, or larger than `MAX_REQUEST_BYTES`.
        """
        if len(data) > MAX_ENCODED_BYTES:
            raise InvalidError(
                f"request for ranges: {len(data)} bytes, at most {MAX_REQUEST_BYTES}: ask in parts"
            )
        try:
            raw = msgspec.msgpack.decode(data, type=_Request)
            ranges = tuple(Ranges(part.rank, part.path, part.itemsize, _unpacked(part)) for part in raw.parts)
        except (ValueError, msgspec.MsgspecError) as error:
            raise InvalidError(f"request for ranges: {error}") from error
        if sum(map(_cost, ranges)) > MAX_REQUEST_BYTES:
            raise InvalidError(
                f"request for ranges: need at most {MAX_REQUEST_BYTES} bytes of it, ask in parts"
            )
        request = cls(check_job_name(raw.job), check_txid(raw.txid), raw.start, ranges, raw.message_bytes)
        if raw.start > request.nbytes:
            raise InvalidError(f"request for ranges: need start <= {request.nbytes}, got {raw.start}")
        return request


class _Part(msgspec.Struct, array_like=True, frozen=True):
    rank: Annotated[int, msgspec.Meta(ge=0)]
    path: str
    itemsize: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    count: Annotated[int, msgspec.Meta(ge=0, le=MAX_REQUEST_BYTES // 16)]
    ndim: Annotated[int, msgspec.Meta(ge=0, le=64)]
    boxes: bytes


class _Request(msgspec.Struct, array_like=True, frozen=True):
    job: str
    txid: str
    start: Annotated[int, msgspec.Meta(ge=0)]
    parts: Annotated[list[_Part], msgspec.Meta(max_length=MAX_REQUEST_BYTES // _PART_BYTES)]
    message_bytes: Annotated[int, msgspec.Meta(ge=1 << 12, le=MESSAGE_BYTES)] = MESSAGE_BYTES


def _packed(boxes: npt.NDArray[np.int64]) -> bytes:
    return boxes.astype("<i8", copy=False).tobytes()


def _unpacked(part: _Part) -> npt.NDArray[np.int64]:
    numbers = np.frombuffer(part.boxes, "<i8").astype(np.int64, copy=False)
    return numbers.reshape(part.count, 2, part.ndim)


def _cost(part: Ranges) -> int:
    count, _, ndim = part.boxes.shape
    return int(_PART_BYTES + len(part.path) + 16 * max(1, ndim) * count)


def split(ranges: Sequence[Ranges], max_bytes: int = MAX_REQUEST_BYTES) -> Iterator[tuple[Ranges, ...]]:
    """Yields ``ranges`` in order, in batches that one request may carry, cutting long ones."""
    batch: list[Ranges] = []
    room = max_bytes
    for part in ranges:
        boxes = part.boxes
        while len(boxes):
            count = (room - _PART_BYTES - len(part.path)) // (16 * max(1, boxes.shape[2]))
            if count < 1 and batch:
                yield tuple(batch)
                batch, room = [], max_bytes
                continue
            piece = Ranges(part.rank, part.path, part.itemsize, boxes[: max(1, count)])
            batch.append(piece)
            boxes, room = boxes[len(piece.boxes) :], room - _cost(piece)
    if batch:
        yield tuple(batch)


def with_sums(messages: Iterable[bytes]) -> Iterator[bytes]:
    """Yields ``messages``, and after each group of them their sums."""
    sums: list[int] = []
    for message in messages:
        sums.append(xxh3_64_intdigest(message))
        yield message
        if len(sums) == GROUP_COUNT:
            yield struct.pack(f"<{len(sums)}Q", *sums)
            sums = []
    if sums:
        yield struct.pack(f"<{len(sums)}Q", *sums)


def checked(stream: Iterator[bytes], nbytes: int) -> Iterator[bytes]:
    """Yields the ``nbytes`` bytes of ``stream`` in its messages, without the sums, each checked.

    Raises:
        CorruptError: A message is not what its sum says, or the stream is too long or cut short.
    """
    left = nbytes
    while left:
        group: list[bytes] = []
        while left and len(group) < GROUP_COUNT:
            message = _next(stream, nbytes - left, nbytes)
            if not message or len(message) > left:
                raise CorruptError(
                    f"stream of {nbytes} bytes: got a message of {len(message)} with {left} left"
                )
            group.append(message)
            left -= len(message)
        sums = _next(stream, nbytes - left, nbytes)
        got = struct.pack(f"<{len(group)}Q", *map(xxh3_64_intdigest, group))
        if got != sums:
            where = f"stream of {nbytes} bytes, before byte {nbytes - left}"
            raise CorruptError(f"{where}: checksums are {got.hex()}, sent as {sums.hex()}")
        if not left and (extra := next(stream, None)) is not None:
            raise CorruptError(f"stream of {nbytes} bytes: got {len(extra)} more")
        yield from group


def _next(stream: Iterator[bytes], at: int, nbytes: int) -> bytes:
    message = next(stream, None)
    if message is None:
        raise CorruptError(f"stream of {nbytes} bytes: ended at byte {at}")
    return message
