"""The embedded registry as a service: messages in, messages out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from tenplexfs._pb import registry_pb2
from tenplexfs.core.snapshot import JobName, check_job_name
from tenplexfs.errors import InvalidError
from tenplexfs.rpc.messages import head_of, head_to_pb
from tenplexfs.runtime.protocols import Lock, Registry

__all__ = ["RegistryService"]


class RegistryService:
    """Answers the Registry service from ``registry``."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def heads(self, _: registry_pb2.HeadsRequest) -> registry_pb2.HeadsReply:
        """Returns every head, and the revision as of which they are."""
        revision, heads = await self._registry.heads()
        return registry_pb2.HeadsReply(
            revision=revision, heads={job: head_to_pb(head) for job, head in heads.items()}
        )

    async def lock(self, request: registry_pb2.LockRequest) -> registry_pb2.LockReply:
        """Takes or renews a lock."""
        if not (request.owner and 0 < request.ttl_s <= 3600):
            raise InvalidError(
                f"lock of job {request.job}: need an owner and 0 < ttl_s <= 3600, got {request.ttl_s}"
            )
        job = check_job_name(request.job)
        lock = await self._registry.lock(job, str(request.owner), ttl_s=float(request.ttl_s))
        return registry_pb2.LockReply(token=lock.token)

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


def _lock(request: registry_pb2.UnlockRequest | registry_pb2.CompareAndSetRequest) -> Lock:
    return Lock(JobName(str(request.job)), str(request.owner), _signed(request.token))


def _signed(number: int) -> int:
    """Returns ``number`` as registries keep it, in 63 bits; they make no larger ones."""
    return min(int(number), (1 << 63) - 1)
