"""Nodes without sockets: real stores and members, and a peer that gathers from the other's arrays."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
import trio

from tenplexfs.core.membership import Mandate, Standing
from tenplexfs.core.snapshot import Head, JobName, NodeName, TxId
from tenplexfs.errors import ConflictError, UnavailableError
from tenplexfs.formats import npy
from tenplexfs.rpc.ranges import Scatter
from tenplexfs.rpc.sending import messages_of
from tenplexfs.rpc.wire import FetchRequest
from tenplexfs.runtime.coordinator import Coordinator
from tenplexfs.runtime.importer import Import, import_state
from tenplexfs.runtime.jobs import JobTable
from tenplexfs.runtime.leases import LeaseTable
from tenplexfs.runtime.member import Member
from tenplexfs.runtime.namespace import Control, Namespace, StoreNumbers
from tenplexfs.runtime.orders import Description, StageOrder, StoredPart
from tenplexfs.runtime.protocols import ArraySource, FileContent, Lock, Ranges, RegistryEvent
from tenplexfs.runtime.snapshot import Snapshot
from tenplexfs.storage.store import Store
from tests.states import shard_of as shard_of
from tests.states import tensors_of as tensors_of

JOB = JobName("gpt")
LAYOUT = {
    "format": "tenplexfs-layout",
    "version": 1,
    "mesh": {"pp": 2, "tp": 2},
    "nodes": {"node0": [0, 1], "node1": [2, 3]},
    "tensors": {
        "emb": {
            "shape": [10, 6],
            "dtype": "float32",
            "shard": [{"axis": "tp", "dim": 0, "pad_to": 12}],
            "on": {"pp": 0},
        },
        "layers/{i}/w": {
            "shape": [7, 8],
            "dtype": "bfloat16",
            "count": {"i": 4},
            "shard": [{"axis": "tp", "dim": 1}],
            "on": {"pp": {"by": "i", "owner": [0, 0, 1, 1]}},
        },
        "adam/layers/{i}/w": {
            "like": "layers/{i}/w",
            "dtype": "float32",
            "shard": [{"axis": "tp", "flat": True, "pad_to_multiple": 3}],
        },
        "norm": {"shape": [], "dtype": "float64"},
        "none": {"shape": [0, 3], "dtype": "int8"},
        "head": {"alias": "emb", "on": {"pp": -1}},
    },
}


def layout_json(**changes: object) -> bytes:
    return json.dumps({**LAYOUT, **changes}).encode()


@dataclass
class Peers:
    """A `PeerReader` over arrays in this process.

    Attributes:
        open_arrays: Node to what gives its arrays; a node that is not there does not answer.
    """

    open_arrays: dict[NodeName, Callable[[JobName, TxId], AbstractContextManager[ArraySource]]] = field(
        default_factory=dict
    )
    asked: list[NodeName] = field(default_factory=list)
    message_bytes: int = 37

    async def fetch(
        self,
        node: NodeName,
        job: JobName,
        txid: TxId,
        ranges: Sequence[Ranges],
        write: Callable[[int, bytes | memoryview], None],
        *,
        deadline_s: float,
        patience_s: float | None = None,
    ) -> None:
        self.asked.append(node)
        if node not in self.open_arrays:
            raise UnavailableError(f"node {node}: does not answer")

        def send() -> None:
            request = FetchRequest(job, txid, 0, tuple(ranges), self.message_bytes)
            with self.open_arrays[node](job, txid) as arrays:
                offset = 0
                for data in messages_of(arrays, request):
                    write(offset, data)
                    offset += len(data)

        await trio.to_thread.run_sync(send)


@dataclass
class Handles:
    """Counts what is held."""

    held: dict[tuple[NodeName, JobName, TxId], int] = field(default_factory=dict)

    def hold(self, node: NodeName, job: JobName, txid: TxId) -> None:
        self.held[node, job, txid] = self.held.get((node, job, txid), 0) + 1

    def drop(self, node: NodeName, job: JobName, txid: TxId) -> None:
        self.held[node, job, txid] -= 1

    async def settle(self) -> None:
        await trio.lowlevel.checkpoint()


@dataclass
class Arrays:
    """`LocalArrays` of some ranks, as .npy files in memory."""

    files: Mapping[tuple[int, str], bytes]
    shapes: Mapping[tuple[int, str], tuple[tuple[int, ...], np.dtype]]

    def array(self, rank: int, path: str) -> np.ndarray | None:
        if (rank, path) not in self.files:
            return None
        shape, dtype = self.shapes[rank, path]
        data = self.files[rank, path]
        size = int(np.prod(shape)) * dtype.itemsize
        return np.frombuffer(data[len(data) - size :], dtype).reshape(shape)

    def file(self, rank: int, path: str) -> memoryview | None:
        data = self.files.get((rank, path))
        return None if data is None else memoryview(data)

    def release(self) -> None:
        pass


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a file as the library would; bfloat16 too, which its numpy side does not know."""
    names = {"float32": "F32", "float64": "F64", "bfloat16": "BF16", "int8": "I8", "float16": "F16"}
    header, offset, parts = {}, 0, []
    for name, array in sorted(tensors.items()):
        data = array.tobytes()
        header[name] = {
            "dtype": names[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
        parts.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


async def inline(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Stands in for `runtime.compute.Compute`: the same, in this process."""
    return function(*args, **kwargs)


@dataclass
class MemoryRegistry:
    """A `Registry` in memory.

    Attributes:
        lose_reply: The next compare-and-set does its work and says that it is away.
        away: Nothing answers.
    """

    current: dict[JobName, Head] = field(default_factory=dict)
    events: list[RegistryEvent] = field(default_factory=list)
    locks: dict[JobName, Lock] = field(default_factory=dict)
    tokens: Iterator[int] = field(default_factory=lambda: count(1))
    lose_reply: bool = False
    refuse: bool = False
    away: bool = False
    moved: trio.Event = field(default_factory=trio.Event)

    async def heads(self) -> tuple[int, dict[JobName, Head]]:
        await self._answer()
        return len(self.events), dict(self.current)

    async def look(self, job: JobName) -> Standing:
        await self._answer()
        held = self.locks.get(job)
        return Standing(self.current.get(job), *(() if held is None else (held.owner, held.token)))

    async def lock(self, job: JobName, owner: str, *, ttl_s: float) -> Lock:
        await self._answer()
        held = self.locks.get(job)
        if held is not None and held.owner != owner:
            raise ConflictError(f"job {job}: {held.owner} holds the lock")
        self.locks[job] = Lock(job, owner, next(self.tokens))
        return self.locks[job]

    async def renew(self, lock: Lock, *, ttl_s: float) -> None:
        await self._answer()
        if self.locks.get(lock.job) != lock:
            raise ConflictError(f"job {lock.job}: the lock is lost")

    async def unlock(self, lock: Lock) -> None:
        await self._answer()
        if self.locks.get(lock.job) == lock:
            del self.locks[lock.job]

    async def compare_and_set(self, lock: Lock, expected: Head | None, new: Head | None) -> None:
        await self._answer()
        if self.locks.get(lock.job) != lock or self.current.get(lock.job) != expected or self.refuse:
            raise ConflictError(f"job {lock.job}: the head is another")
        self.current.pop(lock.job, None)
        if new is not None:
            self.current[lock.job] = new
        self.events.append(RegistryEvent(len(self.events) + 1, lock.job, new))
        self.moved.set()
        self.moved = trio.Event()
        if self.lose_reply:
            self.lose_reply = False
            raise UnavailableError("registry: the reply was lost")

    async def watch(self, revision: int) -> AsyncIterator[RegistryEvent]:
        while True:
            moved = self.moved
            for event in self.events[revision:]:
                yield event
                revision = event.revision
            await moved.wait()

    async def _answer(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.away:
            raise UnavailableError("registry: does not answer")


class Node:
    """A daemon without edges."""

    def __init__(
        self,
        name: str,
        path: Path,
        registry: MemoryRegistry,
        peers: Peers,
        calls: Calls,
        limit_bytes: int = 1 << 26,
    ) -> None:
        self.name = NodeName(name)
        self.store = Store.open(path, node=name, limit_bytes=limit_bytes)
        self.tree = Namespace(Control({}, list, {}), lambda: StoreNumbers(1, 0), clock_ns=lambda: 1)
        self.leases = LeaseTable()
        self.member = Member(
            node=self.name,
            store=self.store,
            look=registry.look,
            tree=self.tree,
            peers=peers,
            scatter=Scatter,
            handles=Handles(),
            leases=self.leases,
            compute=inline,
            read_timeout_s=5,
            retain_s=600,
            remote_reads=True,
            grace_s=0,
        )
        peers.open_arrays[self.name] = self.member.open_arrays
        self.coordinator = Coordinator(
            node=self.name,
            registry=registry,
            calls=calls,
            compute=inline,
            endpoints=lambda: dict.fromkeys(calls.nodes, "here"),
            living=lambda: calls.living if calls.living is not None else calls.nodes,
            new_txid=lambda: TxId(f"{next(calls.txids):016x}"),
            clock_ns=lambda: 7,
        )
        self.table = JobTable(self.member, registry, self.coordinator.describe)
        calls.nodes[self.name] = self

    def shown(self, job: JobName = JOB) -> Snapshot:
        return self.member.shown()[job].view

    def close(self) -> None:
        self.store.close()


@dataclass
class Calls:
    """`NodeCalls` to the members of one process.

    Attributes:
        broken: (node, call) that fails.
        living: The nodes that the registry says are alive; None: all.
    """

    nodes: dict[NodeName, Node] = field(default_factory=dict)
    broken: set[tuple[str, str]] = field(default_factory=set)
    txids: Iterator[int] = field(default_factory=lambda: count(1))
    living: set[str] | None = None

    async def stage(self, node: NodeName, order: StageOrder, report: Callable[[int, int], None]) -> None:
        await self._node(node, "stage").member.stage(order, report)

    async def switch(self, node: NodeName, job: JobName, head: Head | None) -> None:
        await self._node(node, "switch").table.switch(job, head)

    async def drop(
        self, node: NodeName, job: JobName, txid: TxId, by: Mandate | None, reason: str = ""
    ) -> None:
        await self._node(node, "drop").member.drop(job, txid, by)

    async def describe(
        self, node: NodeName, job: JobName, txid: TxId, *, patience_s: float | None = None
    ) -> Description:
        await trio.lowlevel.checkpoint()
        return self._node(node, "describe").member.describe(job, txid)

    async def jobs(self, node: NodeName) -> tuple[JobName, ...]:
        await trio.lowlevel.checkpoint()
        return self._node(node, "jobs").member.jobs()

    async def inventory(
        self, node: NodeName, job: JobName, *, patience_s: float | None = None
    ) -> tuple[StoredPart, ...]:
        await trio.lowlevel.checkpoint()
        return self._node(node, "inventory").member.inventory(job)

    async def sums(self, node: NodeName, job: JobName, txid: TxId) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._node(node, "sums").member.sums(job, txid)

    def _node(self, name: NodeName, call: str) -> Node:
        if (name, call) in self.broken or name not in self.nodes:
            raise UnavailableError(f"node {name}: does not answer")
        return self.nodes[name]


class Cluster:
    """Nodes node0, node1, ... of one process and one registry."""

    def __init__(self, path: Path, count: int = 2) -> None:
        self.path = path
        self.registry, self.peers, self.calls = MemoryRegistry(), Peers(message_bytes=4096), Calls()
        self.nodes = [self.start(f"node{n}") for n in range(count)]

    def start(self, name: str, **limits: int) -> Node:
        return Node(name, self.path / name, self.registry, self.peers, self.calls, **limits)

    def restart(self, number: int, **limits: int) -> Node:
        self.nodes[number].close()
        self.nodes[number] = self.start(f"node{number}", **limits)
        return self.nodes[number]

    def kill(self, number: int) -> None:
        """Takes a node away, its store too."""
        node = self.nodes[number]
        node.close()
        shutil.rmtree(self.path / node.name)
        del self.calls.nodes[node.name], self.peers.open_arrays[node.name]

    async def load(
        self, tensors: Mapping[str, np.ndarray], *, step: int = 0, by: int = 0, **asked: object
    ) -> Head:
        file = self.path / "model.safetensors"
        write_safetensors(file, {path.replace("/", "."): array for path, array in tensors.items()})
        node = self.nodes[by]
        return await import_state(
            Import(JOB, file, step, **asked),
            coordinator=node.coordinator,
            member=node.member,
            compute=inline,
            new_txid=lambda: TxId(f"{next(self.calls.txids):016x}"),
            report=lambda progress: None,
        )

    async def check(self, whole: Mapping[str, np.ndarray]) -> None:
        """Every file of every rank, and every whole tensor, read on every node."""
        for node in self.nodes:
            view = node.shown()
            for rank in range(view.ptc.world_size):
                for path in view.ptc.rank_paths(rank):
                    tensor = view.ptc.tensors[path]
                    local = shard_of(view.ptc, rank, path, whole[tensor.path])
                    found = await self.read(view.open_shard(rank, path))
                    assert found == npy.header(local.shape, tensor.dtype) + local.tobytes(), (rank, path)
            for path, tensor in view.ptc.tensors.items():
                found = await self.read(view.open_full(path))
                assert found == npy.header(tensor.shape, tensor.dtype) + whole[tensor.path].tobytes(), path

    async def read(self, content: FileContent) -> bytes:
        data = content.read(0, content.size)
        if data is None:
            data = await content.read_wait(0, content.size)
        content.close()
        return bytes(data)

    def close(self) -> None:
        for node in self.nodes:
            node.close()
