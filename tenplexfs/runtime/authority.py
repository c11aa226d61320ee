"""What this node's registry says of orders, and of heads that cannot be: nobody else's word counts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from tenplexfs.core.membership import Standing
from tenplexfs.core.snapshot import Head, JobName, NodeName, SnapshotId
from tenplexfs.errors import ConflictError, PreconditionError, UnavailableError
from tenplexfs.formats.requests import birth_of
from tenplexfs.runtime.orders import Description

__all__ = ["Authority", "GoneBackError"]


class GoneBackError(ConflictError):
    """The registry says of a job what it was long ago: it was made anew of an old backup."""


class Authority:
    """Asks the registry. Belongs to the trio thread.

    Args:
        look: Asks it what a job is, and who has its lock.

    Attributes:
        fences: Of the last order of each job that was obeyed.
    """

    def __init__(self, node: NodeName, look: Callable[[JobName], Awaitable[Standing]]) -> None:
        self.fences: dict[JobName, int] = {}
        self._node = node
        self._look = look
        self._judging: dict[JobName, trio.Lock] = {}

    @asynccontextmanager
    async def judging(self, job: JobName) -> AsyncIterator[Standing]:
        """Gives what the registry says now. Orders are judged, and obeyed, one after the other."""
        try:
            async with self._judging.setdefault(job, trio.Lock()):
                yield await self._look(job)
        except (ConflictError, PreconditionError, UnavailableError) as error:
            raise type(error)(f"node {self._node}: job {job}: {error.message}") from error

    async def has_remade(
        self,
        job: JobName,
        head: Head,
        newer: SnapshotId,
        settings_json: bytes,
        describe: Callable[[JobName, Head], Awaitable[Description]],
    ) -> bool:
        """Returns whether a job is another one of the same name, as its head is older than what is here.

        If not, the head was only late news.

        Args:
            job: Name of the job.
            head: What the registry said.
            newer: What is here.
            settings_json: Of ``newer``.
            describe: Asks the nodes of a head what they store of it.

        Raises:
            GoneBackError: It is the same job, and the registry says that still.
            UnavailableError: Nobody can tell, for no node has that head.
        """
        if (await self._look(job)).head != head:
            return False
        try:
            known = await describe(job, head)
        except UnavailableError as error:
            raise UnavailableError(
                f"{error.message}; {newer} is here: if that was committed since, the registry was made of an "
                "old backup, and `registry rebuild` moves it on"
            ) from error
        if birth_of(known.settings_json) == birth_of(settings_json):
            raise GoneBackError(
                f"job {job}: the registry says {head.snapshot}, and {newer} was committed since: it was made "
                "of an old backup; `registry rebuild` moves it on"
            )
        return True
