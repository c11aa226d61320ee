"""etcd's JSON gateway over HTTP: calls, and watches, of whichever endpoint answers.

In its JSON an int64 is a string, bytes are base64, and fields that are false, zero or empty are left out.
Source: etcd 3.4 and later, ``api_grpc_gateway`` of its documentation.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from ssl import SSLContext
from typing import Any

import httpx
import trio

from tenplexfs.errors import NotFoundError, UnavailableError

__all__ = ["Etcd", "Reply"]

Reply = Mapping[str, Any]

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0
_WATCH_SILENCE_S = 60.0
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
_NOT_FOUND = 5  # gRPC's status code


class Etcd:
    """One etcd cluster. For one trio thread; `aclose` it.

    Args:
        endpoints: ``http://host:port`` of its members; asked in turn, the one that answered last in front.
        deadline_s: For each call. Calls that may be made twice are tried again until then.
        tls: For ``https://`` endpoints.
    """

    def __init__(
        self, endpoints: Sequence[str], *, deadline_s: float = 4.0, tls: SSLContext | None = None
    ) -> None:
        self._endpoints = list(endpoints)
        self._deadline_s = deadline_s
        # A member that is cut off without a word must not take the time of the others.
        self._try_s = deadline_s / (len(self._endpoints) + 1)
        # Proxies of the environment are for the world outside.
        self._http = httpx.AsyncClient(
            timeout=self._try_s, trust_env=False, verify=True if tls is None else tls
        )

    async def aclose(self) -> None:
        """Ends all calls."""
        await self._http.aclose()

    async def call(self, path: str, body: Reply, *, again: bool = True) -> Reply:
        """Returns the answer to ``body`` sent to ``/v3/<path>``.

        Args:
            path: As "kv/range".
            body: As etcd's JSON has it.
            again: Whether a request that may have arrived can be made twice.

        Raises:
            NotFoundError: What it names is not there: a lease that is over.
            UnavailableError: No endpoint answers, or, unless ``again``, a reply was lost.
        """
        failure, wait_s = "no answer", _FIRST_WAIT_S
        with trio.move_on_after(self._deadline_s):
            while True:
                for _ in self._endpoints:
                    try:
                        return await self._post(path, body)
                    except _NOT_SENT as error:
                        failure = _words(error)
                    except (httpx.HTTPError, _RefusedError) as error:
                        failure = _words(error)
                        if not again:
                            raise UnavailableError(
                                f"{self._endpoints[0]}: {path}: the reply was lost: {failure}"
                            ) from error
                    self._turn()
                await trio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        raise UnavailableError(f"etcd {', '.join(self._endpoints)}: {path}: {failure}")

    async def watch(self, body: Reply) -> AsyncGenerator[Reply, None]:
        """Yields what one watch, made by ``body``, is told, until its connection ends or is silent.

        Raises:
            UnavailableError: It cannot be made, or ended.
        """
        try:
            async with self._lines("watch", body) as lines:
                async for line in lines:
                    yield _result(line)
        except httpx.ReadTimeout:  # nothing happens, or the member is cut off: the next watch will tell
            return
        except (httpx.HTTPError, _RefusedError) as error:
            endpoint = self._endpoints[0]
            self._turn()
            raise UnavailableError(f"{endpoint}: watch: {_words(error)}") from error

    def _turn(self) -> None:
        self._endpoints.append(self._endpoints.pop(0))

    async def _post(self, path: str, body: Reply) -> Reply:
        response = await self._http.post(f"{self._endpoints[0]}/v3/{path}", json=body)
        return _checked(response.status_code, response.content)

    @asynccontextmanager
    async def _lines(self, path: str, body: Reply) -> AsyncIterator[AsyncIterator[str]]:
        silence = httpx.Timeout(self._try_s, read=_WATCH_SILENCE_S)
        url = f"{self._endpoints[0]}/v3/{path}"
        async with self._http.stream("POST", url, json=body, timeout=silence) as response:
            if response.status_code != httpx.codes.OK:
                _checked(response.status_code, await response.aread())
            lines = response.aiter_lines()
            try:
                yield lines
            finally:
                await _unwind(lines)


async def _unwind(lines: AsyncIterator[str]) -> None:
    """Ends a stream that may be left half read.

    httpx reads through a chain of generators, and closing the outermost leaves the others to the garbage
    collector; an exception from the innermost ends them all.
    """
    with trio.CancelScope() as scope:
        scope.cancel()
        async for _ in lines:
            pass


class _RefusedError(Exception):
    """What an endpoint answered instead of a reply; another may do better."""


def _checked(status: int, content: bytes) -> Reply:
    try:
        reply = json.loads(content)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict):
        raise _RefusedError(f"HTTP {status} and no JSON: is this an etcd of 3.4 or later?")
    if status == httpx.codes.OK:
        return reply
    message = str(reply.get("message") or reply.get("error") or f"HTTP {status}")
    if reply.get("code") == _NOT_FOUND:
        raise NotFoundError(f"etcd: {message}")
    raise _RefusedError(message)


def _result(line: str) -> Reply:
    """Returns the reply of one line of a stream."""
    reply = _checked(httpx.codes.OK, line.encode())
    if "result" not in reply:
        raise _RefusedError(str(reply.get("error", reply))[:200])
    result: Reply = reply["result"]
    return result


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
