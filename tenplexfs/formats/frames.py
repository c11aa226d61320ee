"""The messages between a training process and its daemon: a length, then a msgpack map.

A request is ``{v: 1, id, op, ...}``, its answer ``{v: 1, id, ok: {...}}`` or ``{v: 1, id, error: {code,
message, details}}``. Descriptors travel beside a frame (SCM_RIGHTS), at most 64.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import msgpack

from tenplexfs.errors import InvalidError, TenplexError, error_from_code

__all__ = [
    "ALIGNMENT",
    "MAX_FDS",
    "MAX_FRAME_BYTES",
    "PREFIX_BYTES",
    "VERSION",
    "answer",
    "body_bytes",
    "decode",
    "encode",
    "failure",
    "outcome",
]

VERSION = 1
MAX_FRAME_BYTES = 64 << 20
MAX_FDS = 64
ALIGNMENT = 64
"""Of each tensor in what `load.data` answers."""

_PREFIX = struct.Struct("<I")
PREFIX_BYTES = _PREFIX.size


def encode(message: Mapping[str, object]) -> bytes:
    """Returns the frame of ``message``, which says its version by itself.

    Raises:
        InvalidError: It is larger than `MAX_FRAME_BYTES`.
    """
    body: bytes = msgpack.packb({"v": VERSION, **message}, use_bin_type=True)
    if len(body) > MAX_FRAME_BYTES:
        raise InvalidError(f"frame: {len(body)} bytes, at most {MAX_FRAME_BYTES}")
    return _PREFIX.pack(len(body)) + body


def body_bytes(prefix: bytes) -> int:
    """Returns how many bytes follow the first `PREFIX_BYTES` of a frame.

    Raises:
        InvalidError: More than `MAX_FRAME_BYTES`.
    """
    (size,) = _PREFIX.unpack(prefix)
    if size > MAX_FRAME_BYTES:
        raise InvalidError(f"frame: {size} bytes announced, at most {MAX_FRAME_BYTES}")
    return int(size)


def decode(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Returns the message of a frame's body.

    Raises:
        InvalidError: It is no map with an id, or of another version.
    """
    try:
        message = msgpack.unpackb(body, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise InvalidError(f"frame: no msgpack: {error}") from error
    if not isinstance(message, dict) or message.get("v") != VERSION:
        version = message.get("v") if isinstance(message, dict) else None
        raise InvalidError(f"frame: of version {version!r}, this program speaks {VERSION}")
    if type(message.get("id")) is not int:
        raise InvalidError(f"frame: id {message.get('id')!r}: need a whole number")
    return message


def answer(request_id: int, content: Mapping[str, object]) -> dict[str, object]:
    """Returns the message that answers a request."""
    return {"id": request_id, "ok": dict(content)}


def failure(request_id: int, error: TenplexError) -> dict[str, object]:
    """Returns the message that refuses a request."""
    details = {key: value for key, value in error.details.items() if _is_plain(value)}
    return {"id": request_id, "error": {"code": error.code, "message": error.message, "details": details}}


def outcome(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what an answer holds.

    Raises:
        TenplexError: The request was refused.
        InvalidError: It is no answer.
    """
    if isinstance(ok := message.get("ok"), dict):
        return ok
    error = message.get("error")
    if not isinstance(error, dict):
        raise InvalidError("frame: neither ok nor error in the daemon's answer")
    details = error.get("details")
    known = details if isinstance(details, dict) else {}
    raise error_from_code(str(error.get("code")), str(error.get("message")), **known)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
