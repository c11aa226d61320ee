import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from tenplexfs.core.node_part import Target
from tenplexfs.core.ptc import Piece, Shard
from tenplexfs.core.region import Region
from tenplexfs.core.snapshot import JobName, NodeName, SnapshotId, TxId
from tenplexfs.errors import CorruptError
from tenplexfs.rpc.ranges import Scatter
from tenplexfs.runtime.landing import Fetch, Landing, Reporter, Sums
from tenplexfs.runtime.protocols import Ranges
from tenplexfs.storage.store import Store, Wanted

SHAPES = {"tiny": (3, 4), "rows": (700, 512), "columns": (600, 640), "none": (0, 5), "flat": (300_000,)}
BOXES = {
    "tiny": [[[0, 0], [3, 4]]],
    "rows": [[[0, 0], [700, 512]]],
    "columns": [[[0, 0], [600, 320]], [[0, 320], [600, 640]]],
    "none": [[[0, 0], [0, 5]]],
    "flat": [[[0], [100_000]], [[100_000], [300_000]]],
}


def target_of(path):
    shape = SHAPES[path]
    shard = Shard(shape, (Piece(Region((0,) * len(shape), shape), (0,) * len(shape)),))
    return Target(path, ((0, path),), shard, "float32", None, (), ())


@pytest.fixture
def store(tmp_path):
    with_store = Store.open(tmp_path / "store", node="n0", limit_bytes=1 << 28)
    yield with_store
    with_store.close()


def ingest_of(store):
    return store.ingest(JobName("j"), SnapshotId(1, 0, TxId("a")), b"", 1)


def landing_of(ingest, order):
    """Each box is an item of its own."""
    ingest.reserve([Wanted(((0, path),), shape, "float32") for path, shape in SHAPES.items()])
    targets = {path: target_of(path) for path in SHAPES}
    sums, items = Sums(ingest), []
    for path in order:
        sums.expect(targets[path], len(BOXES[path]))
        for box in np.array(BOXES[path], np.int64):
            ranges = Ranges(0, path, 4, box[None])
            items.append(Fetch(NodeName("n1"), ranges, targets[path], ingest.array((0, path)), box[None]))
    told = []
    progress = Reporter(lambda done, total: told.append((done, total)))
    return Landing(ingest, items, Scatter, progress, sums), progress, sums, told


@settings(max_examples=30)
@given(st.permutations(list(SHAPES)), st.lists(st.integers(4001, 1 << 20), min_size=1, max_size=9))
def test_a_stream_lands_however_it_is_cut(store_path, order, cuts):
    arrays = {
        path: np.random.default_rng(len(path)).random(shape, np.float32) for path, shape in SHAPES.items()
    }
    boxes = [(arrays[path], box) for path in order for box in BOXES[path]]
    stream = b"".join(array[tuple(map(slice, *box))].tobytes() for array, box in boxes)
    store = Store.open(store_path(), node="n0", limit_bytes=1 << 28)

    async def land(ingest):
        landing, progress, sums, told = landing_of(ingest, order)
        progress.begin(len(stream))

        def feed():
            at = turn = 0
            while at < len(stream):
                data = stream[at : at + cuts[turn % len(cuts)]]
                landing.write(at, data)
                at, turn = at + len(data), turn + 1
            sums.end()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, sums.run)
            await trio.to_thread.run_sync(feed)
        landing.check(NodeName("n1"))
        await trio.testing.wait_all_tasks_blocked()
        assert told[0] == (0, len(stream)) and told[-1] == (len(stream), len(stream))
        assert len(told) <= 102
        return sums.found

    with ingest_of(store) as ingest:
        found = trio.run(land, ingest)
        assert set(found) == {(0, path) for path in SHAPES}
        shards = {(0, path): target_of(path).shard for path in SHAPES}
        stored = ingest.seal(shards, sums=found)
    with store.arrays(stored) as view:
        for path, array in arrays.items():
            assert np.array_equal(view.array(0, path), array)
    assert not list(store.verify())
    store.close()


@pytest.fixture(scope="module")
def store_path(tmp_path_factory):
    return lambda: tmp_path_factory.mktemp("landing") / "store"


def test_a_stream_out_of_order_or_cut_short_is_refused(store):
    async def land(ingest):
        landing, progress, _, _ = landing_of(ingest, ["tiny", "rows"])
        progress.begin(landing.nbytes)
        landing.write(0, bytes(8))
        for offset, count in ((4, 4), (16, 4), (8, landing.nbytes)):
            with pytest.raises(CorruptError, match=f"got {count} at {offset}, not 8"):
                landing.write(offset, bytes(count))
        with pytest.raises(CorruptError, match=f"n1: sent 8 bytes of {landing.nbytes}"):
            landing.check(NodeName("n1"))

    with ingest_of(store) as ingest:
        trio.run(land, ingest)
