"""The embedded registry as a service: messages in, messages out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Protocol

from tenplexfs._pb import registry_pb2
from tenplexfs.core.snapshot import JobName, NodeInfo, NodeName, check_job_name
from tenplexfs.errors import InvalidError
from tenplexfs.rpc.messages import check_txid, head_of, head_to_pb, node_of, node_to_pb
from tenplexfs.runtime.protocols import Lock, NamedRegistry, NodeRegistry, Registry

__all__ = ["RegistryService", "ServedRegistry"]

_LONGEST_S = 3600


class ServedRegistry(Registry, NodeRegistry, NamedRegistry, Protocol):
    """What a daemon serves to others: heads, locks, nodes."""


class RegistryService:
    """Answers the Registry service from ``registry``."""

    def __init__(self, registry: ServedRegistry) -> None:
        self._registry = registry

    async def name(self, request: registry_pb2.NameRequest) -> registry_pb2.NameReply:
        """Names the registry, or says its name."""
        return registry_pb2.NameReply(name=await self._registry.name(check_txid(request.proposed)))

    async def heads(self, _: registry_pb2.HeadsRequest) -> registry_pb2.HeadsReply:
        """Returns every head, and the revision as of which they are."""
        revision, heads = await self._registry.heads()
        return registry_pb2.HeadsReply(
            revision=revision, heads={job: head_to_pb(head) for job, head in heads.items()}
        )

    async def look(self, request: registry_pb2.LookRequest) -> registry_pb2.LookReply:
        """Returns what a job is, and who has its lock."""
        now = await self._registry.look(check_job_name(request.job))
        head = None if now.head is None else head_to_pb(now.head)
        return registry_pb2.LookReply(head=head, owner=now.owner, token=now.token)

    async def lock(self, request: registry_pb2.LockRequest) -> registry_pb2.LockReply:
        """Takes a lock."""
        _check_lock_request(request)
        job = check_job_name(request.job)
        lock = await self._registry.lock(job, str(request.owner), ttl_s=float(request.ttl_s))
        return registry_pb2.LockReply(token=lock.token)

    async def renew(self, request: registry_pb2.RenewRequest) -> registry_pb2.RenewReply:
        """Keeps a lock."""
        _check_lock_request(request)
        await self._registry.renew(_lock(request), ttl_s=float(request.ttl_s))
        return registry_pb2.RenewReply()

    async def unlock(self, request: registry_pb2.UnlockRequest) -> registry_pb2.UnlockReply:
        """Releases a lock."""
        await self._registry.unlock(_lock(request))
        return registry_pb2.UnlockReply()

    async def compare_and_set(
        self, request: registry_pb2.CompareAndSetRequest
    ) -> registry_pb2.CompareAndSetReply:
        """Moves a head."""
        expected = head_of(request.expected) if request.HasField("expected") else None
        new = head_of(request.new) if request.HasField("new") else None
        await self._registry.compare_and_set(_lock(request), expected, new)
        return registry_pb2.CompareAndSetReply()

    async def watch(self, request: registry_pb2.WatchRequest) -> AsyncIterator[registry_pb2.HeadEvent]:
        """Yields each change."""
        async with aclosing(self._registry.watch(_signed(request.revision))) as events:  # type: ignore[type-var]
            async for event in events:
                head = None if event.head is None else head_to_pb(event.head)
                yield registry_pb2.HeadEvent(revision=event.revision, job=event.job, head=head)

    async def announce(self, request: registry_pb2.AnnounceRequest) -> registry_pb2.AnnounceReply:
        """Takes note that a node lives."""
        info = node_of(request.info)
        if not 0 < request.ttl_s <= _LONGEST_S:
            raise InvalidError(f"node {info.node}: need 0 < ttl_s <= {_LONGEST_S}, got {request.ttl_s}")
        await self._registry.announce(info, ttl_s=float(request.ttl_s))
        return registry_pb2.AnnounceReply()

    async def withdraw(self, request: registry_pb2.WithdrawRequest) -> registry_pb2.WithdrawReply:
        """Takes note that a node lives no more."""
        await self._registry.withdraw(node_of(request.info))
        return registry_pb2.WithdrawReply()

    async def nodes(self, _: registry_pb2.NodesRequest) -> registry_pb2.NodesReply:
        """Returns the living ones."""
        return _nodes(await self._registry.nodes())

    async def watch_nodes(self, _: registry_pb2.NodesRequest) -> AsyncIterator[registry_pb2.NodesReply]:
        """Yields the living ones at each change."""
        async with aclosing(self._registry.watch_nodes()) as changes:  # type: ignore[type-var]
            async for living in changes:
                yield _nodes(living)


def _nodes(living: Mapping[NodeName, NodeInfo]) -> registry_pb2.NodesReply:
    return registry_pb2.NodesReply(nodes=[node_to_pb(info) for info in living.values()])


def _check_lock_request(request: registry_pb2.LockRequest | registry_pb2.RenewRequest) -> None:
    if not (request.owner and 0 < request.ttl_s <= _LONGEST_S):
        raise InvalidError(
            f"lock of job {request.job}: need an owner and 0 < ttl_s <= {_LONGEST_S}, got {request.ttl_s}"
        )


def _lock(
    request: registry_pb2.RenewRequest | registry_pb2.UnlockRequest | registry_pb2.CompareAndSetRequest,
) -> Lock:
    return Lock(JobName(str(request.job)), str(request.owner), _signed(request.token))


def _signed(number: int) -> int:
    """Returns ``number`` as registries keep it, in 63 bits; they make no larger ones."""
    return min(int(number), (1 << 63) - 1)
