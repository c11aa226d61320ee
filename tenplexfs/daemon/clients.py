"""The daemon's side of training processes: their saves, their loads, and where they stop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

import trio

from tenplexfs.core.snapshot import Head, JobName, NodeName
from tenplexfs.daemon.config import Config
from tenplexfs.daemon.node_calls import Desks, Nodes
from tenplexfs.daemon.view import VERSION
from tenplexfs.errors import InvalidError
from tenplexfs.rpc.peer_client import PeerClient
from tenplexfs.runtime.attempts import Base, SaveRequest
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.coordinator import Coordinator
from tenplexfs.runtime.jobs import JobTable
from tenplexfs.runtime.member import Member
from tenplexfs.runtime.orders import Progress, Report
from tenplexfs.runtime.planning import layout_of_only_rank
from tenplexfs.runtime.save_leader import SaveLeader
from tenplexfs.runtime.saving import Saves
from tenplexfs.runtime.stopping import Stopper, Stops
from tenplexfs.unix.regions import SharedRegions
from tenplexfs.unix.server import UnixServer
from tenplexfs.unix.session import ClientSession, Parts

__all__ = ["Clients"]

_SAVE_PATIENCE_S = 600.0
_STOP_TIMEOUT_S = 60.0


class Clients:
    """Composes what training processes need; `run` serves them.

    Attributes:
        stops, saves: Of this node.
    """

    def __init__(
        self,
        *,
        config: Config,
        member: Member,
        table: JobTable,
        coordinator: Coordinator,
        compute: Compute,
        nodes: Nodes,
        client: PeerClient,
        state: Callable[[JobName], str],
        living: Callable[[], Collection[NodeName]],
        nursery: trio.Nursery,
        clock_ns: Callable[[], int],
    ) -> None:
        self.stops = Stops()
        self._config = config
        self._member = member
        self._coordinator = coordinator
        self._compute = compute
        self._stopper = Stopper(
            Desks(config.node, client, self.stops), self._base_of_stop, lambda: table.changed, living
        )
        saves = self.saves = member.saves = Saves(
            node=config.node,
            store=member.store,
            base=self.base,
            lead=SaveLeader(coordinator, nodes, node=config.node, patience_s=_SAVE_PATIENCE_S),
            nursery=nursery,
            clock_ns=clock_ns,
        )
        parts = Parts(
            config.node,
            None if config.mount is None else str(config.mount),
            VERSION,
            member,
            table,
            saves,
            self.stops,
            state,
            self._create,
            lambda job, layout: coordinator.create(job, layout, b"{}"),
            SharedRegions(),
        )
        self.run = UnixServer(config.socket, lambda pid: ClientSession(parts, pid)).run

    def stop_text(self, job: JobName) -> bytes:
        """Returns what the file ``stop`` of a job says: the step to stop at, or "-"."""
        shown = self._member.shown().get(job)
        step = None if shown is None else self.stops.stop_at(job, shown.head.snapshot.generation)
        return b"-\n" if step is None else b"%d\n" % step

    async def stopped(
        self,
        job: JobName,
        timeout_s: float,
        report: Report,
        switch: Callable[[Callable[[Head], Awaitable[None]]], Awaitable[Head]],
    ) -> Head:
        """Returns what ``switch`` does, which is given what stops the ranks of the head it found.

        When the switch fails, new processes of the job are not stopped.

        Raises:
            InvalidError: The timeout is none.
        """
        if not timeout_s >= 0:  # also what is no number
            raise InvalidError(f"job {job}: stop timeout: need seconds >= 0, got {timeout_s}")
        stopped: list[Head] = []

        async def stop(head: Head) -> None:
            def say(message: str) -> None:
                stopped.append(head)
                report(Progress("stopping", message))

            await self._stopper.stop(job, timeout_s or _STOP_TIMEOUT_S, say)

        try:
            return await switch(stop)
        except BaseException:
            if stopped:
                with trio.move_on_after(_STOP_TIMEOUT_S / 6, shield=True):
                    await self._stopper.clear(job, stopped[0].snapshot.generation, stopped[0].nodes)
            raise

    def base(self, job: JobName) -> Base | None:
        """Returns what a save of a job begins with, or None where there is no such job."""
        shown = self._member.shown().get(job)
        if shown is None:
            return None
        return Base(shown.head, shown.view.ptc, shown.view.layout_json, shown.settings_json)

    def _base_of_stop(self, job: JobName) -> tuple[Head, int] | None:
        shown = self._member.shown().get(job)
        return None if shown is None else (shown.head, shown.view.ptc.world_size)

    async def _create(self, request: SaveRequest) -> None:
        """Makes the job of a first save by its only rank, on a lone node."""
        if self._config.peers:
            raise InvalidError(
                f"job {request.job}: no such job, and other nodes are known; `tenplexfs job create` says "
                "which node has which rank"
            )
        given = request.tensors
        kinds = [(shape, dtype) for dtype, shape in given.kinds]
        tensors = {path: kinds[kind] for path, kind in zip(given.paths, given.of, strict=True)}
        layout = await self._compute(layout_of_only_rank, tensors, self._config.node)
        await self._coordinator.create(request.job, layout, b"{}")
