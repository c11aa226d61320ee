"""The daemon: its parts, put together in one nursery, and their life.

Up: store, registry, peers, jobs, mount, ready. Down, within five seconds whatever hangs: the mount first, so
that nobody waits for a process that is going; then the calls, then the store.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import trio

from tenplexfs.core.snapshot import NodeInfo, NodeName, TxId
from tenplexfs.daemon.clients import Clients
from tenplexfs.daemon.config import Config, etcd_address
from tenplexfs.daemon.control_files import control_files
from tenplexfs.daemon.dataset_calls import SampleCalls, SampleService
from tenplexfs.daemon.dataset_service import DatasetService
from tenplexfs.daemon.deciding import Deciding
from tenplexfs.daemon.draining import Draining
from tenplexfs.daemon.joining import join
from tenplexfs.daemon.keeping import Keeping
from tenplexfs.daemon.logs import setup_logs
from tenplexfs.daemon.membership import Meeting, Members
from tenplexfs.daemon.memory import opened_store
from tenplexfs.daemon.node_calls import Leasing, Nodes
from tenplexfs.daemon.notify import sd_notify
from tenplexfs.daemon.peer_service import PeerService
from tenplexfs.daemon.service import Service
from tenplexfs.daemon.transactions import Transactions
from tenplexfs.daemon.view import VERSION, Metrics, View
from tenplexfs.daemon.watchdog import check_mount, watch
from tenplexfs.daemon.web import start_http
from tenplexfs.daemon.webhooks import Webhooks
from tenplexfs.fuse.mount import Mount
from tenplexfs.rpc import server
from tenplexfs.rpc.connection import Connection
from tenplexfs.rpc.etcd_client import Etcd
from tenplexfs.rpc.etcd_registry import EtcdRegistry
from tenplexfs.rpc.peer_client import PeerClient
from tenplexfs.rpc.ranges import Scatter
from tenplexfs.rpc.registry_client import LocalRegistry, RemoteRegistry
from tenplexfs.rpc.registry_service import ServedRegistry
from tenplexfs.rpc.tls import Access, Identity, read_token
from tenplexfs.runtime.belonging import OwnRegistry
from tenplexfs.runtime.compute import Compute
from tenplexfs.runtime.coordinator import Coordinator
from tenplexfs.runtime.datasets import Datasets
from tenplexfs.runtime.heads import HeadMover
from tenplexfs.runtime.jobs import JobTable
from tenplexfs.runtime.leases import LeaseKeeper, LeaseTable
from tenplexfs.runtime.living import Living
from tenplexfs.runtime.member import Member
from tenplexfs.runtime.namespace import Namespace, StoreNumbers
from tenplexfs.runtime.rebuilding import Rebuilder
from tenplexfs.storage.directory import CLUSTER, INDEXES, REGISTRY
from tenplexfs.storage.registry_sqlite import SqliteRegistry
from tenplexfs.storage.samples.recipe import make_reader
from tenplexfs.storage.store import Store

__all__ = ["run"]

log = logging.getLogger(__name__)

_END_S = 4.5
_SWITCH_INTERVAL_S = 0.0005  # a thread that computes holds up a read by less


def run(config: Config) -> int:
    """Serves until a signal or a request to stop; returns the exit status.

    Raises:
        TenplexError: It cannot start; one line that says why.
    """
    setup_logs()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # comes when somebody opens what a lease is just tested on
    try:
        trio.run(_serve, config)
    except BaseExceptionGroup as group:
        raise _only(group) from group
    return 0


def _only(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup) and len(group.exceptions) == 1:
        group = group.exceptions[0]
    return group


async def _serve(config: Config) -> None:
    stop = trio.Event()
    async with trio.open_nursery() as signals:
        await signals.start(_listen_for_signals, stop)
        with opened_store(config) as store, _compute() as compute:
            async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
                await _start(config, store, compute, nursery, stack, stop)
                sd_notify("READY=1")
                log.info("node %s: ready, tenplexfs %s, pid %d", config.node, VERSION, os.getpid())
                await stop.wait()
                sd_notify("STOPPING=1")
                log.info("node %s: stopping", config.node)
                end = threading.Timer(_END_S, _end_now)
                end.daemon = True
                end.start()
                await stack.aclose()
                nursery.cancel_scope.cancel()
        end.cancel()
        signals.cancel_scope.cancel()
    log.info("node %s: ended", config.node)


async def _start(
    config: Config,
    store: Store,
    compute: Compute,
    nursery: trio.Nursery,
    stack: AsyncExitStack,
    stop: trio.Event,
) -> None:
    """Starts every part; ``stack`` ends what has an order to end in, ``nursery`` the rest."""
    access = _access(config)
    config = await join(config, access)
    client = PeerClient(config.peers, credentials=access.channel, context=access.context, token=access.token)
    stack.callback(client.close)
    named, own_registry = _registry(config, access, stack)
    registry = OwnRegistry(
        named,
        config.store / CLUSTER,
        has_state=lambda: any(stored.committed for stored in store.snapshots()),
        new_name=_new_txid,
    )
    given = () if config.join is not None else config.peers
    nodes = Nodes(config.node, client, {config.node: config.advertise, **config.peers}, given)
    leases, keeper, metrics = LeaseTable(), LeaseKeeper(Leasing(client)), Metrics()
    tree = Namespace(
        control_files(config, lambda: view, lambda: clients),
        lambda: StoreNumbers(store.limit_bytes, store.used_bytes),
        clock_ns=time.time_ns,
    )
    datasets = Datasets(
        config.store / INDEXES,
        make_reader(),
        SampleCalls(config.node, client, nodes.endpoints),
        here=config.node,
        nursery=nursery,
        window_bytes=config.window_bytes,
        timeout_s=config.read_timeout_s,
    )
    stack.callback(datasets.close)
    datasets.keep([stored.settings_json for stored in store.snapshots()])
    member = nodes.member = Member(
        node=config.node,
        store=store,
        look=registry.look,
        tree=tree,
        peers=client,
        scatter=Scatter,
        handles=keeper,
        leases=leases,
        compute=compute,
        read_timeout_s=config.read_timeout_s,
        retain_s=config.retain_s,
        remote_reads=config.remote_reads,
        transfer_bytes=config.transfer_bytes,
        spill=config.spill,
        datasets=datasets,
    )
    me = NodeInfo(config.node, config.advertise, store.incarnation, VERSION)
    living = Living(registry, me)
    if own_registry is None:  # else whoever has this name is in another cluster
        await living.claim()
    coordinator = Coordinator(
        node=config.node,
        registry=registry,
        calls=nodes,
        compute=compute,
        endpoints=nodes.endpoints,
        living=living.nodes,
        new_txid=_new_txid,
        clock_ns=time.time_ns,
    )
    table = nodes.table = JobTable(member, registry, coordinator.describe)

    def heard() -> None:
        nodes.hear(living.nodes())
        table.touch()

    living.heard = heard
    webhooks = Webhooks(nursery, insecure=config.insecure)
    transactions = Transactions(nursery, table.touch, lambda ended: webhooks.tell(*view.event(ended)))
    view = View(config, member, table, transactions, metrics)
    clients = Clients(
        config=config,
        member=member,
        table=table,
        coordinator=coordinator,
        compute=compute,
        nodes=nodes,
        client=client,
        state=view.state,
        living=living.nodes,
        nursery=nursery,
        clock_ns=time.time_ns,
    )
    keeping = Keeping(
        config=config,
        member=member,
        table=table,
        coordinator=coordinator,
        compute=compute,
        nodes=nodes,
        client=client,
        scatter=Scatter,
        datasets=datasets,
        living=living.nodes,
        clock_ns=time.time_ns,
    )
    view.keeping = keeping
    deciding = Deciding(node=config.node, coordinator=coordinator, compute=compute, clients=clients)
    members = Members(
        config=config,
        nodes=nodes,
        living=living,
        member=member,
        table=table,
        compute=compute,
        transactions=transactions,
        view=view,
        draining=Draining(
            coordinator=coordinator,
            compute=compute,
            clients=clients,
            deciding=deciding,
            living=living.nodes,
            heads=table.heads,
        ),
        nursery=nursery,
    )
    rebuilder = Rebuilder(
        node=config.node,
        heads=HeadMover(registry),
        calls=nodes,
        compute=compute,
        recovery=coordinator.recovery,
        nodes=lambda: nodes.endpoints().keys(),
    )
    service = Service(
        config=config,
        member=member,
        table=table,
        coordinator=coordinator,
        compute=compute,
        transactions=transactions,
        view=view,
        metrics=metrics,
        new_txid=_new_txid,
        stop=stop.set,
        clients=clients,
        deciding=deciding,
        nodes=nodes,
        keeping=keeping,
        rebuilder=rebuilder,
    )
    peer = PeerService(
        member=member,
        table=table,
        leases=leases,
        metrics=metrics,
        nursery=nursery,
        learn=nodes.learn,
        stops=clients.stops,
        shares=keeping.shares,
    )
    await stack.enter_async_context(
        server.serve(
            nursery,
            control=service,
            peer=peer,
            ranges=peer,
            local=service,
            datasets=DatasetService(
                node=config.node,
                datasets=datasets,
                coordinator=coordinator,
                transactions=transactions,
                view=view,
                nursery=nursery,
            ),
            samples=SampleService(datasets),
            members=members,
            meeting=Meeting(config, nodes, members),
            registry=own_registry,
            listen=config.listen,
            socket=_grpc_socket(config),
            credentials=access.server,
            context=access.server_context,
            data_port=config.data_port,
            token=access.token,
            node=config.node,
        )
    )
    nursery.start_soon(keeper.run)
    nursery.start_soon(member.run)
    await nursery.start(table.run)
    nursery.start_soon(living.run)
    stack.push_async_callback(living.withdraw)
    await nursery.start(clients.run)
    nursery.start_soon(keeping.run)
    await start_http(config, nursery, member, clients, nodes.endpoints, access, _new_txid)
    if config.mount is not None:
        mount = await stack.enter_async_context(Mount(tree, config.mount, allow_other=config.allow_other))
        nursery.start_soon(_stop_when, mount.ended, stop)
        await check_mount(mount.path)
    nursery.start_soon(watch, config.mount)


def _access(config: Config) -> Access:
    identity = None
    if config.tls is not None:
        identity = Identity.load(config.tls, config.node)
        identity.check_hosts(config.node, config.addresses())
    return Access(identity, None if config.token_file is None else read_token(config.token_file))


def _registry(
    config: Config, access: Access, stack: AsyncExitStack
) -> tuple[ServedRegistry, ServedRegistry | None]:
    """Returns the registry, and again when this daemon is the one that serves it."""
    if (address := etcd_address(config.registry)) is not None:
        etcd = Etcd(address.endpoints, tls=access.context)
        stack.push_async_callback(etcd.aclose)
        return EtcdRegistry(etcd, prefix=address.prefix), None
    if config.registry != config.node:
        peer = config.peers[NodeName(config.registry)]
        connection = Connection(peer, credentials=access.channel, token=access.token, node=config.registry)
        stack.callback(connection.close)
        return RemoteRegistry(connection), None
    directory = config.store / REGISTRY
    directory.mkdir(mode=0o700, exist_ok=True)
    core = SqliteRegistry(directory / "registry.sqlite3")
    stack.callback(core.close)
    own = LocalRegistry(core)
    return own, own


async def _stop_when(ended: trio.Event, stop: trio.Event) -> None:
    await ended.wait()
    if not stop.is_set():
        log.warning("the mount was taken away; ending")
        stop.set()


async def _listen_for_signals(
    stop: trio.Event, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
        task_status.started()
        async for number in received:
            log.info("got %s", signal.Signals(number).name)
            stop.set()


def _end_now() -> None:
    log.error("some part does not end; leaving without it")
    os._exit(1)


def _new_txid() -> TxId:
    return TxId(secrets.token_hex(8))


def _grpc_socket(config: Config) -> Path:
    config.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return config.socket.with_name(config.socket.name + ".grpc")


@contextmanager
def _compute() -> Iterator[Compute]:
    compute = Compute()
    try:
        yield compute
    finally:
        compute.close()
