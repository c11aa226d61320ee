"""That a job is paused, and why, among its settings: every node knows, also after a restart.

A switch to another layout, or to the same one when there are devices again, ends it.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["paused_of", "with_paused"]


def paused_of(settings_json: bytes) -> str | None:
    """Returns why a job with these settings is paused, or None.

    >>> paused_of(with_paused(b'{"keep_steps": 2}', "too few devices"))
    'too few devices'
    """
    why = json.loads(settings_json or b"{}").get("paused")
    return None if why is None else str(why)


def with_paused(settings_json: bytes, why: str | None) -> bytes:
    """Returns the settings of a job that is paused, or of one that is not.

    >>> with_paused(b'{"paused": "too few devices"}', None)
    b'{}'
    """
    settings: dict[str, Any] = json.loads(settings_json or b"{}")
    if settings.pop("paused", None) is None and why is None:
        return settings_json
    return json.dumps(settings if why is None else {**settings, "paused": why}, sort_keys=True).encode()
