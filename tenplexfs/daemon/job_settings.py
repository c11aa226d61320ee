"""The settings of a job: what each may be."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from tenplexfs.daemon.settings import parse_size
from tenplexfs.errors import InvalidError
from tenplexfs.formats.dataset_settings import begin_datasets
from tenplexfs.formats.parallelizer_json import parse_parallelizer
from tenplexfs.storage.places import check_url

__all__ = ["SETTINGS", "check_changes", "check_settings", "check_webhook", "with_changes"]

_MAX_BYTES = 1 << 24


def check_settings(text: str, *, insecure: bool) -> bytes:
    """Returns the settings as one form, so that equal ones are equal bytes.

    Args:
        text: A JSON object; empty for the defaults.
        insecure: Whether events may go to other machines in the clear.

    Raises:
        InvalidError: One is unknown or wrong; names it.
    """
    return json.dumps(_checked(_parse(text), insecure=insecure), sort_keys=True).encode()


def check_changes(text: str, *, insecure: bool) -> dict[str, object]:
    """Returns the settings that are to change, as they are kept; None for one that is to go.

    Args:
        text: A JSON object of at least one.
        insecure: Whether events may go to other machines in the clear.

    Raises:
        InvalidError: One is unknown or wrong; names it.
    """
    given = _parse(text)
    if not given:
        raise InvalidError("settings: name at least one to change")
    kept = {name: value for name, value in given.items() if value is not None}
    return {**given, **_checked(kept, insecure=insecure)}


def with_changes(
    settings_json: bytes, changes: Mapping[str, object], step: int | None, layout_json: bytes
) -> bytes:
    """Returns the settings with ``changes``, datasets begun anew; the same bytes where all is so already.

    Args:
        settings_json: Those of the job at ``step``.
        changes: As `check_changes` returns them.
        step: Where the new generation begins; None without state.
        layout_json: Of the job, complete.
    """
    settings = json.loads(settings_json or b"{}")
    changed = {name: value for name, value in {**settings, **changes}.items() if value is not None}
    if changed == settings:
        return settings_json
    return begin_datasets(json.dumps(changed, sort_keys=True).encode(), step, step, layout_json)


def _parse(text: str) -> dict[str, Any]:
    if len(text) > _MAX_BYTES:
        raise InvalidError(f"settings: {len(text)} characters, at most {_MAX_BYTES}")
    try:
        settings = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidError(f"settings: no valid JSON: {error}") from error
    if not isinstance(settings, dict):
        raise InvalidError("settings: need a JSON object")
    for name in settings:
        if name not in SETTINGS:
            raise InvalidError(f"setting {name!r}: unknown; there are: {', '.join(SETTINGS)}")
    return settings


def _checked(settings: Mapping[str, Any], *, insecure: bool) -> dict[str, object]:
    checked = {name: SETTINGS[name](name, value) for name, value in settings.items()}
    if "webhook" in settings:
        check_webhook(settings["webhook"], insecure=insecure)
    return checked


def check_webhook(url: str, *, insecure: bool) -> None:
    """Refuses an address to which events of a job would go in the clear.

    Raises:
        InvalidError: It is no URL, or plain http to another machine without ``insecure``.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidError(f"webhook {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not host or not url.isprintable() or " " in url:
        raise InvalidError(f"webhook {url!r}: need a URL as https://host/path")
    if parts.scheme == "http" and not insecure and not _is_loopback(host):
        raise InvalidError(
            f"webhook {url!r}: http beyond this machine; give https, or start the daemon with --insecure"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _whole(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidError(f"setting {name!r}: need a whole number >= 1, got {value!r}")
    return value


def _size(name: str, value: object) -> int:
    return _whole(name, parse_size(value, of_bytes=0) if isinstance(value, str) else value)


def _parallelizer(_: str, value: object) -> object:
    parse_parallelizer(value)
    return value


def _webhook(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidError(f"setting {name!r}: need a URL, got {value!r}")
    return value


def _persist(name: str, value: object) -> dict[str, object]:
    given = value if isinstance(value, dict) else {}
    if not isinstance(given.get("to"), str) or given.keys() - {"to", *_PERSIST}:
        raise InvalidError(
            f'setting {name!r}: need {{"to": directory or URL, "every": steps, "keep": steps}}, got {value!r}'
        )
    try:
        to = check_url(given["to"])
    except InvalidError as error:
        raise InvalidError(f"setting {name!r}: to: {error.message}") from error
    every, keep = (_whole(f"{name}.{key}", given.get(key, default)) for key, default in _PERSIST.items())
    return {"to": to, "every": every, "keep": keep}


_PERSIST = {"every": 1, "keep": 3}

SETTINGS: Mapping[str, Callable[[str, Any], object]] = {
    "keep_steps": _whole,
    "memory": _size,
    "parallelizer": _parallelizer,
    "persist": _persist,
    "replicas": _whole,
    "webhook": _webhook,
}
"""Name, and what checks a value and returns it as it is kept."""
