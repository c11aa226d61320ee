"""Members of a zip archive (``.npz``), without the archive in memory: stored or deflated, beyond 4 GiB.

A member is taken by the range from its local header to the next one's, so one read has all of it.
Source: PKWARE APPNOTE 6.3.10, sections 4.3 and 4.5.3.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tenplexfs.errors import CorruptError, InvalidError

__all__ = ["END_BYTES", "DirectoryAt", "Member", "find_directory", "parse_directory", "unpack_member"]

END_BYTES = (1 << 16) + 22 + 20 + 56
"""A tail of this many bytes holds the end record, whatever comment follows it."""

_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_ABSENT32 = 0xFFFFFFFF
_STORED, _DEFLATED = 0, 8
_ENCRYPTED, _DESCRIPTOR, _UTF8 = 0x1, 0x8, 0x800


@dataclass(frozen=True, slots=True)
class DirectoryAt:
    """Where the central directory of an archive lies: bytes [begin, end), and how many members it has."""

    begin: int
    end: int
    count: int


@dataclass(frozen=True, slots=True)
class Member:
    """One file of an archive.

    Attributes:
        name: As the archive has it.
        begin: Where its local header begins.
        end: Where the next local header, or the directory, begins.
        size: Bytes when unpacked.
    """

    name: str
    begin: int
    end: int
    size: int


def find_directory(tail: bytes, size: int) -> DirectoryAt:
    """Finds the central directory from the last min(``size``, `END_BYTES`) bytes of an archive of ``size``.

    Raises:
        InvalidError: It is no zip archive, or one of several parts.
        CorruptError: The records contradict the size.
    """
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < _END.size:
        raise InvalidError(f"no zip archive: no end record in the last {len(tail)} bytes")
    _, disk, first_disk, _, count, length, begin, _ = _END.unpack_from(tail, at)
    end = size - len(tail) + at
    if at >= _LOCATOR64.size and tail[at - _LOCATOR64.size : at].startswith(b"PK\6\7"):
        _, _, record_at, _ = _LOCATOR64.unpack_from(tail, at - _LOCATOR64.size)
        where = record_at - (size - len(tail))
        if not 0 <= where <= at - _LOCATOR64.size - _END64.size or tail[where : where + 4] != b"PK\6\6":
            raise CorruptError(f"zip archive of {size} bytes: no zip64 end record at {record_at}")
        _, _, _, _, disk, first_disk, _, count, length, begin = _END64.unpack_from(tail, where)
        end = record_at
    if disk or first_disk:
        raise InvalidError("zip archive of several parts: join them first")
    if begin + length != end:
        raise CorruptError(
            f"zip archive of {size} bytes: directory [{begin}, {begin + length}), need end {end}"
        )
    return DirectoryAt(begin, end, count)


def parse_directory(data: bytes, where: DirectoryAt) -> tuple[Member, ...]:
    """Returns the members in the order in which they lie; directories in the archive are left out.

    Args:
        data: The bytes [begin, end) of the archive.
        where: As `find_directory` found it.

    Raises:
        CorruptError: The directory is cut short or contradicts itself.
        InvalidError: A member is encrypted or packed by another method than deflate.
    """
    members: list[Member] = []
    at = 0
    for _ in range(where.count):
        if len(data) - at < _CENTRAL.size or data[at : at + 4] != b"PK\1\2":
            raise CorruptError(
                f"zip directory: entry {len(members)} of {where.count} is cut short or damaged"
            )
        fields = _CENTRAL.unpack_from(data, at)
        flags, method, packed, size = fields[3], fields[4], fields[8], fields[9]
        name_bytes, extra_bytes, comment_bytes, begin = fields[10], fields[11], fields[12], fields[16]
        name_at = at + _CENTRAL.size
        name = data[name_at : name_at + name_bytes].decode("utf-8" if flags & _UTF8 else "cp437", "replace")
        extra = data[name_at + name_bytes : name_at + name_bytes + extra_bytes]
        size, packed, begin = _long((size, packed, begin), extra, name)
        if flags & _ENCRYPTED or method not in (_STORED, _DEFLATED):
            raise InvalidError(
                f"zip member {name!r}: method {method}, flags {flags:#x}: need stored or deflated"
            )
        if begin + _LOCAL.size + packed > where.begin:
            raise CorruptError(
                f"zip member {name!r}: {packed} bytes at {begin}, the directory is at {where.begin}"
            )
        members.append(Member(name, begin, where.begin, size))
        at = name_at + name_bytes + extra_bytes + comment_bytes
    members.sort(key=lambda member: member.begin)
    ends = [*(member.begin for member in members), where.begin][1:]
    if any(member.begin >= end for member, end in zip(members, ends, strict=True)):
        raise CorruptError("zip directory: two members lie at the same place")
    return tuple(
        replace(member, end=end)
        for member, end in zip(members, ends, strict=True)
        if not member.name.endswith("/")
    )


def unpack_member(data: bytes | memoryview, size: int | None) -> bytes:
    """Returns what is packed in ``data``, the bytes [begin, end) of a member, or as many from begin on.

    Args:
        data: Of the archive, from the local header on.
        size: Bytes when unpacked: all of them, and the checksum is compared. None: as many as there are.

    Raises:
        CorruptError: The bytes are not what the archive says.
    """
    view = memoryview(data)
    if len(view) < _LOCAL.size or bytes(view[:4]) != b"PK\3\4":
        raise CorruptError(f"no zip member: begins with {bytes(view[:4])!r}")
    fields = _LOCAL.unpack_from(view)
    flags, method, checksum = fields[2], fields[3], fields[6]
    packed = view[_LOCAL.size + fields[9] + fields[10] :]
    if method == _STORED:
        unpacked = bytes(packed if size is None else packed[:size])
        after = b"" if size is None else bytes(packed[size : size + 8])
    elif method == _DEFLATED:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            unpacked = inflater.decompress(packed) if size is None else inflater.decompress(packed, size + 1)
        except zlib.error as error:
            raise CorruptError(f"zip member: {error}") from error
        if size is not None and not inflater.eof:
            raise CorruptError(f"zip member: its {len(packed)} packed bytes do not end after {size} bytes")
        after = inflater.unused_data[:8]
    else:
        raise CorruptError(f"zip member: method {method}: need stored or deflated")
    if size is None:
        return unpacked
    if flags & _DESCRIPTOR:
        checksum = int.from_bytes(after[4:8] if after.startswith(b"PK\7\x08") else after[:4], "little")
    if len(unpacked) != size or zlib.crc32(unpacked) != checksum:
        got = f"{len(unpacked)} bytes with crc {zlib.crc32(unpacked):08x}"
        raise CorruptError(f"zip member: need {size} bytes with crc {checksum:08x}, got {got}")
    return unpacked


def _long(short: Sequence[int], extra: bytes, name: str) -> tuple[int, int, int]:
    """Returns size, packed size and begin, from the zip64 field where the short ones say so."""
    long = b""
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<2H", extra, at)
        if tag == 1:
            long = extra[at + 4 : at + 4 + length]
        at += 4 + length
    values = []
    for value in short:
        if value != _ABSENT32:
            values.append(value)
        elif len(long) >= 8:
            values.append(int.from_bytes(long[:8], "little"))
            long = long[8:]
        else:
            raise CorruptError(f"zip member {name!r}: its zip64 field is missing")
    size, packed, begin = values
    return size, packed, begin
