"""What made a job what it is, among its settings: its birth, and requests, which every node knows again.

They travel with every snapshot, and are nobody's business but the coordinator's.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from tenplexfs.errors import InvalidError

__all__ = ["Request", "add_request", "birth_of", "has_request", "with_birth", "without_requests"]

_KEPT = 64  # newest; who repeats an older one looks at the job first


@dataclass(frozen=True, slots=True)
class Request:
    """One request to change a job.

    Attributes:
        id: The same one is the same request; empty for none.
        arguments: What it asks for, in whatever form.
    """

    job: str
    id: str
    arguments: bytes = b""

    @property
    def key(self) -> str:
        """16 hex digits that stand for its id; nothing where it has none."""
        return _digest(f"{self.job}\0{self.id}".encode()) if self.id else ""


def has_request(settings_json: bytes, request: Request) -> bool:
    """Says whether a job with these settings went through the request.

    Raises:
        InvalidError: It went through one of the same id that asked for something else.
    """
    key = request.key
    for known, _, arguments in (entry.partition(":") for entry in _load(settings_json).get("requests", [])):
        if key and known == key:
            if arguments and arguments != _digest(request.arguments):
                raise InvalidError(
                    f"job {request.job}: request {request.id!r} was made before and asked for something "
                    "else; give each request an id of its own"
                )
            return True
    return False


def add_request(settings_json: bytes, request: Request) -> bytes:
    """Returns the settings of what the request makes."""
    if not request.id:
        return settings_json
    settings = _load(settings_json)
    entry = f"{request.key}:{_digest(request.arguments)}"
    requests = [*settings.get("requests", []), entry][-_KEPT:]
    return json.dumps({**settings, "requests": requests}, sort_keys=True).encode()


def with_birth(settings_json: bytes, txid: str) -> bytes:
    """Returns the settings of a job that transaction ``txid`` makes, to tell it from others of its name."""
    return json.dumps({**_load(settings_json), "birth": txid}, sort_keys=True).encode()


def birth_of(settings_json: bytes) -> str:
    """Returns which transaction made the job; empty where nobody has written it down."""
    return str(_load(settings_json).get("birth", ""))


def without_requests(settings_json: bytes) -> bytes:
    """Returns the settings that others see.

    >>> without_requests(add_request(b'{"keep_steps": 2}', Request("gpt", "ab")))
    b'{"keep_steps": 2}'
    """
    settings = _load(settings_json)
    hidden = [settings.pop(name, None) for name in ("requests", "branches", "birth")]
    return json.dumps(settings).encode() if any(hidden) else settings_json


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _load(settings_json: bytes) -> dict[str, Any]:
    return dict(json.loads(settings_json or b"{}"))
