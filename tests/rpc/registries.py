"""The kinds of registries, with what time and accidents do to them; all fulfil one contract."""

from __future__ import annotations

from base64 import b64encode
from contextlib import aclosing, asynccontextmanager

from tenplexfs.core.snapshot import Head, SnapshotId
from tenplexfs.rpc.connection import Connection
from tenplexfs.rpc.etcd_client import Etcd
from tenplexfs.rpc.etcd_registry import EtcdRegistry
from tenplexfs.rpc.registry_client import LocalRegistry, RemoteRegistry
from tenplexfs.storage.registry_sqlite import SqliteRegistry
from tests.core.simulation.registry import RegistryCore
from tests.rpc.fakes import running


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def head(generation, step=None, txid=None):
    return Head(
        SnapshotId(generation, step, txid or f"{generation:016x}"), f"digest{generation}", ("n0", "n1")
    )


@asynccontextmanager
async def open_registry(kind, path, clock):
    core = SqliteRegistry(path / "registry.sqlite", clock=clock)
    local = LocalRegistry(core)
    try:
        if kind == "local":
            yield local
            return
        async with running(registry=local) as (address, _, _):
            connection = Connection(address)
            yield RemoteRegistry(connection, deadline_s=5)
            connection.close()
    finally:
        core.close()


class Embedded:
    """The registry in a SQLite file, asked here or over gRPC."""

    def __init__(self, kind, path):
        self.clock = Clock()
        self.open = lambda: open_registry(kind, path, self.clock)

    async def expire(self, job):
        self.clock.now += 10

    async def expire_node(self, node):
        self.clock.now += 10

    @asynccontextmanager
    async def another(self, registry):
        yield registry

    def restart(self):
        self.clock.now = 1.0  # the machine was started again


class Simulated:
    """The one that the simulation of the core runs on."""

    def __init__(self):
        self.clock = Clock()
        self.core = RegistryCore(self.clock)

    @asynccontextmanager
    async def open(self):
        yield LocalRegistry(self.core)

    @asynccontextmanager
    async def another(self, registry):
        yield registry

    async def expire(self, job):
        self.clock.now += 10

    async def expire_node(self, node):
        self.clock.now += 10

    def restart(self):
        self.clock.now = 1.0
        self.core.restart()


class InEtcd:
    def __init__(self, server, prefix):
        self.server = server
        self.prefix = prefix

    @asynccontextmanager
    async def open(self):
        async with aclosing(Etcd([self.server.url])) as etcd:
            yield EtcdRegistry(etcd, prefix=self.prefix)

    async def expire(self, job):
        self.revoke(f"locks/{job}")

    async def expire_node(self, node):
        self.revoke(f"nodes/{node}")

    def revoke(self, name):
        key = b64encode(f"{self.prefix}/{name}".encode()).decode()
        (held,) = self.server.ask("kv/range", {"key": key})["kvs"]
        self.server.ask("lease/revoke", {"ID": held["lease"]})

    def another(self, registry):
        return self.open()

    def restart(self):
        self.server.kill()
        self.server.start()
