"""Which nodes live: this one says that it does, and hears of the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import trio

from tenplexfs.core.snapshot import NodeInfo, NodeName
from tenplexfs.errors import ExistsError, TenplexError
from tenplexfs.runtime.protocols import NodeRegistry

__all__ = ["Living"]

log = logging.getLogger(__name__)

_TTL_S = 5.0  # said again thrice in it; under load no word came more than 0.2 s late
_RETRY_S = 1.0
_WITHDRAW_S = 1.0
_ASK_S = 2.0
_LOOK_S = 0.5


class Living:
    """The living nodes, as the registry knows them. Belongs to the trio thread.

    Args:
        me: This node, announced as long as `run` runs.
        ttl_s: A daemon that says nothing for so long is taken for dead.

    Attributes:
        heard: Called after each change of `nodes`.
    """

    def __init__(self, registry: NodeRegistry, me: NodeInfo, *, ttl_s: float = _TTL_S) -> None:
        self.heard: Callable[[], None] = lambda: None
        self._registry = registry
        self._me = me
        self._ttl_s = ttl_s
        self._nodes: Mapping[NodeName, NodeInfo] = {}
        self._scope = trio.CancelScope()

    def nodes(self) -> Mapping[NodeName, NodeInfo]:
        """Returns them by name, as last heard of; while the registry is away that may be long ago."""
        return self._nodes

    async def claim(self) -> None:
        """Returns once no other daemon has this node's name, or the registry does not say.

        One that was here is this one's past; one elsewhere may be, until its time is over.

        Raises:
            ExistsError: It lives on.
        """
        end_s = trio.current_time() + 1.5 * self._ttl_s
        is_told = False
        while (other := await self._elsewhere()) is not None:
            if trio.current_time() > end_s:
                raise ExistsError(
                    f"node {self._me.node}: a daemon of this name lives at {other.endpoint}, and this is "
                    f"{self._me.endpoint}: stop that one, or give this one another --node"
                )
            if not is_told:
                is_told = True
                log.warning("node %s: waits for the one at %s to be gone", self._me.node, other.endpoint)
            await trio.sleep(_LOOK_S)

    async def _elsewhere(self) -> NodeInfo | None:
        try:
            with trio.move_on_after(_ASK_S):
                other = (await self._registry.nodes()).get(self._me.node)
                return None if other is None or other.endpoint == self._me.endpoint else other
        except TenplexError as error:
            log.info("node %s: whether its name is free: %s", self._me.node, error)
        return None

    async def run(self) -> None:
        """Announces this node and listens, until cancelled or withdrawn."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._announce)
                async for living in self._registry.watch_nodes():
                    self._nodes = living
                    self.heard()

    async def withdraw(self) -> None:
        """Ends `run`, and tells the others not to wait for this node."""
        self._scope.cancel()
        with trio.move_on_after(_WITHDRAW_S):
            try:
                await self._registry.withdraw(self._me)
            except TenplexError as error:  # its time will be over
                log.info("node %s: not withdrawn: %s", self._me.node, error)

    async def _announce(self) -> None:
        is_known = False
        while True:
            try:
                await self._registry.announce(self._me, ttl_s=self._ttl_s)
            except TenplexError as error:
                if is_known:
                    log.warning("node %s: could not be announced: %s", self._me.node, error)
                is_known = False
                await trio.sleep(_RETRY_S)
                continue
            is_known = True
            await trio.sleep(self._ttl_s / 3)
