"""The Registry service, told what a fuzzer says, one call after the other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import trio

from tenplexfs._pb import registry_pb2
from tenplexfs.core.snapshot import Head, NodeInfo, SnapshotId
from tenplexfs.rpc.connection import SERVICES
from tenplexfs.rpc.messages import head_to_pb, node_to_pb


def caller() -> tuple[Callable[[bytes], object], list[bytes]]:
    """Returns what makes a call of bytes, a method's number first, and good calls."""
    from tenplexfs.rpc.registry_client import LocalRegistry
    from tenplexfs.rpc.registry_service import RegistryService
    from tenplexfs.rpc.server import _decoder, _python_name
    from tenplexfs.storage.registry_sqlite import SqliteRegistry

    directory = tempfile.mkdtemp()
    service = RegistryService(LocalRegistry(SqliteRegistry(Path(directory) / "registry.sqlite3")))
    methods = [method for method in SERVICES["Registry"].methods if not method.server_streaming]

    def call(data: bytes) -> None:
        method = methods[data[0] % len(methods) if data else 0]
        request = _decoder(method.input_type)(data[1:])
        trio.run(getattr(service, _python_name(method.name)), request)

    head = head_to_pb(Head(SnapshotId(1, 5, "0" * 16), "ab", ("node0",)))
    node = node_to_pb(NodeInfo("node0", "127.0.0.1:1", "ab", "1"))
    good = {
        "Lock": registry_pb2.LockRequest(job="gpt", owner="node0", ttl_s=5),
        "Unlock": registry_pb2.UnlockRequest(job="gpt", owner="node0", token=1),
        "CompareAndSet": registry_pb2.CompareAndSetRequest(job="gpt", owner="node0", token=1, new=head),
        "Announce": registry_pb2.AnnounceRequest(info=node, ttl_s=5),
    }
    numbers = {method.name: number for number, method in enumerate(methods)}
    return call, [bytes([numbers[name]]) + bytes(each.SerializeToString()) for name, each in good.items()]
