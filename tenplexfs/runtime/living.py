"""Which nodes live: this one says that it does, and hears of the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import trio

from tenplexfs.core.snapshot import NodeInfo, NodeName
from tenplexfs.errors import TenplexError
from tenplexfs.runtime.protocols import NodeRegistry

__all__ = ["Living"]

log = logging.getLogger(__name__)

_TTL_S = 10.0
_RETRY_S = 1.0
_WITHDRAW_S = 1.0


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
