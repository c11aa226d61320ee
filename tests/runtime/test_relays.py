"""Pieces that several nodes need travel on from node to node, while they arrive."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tenplexfs.core.build import build_ptc
from tenplexfs.core.node_part import Target as Part
from tenplexfs.core.ptc import Shard
from tenplexfs.core.snapshot import NodeName
from tenplexfs.errors import NotFoundError, UnavailableError
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.rpc.sending import messages_of
from tenplexfs.rpc.wire import FetchRequest
from tenplexfs.runtime.board import Board
from tenplexfs.runtime.coordinator import Change
from tenplexfs.runtime.landing import Fetch
from tenplexfs.runtime.planning import Target
from tenplexfs.runtime.protocols import Ranges
from tests.runtime.cluster import JOB, Cluster, tensors_of


def replicas(count: int, tp: int = 1) -> bytes:
    """``count`` replicas, each on a node of its own."""
    return json.dumps(
        {
            "format": "tenplexfs-layout",
            "version": 1,
            "mesh": {"dp": count, "tp": tp},
            "nodes": {f"node{n}": list(range(n * tp, (n + 1) * tp)) for n in range(count)},
            "tensors": {
                "w/{i}": {
                    "shape": [320, 256],
                    "dtype": "float32",
                    "count": {"i": 3},
                    "shard": [{"axis": "tp", "dim": 1}],
                },
                "flat": {
                    "shape": [100, 900],
                    "dtype": "float32",
                    "shard": [{"axis": "tp", "flat": True, "pad_to_multiple": 7}],
                },
                "small": {"shape": [3], "dtype": "int8"},
            },
        }
    ).encode()


WHOLE = tensors_of(build_ptc(parse_layout(replicas(1))))


async def grow(cluster: Cluster, count: int, old_tp: int = 1, new_tp: int = 1) -> None:
    await cluster.nodes[0].coordinator.create(JOB, replicas(1, old_tp), b"{}")
    await cluster.load(WHOLE)
    cluster.peers.asked.clear()
    change = Change(JOB, Target(replicas(count, new_tp)))
    await cluster.nodes[0].coordinator.reconfigure(change, lambda progress: None)


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path, 5)
    yield made
    made.close()


@pytest.mark.parametrize(("old_tp", "new_tp"), [(1, 1), (2, 1), (1, 2)])
def test_replicas_have_it_from_each_other(cluster, old_tp, new_tp):
    async def main():
        await grow(cluster, 5, old_tp, new_tp)
        asked = {node: cluster.peers.asked.count(node) for node in sorted(cluster.peers.asked)}
        assert asked.pop("node0") == 4
        assert [*asked] == ["node1", "node2", "node3", "node4"]
        assert min(asked.values()) >= 3  # more where one had not begun yet
        await cluster.check(WHOLE)
        for node in cluster.nodes:
            assert not list(node.store.verify())

    trio.run(main)


@pytest.mark.parametrize("error", [UnavailableError("does not answer"), NotFoundError("not begun")])
def test_where_a_node_does_not_pass_on_holders_are_asked(cluster, monkeypatch, error):
    monkeypatch.setattr("tenplexfs.runtime.staging._RELAY_START_S", 0.1)
    given = cluster.peers.open_arrays[NodeName("node2")]

    @contextmanager
    def refusing(job, txid):
        if cluster.nodes[0].shown().id.generation == 1:  # until the new snapshot is there
            raise error
        with given(job, txid) as arrays:
            yield arrays

    cluster.peers.open_arrays[NodeName("node2")] = refusing

    async def main():
        await grow(cluster, 5)
        assert cluster.peers.asked.count("node0") == 4 + 3
        await cluster.check(WHOLE)

    trio.run(main)


def item_of(array: np.ndarray, boxes: np.ndarray) -> Fetch:
    target = Part("w", ((0, "w"),), Shard(array.shape, ()), "uint8", None, (), ())
    return Fetch(NodeName("n"), Ranges(0, "w", 1, boxes), target, array, boxes)


def cut(box, points):
    """Cuts a box of two dims at rows and columns."""
    rows, columns = (sorted({0, size, *(p % size for p in points)}) for size in box)
    return [[[a, c], [b, d]] for a, b in pairwise(rows) for c, d in pairwise(columns)]


@given(st.data())
def test_what_is_waited_for_has_landed_and_is_not_waited_for_longer(data):
    shape = (data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)))
    points = data.draw(st.lists(st.integers(0, 50), max_size=3))
    boxes = np.array(data.draw(st.permutations(cut(shape, points))))
    split = data.draw(st.integers(0, len(boxes)))
    array, there = np.zeros(shape, np.uint8), np.zeros(shape, bool)
    board = Board(clock=iter(range(0, 10**6, 10)).__next__)  # every look at it is a pulse later
    items = [item_of(array, some) for some in (boxes[:split], boxes[split:]) if len(some)]
    board.show([(0, "w")], array, items)
    for item in items:
        landed = data.draw(st.integers(0, item.nbytes))
        left = landed
        for (a, c), (b, d) in item.boxes.tolist():
            ids = [(i, j) for i in range(a, b) for j in range(c, d)][:left]
            left -= len(ids)
            for place in ids:
                there[place] = True
        board.landed(item, landed)
    a, b = sorted(data.draw(st.tuples(st.integers(0, shape[0]), st.integers(0, shape[0]))))
    c, d = sorted(data.draw(st.tuples(st.integers(0, shape[1]), st.integers(0, shape[1]))))
    wanted = np.array([[[a, c], [b, d]]])
    assert board.wait(0, "w", wanted) == there[a:b, c:d].all()


def test_messages_wait_for_what_lands_and_never_overtake_it():
    array = np.zeros((64, 32), np.uint8)
    source = np.random.default_rng(0).integers(1, 256, array.shape, np.uint8)
    item = item_of(array, np.array([[[0, 0], [64, 32]]]))
    board = Board()
    board.show([(0, "w")], array, [item])
    request = FetchRequest("j", "t" * 16, 33, (Ranges(0, "w", 1, np.array([[[1, 1], [60, 31]]])),), 100)

    def land():
        for row in range(64):
            array[row] = source[row]
            board.landed(item, 32 * (row + 1))

    writer = threading.Thread(target=land)
    writer.start()
    sent = b"".join(messages_of(board, request))
    writer.join()
    assert sent == source[1:60, 1:31].tobytes()[33:]


@pytest.mark.parametrize("pairs", [1, 1 << 18])
def test_what_does_not_come_from_afar_is_not_passed_on(monkeypatch, pairs):
    monkeypatch.setattr("tenplexfs.runtime.board._PAIRS", pairs)
    array = np.zeros((4, 4), np.uint8)
    items = [item_of(array, np.array([[[0, 0], [1, 4]], [[1, 0], [2, 2]]]))]
    board = Board()
    board.show([(0, "w")], array, items)
    board.show([(0, "local")], array, [])
    board.landed(items[0], 6)
    assert board.wait(0, "w", np.array([[[0, 1], [2, 2]], [[0, 3], [1, 4]]]))
    for path, boxes in (("w", [[[0, 0], [1, 4]], [[1, 1], [2, 3]]]), ("local", [[[0, 0], [1, 1]]])):
        with pytest.raises(UnavailableError, match=f"{path} of rank 0 is not all here to be passed on"):
            board.wait(0, path, np.array(boxes))


def test_a_stage_that_ends_lets_nobody_wait():
    array = np.zeros((4, 4), np.uint8)
    item = item_of(array, np.array([[[0, 0], [4, 4]]]))
    board = Board()
    board.show([(0, "w")], array, [item])
    board.landed(item, 8)
    board.end()
    assert board.wait(0, "w", np.array([[[0, 0], [2, 4]]]))
    with pytest.raises(UnavailableError, match="w of rank 0 is not here to be passed on: the stage ended"):
        board.wait(0, "w", np.array([[[0, 0], [3, 4]]]))
    assert board.array(1, "w") is None
