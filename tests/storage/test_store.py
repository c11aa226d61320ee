import itertools
import threading

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tenplexfs.core.ptc import Piece, Shard
from tenplexfs.core.region import Region
from tenplexfs.core.snapshot import JobName, SnapshotId, TxId
from tenplexfs.errors import (
    CorruptError,
    ExistsError,
    InvalidError,
    NoRoomError,
    NotFoundError,
    PreconditionError,
    StaleError,
)
from tenplexfs.storage.ingest import lay_out
from tenplexfs.storage.store import Store, Wanted

J = JobName("j")
BIG = (600, 500)


def whole(shape):
    return Shard(shape, (Piece(Region((0,) * len(shape), shape), (0,) * len(shape)),))


def an_id(txid, step=0):
    return SnapshotId(1, step, TxId(txid))


@pytest.fixture
def store(tmp_path):
    store = Store.open(tmp_path / "store", node="n0", limit_bytes=1 << 28)
    yield store
    store.close()


def reopened(store):
    store.close()
    return Store.open(store.path, node="n0", limit_bytes=store.limit_bytes)


def put(store, txid, arrays, job=J, commit=True):
    with store.ingest(job, an_id(txid), b"{}", 5) as ingest:
        ingest.reserve([Wanted((key,), a.shape, a.dtype.name) for key, a in arrays.items()])
        for key, array in arrays.items():
            ingest.array(key)[...] = array
        stored = ingest.seal({key: whole(array.shape) for key, array in arrays.items()})
    if commit:
        store.commit(job, txid)
    return stored


def sample(seed=0):
    rng = np.random.default_rng(seed)
    return {
        (0, "big"): rng.random(BIG, "f4"),
        (0, "b"): rng.random((3, 5), "f4").astype(ml_dtypes.bfloat16),
        (0, "empty"): np.zeros((0, 4), "i8"),
        (0, "scalar"): np.array(7, "u1"),
        (1, "b"): rng.random(11).astype(ml_dtypes.float8_e5m2),
        (1, "c"): rng.random(4) + 1j,
    }


def test_what_goes_in_comes_out_and_survives(store):
    arrays = sample()
    put(store, "a", arrays)
    assert store.used_bytes < 600 * 500 * 4 + 3 * 4096
    for opened in (store, again := reopened(store)):
        (stored,) = opened.snapshots("j")
        assert (
            stored.committed
            and stored.id == an_id("a")
            and stored.layout_json == b"{}"
            and stored.created_ns == 5
        )
        assert stored.arrays.keys() == arrays.keys()
        with opened.arrays(stored) as view:
            for key, array in arrays.items():
                got = view.array(*key)
                assert (
                    got.dtype == array.dtype and got.shape == array.shape and got.tobytes() == array.tobytes()
                )
                assert not got.flags.writeable and got.ctypes.data % 64 == 0
                assert view.file(*key).readonly
            assert view.array(2, "b") is None and view.file(0, "c") is None
        if opened is store:
            store.close()
    assert again.incarnation == store.incarnation and not list(again.verify())
    again.close()


def test_files_are_npy(store, tmp_path):
    arrays = sample()
    stored = put(store, "a", arrays)
    assert {key for key, ref in stored.arrays.items() if ref.file.startswith("objects/")} == {(0, "big")}
    assert len({ref.file for ref in stored.arrays.values()}) == 2
    file = store.path / stored.arrays[(0, "big")].file
    assert file.suffix == ".npy" and np.array_equal(np.load(file, mmap_mode="r"), arrays[(0, "big")])
    assert file.stat().st_mode & 0o777 == 0o400
    with store.arrays(stored) as view:
        for number, (key, array) in enumerate(arrays.items()):
            (tmp_path / f"{number}.npy").write_bytes(view.file(*key))
            assert np.load(tmp_path / f"{number}.npy").tobytes() == array.tobytes()


def test_staged_then_committed(store):
    stored = put(store, "a", sample(), commit=False)
    assert not stored.committed and not store.snapshots()[0].committed
    store.commit("j", "a")
    store.commit("j", "a")
    assert store.snapshots()[0].committed
    with pytest.raises(NotFoundError, match="no snapshot b of job j"):
        store.commit("j", "b")
    with pytest.raises(ExistsError, match="already"):
        store.ingest(J, an_id("a"), b"", 0)
    put(store, "a", sample(), job=JobName("k"))
    assert [s.job for s in store.snapshots()] == ["j", "k"] and len(store.snapshots("k")) == 1


def test_sharing_is_the_same_file(store):
    a = put(store, "a", sample())
    used = store.used_bytes
    with store.ingest(J, an_id("b"), b"{}", 1) as ingest:
        ingest.share([(4, "big"), (5, "big")], a.arrays[(0, "big")])
        ingest.share((4, "b"), a.arrays[(0, "b")])
        with pytest.raises(InvalidError, match="there already"):
            ingest.share((4, "b"), a.arrays[(0, "b")])
        with pytest.raises(NotFoundError, match="no room was reserved"):
            ingest.array((4, "b"))
        b = ingest.seal({})
    assert b.arrays[(5, "big")] == a.arrays[(0, "big")] and store.used_bytes == used
    store = reopened(store)
    store.drop("j", "a")
    assert store.used_bytes == used
    store = reopened(store)
    with store.arrays(store.snapshots()[0]) as view:
        assert np.array_equal(view.array(5, "big"), sample()[(0, "big")])
    assert not list(store.verify())
    store.drop("j", "b")
    assert store.used_bytes == 0
    with pytest.raises(StaleError, match="dropped"), store.ingest(J, an_id("c"), b"", 1) as ingest:
        ingest.share((0, "b"), a.arrays[(0, "b")])
    store.close()


def test_shared_array_that_is_cut_otherwise_gets_its_own_sums(store):
    a = put(store, "a", sample())
    halves = Shard(BIG, tuple(Piece(Region((i, 0), (i + 300, 500)), (i, 0)) for i in (0, 300)))
    with store.ingest(J, an_id("b"), b"{}", 1) as ingest:
        ingest.share((0, "big"), a.arrays[(0, "big")])
        b = ingest.seal({(0, "big"): halves})
    assert len(b.arrays[(0, "big")].sums) == 2 and not list(store.verify())


def test_views_outlive_the_drop(store):
    arrays = sample()
    stored = put(store, "a", arrays)
    view = store.arrays(stored)
    store.drop("j", "a")
    store.drop("j", "a")
    assert not store.snapshots()
    with pytest.raises(StaleError):
        store.arrays(stored)
    big, small = view.array(0, "big"), view.array(1, "c")  # mapped only now: the pin kept the file
    view.release()
    view.release()
    with pytest.raises(StaleError, match="released"):
        view.array(0, "big")
    assert not list((store.path / "objects").iterdir())
    assert np.array_equal(big, arrays[(0, "big")]) and np.array_equal(small, arrays[(1, "c")])
    assert store.used_bytes > 4 * 600 * 500
    del big
    assert 0 < store.used_bytes <= 4096
    del small
    assert store.used_bytes == 0


def test_what_is_not_sealed_leaves_nothing(store):
    with pytest.raises(RuntimeError, match="mine"), store.ingest(J, an_id("a"), b"", 1) as ingest:
        ingest.reserve([Wanted(((0, "big"),), BIG, "float32"), Wanted(((0, "x"),), (3,), "int8")])
        assert store.used_bytes > 0
        raise RuntimeError("mine")
    assert store.used_bytes == 0 and not store.snapshots()
    with pytest.raises(PreconditionError, match="sealed or dropped"):
        ingest.array((0, "x"))
    ingest = store.ingest(J, an_id("b"), b"", 1)
    ingest.reserve([Wanted(((0, "x"),), (3,), "int8")])
    again = reopened(store)
    assert again.used_bytes == 0 and not list((store.path / "segments").iterdir())
    with pytest.raises(PreconditionError, match="closed"):
        ingest.seal({(0, "x"): whole((3,))})
    again.close()


def test_no_room(tmp_path):
    store = Store.open(tmp_path / "s", node="n", limit_bytes=2_000_000)
    put(store, "a", {(0, "x"): np.ones(BIG, "f4")})
    with store.ingest(J, an_id("b"), b"", 1) as ingest:
        with pytest.raises(NoRoomError, match="limit 2000000"):
            ingest.reserve([Wanted(((0, "y"),), (3,), "int8"), Wanted(((0, "x"),), BIG, "float32")])
        ingest.reserve([Wanted(((0, "y"),), (3,), "int8")])
        ingest.seal({(0, "y"): whole((3,))})
    assert not list(store.verify()) and len(store.snapshots()) == 2
    store.close()


def test_padding_is_zeros_and_pieces_have_sums(store):
    shard = Shard((4, 3), (Piece(Region((8, 0), (10, 3)), (0, 0)), Piece(Region((2, 0), (3, 3)), (2, 0))))
    with store.ingest(J, an_id("a"), b"", 1) as ingest:
        ingest.reserve([Wanted(((0, "w"),), (4, 3), "float32")])
        ingest.pwrite((0, "w"), 0, np.arange(9, dtype="f4"))
        stored = ingest.seal({(0, "w"): shard})
    with store.arrays(stored) as view:
        assert view.array(0, "w").tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 0, 0]]
    assert len(stored.arrays[(0, "w")].sums) == 2


@pytest.mark.parametrize("shape", [(5, 3), BIG])
def test_pwrite(store, shape):
    wanted = np.random.default_rng(0).random(shape, "f4")
    data = wanted.tobytes()
    with store.ingest(J, an_id("a"), b"", 1) as ingest:
        ingest.reserve([Wanted(((0, "w"), (1, "w")), shape, "float32"), Wanted(((0, "v"),), (1,), "float32")])
        cut = len(data) // 3
        ingest.pwrite((1, "w"), cut, memoryview(data)[cut:])
        ingest.pwrite((0, "w"), 0, bytearray(data[:cut]))
        ingest.pwrite((0, "v"), 0, np.ones(1, ml_dtypes.bfloat16))
        for offset, count in ((-1, 1), (len(data), 1), (0, len(data) + 1)):
            with pytest.raises(InvalidError, match=rf"rank 0, w: {count} bytes at byte {offset}"):
                ingest.pwrite((0, "w"), offset, bytes(count))
        stored = ingest.seal({(0, "w"): whole(shape), (0, "v"): whole((1,))})
    with store.arrays(stored) as view:
        assert np.array_equal(view.array(0, "w"), wanted) and np.array_equal(view.array(1, "w"), wanted)
    assert stored.arrays[(0, "w")] is stored.arrays[(1, "w")]


@pytest.mark.parametrize("shape", [(6, 8, 4), (600, 5, 320), (3, 2, 400_000)])
def test_put_takes_any_strides_into_any_place(store, shape):
    source = np.random.default_rng(0).random((shape[0], shape[1] * 2, shape[2]), "f4")[:, ::2]
    flat = int(np.prod(shape))
    with store.ingest(J, an_id("a"), b"", 1) as ingest:
        ingest.reserve([Wanted(((0, "w"),), shape, "float32")])
        array = ingest.array((0, "w"))
        ravel = array.reshape(-1)
        ingest.put((0, "w"), array, array[:1], source[:1])
        ingest.put((0, "w"), array, array[1:, 1:], source[1:, 1:])
        ingest.put((0, "w"), array, array[1:, :1], source[1:, :1].reshape(-1))
        ingest.put((0, "w"), ravel, ravel[flat // 2 :], source.reshape(-1)[flat // 2 :])
        shard = whole(shape)
        sums = ingest.sums((0, "w"), shard)
        stored = ingest.seal({(0, "w"): shard}, sums={(0, "w"): sums})
    with store.arrays(stored) as view:
        assert np.array_equal(view.array(0, "w"), source)
    assert sums == (xxhash.xxh3_64_intdigest(source.tobytes()),)


def test_seal_refuses_what_does_not_fit(store):
    with store.ingest(J, an_id("a"), b"", 1) as ingest:
        ingest.reserve([Wanted(((3, "w"),), (2, 2), "int8")])
        with pytest.raises(InvalidError, match="rank 3, w: no shard"):
            ingest.seal({})
        with pytest.raises(InvalidError, match=r"rank 3, w: the shard is \(2, 3\), the array \(2, 2\)"):
            ingest.seal({(3, "w"): whole((2, 3))})
        with pytest.raises(InvalidError, match="2 sums for 1 pieces"):
            ingest.seal({(3, "w"): whole((2, 2))}, sums={(3, "w"): (1, 2)})
        with pytest.raises(InvalidError, match="there already"):
            ingest.reserve([Wanted(((3, "w"),), (2, 2), "int8")])
        with pytest.raises(InvalidError, match="no objects"):
            ingest.reserve([Wanted(((3, "v"),), (2,), "O")])
        ingest.seal({(3, "w"): whole((2, 2))}, sums={(3, "w"): (12,)})
    (mismatch,) = store.verify()
    assert mismatch.wanted == 12 and mismatch.keys == ((3, "w"),)


def test_verify_finds_each_damaged_piece(store):
    stored = put(store, "a", sample())
    put(store, "k", {(0, "x"): np.ones(3)}, job=JobName("k"))
    ref = stored.arrays[(1, "c")]
    file = store.path / ref.file
    file.chmod(0o600)
    with file.open("r+b") as damaged:
        damaged.seek(ref.offset + ref.header_bytes + 3)
        byte = damaged.read(1)[0]
        damaged.seek(-1, 1)
        damaged.write(bytes([byte ^ 1]))
        damaged.seek(stored.arrays[(0, "b")].offset + 10)
        damaged.write(b"?")
    found = {(m.keys, m.piece): m for m in store.verify("j")}
    assert found.keys() == {(((1, "c"),), 0), (((0, "b"),), -1)}
    assert found[((1, "c"),), 0].box == Region((0,), (4,))
    assert "job j, generation 1 step 0 txid a, rank 1, c, piece 0, box (0,) to (4,): checksum" in str(
        found[((1, "c"),), 0]
    )
    assert not list(store.verify("k"))


def test_store_of_another_node_or_damaged(store):
    stored = put(store, "a", sample())
    store.close()
    with pytest.raises(PreconditionError, match="that of node 'n0', this is 'n1'"):
        Store.open(store.path, node="n1", limit_bytes=1)
    manifest = store.path / "manifest.msgpack"
    good = manifest.read_bytes()
    manifest.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(CorruptError, match=rf"store {store.path}: manifest: checksum"):
        Store.open(store.path, node="n0", limit_bytes=1)
    manifest.write_bytes(good)
    (store.path / stored.arrays[(0, "big")].file).rename(store.path / "gone")
    (store.path / "gone").rename(store.path.with_name("gone"))
    with pytest.raises(CorruptError, match="is missing, the manifest needs"):
        Store.open(store.path, node="n0", limit_bytes=1)
    store.path.with_name("gone").rename(store.path / stored.arrays[(0, "big")].file)
    Store.open(store.path, node="n0", limit_bytes=1).close()


def test_many_threads(store):
    arrays = {(rank, "x"): np.full(BIG if rank % 2 else (7,), rank, "f4") for rank in range(8)}
    errors = []

    def work(number):
        try:
            for turn in range(5):
                txid = f"{number}-{turn}"
                stored = put(store, txid, arrays)
                with store.arrays(stored) as view:
                    store.drop("j", txid)
                    for key, array in arrays.items():
                        assert np.array_equal(view.array(*key), array)
        except BaseException as error:  # handed to the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and not store.snapshots() and store.used_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 1 << 21), st.booleans()), max_size=12))
def test_layout_of_files(sizes):
    wanted = [Wanted(((i, "x"),), (n,), "bool" if b else "float64") for i, (n, b) in enumerate(sizes)]
    files, places = lay_out(wanted)
    taken = sorted(
        (file, offset, offset + 128 + n * (1 if b else 8))
        for (file, offset), (n, b) in zip(places, sizes, strict=True)
    )
    for (file, _, end), (other, begin, _) in itertools.pairwise(taken):
        assert file != other or end <= begin
    assert all(offset % 64 == 0 and end <= files[file][1] for file, offset, end in taken)
    assert all(
        (files[file][0] == "objects") == (n * (1 if b else 8) >= 1 << 20)
        for (file, _), (n, b) in zip(places, sizes, strict=True)
    )


def test_a_manifest_torn_at_any_byte_is_refused_or_was_never_named(tmp_path):
    store = Store.open(tmp_path / "s", node="n", limit_bytes=1 << 24)
    with store.ingest(J, SnapshotId(1, 0, TxId("a" * 16)), b"{}", 1) as ingest:
        ingest.reserve([Wanted(((0, "w"),), (3,), "float32")])
        ingest.seal({(0, "w"): Shard((3,), (Piece(Region((0,), (3,)), (0,)),))})
    store.commit(J, "a" * 16)
    store.close()
    manifest, aside = tmp_path / "s/manifest.msgpack", tmp_path / "s/manifest.next"
    good = manifest.read_bytes()
    for cut in range(len(good)):
        # A crash while the next one is written: it is beside, and nobody looks at it.
        aside.write_bytes(good[:cut])
        again = Store.open(tmp_path / "s", node="n", limit_bytes=1 << 24)
        assert [stored.committed for stored in again.snapshots()] == [True]
        again.close()
    for cut in range(len(good)):
        # A file system that tears what was renamed: refused by name, and no file is deleted.
        manifest.write_bytes(good[:cut])
        with pytest.raises(CorruptError, match=r"store .*: manifest"):
            Store.open(tmp_path / "s", node="n", limit_bytes=1 << 24)
    manifest.write_bytes(good)
    again = Store.open(tmp_path / "s", node="n", limit_bytes=1 << 24)
    assert list(again.verify()) == [] and len(again.snapshots()) == 1
    again.close()
