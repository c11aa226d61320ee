"""Making all ranks of a job stop at one step: the desks of this node, and the one who asks all nodes."""

from __future__ import annotations

import logging
import os
import secrets
import select
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Protocol

import trio

from tenplexfs.core.snapshot import Head, JobName, NodeName
from tenplexfs.core.stopping import Agreement, Desk, Told, agree
from tenplexfs.errors import ConflictError, TenplexError
from tenplexfs.runtime.tasks import run_all

__all__ = ["StopCalls", "Stopper", "Stops"]

log = logging.getLogger(__name__)

_HOLD_S = 60.0  # a coordinator that died does not hold ranks for longer
_TRY_S = 1.0  # how long to wait for ranks that are not known, before answers go on for a moment
_PAUSE_S = 0.5
_POLL_S = 0.05
_RETRY_S = 0.5
_LOOK_S = 0.5
_COMMIT_S = 5.0  # how long a save that is sealed may take after its processes have ended


class Stops:
    """The desks of this node, one for each generation of a job. Belongs to the trio thread."""

    def __init__(self) -> None:
        self.changed = trio.Event()
        self._desks: dict[tuple[JobName, int], Desk] = {}
        self._held_since_s: dict[tuple[JobName, int], float] = {}
        self._processes: dict[tuple[JobName, int], dict[int, _Process]] = {}

    def ask(
        self,
        job: JobName,
        generation: int,
        now: int,
        rank: int,
        process: str,
        step: int,
        *,
        for_all: bool,
        pid: int,
    ) -> bool | None:
        """Returns whether a rank that was loaded from ``generation`` stops, or None while that is held.

        Args:
            job: Name of the job.
            generation: Of the rank.
            now: Of the job.
            rank: Who asks.
            process: Its process.
            step: The one it asks about.
            for_all: It asks for all ranks.
            pid: Of its process, 0 where that cannot be seen from here.
        """
        where = job, generation
        if generation < now:
            desk = self._desks.get(where)
            stop_at = desk.stop_at if desk is not None else None
            return stop_at is None or step >= stop_at
        for old in [each for each in self._desks if each[0] == job and each[1] < now - 1]:
            del self._desks[old]
            for gone in self._processes.pop(old, {}).values():
                gone.close()
        known = self._processes.setdefault(where, {})
        if rank not in known or known[rank].name != process:
            if rank in known:
                known[rank].close()
            known[rank] = _Process(process, pid)
        known[rank].left = False
        desk = self._desk(where)
        if desk.is_held and trio.current_time() - self._held_since_s[where] > _HOLD_S:
            log.warning("job %s: whoever wanted it to stop is gone; it goes on", job)
            desk.clear()
        return desk.ask(rank, process, step, for_all=for_all)

    def leave(self, job: JobName, generation: int, rank: int, process: str) -> None:
        """Takes note that the connection ended over which a rank asked."""
        found = self._processes.get((job, generation), {}).get(rank)
        if found is not None and found.name == process:
            found.left = True

    def stop_at(self, job: JobName, generation: int) -> int | None:
        """Returns the step at which the job is to stop."""
        desk = self._desks.get((job, generation))
        return None if desk is None else desk.stop_at

    def act(self, job: JobName, generation: int, token: str, action: str, step: int) -> Told:
        """Does "hold", "publish", "release", "clear" or "look", as a coordinator asks; returns what was told.

        To a "look" it tells of the processes that asked: their ranks, and whether all have ended.
        """
        where = job, generation
        desk = self._desk(where)
        told = Told({})
        processes = self._processes.get(where, {})
        if action == "look":
            return Told(dict.fromkeys(processes, step), ended=all(p.has_ended() for p in processes.values()))
        if action == "hold":
            told = desk.hold(token)
            told = Told(told.steps, told.for_all, any(each.has_ended() for each in processes.values()))
            self._held_since_s[where] = trio.current_time()
        elif action == "publish":
            desk.publish(token, step)
        elif action == "release":
            desk.release(token)
        else:
            desk.clear()
        self.changed.set()
        self.changed = trio.Event()
        return told

    def _desk(self, where: tuple[JobName, int]) -> Desk:
        return self._desks.setdefault(where, Desk())


class _Process:
    """A process that asks, and whether it still lives; a number that is used again does not deceive it.

    Attributes:
        left: Its connection ended. It says something of a process that cannot be seen from here.
    """

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.left = False
        try:
            self._fd = os.pidfd_open(pid) if pid else -1
        except OSError:
            self._fd = -1

    def has_ended(self) -> bool:
        """Returns whether it has, as far as anybody can tell."""
        if self._fd < 0:
            return self.left
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Forgets it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class StopCalls(Protocol):
    """Asks the desk of a node, this one or another."""

    async def stop_at(
        self, node: NodeName, job: JobName, generation: int, token: str, action: str, step: int
    ) -> Told:
        """Does ``action`` there; returns what was told."""
        ...


class Stopper:
    """Stops the ranks of a job before it is reconfigured.

    Args:
        base: Returns the head that this node shows of a job, and how many ranks it has.
        changed: Returns what is set when something about a job changes.
        living: The nodes that the registry says are alive; none while it has said nothing.
    """

    def __init__(
        self,
        calls: StopCalls,
        base: Callable[[JobName], tuple[Head, int] | None],
        changed: Callable[[], trio.Event],
        living: Callable[[], Collection[NodeName]] = tuple,
    ) -> None:
        self._calls = calls
        self._base = base
        self._changed = changed
        self._living = living

    async def stop(self, job: JobName, timeout_s: float, say: Callable[[str], None]) -> int | None:
        """Returns the step of the newest save once all ranks were stopped and have saved, or after a while.

        Where no rank asks `should_stop`, it returns at once; soon, where all that asked have ended, or where
        a node is missed: its ranks are gone, and the others cannot finish a step without them.

        Args:
            job: Name of the job.
            timeout_s: How long to wait; then the newest complete step is what there is.
            say: Gets what is waited for.
        """
        found = self._base(job)
        if found is None or timeout_s <= 0:
            return None
        head, ranks = found
        generation, nodes = head.snapshot.generation, head.nodes
        with trio.move_on_after(timeout_s):
            step = await self._agree(job, generation, nodes, ranks)
            if step is None:
                return None
            say(f"the ranks stop at step {step}")
            gone_since_s: float | None = None
            while True:
                changed = self._changed()
                now = self._base(job)
                if now is None or now[0].snapshot.generation != generation:
                    return None
                if now[0].snapshot.step is not None and now[0].snapshot.step >= step:
                    return now[0].snapshot.step
                with trio.move_on_after(_LOOK_S):
                    await changed.wait()
                if not await self._are_gone(job, generation, nodes):
                    gone_since_s = None
                elif gone_since_s is None:
                    gone_since_s = trio.current_time()
                elif trio.current_time() - gone_since_s > _COMMIT_S:
                    say(f"the ranks ended without saving step {step}")
                    return None
        log.warning("job %s: not stopped and saved within %s s", job, timeout_s)
        return None

    async def _are_gone(self, job: JobName, generation: int, nodes: tuple[NodeName, ...]) -> bool:
        """Returns whether all processes that asked have ended, on all nodes."""
        told: list[Told] = []

        async def look(node: NodeName) -> None:
            try:
                told.append(await self._calls.stop_at(node, job, generation, "", "look", 0))
            except TenplexError:
                told.append(Told({0: 0}))  # nobody knows

        await self._each(nodes, look)
        return any(each.steps for each in told) and all(each.ended for each in told if each.steps)

    async def clear(self, job: JobName, generation: int, nodes: tuple[NodeName, ...]) -> None:
        """Ends a stop after which nothing changed, so that new processes run."""
        await self._each(nodes, partial(self._quietly, job, generation, "", "clear", 0))

    async def _agree(
        self, job: JobName, generation: int, nodes: tuple[NodeName, ...], ranks: int
    ) -> int | None:
        token = secrets.token_hex(8)
        step: int | Agreement = Agreement.NOT_ALL_KNOWN
        try:
            while step is Agreement.NOT_ALL_KNOWN:
                if missed := self._missed(nodes):
                    log.warning("job %s: not stopped: %s is missed", job, ", ".join(missed))
                    return None
                with trio.move_on_after(_TRY_S):
                    while step is Agreement.NOT_ALL_KNOWN:
                        step = agree((await self._hold(job, generation, token, nodes)).values(), ranks)
                        if step is Agreement.NOT_ALL_KNOWN:
                            await trio.sleep(_POLL_S)
                if step is Agreement.NOT_ALL_KNOWN:
                    with trio.move_on_after(_TRY_S):  # a node that does not answer is soon missed
                        await self._each(nodes, partial(self._quietly, job, generation, token, "release", 0))
                    await trio.sleep(_PAUSE_S)
        except BaseException:
            with trio.move_on_after(_TRY_S, shield=True):
                await self._each(nodes, partial(self._quietly, job, generation, token, "release", 0))
            raise
        if isinstance(step, Agreement):
            await self._each(nodes, partial(self._quietly, job, generation, token, "release", 0))
            return None
        with trio.CancelScope(shield=True):  # all or nobody
            await self._each(nodes, partial(self._publish, job, generation, token, step))
        return step

    def _missed(self, nodes: tuple[NodeName, ...]) -> list[NodeName]:
        living = self._living()
        return [node for node in nodes if node not in living] if living else []

    async def _hold(
        self, job: JobName, generation: int, token: str, nodes: tuple[NodeName, ...]
    ) -> Mapping[NodeName, Told]:
        told: dict[NodeName, Told] = {}

        async def hold(node: NodeName) -> None:
            told[node] = await self._calls.stop_at(node, job, generation, token, "hold", 0)

        await self._each(nodes, hold)
        return told

    async def _publish(self, job: JobName, generation: int, token: str, step: int, node: NodeName) -> None:
        end_s = trio.current_time() + _HOLD_S / 2
        while True:
            try:
                await self._calls.stop_at(node, job, generation, token, "publish", step)
            except ConflictError:
                # It was restarted, and holds nothing: its ranks, known to be stopped by now, are told so.
                await self._quietly(job, generation, token, "hold", 0, node)
            except TenplexError as error:
                log.warning("job %s: node %s does not hear of the stop: %s", job, node, error)
            else:
                return
            if trio.current_time() > end_s:
                return
            await trio.sleep(_RETRY_S)

    async def _quietly(
        self, job: JobName, generation: int, token: str, action: str, step: int, node: NodeName
    ) -> None:
        try:
            await self._calls.stop_at(node, job, generation, token, action, step)
        except TenplexError as error:
            log.warning("job %s: node %s: %s of its stop: %s", job, node, action, error)

    async def _each(self, nodes: tuple[NodeName, ...], call: Callable[[NodeName], object]) -> None:
        await run_all([partial(call, node) for node in nodes])  # type: ignore[misc]
