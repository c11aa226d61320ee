"""A directory on a disk or in an object store, through obstore: what steps are persisted to.

An object is there whole or not at all, on disks too: it is written aside, renamed, and on the disk before the
next one is, so that a manifest speaks of files that survive a power loss. What fails in passing is tried
again; what fails for good says which place it is. Everything here blocks: it is for worker threads.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, from_url

from tenplexfs.errors import InvalidError, NotFoundError, UnavailableError
from tenplexfs.storage.object_errors import error_line, is_final

__all__ = ["Place", "check_url"]

_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss")
_TRIES_S = (0.2, 1.0, 3.0)
_REQUEST_S = 30.0
_CHUNK_BYTES = 8 << 20
_CONCURRENCY = 3
_PARTS = 9000

T = TypeVar("T")


def check_url(text: str) -> str:
    """Returns ``text`` as the address of a place: an absolute path, or a URL without an end slash.

    >>> check_url("s3://bucket/runs/")
    's3://bucket/runs'

    Raises:
        InvalidError: It is none.
    """
    scheme, slashes, rest = text.partition("://")
    if not slashes:
        if not text.startswith("/") or "\0" in text:
            raise InvalidError(f"{text!r}: need an absolute path, or s3://, gs:// or az:// with a bucket")
        return text.rstrip("/") or "/"
    if scheme == "file" and rest.startswith("/"):
        return check_url(unquote(rest))
    if scheme not in _SCHEMES or not urlsplit(text).netloc or not text.isprintable():
        raise InvalidError(f"{text!r}: need an absolute path, or s3://, gs:// or az:// with a bucket")
    return text.rstrip("/")


class Place:
    """Objects below one address.

    Args:
        url: As `check_url` returns it. Stores are configured by the environment (``AWS_...``, ...).

    Raises:
        InvalidError: There can be no such place.
    """

    def __init__(self, url: str) -> None:
        self.url = check_url(url)
        self._local = None if "://" in self.url else Path(self.url)
        retries: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=_REQUEST_S)}
        allow_http = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("true", "1")
        client: Any = {"timeout": timedelta(seconds=_REQUEST_S), "allow_http": allow_http}
        try:
            if self._local is not None:
                # of the root: a directory that is not there yet is made when something is written
                self._store: Any = LocalStore()
                self._root = self.url.strip("/")
            else:
                parts = urlsplit(self.url)
                bucket = f"{parts.scheme}://{parts.netloc}"
                self._store = from_url(bucket, client_options=client, retry_config=retries)
                self._root = self.url[len(bucket) :].strip("/")
        except (BaseError, ValueError) as error:
            raise InvalidError(f"{self.url}: {error_line(error)}") from error

    def __truediv__(self, name: str) -> Place:
        """Returns the place below this one."""
        return Place(f"{self.url}/{name}")

    def put(
        self, name: str, data: bytes | Callable[[], Iterator[bytes | memoryview]], *, size: int = 0
    ) -> None:
        """Writes an object, whole or not at all, in the place of what was there.

        Args:
            name: Below this place.
            data: Its bytes, or what makes the parts of them, again for each try.
            size: Bytes of it, where it may be past 80 GB: stores take so many parts of an object and no more.
        """
        key = self._key(name)
        chunk_bytes = max(_CHUNK_BYTES, -(-size // _PARTS))

        def put() -> None:
            if isinstance(data, bytes):
                obstore.put(self._store, key, data)
            else:
                obstore.put(self._store, key, data(), chunk_size=chunk_bytes, max_concurrency=_CONCURRENCY)
            if self._local is not None:
                _sync(self._local / name)

        self._try(name, put)

    def get(self, name: str) -> bytes:
        """Returns a whole object.

        Raises:
            NotFoundError: There is none.
        """
        return bytes(self._try(name, lambda: obstore.get(self._store, self._key(name)).bytes()))

    def get_range(self, name: str, begin: int, end: int) -> memoryview:
        """Returns bytes [begin, end) of an object; fewer where it is shorter.

        Raises:
            NotFoundError: There is none.
        """
        key = self._key(name)
        return self._try(name, lambda: memoryview(obstore.get_range(self._store, key, start=begin, end=end)))

    def parts(self, name: str) -> Iterator[memoryview]:
        """Yields an object in parts.

        Raises:
            NotFoundError: There is none.
        """
        size = self.size(name)
        if size is None:
            raise NotFoundError(f"{self.url}/{name}: no such object")
        for begin in range(0, size, _CHUNK_BYTES):
            yield self.get_range(name, begin, min(begin + _CHUNK_BYTES, size))

    def size(self, name: str) -> int | None:
        """Returns the bytes of an object, or None where there is none."""
        try:
            return int(self._try(name, lambda: obstore.head(self._store, self._key(name)))["size"])
        except NotFoundError:
            return None

    def directories(self) -> list[str]:
        """Returns the names directly below that have something below them, sorted."""
        if self._local is not None and not self._local.is_dir():
            return []
        prefix = f"{self._root}/" if self._root else None
        found = self._try("", lambda: obstore.list_with_delimiter(self._store, prefix))
        return sorted(str(each).rstrip("/").rpartition("/")[2] for each in found["common_prefixes"])

    def remove(self, name: str) -> None:
        """Removes an object; one that is not there is no error."""
        try:
            self._try(name, lambda: obstore.delete(self._store, self._key(name)))
        except NotFoundError:
            return

    def remove_all(self) -> None:
        """Removes everything below this place, also what was written by halves."""
        if self._local is not None:
            shutil.rmtree(self._local, ignore_errors=True)
            return
        prefix = f"{self._root}/"
        keys = self._try(
            "", lambda: [entry["path"] for part in obstore.list(self._store, prefix) for entry in part]
        )
        for at in range(0, len(keys), 1000):
            self._try("", lambda at=at: obstore.delete(self._store, keys[at : at + 1000]))  # type: ignore[misc]

    def remove_halves(self) -> None:
        """Removes what writers that were killed left beside whole objects; nobody may be writing below."""
        if self._local is None:
            return  # the bucket's to clean
        for each in self._local.rglob("*#*"):
            if each.name.rpartition("#")[2].isdigit():
                each.unlink(missing_ok=True)

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root else name

    def _try(self, name: str, call: Callable[[], T]) -> T:
        where = f"{self.url}/{name}" if name else self.url
        for wait_s in (*_TRIES_S, None):
            try:
                return call()
            except FileNotFoundError as error:
                raise NotFoundError(f"{where}: no such object") from error
            except (BaseError, OSError, ValueError) as error:
                if is_final(error):
                    raise InvalidError(f"{where}: {error_line(error)}") from error
                if wait_s is None:
                    raise UnavailableError(f"{where}: {error_line(error)}") from error
                time.sleep(wait_s)
        raise AssertionError


def _sync(file: Path) -> None:
    """Waits until a file and its name are on the disk."""
    for path in (file, file.parent):
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
