"""Telling a scheduler what became of a job, at the address that its setting ``webhook`` gives."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import httpx
import trio

from tenplexfs.daemon.job_settings import check_webhook
from tenplexfs.errors import InvalidError

__all__ = ["Webhooks"]

log = logging.getLogger(__name__)

_TRY_S = 10.0
_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 30.0
_END_S = 300.0
_MOST_WAITING = 256
_TRIED_AGAIN = (408, 425, 429)


class Webhooks:
    """Posts events in the background, in a nursery of the daemon; forgets those that nobody takes in time.

    Args:
        nursery: Where they are sent.
        insecure: Whether they may go to other machines in the clear.
        wall_s: Wall clock.
    """

    def __init__(
        self, nursery: trio.Nursery, *, insecure: bool, wall_s: Callable[[], float] = time.time
    ) -> None:
        self._nursery = nursery
        self._insecure = insecure
        self._wall_s = wall_s
        self._waiting = 0

    def tell(self, url: str | None, event: Mapping[str, object]) -> None:
        """Begins to post ``event`` as JSON, with format, version and time; nothing without a ``url``."""
        if url is None:
            return
        try:
            check_webhook(url, insecure=self._insecure)
        except InvalidError as error:
            log.warning("not told: %s", error)
            return
        if self._waiting >= _MOST_WAITING:
            log.warning("webhook %s: %d events wait already; one is dropped", url, self._waiting)
            return
        moment = datetime.fromtimestamp(self._wall_s(), UTC).isoformat(timespec="milliseconds")
        self._waiting += 1
        self._nursery.start_soon(
            self._post, url, {"format": "tenplexfs-event", "version": 1, "time": moment, **event}
        )

    async def _post(self, url: str, event: Mapping[str, object]) -> None:
        try:
            with trio.move_on_after(_END_S) as scope:
                # Proxies of the environment are for the world outside; a redirect could lead anywhere.
                async with httpx.AsyncClient(timeout=_TRY_S, trust_env=False) as http:
                    await self._until_taken(http, url, event)
            if scope.cancelled_caught:
                log.warning("webhook %s: not taken within %g s; given up", url, _END_S)
        finally:
            self._waiting -= 1

    async def _until_taken(self, http: httpx.AsyncClient, url: str, event: Mapping[str, object]) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                async with http.stream("POST", url, json=event) as answer:
                    pass  # what it says besides may have no end
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                why = f"{type(error).__name__}: {error}"
            else:
                if answer.is_success:
                    return
                why = f"status {answer.status_code}"
                if answer.status_code < 500 and answer.status_code not in _TRIED_AGAIN:
                    log.warning("webhook %s: refused: %s", url, why)
                    return
            log.info("webhook %s: %s; again in %g s", url, why, wait_s)
            await trio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
