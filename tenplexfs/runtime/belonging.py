"""A store belongs to one cluster: what another one's registry says of a job does not count for its bytes.

A node that comes back drops what is not on the head. So a daemon that is started on the store of another
cluster, or with the registry of one, would drop all that it has of jobs that happen to have the same name.
The registry has a name, which the first daemon with committed state gives it, and each store remembers it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

import trio

from tenplexfs.core.membership import Standing
from tenplexfs.core.snapshot import Head, JobName, NodeInfo, NodeName
from tenplexfs.errors import UnavailableError
from tenplexfs.runtime.protocols import Lock, NamedRegistry, NodeRegistry, Registry, RegistryEvent

__all__ = ["OwnRegistry"]

_WAIT_S = 1.0


class _Whole(Registry, NodeRegistry, NamedRegistry, Protocol):
    pass


class OwnRegistry:
    """A `Registry` and `NodeRegistry` that is away as long as it is another cluster's. For one trio thread.

    Args:
        registry: The one that the configuration names.
        file: Of the store; has the name of its cluster, once it has one.
        has_state: Whether there is anything that could be lost.
        new_name: Makes one.
    """

    def __init__(
        self, registry: _Whole, file: Path, *, has_state: Callable[[], bool], new_name: Callable[[], str]
    ) -> None:
        self._registry = registry
        self._file = file
        self._has_state = has_state
        self._new_name = new_name
        self._mine = file.read_text().strip() if file.exists() else ""
        self._is_known = False

    async def _check(self) -> None:
        """Raises UnavailableError where the registry is not that of the store, or does not say."""
        if self._is_known or not (self._mine or self._has_state()):
            return
        proposed = self._mine or self._new_name()
        name = await self._registry.name(proposed)
        if self._mine and name != self._mine:
            raise UnavailableError(
                f"store {self._file.parent}: of another cluster ({self._mine}) than the registry ({name}): "
                "give this node its own --store, or --registry; nothing of the store is dropped"
            )
        if not self._mine:
            aside = self._file.with_suffix(".next")
            aside.write_text(f"{name}\n")
            aside.replace(self._file)
            self._mine = name
        self._is_known = True

    async def heads(self) -> tuple[int, dict[JobName, Head]]:
        """Returns the current revision and the head of every job as of it."""
        await self._check()
        return await self._registry.heads()

    async def look(self, job: JobName) -> Standing:
        """Returns what the job is, and who has its lock."""
        await self._check()
        return await self._registry.look(job)

    async def watch(self, revision: int) -> AsyncIterator[RegistryEvent]:
        """Yields each change after ``revision``, in order."""
        await self._until_known()
        async with aclosing(self._registry.watch(revision)) as events:  # type: ignore[type-var]
            async for event in events:
                yield event

    async def lock(self, job: JobName, owner: str, *, ttl_s: float) -> Lock:
        """Takes the job's lock."""
        await self._check()
        return await self._registry.lock(job, owner, ttl_s=ttl_s)

    async def renew(self, lock: Lock, *, ttl_s: float) -> None:
        """Keeps ``lock``."""
        await self._registry.renew(lock, ttl_s=ttl_s)

    async def unlock(self, lock: Lock) -> None:
        """Releases ``lock``."""
        await self._registry.unlock(lock)

    async def compare_and_set(self, lock: Lock, expected: Head | None, new: Head | None) -> None:
        """Moves the head of ``lock.job``, which was taken here."""
        await self._registry.compare_and_set(lock, expected, new)

    async def announce(self, info: NodeInfo, *, ttl_s: float) -> None:
        """Says that a node lives."""
        await self._check()
        await self._registry.announce(info, ttl_s=ttl_s)

    async def withdraw(self, info: NodeInfo) -> None:
        """Says that it lives no more."""
        await self._registry.withdraw(info)

    async def nodes(self) -> dict[NodeName, NodeInfo]:
        """Returns the living ones."""
        await self._check()
        return await self._registry.nodes()

    async def watch_nodes(self) -> AsyncIterator[Mapping[NodeName, NodeInfo]]:
        """Yields the living ones now and after each change."""
        await self._until_known()
        async with aclosing(self._registry.watch_nodes()) as changes:  # type: ignore[type-var]
            async for living in changes:
                yield living

    async def _until_known(self) -> None:
        while True:
            try:
                return await self._check()
            except UnavailableError:  # `heads` says why
                await trio.sleep(_WAIT_S)
