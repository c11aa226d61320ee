"""The indexes of a node's datasets, files beside its store, each under the digest of its bytes."""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path

from tenplexfs.errors import CorruptError, InvalidError
from tenplexfs.formats.sample_index import SampleIndex
from tenplexfs.storage.samples.build import map_index
from tenplexfs.storage.samples.recipe import file_digest

__all__ = ["Indexes"]


class Indexes:
    """A directory of indexes. Thread-safe; what was mapped stays valid."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700, exist_ok=True)
        for left in path.glob(".*"):  # half written when a daemon died
            left.unlink()
        self._mapped: dict[str, SampleIndex] = {}
        self._lock = threading.Lock()

    def has(self, digest: str) -> bool:
        """Returns whether the index is here."""
        return (self.path / _checked(digest)).exists()

    def index(self, digest: str) -> SampleIndex:
        """Returns an index, mapped.

        Raises:
            OSError: It is not here.
            CorruptError: Its file is damaged.
        """
        with self._lock:
            if digest not in self._mapped:
                self._mapped[digest] = map_index(self.path / _checked(digest))
            return self._mapped[digest]

    def take(self, digest: str, file: Path) -> None:
        """Puts an index here that came from elsewhere into ``file``, which is in the directory.

        Raises:
            CorruptError: It is not what the digest says.
        """
        if (found := file_digest(file)) != _checked(digest):
            raise CorruptError(f"index of samples: digest {found}, should be {digest}")
        file.chmod(0o400)
        file.rename(self.path / digest)

    def keep(self, digests: Collection[str]) -> None:
        """Removes every index but these."""
        for file in self.path.glob("[!.]*"):
            if file.name not in digests:
                with self._lock:
                    self._mapped.pop(file.name, None)
                file.unlink(missing_ok=True)


def _checked(digest: str) -> str:
    if len(digest) != 32 or set(digest) - set("0123456789abcdef"):
        raise InvalidError(f"index of samples: digest {digest!r}: need 32 hex digits")
    return digest
