from __future__ import annotations

import io
import json
from contextlib import nullcontext

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tenplexfs.core.build import build_ptc
from tenplexfs.core.dtypes import dtype_of
from tenplexfs.core.snapshot import NodeName, SnapshotId, TxId
from tenplexfs.errors import NotFoundError, PreconditionError, TimedOutError, UnavailableError
from tenplexfs.formats import npy
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.runtime.fetching import Fetcher
from tenplexfs.runtime.protocols import FileContent
from tenplexfs.runtime.snapshot import Snapshot, rank_nodes
from tests.runtime.cluster import JOB, Arrays, Handles, Peers, layout_json, shard_of, tensors_of

TXID = TxId("00000000000000ab")


class World:
    """One snapshot on two nodes; ``here`` reads the rest from the other."""

    def __init__(self, here: str, *, hide: bool = False, allowed: bool = True, **changes: object) -> None:
        text = layout_json(**changes)
        self.ptc = build_ptc(parse_layout(text))
        self.whole = tensors_of(self.ptc)
        self.peers, self.handles = Peers(), Handles()
        local = {}
        for node, ranks in self.ptc.nodes.items():
            arrays = self.arrays(ranks if not hide else ())
            self.peers.open_arrays[NodeName(node)] = lambda job, txid, arrays=arrays: nullcontext(arrays)
            local[node] = arrays
        fetcher = Fetcher(
            job=JOB,
            txid=TXID,
            rank_nodes=rank_nodes(self.ptc),
            here=NodeName(here),
            peers=self.peers,
            handles=self.handles,
            timeout_s=5.0,
            allowed=allowed,
        )
        self.view = Snapshot(
            job=JOB,
            snapshot=SnapshotId(1, 0, TXID),
            layout_json=text,
            layout_digest="d",
            ptc=self.ptc,
            created_ns=1,
            arrays=local.get(here) or self.arrays(()),
            fetcher=fetcher,
        )

    def arrays(self, ranks: tuple[int, ...]) -> Arrays:
        files, shapes = {}, {}
        for rank in ranks:
            for path in self.ptc.rank_paths(rank):
                tensor = self.ptc.tensors[path]
                local = shard_of(self.ptc, rank, path, self.whole[tensor.path])
                files[rank, path] = npy.header(local.shape, tensor.dtype) + local.tobytes()
                shapes[rank, path] = (local.shape, dtype_of(tensor.dtype))
        return Arrays(files, shapes)

    def shard_file(self, rank: int, path: str) -> bytes:
        tensor = self.ptc.tensors[path]
        local = shard_of(self.ptc, rank, path, self.whole[tensor.path])
        return npy.header(local.shape, tensor.dtype) + local.tobytes()

    def full_file(self, path: str) -> bytes:
        tensor = self.ptc.tensors[path]
        return npy.header(tensor.shape, tensor.dtype) + self.whole[tensor.path].tobytes()


def read(content: FileContent, offset: int, size: int) -> bytes:
    async def wait() -> bytes:
        data = content.read(offset, size)
        return bytes(data if data is not None else await content.read_wait(offset, size))

    return trio.run(wait)


@pytest.mark.parametrize("here", ["node0", "node1", "elsewhere"])
def test_every_file_of_every_rank_is_whole_from_any_node(here):
    world = World(here)
    for rank in range(world.ptc.world_size):
        for path in world.ptc.rank_paths(rank):
            content = world.view.open_shard(rank, path)
            expected = world.shard_file(rank, path)
            assert content.size == len(expected)
            assert read(content, 0, content.size + 10) == expected, (rank, path)
            content.close()
    for path in world.ptc.tensors:
        content = world.view.open_full(path)
        assert read(content, 0, content.size) == world.full_file(path), path
        content.close()
    assert not any(world.handles.held.values())


def test_numpy_reads_what_is_served():
    world = World("node0")
    content = world.view.open_full("layers/3/w")
    array = np.load(io.BytesIO(read(content, 0, content.size)))
    assert array.dtype == np.dtype("V2")
    assert array.tobytes() == world.whole["layers/3/w"].tobytes()


def test_what_is_here_is_read_at_once_and_without_a_peer():
    world = World("node0")
    assert world.view.open_shard(1, "emb").read(0, 1 << 20) is not None
    full = world.view.open_full("emb")
    assert bytes(full.read(0, 1 << 20) or b"") == world.full_file("emb")
    assert world.view.open_full("layers/3/w").read(0, 1 << 20) is None
    assert world.peers.asked == []


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_run_of_bytes_is_right(data):
    world = World(data.draw(st.sampled_from(["node0", "node1"])))
    path = data.draw(st.sampled_from(sorted(world.ptc.tensors)))
    expected, content = world.full_file(path), world.view.open_full(path)
    rank = data.draw(st.sampled_from([r for r in range(4) if path in world.ptc.rank_paths(r)]))
    if data.draw(st.booleans()):
        expected, content = world.shard_file(rank, path), world.view.open_shard(rank, path)
    offset = data.draw(st.integers(0, len(expected)))
    size = data.draw(st.integers(0, len(expected)))
    assert read(content, offset, size) == expected[offset : offset + size]


def test_a_replica_that_answers_stands_in_for_one_that_does_not():
    world = World("elsewhere", mesh={"dp": 2, "pp": 2, "tp": 1}, nodes={"node0": [0, 1], "node1": [2, 3]})
    del world.peers.open_arrays[NodeName("node0")]
    content = world.view.open_full("layers/0/w")
    assert read(content, 0, content.size) == world.full_file("layers/0/w")
    shard = world.view.open_shard(0, "emb")
    assert read(shard, 0, shard.size) == world.shard_file(0, "emb")


def test_a_rank_of_another_node_is_served_from_an_equal_array_here():
    world = World("node1", mesh={"dp": 2, "pp": 2, "tp": 1}, nodes={"node0": [0, 1], "node1": [2, 3]})
    assert bytes(world.view.open_shard(0, "emb").read(0, 1 << 20) or b"") == world.shard_file(0, "emb")
    assert world.peers.asked == []


def test_open_handles_hold_the_other_node_and_close_lets_go():
    world = World("node0")
    content = world.view.open_shard(2, "layers/3/w")
    assert world.handles.held == {(NodeName("node1"), JOB, TXID): 1}
    content.close()
    assert world.handles.held == {(NodeName("node1"), JOB, TXID): 0}


def test_what_nobody_answers_for_is_an_error():
    world = World("node0")
    del world.peers.open_arrays[NodeName("node1")]
    with pytest.raises(UnavailableError, match="node1"):
        read(world.view.open_full("layers/3/w"), 0, 1 << 20)


def test_remote_reads_can_be_forbidden():
    world = World("node0", allowed=False)
    content = world.view.open_shard(2, "layers/3/w")
    with pytest.raises(PreconditionError, match="--remote-reads is off"):
        read(content, 0, 1 << 20)


def test_a_peer_that_says_nothing_ends_in_an_error_after_the_timeout():
    world = World("node0")

    async def hang(*args: object, **kwargs: object) -> None:
        await trio.sleep_forever()

    world.peers.fetch = hang  # type: ignore[method-assign]
    content = world.view.open_shard(2, "layers/3/w")

    async def wait() -> None:
        with pytest.raises(TimedOutError, match="within 5 s"):
            await content.read_wait(0, 1 << 20)

    trio.run(wait, clock=MockClock(autojump_threshold=0.01))


def test_a_stream_that_ends_early_is_no_answer():
    world = World("node0")

    async def cut(node, job, txid, ranges, write, *, deadline_s):
        write(0, b"abc")

    world.peers.fetch = cut  # type: ignore[method-assign]
    with pytest.raises(Exception, match="sent 3 bytes of"):
        read(world.view.open_shard(2, "layers/3/w"), 0, 1 << 20)


def test_documents():
    view = World("node0").view
    assert b'"mesh": [' in view.document("job.json")
    assert view.document("ptc/3.json") == view.document("ptc/3.json")
    assert json.loads(view.document("ptc/3.json"))["aliases"] == {"head": "emb"}
    for name in ("ptc/4.json", "ptc/x.json", "other"):
        with pytest.raises(NotFoundError):
            view.document(name)
