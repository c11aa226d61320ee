"""Lists of hosts as Slurm writes them: ``n[01-03,07],gpu5``.

Source: "hostlist expressions" of Slurm's documentation (scontrol show hostnames). The rule is written out
here because a container in a job has the variable, and rarely Slurm's programs.
"""

from __future__ import annotations

import re
from itertools import product

from tenplexfs.errors import InvalidError

__all__ = ["expand_hostlist"]

_ITEM = re.compile(r"(?:[A-Za-z0-9_.-]|\[[0-9,-]+\])+", re.ASCII)
_PART = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_MOST = 1 << 17


def expand_hostlist(text: str) -> list[str]:
    """Returns the hosts in order, each once; leading zeros count.

    >>> expand_hostlist("n[01-03,07],gpu5")
    ['n01', 'n02', 'n03', 'n07', 'gpu5']
    >>> expand_hostlist("r[1-2]n[9-10].local")
    ['r1n9.local', 'r1n10.local', 'r2n9.local', 'r2n10.local']

    Raises:
        InvalidError: It is no such list, or names more than 131,072 hosts.
    """
    hosts: dict[str, None] = {}
    for item in _split(text):
        if not _ITEM.fullmatch(item):
            raise InvalidError(f"hosts {text[:200]!r}: {item[:80]!r} is no host or range of hosts")
        parts = [
            _numbers(text, match[1]) if match[2] is None else [match[2]] for match in _PART.finditer(item)
        ]
        count = 1
        for part in parts:
            count *= len(part)
        if count + len(hosts) > _MOST:
            raise InvalidError(f"hosts {text[:200]!r}: more than {_MOST}")
        hosts.update(dict.fromkeys("".join(words) for words in product(*parts)))
    return list(hosts)


def _split(text: str) -> list[str]:
    """Splits at the commas that are in no bracket."""
    return re.split(r",(?![^\[]*\])", text.strip())


def _numbers(text: str, ranges: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first) or int(last) - int(first) >= _MOST or len(found) >= _MOST:
            raise InvalidError(f"hosts {text[:200]!r}: [{ranges[:80]}]: need ranges as 01-03,07")
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return found
