"""Puts the HTTP edge together, for Tenplex's clients."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import trio

from tenplexfs.core.snapshot import NodeName
from tenplexfs.daemon.clients import Clients
from tenplexfs.daemon.config import Config
from tenplexfs.http.edge import Edge
from tenplexfs.http.server import HttpServer
from tenplexfs.rpc.tls import Access
from tenplexfs.runtime.incoming import Incoming
from tenplexfs.runtime.member import Member

__all__ = ["start_http"]


async def start_http(
    config: Config,
    nursery: trio.Nursery,
    member: Member,
    clients: Clients,
    endpoints: Callable[[], Mapping[NodeName, str]],
    access: Access,
    new_token: Callable[[], str],
) -> None:
    """Serves where the configuration says so, until ``nursery`` ends; returns once it listens.

    Raises:
        ExistsError: The port is in use.
    """
    if config.http is None:
        return
    incoming = Incoming(
        node=member.node,
        store=member.store,
        saves=clients.saves,
        base=clients.base,
        nursery=nursery,
        clock_ns=time.time_ns,
        new_token=new_token,
    )
    nursery.start_soon(incoming.run)
    edge = Edge(member, incoming, member.node, endpoints)
    server = HttpServer(config.http, edge, context=access.server_context, token=access.token)
    await nursery.start(server.run)
