"""Tar archives as they come in: plain files one after the other, and nothing that leads elsewhere.

Headers are read by `tarfile.TarInfo`, but its archives are not: what they hold back in memory, a member says.
"""

from __future__ import annotations

import tarfile
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from tenplexfs.errors import InvalidError
from tenplexfs.http.message import Body, read_all

__all__ = ["Member", "members"]

_BLOCK = 512
_MAX_NAME_BYTES = 64 << 10
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)


@dataclass
class Member:
    """A file of an archive; it is to be read, or not, before the next one is asked for.

    Implements `http.message.Body`.
    """

    name: str
    size: int
    _body: Body
    _left: int

    async def read_into(self, view: memoryview) -> int:
        """Reads the next bytes; returns how many, 0 at the end.

        Raises:
            InvalidError: The archive ends before.
        """
        if not self._left:
            return 0
        count = await self._body.read_into(view[: self._left])
        if not count:
            raise InvalidError(f"tar: {self.name}: ends {self._left} bytes before its end")
        self._left -= count
        return count


async def members(body: Body, *, may_be_absolute: bool) -> AsyncGenerator[Member]:
    """Yields the files of an archive, in their order; the blocks at its end may be missing, as in mlfs's.

    Raises:
        InvalidError: It is none, or has links, devices, or names that lead out of it.
    """
    said: dict[str, str] = {}
    while (header := await _next_header(body)) is not None:
        if header.type in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
            long = Member(header.name, header.size, body, header.size)
            data = await read_all(long, "tar: a name", _MAX_NAME_BYTES)
            await _skip(body, -header.size % _BLOCK)
            said |= _records(data) if header.type == tarfile.XHDTYPE else {"path": _text(data.rstrip(b"\0"))}
            continue
        if header.type == tarfile.XGLTYPE:
            await _skip(body, header.size + -header.size % _BLOCK)
            continue
        name, size = said.get("path", header.name), _size(said.get("size"), header.size)
        said = {}
        _check_name(name, may_be_absolute=may_be_absolute)
        if header.type == tarfile.DIRTYPE:
            continue
        if header.type not in _PLAIN:
            raise InvalidError(f"tar: {name}: type {header.type!r}: need files and directories")
        member = Member(name, size, body, size)
        yield member
        await _skip(body, member._left)
        await _skip(body, -size % _BLOCK, may_end=True)


async def _next_header(body: Body) -> tarfile.TarInfo | None:
    block = bytearray(_BLOCK)
    done = 0
    with memoryview(block) as view:
        while done < _BLOCK and (count := await body.read_into(view[done:])):
            done += count
    if not any(block):
        return None  # the end: what follows is padding
    if done < _BLOCK:
        raise InvalidError("tar: it ends in the middle of a header")
    try:
        return tarfile.TarInfo.frombuf(bytes(block), "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError) as error:
        raise InvalidError(f"tar: no header: {error}") from None


async def _skip(body: Body, count: int, *, may_end: bool = False) -> None:
    block = memoryview(bytearray(min(count, 1 << 16)))
    left = count
    while left:
        got = await body.read_into(block[:left])
        if not got and may_end and left == count:
            return
        if not got:
            raise InvalidError("tar: it ends in the middle")
        left -= got


def _records(data: bytes) -> dict[str, str]:
    """Returns what an extended header says: ``length key=value`` lines."""
    found: dict[str, str] = {}
    while data:
        length, _, _ = data.partition(b" ")
        line = data[: int(length)] if length.isdigit() and len(length) < 9 else b""
        key, equals, value = line[len(length) + 1 : -1].partition(b"=")
        if not equals or line[-1:] != b"\n":
            raise InvalidError("tar: an extended header is none")
        if key.startswith(b"GNU.sparse"):
            raise InvalidError("tar: a sparse file: write it whole")
        found[_text(key)] = _text(value)
        data = data[len(line) :]
    return found


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidError(f"tar: a name is no UTF-8: {error}") from None


def _size(said: str | None, size: int) -> int:
    if said is not None:
        if not (said.isdecimal() and len(said) < 20):
            raise InvalidError(f"tar: size {said[:20]!r}: need a number")
        size = int(said)
    if size < 0:
        raise InvalidError(f"tar: size {size}: need 0 or more")
    return size


def _check_name(name: str, *, may_be_absolute: bool) -> None:
    if (name.startswith("/") and not may_be_absolute) or "\0" in name or ".." in name.split("/"):
        raise InvalidError(f"tar: {name[:200]!r}: leads out of the archive")
    if not name.isprintable() and any("\ud800" <= each <= "\udfff" for each in name):
        raise InvalidError(f"tar: a name is no UTF-8: {name[:200]!r}")
