"""Files that are nobody's and are kept, as memory that is there already, for whatever comes next."""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["Spare", "Spares", "pages"]

_PAGE = mmap.PAGESIZE


class Spare(NamedTuple):
    """A file, by its name, and since when nothing has come for it."""

    name: str
    size: int
    since_s: float

    @property
    def kind(self) -> str:
        """Of the file: where it lies."""
        return self.name.partition("/")[0]


class Spares:
    """Those of a store. What is taken or popped is none any more; for one thread at a time."""

    def __init__(self) -> None:
        self._files: dict[str, Spare] = {}  # by name, the oldest first

    @property
    def nbytes(self) -> int:
        """Bytes of all, in whole pages."""
        return sum(pages(spare.size) for spare in self._files.values())

    def add(self, spare: Spare) -> None:
        """Keeps one, which is not older than any other."""
        self._files[spare.name] = spare

    def take(self, wanted: Sequence[tuple[str, int]]) -> dict[int, Spare]:
        """Returns which of ``wanted``, by kind and size, get which: of their size, else of about their size.

        About is half to twice as much. Of one size the one that was used last is taken: what is too many
        grows old.
        """
        known: dict[tuple[str, int], list[Spare]] = {}
        for spare in self._files.values():
            known.setdefault((spare.kind, spare.size), []).append(spare)
        taken: dict[int, Spare] = {}

        def take(i: int, key: tuple[str, int]) -> None:
            taken[i] = self._files.pop(known[key].pop().name)
            if not known[key]:
                del known[key]

        for i, key in enumerate(wanted):
            if key in known:
                take(i, key)
        sizes = sorted(known)
        for i, (kind, size) in enumerate(wanted) if sizes else ():
            if i in taken:
                continue
            at = bisect_left(sizes, (kind, size))
            near = sizes[max(0, at - 1) : at + 1]
            near = [key for key in near if key[0] == kind and size <= 2 * key[1] <= 4 * size]
            if near:
                take(i, near[-1])  # the smallest that is big enough, else the biggest
                if near[-1] not in known:
                    sizes.remove(near[-1])
        return taken

    def pop_to(self, room_bytes: int) -> list[Spare]:
        """Returns the oldest, as many as must go until the others have so much room."""
        left = self.nbytes

        def is_too_much(spare: Spare) -> bool:
            nonlocal left
            before, left = left, left - pages(spare.size)
            return before > room_bytes

        return self._pop(is_too_much)

    def pop_since(self, until_s: float) -> list[Spare]:
        """Returns those for which nothing has come since then."""
        return self._pop(lambda spare: spare.since_s <= until_s)

    def _pop(self, goes: Callable[[Spare], bool]) -> list[Spare]:
        popped = [spare for spare in self._files.values() if goes(spare)]
        for spare in popped:
            del self._files[spare.name]
        return popped


def pages(size: int) -> int:
    """Returns ``size`` in whole pages."""
    return -(-size // _PAGE) * _PAGE
