"""The requests that made a job what it is, among its settings: a repeated one is known by every node.

They travel with every snapshot, and are nobody's business but the coordinator's.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

__all__ = ["add_request", "has_request", "request_key", "without_requests"]

_KEPT = 64  # newest; who repeats an older one looks at the job first


def request_key(job: str, request_id: str) -> str:
    """Returns 16 hex digits that stand for a request; nothing for a request without an id."""
    return hashlib.blake2b(f"{job}\0{request_id}".encode(), digest_size=8).hexdigest() if request_id else ""


def has_request(settings_json: bytes, key: str) -> bool:
    """Says whether a job with these settings went through the request."""
    return bool(key) and key in _load(settings_json).get("requests", [])


def add_request(settings_json: bytes, key: str) -> bytes:
    """Returns the settings of what the request makes; ``key`` is empty where it has no id."""
    if not key:
        return settings_json
    settings = _load(settings_json)
    requests = [*settings.get("requests", []), key][-_KEPT:]
    return json.dumps({**settings, "requests": requests}, sort_keys=True).encode()


def without_requests(settings_json: bytes) -> bytes:
    """Returns the settings that others see.

    >>> without_requests(add_request(b'{"keep_steps": 2}', "ab"))
    b'{"keep_steps": 2}'
    """
    settings = _load(settings_json)
    return settings_json if settings.pop("requests", None) is None else json.dumps(settings).encode()


def _load(settings_json: bytes) -> dict[str, Any]:
    return dict(json.loads(settings_json or b"{}"))
