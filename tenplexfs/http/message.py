"""A request and what answers it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tenplexfs.errors import InvalidError, TooLargeError

__all__ = ["Body", "Request", "Response", "Stream", "text"]


class Body(Protocol):
    """What comes with a request, piece by piece."""

    @property
    def size(self) -> int | None:
        """Bytes that were announced, or None where the end will say."""
        ...

    async def read_into(self, view: memoryview) -> int:
        """Reads the next bytes; returns how many, 0 at the end.

        Raises:
            OSError: The other side went away, or does nothing, before the end.
        """
        ...


@dataclass(frozen=True)
class Request:
    """What was asked.

    Attributes:
        query: The first value of each name.
        headers: By name in lower case; of several the last.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Body

    @property
    def content_type(self) -> str:
        """What the body is, or, as Tenplex's clients use it, what the answer should be."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def replaces(self) -> bool:
        """Whether what is there may be replaced."""
        return self.headers.get("x-replace", "").lower() == "true"

    async def content(self, what: str, limit_bytes: int) -> bytes:
        """Returns the whole body.

        Raises:
            TooLargeError: It has more than ``limit_bytes``.
        """
        if (self.body.size or 0) > limit_bytes:
            raise TooLargeError(f"{what}: {self.body.size} bytes, at most {limit_bytes}")
        return await read_all(self.body, what, limit_bytes)

    def parameter(self, name: str) -> str:
        """Returns a value of the query.

        Raises:
            InvalidError: It is missing.
        """
        found = self.query.get(name)
        if found is None:
            raise InvalidError(f"{self.method} {self.path}: need {name}=...")
        return found


async def read_all(body: Body, what: str, limit_bytes: int) -> bytes:
    """Returns all that comes.

    Raises:
        TooLargeError: It is more than ``limit_bytes``.
    """
    block = bytearray(min(limit_bytes + 1, 1 << 16))
    parts: list[bytes] = []
    left = limit_bytes
    with memoryview(block) as view:
        while count := await body.read_into(view):
            left -= count
            if left < 0:
                raise TooLargeError(f"{what}: more than {limit_bytes} bytes")
            parts.append(bytes(view[:count]))
    return b"".join(parts)


@dataclass(frozen=True)
class Stream:
    """Bytes that are made while they are sent.

    Attributes:
        blocks: Of ``nbytes`` together; each may be overwritten once the next is asked for.
        close: Lets go of where they come from.
    """

    nbytes: int
    blocks: AsyncGenerator[memoryview]
    close: Callable[[], None]


@dataclass(frozen=True)
class Response:
    """An answer."""

    status: int
    content: bytes | Stream = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def text(status: int, line: str, **headers: str) -> Response:
    """Returns an answer that people read."""
    return Response(
        status, line.encode(errors="replace"), {"content-type": "text/plain; charset=utf-8", **headers}
    )
