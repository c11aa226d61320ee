"""The registry as the runtime sees it: in this daemon, or in the one that serves it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import trio
from google.protobuf.message import Message

from tenplexfs._pb import registry_pb2
from tenplexfs.core.membership import Standing
from tenplexfs.core.snapshot import Head, JobName, NodeInfo, NodeName
from tenplexfs.errors import DeniedError, TimedOutError, UnavailableError
from tenplexfs.rpc.connection import Cancel, Connection
from tenplexfs.rpc.messages import head_of, head_to_pb, node_of, node_to_pb
from tenplexfs.rpc.retries import Retries
from tenplexfs.rpc.threads import in_thread
from tenplexfs.runtime.protocols import Lock, RegistryEvent
from tenplexfs.storage.registry_sqlite import SqliteRegistry

__all__ = ["LocalRegistry", "RemoteRegistry"]

_WATCH_S = 300.0
_WATCH_WAIT_S = 0.2
_EXPIRY_S = 0.5  # a node whose time is over is missed so late


class LocalRegistry:
    """The registry of the daemon that owns the file; a `tenplexfs.runtime.protocols.Registry`.

    Every change has to go through this one object, else watchers do not hear of it. For one trio thread.
    """

    def __init__(self, core: SqliteRegistry) -> None:
        self._core = core
        self._changed = trio.Event()
        self._moved = trio.Event()  # of nodes

    async def name(self, proposed: str) -> str:
        """Returns the registry's name, ``proposed`` if it had none."""
        return await trio.to_thread.run_sync(self._core.name, proposed)

    async def heads(self) -> tuple[int, dict[JobName, Head]]:
        """Returns the current revision and the head of every job as of it."""
        return await trio.to_thread.run_sync(self._core.heads)

    async def look(self, job: JobName) -> Standing:
        """Returns what the job is, and who has its lock."""
        return await trio.to_thread.run_sync(self._core.look, job)

    async def lock(self, job: JobName, owner: str, *, ttl_s: float) -> Lock:
        """Takes the job's lock; ConflictError when another owner holds it."""
        token = await trio.to_thread.run_sync(partial(self._core.lock, job, owner, ttl_s=ttl_s))
        return Lock(job, owner, token)

    async def renew(self, lock: Lock, *, ttl_s: float) -> None:
        """Keeps ``lock``; ConflictError when it is lost."""
        await trio.to_thread.run_sync(partial(self._core.renew, lock.job, lock.token, ttl_s=ttl_s))

    async def unlock(self, lock: Lock) -> None:
        """Releases ``lock`` if it is still held."""
        await trio.to_thread.run_sync(self._core.unlock, lock.job, lock.token)

    async def compare_and_set(self, lock: Lock, expected: Head | None, new: Head | None) -> None:
        """Moves the head of ``lock.job``; ConflictError when it is another, or the lock is lost."""
        try:
            await trio.to_thread.run_sync(self._core.compare_and_set, lock.job, lock.token, expected, new)
        finally:
            # also when cancelled: the write may have been made
            self._changed.set()
            self._changed = trio.Event()

    async def watch(self, revision: int) -> AsyncIterator[RegistryEvent]:
        """Yields each change after ``revision``, in order."""
        while True:
            changed = self._changed
            events = await trio.to_thread.run_sync(self._core.events, revision)
            for number, job, head in events:
                revision = number
                yield RegistryEvent(number, job, head)
            if not events:
                await changed.wait()

    async def announce(self, info: NodeInfo, *, ttl_s: float) -> None:
        """Says that a node lives, for ``ttl_s`` from now."""
        announce = partial(self._core.announce, info, ttl_s=ttl_s)
        if await trio.to_thread.run_sync(announce):
            self._nodes_changed()

    async def withdraw(self, info: NodeInfo) -> None:
        """Says that it lives no more."""
        await trio.to_thread.run_sync(self._core.withdraw, info)
        self._nodes_changed()

    async def nodes(self) -> dict[NodeName, NodeInfo]:
        """Returns the living ones."""
        await trio.lowlevel.checkpoint()
        return self._core.nodes()

    async def watch_nodes(self) -> AsyncIterator[Mapping[NodeName, NodeInfo]]:
        """Yields the living ones now and after each change."""
        told = None
        while True:
            moved = self._moved
            if (living := self._core.nodes()) != told:
                told = living
                yield living
            with trio.move_on_after(_EXPIRY_S):
                await moved.wait()

    def _nodes_changed(self) -> None:
        self._moved.set()
        self._moved = trio.Event()


class RemoteRegistry:
    """The registry of another daemon; a `tenplexfs.runtime.protocols.Registry`. For one trio thread.

    Args:
        connection: To the daemon that serves it.
        deadline_s: For each call. Calls that may be made twice are tried again until then.
    """

    def __init__(self, connection: Connection, *, deadline_s: float = 10.0) -> None:
        self._connection = connection
        self._deadline_s = deadline_s
        self._limiter = trio.CapacityLimiter(64)

    async def _call(self, method: str, request: Message, *, again: bool = True) -> Message:
        def once(cancel: Cancel, deadline_s: float) -> Message:
            return self._connection.call(f"Registry/{method}", request, deadline_s=deadline_s, cancel=cancel)

        def run(cancel: Cancel) -> Message:
            if not again:
                return once(cancel, self._deadline_s)
            return Retries(self._deadline_s).run(lambda left_s: once(cancel, left_s), cancel)

        try:
            return await in_thread(run, limiter=self._limiter)
        except (TimedOutError, DeniedError) as error:
            raise UnavailableError(error.message) from error

    async def name(self, proposed: str) -> str:
        """Returns the registry's name, ``proposed`` if it had none."""
        return str((await self._call("Name", registry_pb2.NameRequest(proposed=proposed))).name)

    async def heads(self) -> tuple[int, dict[JobName, Head]]:
        """Returns the current revision and the head of every job as of it."""
        reply = await self._call("Heads", registry_pb2.HeadsRequest())
        return int(reply.revision), {JobName(job): head_of(head) for job, head in reply.heads.items()}

    async def look(self, job: JobName) -> Standing:
        """Returns what the job is, and who has its lock."""
        reply = await self._call("Look", registry_pb2.LookRequest(job=job))
        head = head_of(reply.head) if reply.HasField("head") else None
        return Standing(head, reply.owner, int(reply.token))

    async def lock(self, job: JobName, owner: str, *, ttl_s: float) -> Lock:
        """Takes the job's lock; ConflictError when another owner holds it."""
        reply = await self._call("Lock", registry_pb2.LockRequest(job=job, owner=owner, ttl_s=ttl_s))
        return Lock(job, owner, int(reply.token))

    async def renew(self, lock: Lock, *, ttl_s: float) -> None:
        """Keeps ``lock``; ConflictError when it is lost."""
        request = registry_pb2.RenewRequest(job=lock.job, owner=lock.owner, token=lock.token, ttl_s=ttl_s)
        await self._call("Renew", request)

    async def unlock(self, lock: Lock) -> None:
        """Releases ``lock`` if it is still held."""
        request = registry_pb2.UnlockRequest(job=lock.job, owner=lock.owner, token=lock.token)
        await self._call("Unlock", request)

    async def compare_and_set(self, lock: Lock, expected: Head | None, new: Head | None) -> None:
        """Moves the head of ``lock.job``; ConflictError when it is another, or the lock is lost.

        It is tried once: after an UnavailableError only the head says whether it was done.
        """
        request = registry_pb2.CompareAndSetRequest(
            job=lock.job,
            owner=lock.owner,
            token=lock.token,
            expected=None if expected is None else head_to_pb(expected),
            new=None if new is None else head_to_pb(new),
        )
        await self._call("CompareAndSet", request, again=False)

    async def _next(self, events: Iterator[Message], call: Cancel) -> Message | None:
        def following(cancel: Cancel) -> Message | None:
            cancel.watch(call)
            return next(events, None)

        return await in_thread(following, limiter=self._limiter)

    async def watch(self, revision: int) -> AsyncIterator[RegistryEvent]:
        """Yields each change after ``revision``, in order; reconnects by itself."""
        while True:
            async with aclosing(
                self._stream("Watch", registry_pb2.WatchRequest(revision=revision))
            ) as events:  # type: ignore[type-var]
                async for event in events:
                    revision = int(event.revision)
                    head = head_of(event.head) if event.HasField("head") else None
                    yield RegistryEvent(revision, JobName(event.job), head)

    async def announce(self, info: NodeInfo, *, ttl_s: float) -> None:
        """Says that a node lives, for ``ttl_s`` from now."""
        await self._call("Announce", registry_pb2.AnnounceRequest(info=node_to_pb(info), ttl_s=ttl_s))

    async def withdraw(self, info: NodeInfo) -> None:
        """Says that it lives no more."""
        await self._call("Withdraw", registry_pb2.WithdrawRequest(info=node_to_pb(info)))

    async def nodes(self) -> dict[NodeName, NodeInfo]:
        """Returns the living ones."""
        return _nodes_of(await self._call("Nodes", registry_pb2.NodesRequest()))

    async def watch_nodes(self) -> AsyncIterator[Mapping[NodeName, NodeInfo]]:
        """Yields the living ones now and after each change; reconnects by itself."""
        told = None
        while True:
            async with aclosing(self._stream("WatchNodes", registry_pb2.NodesRequest())) as replies:  # type: ignore[type-var]
                async for reply in replies:
                    if (living := _nodes_of(reply)) != told:
                        told = living
                        yield living

    async def _stream(self, method: str, request: Message) -> AsyncIterator[Any]:
        """Yields the answers to one call; ends, after a while, when it does."""
        call = Cancel()
        replies = self._connection.stream(f"Registry/{method}", request, deadline_s=_WATCH_S, cancel=call)
        try:
            while (reply := await self._next(replies, call)) is not None:
                yield reply
        except (UnavailableError, TimedOutError, DeniedError):
            await trio.sleep(_WATCH_WAIT_S)
        finally:
            call.cancel()


def _nodes_of(reply: Message) -> dict[NodeName, NodeInfo]:
    return {NodeName(each.node): node_of(each) for each in reply.nodes}
