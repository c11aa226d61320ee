"""Quantities as people read and write them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tenplexfs.errors import InvalidError

__all__ = ["bytes_text", "duration_text", "parse_bandwidth", "runs_text"]

_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)(bit|b|B)(?:/s|ps)?")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def bytes_text(count: int) -> str:
    """Returns ``count`` bytes for a person.

    >>> [bytes_text(n) for n in (0, 1023, 1536, 90868376, 5 << 40)]
    ['0 B', '1023 B', '1.5 KiB', '86.7 MiB', '5.0 TiB']
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def duration_text(seconds: float) -> str:
    """Returns a duration for a person.

    >>> [duration_text(s) for s in (0, 0.0004, 0.25, 8.04, 75, 7322)]
    ['0 s', '0.4 ms', '250 ms', '8.0 s', '1 min 15 s', '2 h 2 min']
    """
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds > 0 else "0 s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def parse_bandwidth(text: str) -> float:
    """Returns the bytes a second of ``text``; a lower-case b is bits.

    >>> [parse_bandwidth(t) for t in ("100Gbit/s", "10 Gbps", "12.5GB/s", "1GiB/s")]
    [12500000000.0, 1250000000.0, 12500000000.0, 1073741824.0]

    Raises:
        InvalidError: It is no such text, or zero.
    """
    match = _BANDWIDTH.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise InvalidError(f"bandwidth {text!r}: need a rate as 100Gbit/s or 12.5GB/s")
    base = 1024 if match[3] else 1000
    return float(match[1]) * float(base ** _POWERS[match[2]]) / (1 if match[4] == "B" else 8)


def runs_text(numbers: Iterable[int], most: int | None = None) -> str:
    """Returns ascending ``numbers`` with runs joined, and how many more there are than ``most`` runs.

    >>> runs_text([0, 1, 2, 3, 8, 9, 12])
    '0-3, 8, 9, 12'
    >>> runs_text(range(0, 20, 2), most=3)
    '0, 2, 4 and 7 more'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] + 1 == number:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = []
    for low, high in runs:
        parts += [f"{low}-{high}"] if high - low > 1 else [str(n) for n in range(low, high + 1)]
    if most is None or len(parts) <= most:
        return ", ".join(parts)
    shown = sum(high - low + 1 for low, high in runs) - _shown(parts[:most])
    return f"{', '.join(parts[:most])} and {shown} more"


def _shown(parts: list[str]) -> int:
    ends = [part.split("-") for part in parts]
    return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)
