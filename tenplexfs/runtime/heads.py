"""Moving a job's head in the registry: under its lock, once, and known for sure."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from tenplexfs.core.coordination import Commitment, Next, Reply
from tenplexfs.core.snapshot import Head, JobName
from tenplexfs.errors import ConflictError, NotFoundError, TenplexError, UnavailableError
from tenplexfs.runtime.protocols import Lock, Registry

__all__ = ["HeadMover", "existing"]

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_LOCK_TTL_S = 15.0
_RETRY_S = 1.0
_LOCK_RETRY_S = 0.05
_UNLOCK_S = 10.0


class HeadMover:
    """What a coordinator does with the registry.

    Args:
        lock_ttl_s: After so long without a renewal somebody else may take a job's lock.
    """

    def __init__(self, registry: Registry, *, lock_ttl_s: float = _LOCK_TTL_S) -> None:
        self._registry = registry
        self._lock_ttl_s = lock_ttl_s

    async def all(self) -> dict[JobName, Head]:
        """Returns every head as it is now.

        Raises:
            UnavailableError: The registry does not answer.
        """
        _, heads = await self._registry.heads()
        return heads

    async def current(self, job: JobName) -> Head | None:
        """Returns the head of ``job`` as it is now, or None.

        Raises:
            UnavailableError: The registry does not answer.
        """
        try:
            _, heads = await self._registry.heads()
        except UnavailableError as error:
            raise _away(job, error) from error
        return heads.get(job)

    async def under_lock(
        self,
        job: JobName,
        owner: str,
        body: Callable[[Lock, Head | None], Awaitable[Answer]],
        *,
        patience_s: float = 0.0,
    ) -> Answer:
        """Runs ``body`` with the lock of ``job`` and its head as of then; a lost lock cancels it.

        Args:
            job: Name of the job.
            owner: Names who has the lock.
            body: Gets the lock and the head.
            patience_s: How long to try while somebody else has the lock.
        """
        try:
            lock = await self._take(job, owner, patience_s)
        except UnavailableError as error:
            raise _away(job, error) from error
        failures: list[TenplexError] = []
        answers: list[Answer] = []

        async def renew(scope: trio.CancelScope) -> None:
            while True:
                await trio.sleep(self._lock_ttl_s / 3)
                try:
                    await self._registry.renew(lock, ttl_s=self._lock_ttl_s)
                except ConflictError as error:
                    failures.append(error)
                    scope.cancel()
                except UnavailableError as error:  # the compare-and-set will tell
                    log.warning("job %s: the lock could not be renewed: %s", job, error)

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(renew, nursery.cancel_scope)
                try:
                    answers.append(await body(lock, await self.current(job)))
                except TenplexError as error:
                    failures.append(error)
                nursery.cancel_scope.cancel()
        finally:
            with trio.move_on_after(_UNLOCK_S, shield=True):
                await self._unlock(lock)
        if answers:
            return answers[0]
        raise failures[0]

    async def _take(self, job: JobName, owner: str, patience_s: float) -> Lock:
        end_s = trio.current_time() + patience_s
        while True:
            try:
                return await self._registry.lock(job, owner, ttl_s=self._lock_ttl_s)
            except ConflictError:
                if trio.current_time() >= end_s:
                    raise
            await trio.sleep(_LOCK_RETRY_S)

    async def _unlock(self, lock: Lock) -> None:
        try:
            await self._registry.unlock(lock)
        except TenplexError as error:  # it ends by itself
            log.warning("job %s: the lock could not be given back: %s", lock.job, error)

    async def commit(
        self,
        lock: Lock,
        expected: Head | None,
        new: Head | None,
        *,
        undecided: Callable[[str], None] = lambda why: None,
    ) -> None:
        """Moves the head; returns when it is known to have moved.

        Args:
            lock: Of the job.
            expected: What the head is.
            new: What it shall be.
            undecided: Called, with the reason, whenever nobody can know yet whether it has moved.

        Raises:
            ConflictError: It has not, and never will.
        """
        machine = Commitment(expected, new)
        why: TenplexError | None = None
        while True:
            with trio.CancelScope(shield=True):
                reply = Reply.MOVED
                try:
                    await self._registry.compare_and_set(lock, expected, new)
                except ConflictError as error:
                    reply, why = Reply.REFUSED, error
                except UnavailableError as error:
                    reply, silence = Reply.SILENT, error
                following = machine.replied(reply)
                if following is Next.READ:
                    try:
                        _, heads = await self._registry.heads()
                    except UnavailableError as error:
                        silence = error
                    else:
                        following = machine.read(heads.get(lock.job))
            if following is Next.DONE:
                return
            if following is Next.REFUSED:
                raise why or ConflictError(f"job {lock.job}: somebody else moved the head; plan again")
            log.warning("job %s: undecided until the registry answers: %s", lock.job, silence)
            undecided(silence.message)
            await trio.sleep(_RETRY_S)


def _away(job: JobName, error: UnavailableError) -> UnavailableError:
    return UnavailableError(f"job {job}: the registry is away, nothing switches: {error}")


def existing(job: JobName, head: Head | None) -> Head:
    """Returns ``head``.

    Raises:
        NotFoundError: There is none.
    """
    if head is None:
        raise NotFoundError(f"job {job}: no such job")
    return head
