"""Every job that the registry knows, followed: this node shows each one's head, whoever moved it.

Nodes that hold nothing of a job show it too; its layout comes from a node that does.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import trio

from tenplexfs.core.membership import Mandate
from tenplexfs.core.snapshot import COPIES, Head, JobName
from tenplexfs.core.transaction import is_older
from tenplexfs.errors import ConflictError, TenplexError, UnavailableError, internal
from tenplexfs.runtime.authority import GoneBackError
from tenplexfs.runtime.heads import HeadMover
from tenplexfs.runtime.member import Member
from tenplexfs.runtime.orders import Description
from tenplexfs.runtime.protocols import Lock, Registry

__all__ = ["JobTable"]

log = logging.getLogger(__name__)

_POLL_S = 3.0
_STAGED_S = 10.0
_RETRY_S = 0.5
_RETRY_MAX_S = 10.0
_FIRST_S = 5.0
_UNKNOWN = (
    "the registry does not know this job; its bytes are kept until `job remove`; if the registry was lost, "
    "`registry rebuild` makes it of them"
)


class JobTable:
    """Follows the registry. Belongs to the trio thread.

    Args:
        describe: Asks the nodes of a head for its layout.

    Attributes:
        registry_away: Why the registry does not answer, or None.
        changed: Set, and replaced, whenever something about a job changed.
    """

    def __init__(
        self,
        member: Member,
        registry: Registry,
        describe: Callable[[JobName, Head], Awaitable[Description]],
    ) -> None:
        self.registry_away: str | None = None
        self.changed = trio.Event()
        self._member = member
        self._registry = registry
        self._mover = HeadMover(registry)
        self._staged_since_s: dict[JobName, float] = {}
        self._describe = describe
        self._revision = -1
        self._watching = trio.CancelScope()
        self._heads: dict[JobName, Head] = {}
        self._failures: dict[JobName, str] = {}
        self._following: dict[JobName, trio.Event] = {}

    def heads(self) -> Mapping[JobName, Head]:
        """Returns the heads as they were last heard of."""
        return self._heads

    def jobs(self) -> list[JobName]:
        """Returns every job by name: those of the registry, and those that are shown without it."""
        return sorted({*self._heads, *self._member.shown(), *self._failures})

    def failure(self, job: JobName) -> str | None:
        """Returns why this node cannot show what the registry says, or None."""
        return self._failures.get(job)

    def touch(self) -> None:
        """Lets those who wait for `changed` look again."""
        self.changed.set()
        self.changed = trio.Event()

    async def switch(self, job: JobName, told: Head | None) -> None:
        """Shows what the registry says, as a coordinator says that the head has moved; returns when it does.

        Raises:
            ConflictError: It says something else than ``told``.
            TenplexError: It could not be shown; following the registry tries again.
        """
        head = (await self._registry.look(job)).head
        if head is None:
            await self._forget(job)
        else:
            await self._member.show(job, head, self._describe)
            self._failures.pop(job, None)
            known = self._heads.get(job)
            if known is None or is_older(known.snapshot, head.snapshot):
                self._heads[job] = head
        self.touch()
        if told is not None and (head is None or is_older(head.snapshot, told.snapshot)):
            now = "knows no such job" if head is None else f"has {head.snapshot}"
            raise ConflictError(
                f"node {self._member.node}: job {job}: told of {told.snapshot}, and this node's registry "
                f"{now}: it is another one"
            )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follows the registry until cancelled; started once the jobs of the store are shown.

        While the registry is away the last committed snapshots are shown, and `registry_away` says why.
        """
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(_FIRST_S):
                await self._poll(nursery)
            if self.registry_away is not None or self._revision < 0:
                self.registry_away = self.registry_away or "no answer yet"
                await self._show_last()
            with trio.move_on_after(_FIRST_S):
                while self._following:
                    await next(iter(self._following.values())).wait()
            task_status.started()
            nursery.start_soon(self._poll_for_ever, nursery)
            while True:
                with trio.CancelScope() as self._watching:
                    async for event in self._registry.watch(max(self._revision, 0)):
                        self._revision = event.revision
                        self._want(nursery, event.job, event.head)

    async def _poll_for_ever(self, nursery: trio.Nursery) -> None:
        while True:
            await trio.sleep(_POLL_S)
            await self._poll(nursery)
            await self._tidy()

    async def _tidy(self) -> None:
        """Drops what coordinators that died have left staged, once it has been there for a while."""
        waiting = {job for job in self._heads if self._member.has_staged(job)}
        now_s = trio.current_time()
        self._staged_since_s = {job: self._staged_since_s.get(job, now_s) for job in waiting}
        for job in sorted(waiting):
            if now_s - self._staged_since_s[job] < _STAGED_S:
                continue

            async def tidy(lock: Lock, head: Head | None) -> None:
                await self._member.tidy(lock.job, Mandate(lock.owner, lock.token))

            try:
                await self._mover.under_lock(job, f"{self._member.node}:tidy", tidy)
            except (ConflictError, UnavailableError):  # somebody works on it
                continue

    async def _poll(self, nursery: trio.Nursery) -> None:
        """Compares with the registry as a whole: finds out whether it answers, and what a watch missed."""
        # Before it is asked: what it says now may lack a job that is made meanwhile.
        before, seen = self._known(), self._revision
        try:
            revision, heads = await self._registry.heads()
        except UnavailableError as error:
            if self.registry_away is None:
                log.warning("the registry is away, nothing switches: %s", error)
            self.registry_away = error.message
            self.touch()
            return
        if self.registry_away is not None:
            log.info("the registry answers")
            self.registry_away = None
            self.touch()
        if revision < seen:
            log.warning("the registry began anew: it was at revision %d, and is at %d", seen, revision)
            self._revision = revision
            self._watching.cancel()
        elif revision < self._revision:  # a watch was quicker
            return
        if self._revision < 0:  # where the watch begins; from then on its events count, removals above all
            self._revision = revision
        for job, head in heads.items():
            self._want(nursery, job, head)
        # Only a removal that the registry tells of frees bytes: a registry that was lost and made anew knows
        # no job, and the stores are then all there is.
        for job in sorted((before & self._known()) - heads.keys()):
            if job not in self._failures:
                log.error("job %s: %s", job, _UNKNOWN)
            self._failures[job] = _UNKNOWN

    def _known(self) -> set[JobName]:
        """Returns the jobs that this node has committed bytes of, or a head."""
        stored = self._member.store.snapshots()
        committed = {each.job for each in stored if each.committed and not self._member.is_past(each.id.txid)}
        return (committed & self._stored()) | self._heads.keys()

    async def _show_last(self) -> None:
        for job in sorted(self._stored()):
            try:
                await self._member.show_last(job)
            except TenplexError as error:
                self._failures[job] = error.message
                log.warning("job %s: cannot be shown: %s", job, error)

    def _stored(self) -> set[JobName]:
        return {each.job for each in self._member.store.snapshots() if COPIES not in each.job}

    def _want(self, nursery: trio.Nursery, job: JobName, head: Head | None) -> None:
        if head is None:
            self._heads.pop(job, None)
        else:
            self._heads[job] = head
        shown = self._member.shown().get(job)
        is_so = (shown.head.snapshot.txid if shown else None) == (head.snapshot.txid if head else None)
        if is_so and head is not None:
            if self._failures.pop(job, None) is not None:  # the registry knows it again
                self.touch()
        elif job not in self._following:
            self._following[job] = trio.Event()
            nursery.start_soon(self._follow, job)

    async def _follow(self, job: JobName) -> None:
        """Makes this node show what is wanted of ``job``; ends when it does."""
        wait_s = _RETRY_S
        while True:
            wanted = self._heads.get(job)
            step = partial(self._forget, job) if wanted is None else partial(self._adopt, job, wanted)
            try:
                await step()
            except (TenplexError, OSError) as raised:
                error = internal(raised)
                if self._failures.get(job) != error.message:
                    log.warning("job %s: cannot show %s: %s", job, wanted and wanted.snapshot, error)
                self._failures[job] = error.message
                self.touch()
                await trio.sleep(wait_s)
                wait_s = min(2 * wait_s, _RETRY_MAX_S)
                continue
            self._failures.pop(job, None)
            if self._heads.get(job) == wanted:
                break
        self._following.pop(job).set()
        self.touch()

    async def _adopt(self, job: JobName, head: Head) -> None:
        try:
            await self._member.show(job, head, self._describe)
        except GoneBackError:
            if job not in self._member.shown():
                await self._member.show_last(job)
            raise

    async def _forget(self, job: JobName) -> None:
        """Removes a job, if it is really gone: the news may be older than a new job of the same name."""
        _, heads = await self._registry.heads()
        if job in heads:
            return
        self._heads.pop(job, None)
        await self._member.remove(job)
        self._failures.pop(job, None)
