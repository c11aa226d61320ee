"""Ranges of objects behind URLs: ``s3:// gs:// az:// https:// http://``, through obstore.

Ranges that lie near each other are one request; what is long is several at once. Every request is counted,
has a time limit, and is tried again until the deadline of its call. Nothing is retried below, so what is
counted is what was asked.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import obstore
from obstore.exceptions import BaseError
from obstore.store import HTTPStore, from_url

from tenplexfs.errors import (
    CorruptError,
    InvalidError,
    NotFoundError,
    TenplexError,
    TimedOutError,
    UnavailableError,
)
from tenplexfs.storage.object_errors import error_line, is_final
from tenplexfs.storage.samples.reader import Failure, FileRanges

__all__ = ["Block", "Limits", "ObjectReader", "join_ranges"]

_BACKOFF_MAX_S = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """How requests are made.

    Attributes:
        gap_bytes: Ranges that are at most this far apart are one request.
        request_bytes: A request is no longer, unless ranges overlap.
        parallel: Requests at once.
        request_s: Time for one request.
        deadline_s: Time for one call, retries included; its last request may end ``request_s`` later.
        backoff_s: Wait before the second try; it doubles up to 5 s.
    """

    gap_bytes: int = 256 << 10
    request_bytes: int = 8 << 20
    parallel: int = 16
    request_s: float = 30.0
    deadline_s: float = 60.0
    backoff_s: float = 0.2


@dataclass(slots=True)
class Block:
    """One request, bytes [begin, end), and what is copied out of it.

    Attributes:
        begin: First byte.
        end: Exclusive.
        takes: (number of the range, offset in the block, offset in the buffer, bytes).
    """

    begin: int
    end: int
    takes: list[tuple[int, int, int, int]] = field(default_factory=list)


def join_ranges(ranges: FileRanges, *, gap_bytes: int, request_bytes: int) -> list[Block]:
    """Returns the requests for ``ranges``: few, in the order of the file. Empty ranges need none."""
    blocks: list[Block] = []
    order = np.argsort(ranges.begin, kind="stable")
    columns = (order, ranges.begin[order], ranges.end[order], ranges.at[order])
    for number, begin, end, at in zip(*(column.tolist() for column in columns), strict=True):
        if begin >= end:
            continue
        last = blocks[-1] if blocks else None
        # Behind the parts of a long range the last block may begin after an overlapping one.
        near = last is not None and last.begin <= begin <= last.end + gap_bytes
        if last and near and max(end, last.end) - last.begin <= request_bytes:
            last.end = max(end, last.end)
            last.takes.append((number, begin - last.begin, at, end - begin))
            continue
        for start in range(begin, end, request_bytes):
            stop = min(start + request_bytes, end)
            blocks.append(Block(start, stop, [(number, 0, at + start - begin, stop - start)]))
    return blocks


class ObjectReader:
    """Files by URL.

    Args:
        config: Of the stores, as obstore names it (``aws_endpoint``, ``skip_signature``, ...); the rest
            comes from the environment as usual (``AWS_ACCESS_KEY_ID``, ...).
        client: Of HTTP, as obstore names it (``proxy_url``, ``root_certificate``, ...).
        limits: How requests are made.
        clock: Seconds, rising.

    Attributes:
        requests: Requests made for bytes, retries included.
        received_bytes: What they gave.
    """

    def __init__(
        self,
        *,
        config: Mapping[str, Any] | None = None,
        client: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.requests = 0
        self.received_bytes = 0
        self._limits = limits or Limits()
        self._config = dict(config or {})
        self._client = {"timeout": timedelta(seconds=self._limits.request_s), **(client or {})}
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._stores: dict[str, Any] = {}
        self._pool = ThreadPoolExecutor(self._limits.parallel, thread_name_prefix="objects")

    def read(self, wanted: Sequence[FileRanges], out: memoryview) -> list[Failure]:
        """Fills ``out``; requests of all files run at once."""
        deadline = self._clock() + self._limits.deadline_s
        limits = self._limits
        running: list[tuple[int, Block, Future[dict[int, TenplexError]]]] = []
        for batch, ranges in enumerate(wanted):
            joined = join_ranges(ranges, gap_bytes=limits.gap_bytes, request_bytes=limits.request_bytes)
            for block in joined:
                try:
                    future = self._pool.submit(self._fetch, ranges, block, out, deadline)
                except RuntimeError as closed:  # of a pool that is shut down
                    raise UnavailableError(f"{ranges.file}: the reader is closed") from closed
                running.append((batch, block, future))
        failed: dict[tuple[int, int], TenplexError] = {}
        for batch, _, future in running:
            for number, error in future.result().items():
                failed.setdefault((batch, number), error)
        return [
            Failure(batch, number, error) for (batch, number), error in sorted(failed.items(), key=_place)
        ]

    def sizes(self, files: Sequence[str]) -> list[int]:
        """Returns the bytes of each file, by one request each."""
        deadline = self._clock() + self._limits.deadline_s
        return list(self._pool.map(lambda file: self._size(file, deadline), files))

    def find(self, pattern: str) -> list[str]:
        """Returns objects by URL, prefix or glob (``*``, ``?``, ``**``); http(s) cannot list: by URL."""
        scheme = urlsplit(pattern).scheme
        if scheme in ("http", "https"):
            if "*" in pattern:
                raise InvalidError(f"{pattern}: {scheme} cannot list; name each file")
            return [pattern]
        store, key = self._store(pattern)
        root = pattern[: len(pattern) - len(key)]
        literal = re.split(r"[*?]", key, maxsplit=1)[0]
        globbed = literal != key
        prefix = literal.rpartition("/")[0] if globbed else key.rstrip("/")
        deadline = self._clock() + self._limits.deadline_s

        def keys() -> list[str]:
            return [entry["path"] for part in obstore.list(store, prefix or None) for entry in part]

        found = self._try(pattern, keys, deadline)
        if globbed:
            expression = re.compile(_glob_expression(key), re.DOTALL)
            found = [name for name in found if expression.fullmatch(name)]
        elif not found:
            self._size(pattern, deadline)
            found = [key]
        if not found:
            raise NotFoundError(f"{pattern}: no such object")
        return sorted(root + name for name in found)

    def close(self) -> None:
        """Ends waits between tries, and the threads when their requests have ended."""
        self._closed.set()
        self._pool.shutdown(wait=True, cancel_futures=False)

    def _store(self, url: str) -> tuple[Any, str]:
        """Returns the store of ``url`` and the key in it."""
        parts = urlsplit(url)
        web = parts.scheme in ("http", "https")
        if (
            parts.scheme not in ("s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https")
            or not parts.netloc
        ):
            raise InvalidError(f"{url}: need s3://, gs://, az://, https:// or http:// and a bucket or host")
        if web and (parts.query or parts.fragment):
            raise InvalidError(f"{url}: a query cannot be used")
        root = f"{parts.scheme}://{parts.netloc}"
        # A key is what stands behind the bucket, as it is: '?', '#' and '%' have no meaning in it.
        key = unquote(parts.path).lstrip("/") if web else url[len(root) :].lstrip("/")
        with self._lock:
            if root not in self._stores:
                retries: Any = {"max_retries": 0}
                client: Any = dict(self._client)
                # Options that are given hide what the environment says; this one is needed for an endpoint.
                may = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
                if may or parts.scheme == "http" or {"aws_endpoint", "endpoint"} & self._config.keys():
                    client["allow_http"] = True
                try:
                    if web:
                        store: Any = HTTPStore.from_url(root, client_options=client, retry_config=retries)
                    else:
                        config: Any = self._config
                        store = from_url(root, config=config, client_options=client, retry_config=retries)
                except (BaseError, ValueError) as error:
                    raise InvalidError(f"{root}: {error_line(error)}") from error
                self._stores[root] = store
            return self._stores[root], key

    def _fetch(
        self, ranges: FileRanges, block: Block, out: memoryview, deadline: float
    ) -> dict[int, TenplexError]:
        """Reads one block; returns what failed."""
        failed: dict[int, TenplexError] = {}
        try:
            if self._copy(ranges.file, block, out, deadline):
                return failed
            # Shorter than its index says: what lies before the end is right.
            size = self._size(ranges.file, deadline)
            inside = Block(block.begin, min(block.end, size))
            for take in block.takes:
                number, offset, _, count = take
                if block.begin + offset + count <= size:
                    inside.takes.append(take)
                else:
                    why = f"the object has {size} bytes, fewer than its index says"
                    failed[number] = CorruptError(f"{_where(ranges, number)}: {why}")
            if not failed or (inside.takes and not self._copy(ranges.file, inside, out, deadline)):
                raise UnavailableError(f"answers are shorter than asked, the object has {size} bytes")
        except TenplexError as error:
            for number, _, _, _ in block.takes:
                why = error.message.removeprefix(f"{ranges.file}: ")
                message = f"{_where(ranges, number)}: {why}"
                failed.setdefault(number, type(error)(message, **error.details))
        return failed

    def _copy(self, file: str, block: Block, out: memoryview, deadline: float) -> bool:
        """Reads ``block``; returns False where the object ends before it."""
        store, key = self._store(file)

        def get() -> memoryview | None:
            with self._lock:
                self.requests += 1
            try:
                data = memoryview(obstore.get_range(store, key, start=block.begin, end=block.end))
            except BaseError as error:
                if re.search(r"\b416\b|InvalidRange|Range Not Satisfiable", str(error)) is None:
                    raise
                return None
            with self._lock:
                self.received_bytes += len(data)
            return data

        data = self._try(file, get, deadline)
        if data is None or len(data) < block.end - block.begin:
            return False
        if len(data) > block.end - block.begin:
            raise CorruptError(f"asked for {block.end - block.begin} bytes, got {len(data)}")
        for _, offset, at, count in block.takes:
            out[at : at + count] = data[offset : offset + count]
        return True

    def _size(self, file: str, deadline: float) -> int:
        store, key = self._store(file)
        return int(self._try(file, lambda: obstore.head(store, key)["size"], deadline))

    def _try(self, file: str, call: Callable[[], Any], deadline: float) -> Any:  # noqa: ANN401 - what `call` gives
        """Returns what ``call`` gives, after as many tries as the deadline allows."""
        wait_s = self._limits.backoff_s
        last = "not tried"
        while self._clock() < deadline and not self._closed.is_set():
            try:
                return call()
            except FileNotFoundError as error:
                raise NotFoundError(f"{file}: no such object") from error
            except (BaseError, OSError, ValueError) as error:
                if is_final(error):
                    raise InvalidError(f"{file}: {error_line(error)}") from error
                last = error_line(error)
            self._closed.wait(max(0.0, min(wait_s, deadline - self._clock())))
            wait_s = min(2 * wait_s, _BACKOFF_MAX_S)
        raise TimedOutError(f"{file}: gave up after {self._limits.deadline_s} s: {last}")


def _place(item: tuple[tuple[int, int], TenplexError]) -> tuple[int, int]:
    return item[0]


def _where(ranges: FileRanges, number: int) -> str:
    return f"{ranges.file}: bytes [{int(ranges.begin[number])}, {int(ranges.end[number])})"


def _glob_expression(pattern: str) -> str:
    """Returns the regular expression of a glob: ``*`` and ``?`` stay within a name, ``**`` does not."""
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return "".join(words.get(part, re.escape(part)) for part in parts)
