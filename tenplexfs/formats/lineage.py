"""Which earlier steps are the past of a job: rolled back, or given other state, it leaves others behind.

``{"branches": [[since, generation, step], ...]}`` among the settings: generation ``since`` went on from
``step`` of ``generation``, so that what was between is no past of the job. They are nobody's business but the
coordinator's.
"""

from __future__ import annotations

import json

__all__ = ["branch_off", "is_past_of", "with_past_of"]


def branch_off(settings_json: bytes, since: int, generation: int, step: int | None) -> bytes:
    """Returns the settings of generation ``since``, which goes on from ``step`` of ``generation``.

    Args:
        settings_json: With the past of that step.
        since: The new generation.
        generation: Of the step.
        step: None: the state comes from outside, and has no past here.
    """
    settings = json.loads(settings_json or b"{}")
    before = [] if step is None else settings.get("branches", [])
    branch = [since, 0, -1] if step is None else [since, generation, step]
    return json.dumps({**settings, "branches": [*before, branch]}, sort_keys=True).encode()


def with_past_of(settings_json: bytes, then_json: bytes) -> bytes:
    """Returns the settings with the past of an earlier snapshot, whose settings were ``then_json``."""
    settings, then = json.loads(settings_json or b"{}"), json.loads(then_json or b"{}")
    settings.pop("branches", None)
    if "branches" in then:
        settings["branches"] = then["branches"]
    return json.dumps(settings, sort_keys=True).encode()


def is_past_of(settings_json: bytes, generation: int, step: int) -> bool:
    """Returns whether a job with these settings came from ``step`` of ``generation``.

    >>> after = branch_off(b"{}", 3, 2, 100)
    >>> is_past_of(after, 2, 100), is_past_of(after, 2, 101), is_past_of(after, 3, 101)
    (True, False, True)
    """
    branches = json.loads(settings_json or b"{}").get("branches", [])
    return not any(
        generation < since and (generation > then or step > last) for since, then, last in branches
    )
