"""Finding the other daemons by one of them, or by a name that stands for all, before this one starts."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace

import trio

from tenplexfs._pb import members_pb2
from tenplexfs.core.snapshot import NodeName, check_node_name
from tenplexfs.daemon.config import Config, etcd_address
from tenplexfs.errors import TenplexError, UnavailableError
from tenplexfs.rpc.connection import Connection
from tenplexfs.rpc.threads import in_thread
from tenplexfs.rpc.tls import Access

__all__ = ["join"]

log = logging.getLogger(__name__)

_PATIENCE_S = 60.0
_TRY_S = 3.0
_PAUSE_S = 0.5
_MOST_ADDRESSES = 1024


async def join(config: Config, access: Access, *, patience_s: float = _PATIENCE_S) -> Config:
    """Returns ``config`` with the peers and the registry that those know whom it says to ask.

    A node that serves the registry itself, or has it in etcd, waits for nobody: the others come to it.

    Raises:
        UnavailableError: Nobody who knows the registry answers within ``patience_s``.
    """
    if config.join is None:
        return config
    failure = "no answer"
    end_s = trio.current_time() + patience_s
    while True:
        peers: dict[NodeName, str] = {}
        registry = config.registry
        for address in await _addresses(config.join):
            if address in (config.listen, config.advertise):
                continue
            try:
                reply = await _meet(address, config, access)
            except TenplexError as error:
                failure = f"{address}: {error.message}"
                continue
            found = {check_node_name(node): endpoint for node, endpoint in reply.endpoints.items()}
            peers |= {node: endpoint for node, endpoint in found.items() if node != config.node}
            registry = registry or reply.registry
        if registry and (registry in (config.node, *peers) or etcd_address(registry) is not None):
            log.info("node %s: joined %s; registry %s", config.node, ", ".join(peers) or "nobody", registry)
            return replace(config, peers=peers, registry=registry)
        if trio.current_time() > end_s:
            raise UnavailableError(
                f"join {config.join}: nobody who knows the registry answered within {patience_s:g} s "
                f"({failure}); is a daemon there, or give --registry"
            )
        await trio.sleep(_PAUSE_S)


async def _meet(address: str, config: Config, access: Access) -> members_pb2.MeetReply:
    connection = Connection(address, credentials=access.channel, token=access.token)
    request = members_pb2.MeetRequest(node=config.node)
    try:
        reply: members_pb2.MeetReply = await in_thread(
            lambda cancel: connection.call("Meeting/Meet", request, deadline_s=_TRY_S, cancel=cancel)
        )
    finally:
        connection.close()
    return reply


async def _addresses(join: str) -> list[str]:
    """Returns ``host:port`` of those to ask."""
    name = join.removeprefix("dns:")
    if name == join:
        return [name]
    host, _, port = name.rpartition(":")
    try:
        found = await trio.socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:  # in Kubernetes a name appears with the first pod that is ready
        log.info("join %s: %s", join, error)
        return []
    hosts = dict.fromkeys(str(address[4][0]) for address in found)
    return [f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts][:_MOST_ADDRESSES]
