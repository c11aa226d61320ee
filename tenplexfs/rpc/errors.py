"""`TenplexError` to a gRPC status and back: the one place that maps them, on each side.

On the wire an error is the status code and message, and, in the trailing metadata, ``tenplexfs-error``
(its code: this is ours, not the transport's) and ``tenplexfs-error-bin`` (JSON: whole message, details).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TypeVar

import grpc

from tenplexfs.errors import TenplexError, TimedOutError, UnavailableError, error_from_code, internal

__all__ = [
    "CLIENT_METADATA",
    "DOCTOR_SAYS_MORE",
    "UnreachedError",
    "UnservedError",
    "answer",
    "error_of",
]

CLIENT_METADATA = ("tenplexfs-client", "1")
"""Says that the client takes long metadata."""

_MARK, _BODY = "tenplexfs-error", "tenplexfs-error-bin"
# Other clients refuse more than 8 KiB of metadata; the message is sent percent-encoded.
_SHORT_BYTES, _LONG_BYTES = 2000, 256 << 10
_TRANSPORT = {"UNAVAILABLE", "CANCELLED", "RESOURCE_EXHAUSTED", "INTERNAL", "UNKNOWN", "ABORTED"}

_UNREACHED = "failed to connect"  # in what gRPC says then, and only then

DOCTOR_SAYS_MORE = "; tenplexfs doctor says more"

_HANDSHAKE = (
    ("certificate has expired", "its certificate has expired"),
    ("certificate is not yet valid", "its certificate is not valid yet: is a clock wrong?"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not signed by the authority that --tls has here"),
    ("Hostname Verification", "its certificate is for another host"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS, and --tls is given here"),
    (
        "Socket closed",
        "it ended the connection at once: it wants TLS and a certificate of its own authority,"
        f" not expired{DOCTOR_SAYS_MORE}",
    ),
)
"""What BoringSSL and gRPC say of a handshake, and what it means; the server's reasons reach nobody."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class UnreachedError(UnavailableError):
    """No connection was made: nobody has heard of the call."""


class UnservedError(UnavailableError):
    """The daemon that has the address now does not know the call; the one that was meant may come back."""


def answer(context: grpc.ServicerContext, call: Callable[[], T]) -> T:
    """Returns what ``call`` returns; ends the gRPC call ``context`` with a status if it raises.

    This is the boundary of the rpc edge: every handler is called through it.
    """
    import trio  # here: servers have it, and the command line starts without

    try:
        return call()
    except (trio.Cancelled, trio.RunFinishedError):
        _abort(context, UnavailableError("this daemon is going away"))
    except Exception as raised:
        error = internal(raised)
        if type(error) is TenplexError and error is not raised:
            log.exception("rpc handler failed")
        _abort(context, error)
    raise AssertionError("abort returned")


def _abort(context: grpc.ServicerContext, error: TenplexError) -> None:
    own = CLIENT_METADATA in {(key, value) for key, value in context.invocation_metadata()}
    limit = _LONG_BYTES if own else _SHORT_BYTES
    body = json.dumps({"message": error.message, "details": error.details}, default=str).encode()
    trailer: list[tuple[str, str | bytes]] = [(_MARK, error.code)]
    if len(body) <= limit:
        trailer.append((_BODY, body))
    context.set_trailing_metadata(tuple(trailer))
    message = error.message if len(error.message) <= limit else f"{error.message[: limit - 4]} ..."
    context.abort(getattr(grpc.StatusCode, error.code), message if not own else message[:_SHORT_BYTES])


def error_of(raised: grpc.RpcError, what: str) -> TenplexError:
    """Returns the error of our tree for the ``grpc.RpcError`` that a call raised.

    Args:
        raised: The ``grpc.RpcError``.
        what: Whom was asked for what; starts the message when the transport failed, not the daemon.
    """
    code, message = raised.code().name, raised.details() or ""
    trailer = {item[0]: item[1] for item in raised.trailing_metadata() or ()}
    if _MARK in trailer:
        body = json.loads(trailer.get(_BODY) or b"{}")
        return error_from_code(trailer[_MARK], body.get("message", message), **body.get("details", {}))
    if code == "DEADLINE_EXCEEDED":
        return TimedOutError(f"{what}: no answer before the deadline")
    if code in _TRANSPORT:
        kind = UnreachedError if _UNREACHED in message else UnavailableError
        return kind(f"{what}: {_reason(message) or f'{code}: {message}'}")
    if code == "UNIMPLEMENTED":
        return UnservedError(f"{what}: not served there: it is of another version, or has no registry")
    return error_from_code(code, f"{what}: {message}")


def _reason(message: str) -> str | None:
    """Returns in words why a connection was not made, where gRPC's text tells; else None."""
    if _UNREACHED not in message:
        return None
    return next((words for mark, words in _HANDSHAKE if mark in message), None)
