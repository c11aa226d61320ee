"""One reader for local files and for objects, by how their names begin."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tenplexfs.storage.samples.reader import Failure, FileRanges, RangeReader

__all__ = ["RoutedReader", "is_url"]


def is_url(file: str) -> bool:
    """Returns whether ``file`` is a URL, not a path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", file) is not None


class RoutedReader:
    """A `RangeReader` that asks ``local`` for paths and ``remote`` for URLs."""

    def __init__(self, local: RangeReader, remote: RangeReader) -> None:
        self._local, self._remote = local, remote

    def read(self, wanted: Sequence[FileRanges], out: memoryview) -> list[Failure]:
        """Fills ``out``, as `RangeReader.read` does."""
        failures: list[Failure] = []
        for remote in (True, False):
            batches = [batch for batch, ranges in enumerate(wanted) if is_url(ranges.file) is remote]
            if not batches:
                continue
            reader = self._remote if remote else self._local
            for failure in reader.read([wanted[batch] for batch in batches], out):
                failures.append(Failure(batches[failure.batch], failure.number, failure.error))
        return failures

    def sizes(self, files: Sequence[str]) -> list[int]:
        """Returns the bytes of each file."""
        remote = [file for file in files if is_url(file)]
        local = [file for file in files if not is_url(file)]
        found = dict(zip(local, self._local.sizes(local), strict=True)) if local else {}
        found |= dict(zip(remote, self._remote.sizes(remote), strict=True)) if remote else {}
        return [found[file] for file in files]

    def find(self, pattern: str) -> list[str]:
        """Returns the files that ``pattern`` means."""
        return (self._remote if is_url(pattern) else self._local).find(pattern)

    def close(self) -> None:
        """Closes both."""
        self._local.close()
        self._remote.close()
