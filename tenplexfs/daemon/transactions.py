"""Transactions outlive the calls that ask for them: a call only watches."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import trio

from tenplexfs.core.snapshot import Head, JobName
from tenplexfs.errors import ConflictError, InvalidError, TenplexError, internal
from tenplexfs.runtime.orders import Progress, Report

__all__ = ["Transaction", "Transactions", "Work"]

log = logging.getLogger(__name__)

Work = Callable[[Report], Awaitable[Head]]
"""What a transaction does, and where it says how far it is."""


class Transaction:
    """One that runs, or has ended.

    Attributes:
        progress: The newest.
        head: What it made, once it is done.
        failure: Why it did not.
        ended: Set when either is known.
    """

    def __init__(self, job: JobName, request_id: str, arguments: bytes = b"") -> None:
        self.job = job
        self.request_id = request_id
        self.arguments = arguments
        self.progress = Progress("planning")
        self.head: Head | None = None
        self.failure: TenplexError | None = None
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self._changed = trio.Event()

    def report(self, progress: Progress) -> None:
        """Takes note of how far it is."""
        self.progress = progress
        self._changed.set()
        self._changed = trio.Event()

    def check_arguments(self, arguments: bytes) -> None:
        """Refuses to be what was asked for by other ``arguments``.

        Raises:
            InvalidError: It was not.
        """
        if self.arguments != arguments:
            raise InvalidError(
                f"job {self.job}: request {self.request_id!r} is {self.progress.phase} and asked for "
                "something else; give each request an id of its own"
            )

    async def watch(self) -> AsyncIterator[Progress]:
        """Yields the progress now, and as it changes, until the end; fast changes are skipped.

        Raises:
            TenplexError: As the transaction failed.
        """
        while not self.ended.is_set():
            changed = self._changed
            yield self.progress
            await changed.wait()
        if self.failure is not None:
            raise self.failure


class Transactions:
    """Those that this daemon coordinates, in a nursery of the daemon; at most one runs for each job.

    Args:
        nursery: Where they run.
        changed: Called when one begins, and when one has ended.
        ended: Called with one that has ended.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        changed: Callable[[], None],
        ended: Callable[[Transaction], None] = lambda _: None,
    ) -> None:
        self._nursery = nursery
        self._changed = changed
        self._ended = ended
        self._running: dict[JobName, Transaction] = {}

    def running(self, job: JobName) -> Transaction | None:
        """Returns the one that runs for ``job``."""
        return self._running.get(job)

    def start(self, job: JobName, request_id: str, work: Work, arguments: bytes = b"") -> Transaction:
        """Starts ``work``, or returns what runs under the same ``request_id`` already.

        Raises:
            ConflictError: Another one runs for the job.
            InvalidError: What runs under the same ``request_id`` was asked for by other ``arguments``.
        """
        running = self._running.get(job)
        if running is not None:
            if request_id and running.request_id == request_id:
                running.check_arguments(arguments)
                return running
            raise ConflictError(
                f"job {job}: another transaction is {running.progress.phase}; try again after it"
            )
        transaction = self._running[job] = Transaction(job, request_id, arguments)
        self._nursery.start_soon(self._run, transaction, work)
        self._changed()
        return transaction

    async def _run(self, transaction: Transaction, work: Work) -> None:
        try:
            with transaction.scope:
                transaction.head = await work(transaction.report)
            if transaction.head is None:
                transaction.failure = ConflictError(f"job {transaction.job}: the transaction was aborted")
        except TenplexError as error:
            transaction.failure = error
        except Exception as error:  # the boundary of a call that only watches: the daemon serves on
            log.exception("job %s: the transaction failed", transaction.job)
            transaction.failure = internal(error)
        finally:
            if transaction.head is None and transaction.failure is None:
                transaction.failure = ConflictError(f"job {transaction.job}: the daemon is stopping")
            del self._running[transaction.job]
            transaction.ended.set()
            transaction.report(transaction.progress)
            self._changed()
            self._ended(transaction)
