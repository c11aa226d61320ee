"""The settings of a job that say where its state is kept beside the newest snapshot."""

from __future__ import annotations

import json
from dataclasses import dataclass

__all__ = ["Persist", "persist_of", "replicas_of"]


@dataclass(frozen=True, slots=True)
class Persist:
    """Where steps are persisted.

    Attributes:
        to: A directory, or the URL of one in an object store.
        every: The first step at or after each multiple of it is.
        keep: So many of the newest stay.
    """

    to: str
    every: int
    keep: int

    def is_due(self, step: int, last: int | None) -> bool:
        """Returns whether ``step`` is to be persisted when ``last`` was.

        >>> [Persist("/a", 10, 2).is_due(step, 20) for step in (20, 29, 30, 41)]
        [False, False, True, True]
        """
        return last is None or step // self.every > last // self.every


def persist_of(settings_json: bytes) -> Persist | None:
    """Returns where a job with these settings persists its steps, or None."""
    given = json.loads(settings_json or b"{}").get("persist")
    return None if given is None else Persist(given["to"], given["every"], given["keep"])


def replicas_of(settings_json: bytes) -> int:
    """Returns on how many other nodes each node's state is kept."""
    return int(json.loads(settings_json or b"{}").get("replicas", 0))
