"""Puts the HTTP edge together, for Tenplex's clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import trio

from tenplexfs.core.snapshot import NodeName
from tenplexfs.daemon.clients import Clients
from tenplexfs.http.edge import Edge
from tenplexfs.http.server import HttpServer
from tenplexfs.rpc.tls import Access
from tenplexfs.runtime.incoming import Incoming
from tenplexfs.runtime.member import Member

__all__ = ["serve_http"]


async def serve_http(
    address: str,
    *,
    member: Member,
    clients: Clients,
    nursery: trio.Nursery,
    endpoints: Callable[[], Mapping[NodeName, str]],
    access: Access,
    new_token: Callable[[], str],
    clock_ns: Callable[[], int],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves at ``address`` until cancelled; started once it listens.

    Raises:
        ExistsError: The port is in use.
    """
    incoming = Incoming(
        node=member.node,
        store=member.store,
        saves=clients.saves,
        base=clients.base,
        nursery=nursery,
        clock_ns=clock_ns,
        new_token=new_token,
    )
    nursery.start_soon(incoming.run)
    edge = Edge(member, incoming, member.node, endpoints)
    server = HttpServer(address, edge, context=access.server_context, token=access.token)
    await server.run(task_status=task_status)
