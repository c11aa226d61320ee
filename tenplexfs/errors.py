"""The exception tree, and what each error is at every edge.

One table says what an error is as an errno (the mount), as a gRPC status (the wire and ``--json``), as an
exit status (the command line) and as a status of HTTP, so that no edge decides by itself.
"""

from __future__ import annotations

import errno
from typing import ClassVar

__all__ = [
    "ConflictError",
    "CorruptError",
    "DeniedError",
    "ExistsError",
    "InvalidError",
    "NoReplicaError",
    "NoRoomError",
    "NotFoundError",
    "PreconditionError",
    "StaleError",
    "TenplexError",
    "TimedOutError",
    "TooLargeError",
    "UnavailableError",
    "UsageError",
    "error_from_code",
    "internal",
]


class TenplexError(Exception):
    """Something was refused or failed; the message says what, where, the values, and what to do.

    Attributes:
        code: The gRPC status name, the same on the wire and in ``--json``.
        errno: What a file system call answers.
        exit_status: What the command line exits with.
        http_status: What a request over HTTP is answered with.
        details: Values for machines, JSON-encodable.
    """

    code: ClassVar[str] = "INTERNAL"
    errno: ClassVar[int] = errno.EIO
    exit_status: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, **details: object) -> None:
        # One line: names from outside may hold others.
        self.message = message.replace("\r", "\\r").replace("\n", "\\n")
        super().__init__(self.message)
        self.details = details


class InvalidError(TenplexError):
    """The input is wrong in itself: a bad layout, file, range or name."""

    code = "INVALID_ARGUMENT"
    errno = errno.EINVAL
    http_status = 400


class UsageError(InvalidError):
    """The command line or the configuration is wrong."""

    exit_status = 2


class TooLargeError(InvalidError):
    """There is more of something than is taken; the message has the limit."""

    errno = errno.EFBIG
    http_status = 413


class NotFoundError(TenplexError):
    """No such job, rank, tensor, node or snapshot."""

    code = "NOT_FOUND"
    errno = errno.ENOENT
    http_status = 404


class ExistsError(TenplexError):
    """The thing is there already, or something is in use by somebody else."""

    code = "ALREADY_EXISTS"
    errno = errno.EEXIST
    http_status = 409


class PreconditionError(TenplexError):
    """The input is fine, the present state does not allow it."""

    code = "FAILED_PRECONDITION"
    errno = errno.EBUSY
    http_status = 409


class ConflictError(TenplexError):
    """Somebody else moved the head or holds the lock; look again and plan again."""

    code = "ABORTED"
    errno = errno.EBUSY
    exit_status = 4
    http_status = 409


class StaleError(TenplexError):
    """The snapshot was freed; a fresh walk from the job's name finds the newest."""

    code = "OUT_OF_RANGE"
    errno = errno.ESTALE
    http_status = 409


class NoRoomError(TenplexError):
    """The store has no room; the numbers are in the message."""

    code = "RESOURCE_EXHAUSTED"
    errno = errno.ENOSPC
    exit_status = 5
    http_status = 507


class UnavailableError(TenplexError):
    """A daemon, peer or registry could not be reached; trying again may help."""

    code = "UNAVAILABLE"
    errno = errno.EIO
    exit_status = 3
    http_status = 503


class NoReplicaError(UnavailableError):
    """Only nodes that are lost held some of the bytes."""


class TimedOutError(TenplexError):
    """A wait ended by its deadline."""

    code = "DEADLINE_EXCEEDED"
    errno = errno.EIO
    exit_status = 124
    http_status = 504


class CorruptError(TenplexError):
    """Bytes are not what their checksum says."""

    code = "DATA_LOSS"
    errno = errno.EIO


class DeniedError(TenplexError):
    """The caller did not show the token that is wanted."""

    code = "UNAUTHENTICATED"
    errno = errno.EACCES
    http_status = 401


_BY_CODE: dict[str, type[TenplexError]] = {
    cls.code: cls
    for cls in (
        TenplexError,
        InvalidError,
        NotFoundError,
        ExistsError,
        PreconditionError,
        ConflictError,
        StaleError,
        NoRoomError,
        UnavailableError,
        TimedOutError,
        CorruptError,
        DeniedError,
    )
}


def error_from_code(code: str, message: str, **details: object) -> TenplexError:
    """Returns the error that ``code``, a gRPC status name, stands for; unknown codes give the base class."""
    return _BY_CODE.get(code, TenplexError)(message, **details)


def internal(raised: Exception) -> TenplexError:
    """Returns what a boundary says of an error that nobody expected; one of ours is as it is."""
    while isinstance(raised, ExceptionGroup) and len(raised.exceptions) == 1:
        raised = raised.exceptions[0]
    if isinstance(raised, TenplexError):
        return raised
    return TenplexError(f"internal error: {type(raised).__name__}: {raised}; the daemon's log has more")
