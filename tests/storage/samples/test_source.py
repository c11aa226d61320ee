import struct
import warnings
import zipfile

import numpy as np
import pytest

from tenplexfs.errors import CorruptError, InvalidError, NotFoundError
from tenplexfs.formats.sample_index import index_parts
from tenplexfs.storage.samples.build import IndexBuilder, map_index, write_index
from tenplexfs.storage.samples.reader import LocalReader
from tenplexfs.storage.samples.source import IndexedSamples, SamplesError, read_samples

RANDOM = np.random.default_rng(11)
PAIR = np.dtype([("x", "<f4"), ("数", ">i2", (2,))])


@pytest.fixture
def build(local):
    return IndexBuilder(local)


@pytest.fixture
def opened(tmp_path, local):
    """Writes an index, maps it, and gives the samples."""

    def open_(built):
        path = tmp_path / "the.index"
        write_index(built.index, path)
        return IndexedSamples(map_index(path), local)

    return open_


def save(path, array, version=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file, warnings.catch_warnings(action="ignore"):
        np.lib.format.write_array(file, array, version=version)
    return str(path)


def rows_of(samples, ids):
    return np.stack(
        [np.frombuffer(part, samples.dtype).reshape(samples.shape) for part in read_samples(samples, ids)]
    )


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("<f4", (3,)), (">i2", (2, 5)), ("<f8", ()), ("|b1", (2, 3, 4)), (PAIR, (2,)), ("S5", (1,))],
)
@pytest.mark.parametrize("orders", ["CC", "FF", "FC"])
def test_rows_of_npy_files(tmp_path, build, opened, version, dtype, shape, orders):
    dtype = np.dtype(dtype)
    arrays = []
    for count, order in zip((7, 4), orders, strict=True):
        flat = np.frombuffer(
            RANDOM.integers(0, 2, count * int(np.prod(shape)) * dtype.itemsize, np.uint8), dtype
        )
        arrays.append(np.asarray(flat.reshape(count, *shape), order=order))
    if dtype is PAIR and version != (3, 0):
        version = (3, 0)
    files = [save(tmp_path / "mit Leer" / f"ü%{i}.npy", array, version) for i, array in enumerate(arrays)]
    samples = opened(build.npy(files))
    assert (samples.count, samples.shape, samples.dtype) == (11, shape, dtype)
    ids = np.array([10, 0, 3, 7, 3, 6])
    assert rows_of(samples, ids).tobytes() == np.concatenate(arrays)[ids].tobytes()
    assert (samples.sizes(ids) == dtype.itemsize * np.prod(shape, dtype=int)).all()


def test_rows_above_four_gib(tmp_path, build, opened):
    path = tmp_path / "big.npy"
    np.lib.format.open_memmap(path, "w+", np.uint8, ((1 << 32) // 1024 + 8, 1024))[-1] = 7  # sparse
    samples = opened(build.npy([str(path)]))
    assert rows_of(samples, [samples.count - 1, samples.count - 2]).sum(axis=1).tolist() == [7 * 1024, 0]


def test_no_rows_and_rows_of_nothing(tmp_path, build, opened):
    files = [save(tmp_path / "0.npy", np.zeros((0, 2))), save(tmp_path / "1.npy", np.ones((1, 2)))]
    assert rows_of(opened(build.npy(files)), [0]).tolist() == [[1, 1]]
    nothing = build.npy([save(tmp_path / "2.npy", np.zeros((3, 0)))])
    assert nothing.empty_count == 3
    assert [bytes(part) for part in read_samples(opened(nothing), [2, 0])] == [b"", b""]


def test_arrays_that_are_refused_by_name(tmp_path, build):
    objects = tmp_path / "objects.npy"
    np.save(objects, np.array([{}], object), allow_pickle=True)
    good = save(tmp_path / "good.npy", np.zeros((2, 3)))
    (tmp_path / "short.npy").write_bytes((tmp_path / "good.npy").read_bytes()[:-1])
    for name, message in [
        (str(objects), "objects.npy: .*objects are not read"),
        (save(tmp_path / "scalar.npy", np.zeros(())), "scalar.npy: an array without dims"),
        (
            save(tmp_path / "other.npy", np.zeros((2, 4))),
            r"other.npy: rows of \(4,\) float64, those of .*good.npy",
        ),
        (str(tmp_path / "short.npy"), "short.npy: has 175 bytes, its header says 176"),
        (str(tmp_path / "none.npy"), "none.npy: no such file"),
    ]:
        with pytest.raises((InvalidError, NotFoundError), match=message):
            build.npy([good, name])
    with pytest.raises(InvalidError, match=r"no \.npy files"):
        build.npy([])


def test_records(tmp_path, build, opened):
    data = RANDOM.bytes(10 + 8 * 5)
    (tmp_path / "r.bin").write_bytes(data)
    (tmp_path / "none.bin").write_bytes(data[:10])
    files = [str(tmp_path / "none.bin"), str(tmp_path / "r.bin")]
    samples = opened(build.records(files, record_bytes=8, skip_bytes=10, dtype=np.dtype("<u2"), shape=(2, 2)))
    assert rows_of(samples, [4, 1]).tobytes() == data[42:50] + data[18:26]
    assert build.records(files[1:], record_bytes=5).index.shape == (5,)
    with pytest.raises(InvalidError, match=r"r\.bin: 50 bytes are not 0 and whole records of 7"):
        build.records(files[1:], record_bytes=7)
    with pytest.raises(InvalidError, match=r"records of 8 bytes: not of \(3,\) uint8"):
        build.records(files, record_bytes=8, shape=(3,))
    with pytest.raises(InvalidError, match="no such"):
        build.records(files, record_bytes=0)


def test_each_file_a_sample(tmp_path, build, opened, local):
    contents = {f"a b/{i:03}ü%.npz": RANDOM.bytes(i) for i in range(300)}
    (tmp_path / "in" / "a b").mkdir(parents=True)
    for name, data in contents.items():
        (tmp_path / "in" / name).write_bytes(data)
    seen = []
    counting = IndexBuilder(local, lambda done, total: seen.append((done, total)))
    built = counting.files(local.find(str(tmp_path / "in")))
    assert seen == [(256, 300), (300, 300)]
    assert built.empty_count == 1
    samples = opened(built)
    assert (samples.shape, samples.dtype) == (None, None)
    ids = RANDOM.permutation(300)
    assert [bytes(part) for part in read_samples(samples, ids)] == [list(contents.values())[i] for i in ids]
    assert samples.sizes(ids).tolist() == ids.tolist()


@pytest.mark.parametrize("savez", [np.savez, np.savez_compressed])
def test_arrays_in_npz_archives(tmp_path, build, opened, savez):
    arrays = [np.asarray(RANDOM.integers(0, 9, (4, 3, 2)), order=order) for order in "CFCFC"]
    savez(tmp_path / "one.npz", *arrays[:3])
    savez(tmp_path / "empty.npz")
    savez(tmp_path / "two.npz", a=arrays[3], b=arrays[4])
    samples = opened(build.members([str(tmp_path / f"{name}.npz") for name in ("one", "empty", "two")]))
    assert (samples.count, samples.shape, samples.dtype) == (5, (4, 3, 2), np.int64)
    assert np.array_equal(rows_of(samples, [4, 1, 3, 0, 2, 2]), np.stack(arrays)[[4, 1, 3, 0, 2, 2]])


def test_arrays_of_several_shapes_stay_npy_files(tmp_path, build, opened):
    arrays = {"a": np.arange(5.0), "b": np.zeros((2, 2), "<i2"), "c": np.array(3), "d": np.zeros(0)}
    np.savez_compressed(tmp_path / "x.npz", **arrays)
    samples = opened(build.members([str(tmp_path / "x.npz")]))
    assert (samples.shape, samples.dtype) == (None, None)
    for part, array in zip(read_samples(samples, range(4)), arrays.values(), strict=True):
        path = tmp_path / "out.npy"
        path.write_bytes(part)
        assert np.array_equal(np.load(path), array)
    assert samples.sizes(np.array([3])).tolist() == [128]


def test_a_member_behind_four_gib(tmp_path, build, opened):
    path = tmp_path / "big.npz"
    with path.open("wb") as file:
        file.seek(1 << 32)
        with zipfile.ZipFile(file, "w") as archive, archive.open("x.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, np.arange(1000))
    samples = opened(build.members([str(path)]))
    assert rows_of(samples, [0])[0].tolist() == list(range(1000))


def test_members_that_are_refused_or_damaged(tmp_path, build, opened):
    np.savez(tmp_path / "objects.npz", good=np.zeros(2), bad=np.array([{}], object))
    with pytest.raises(InvalidError, match=r"objects\.npz: member 'bad.npy': .*objects are not read"):
        build.members([str(tmp_path / "objects.npz")])
    with zipfile.ZipFile(tmp_path / "text.npz", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(InvalidError, match=r"text\.npz: member 'readme.txt': no .npy file"):
        build.members([str(tmp_path / "text.npz")])
    path = tmp_path / "damaged.npz"
    np.savez(path, a=np.arange(100), b=np.arange(100), c=np.arange(100))
    samples = opened(build.members([str(path)]))
    data = bytearray(path.read_bytes())
    data[data.index(np.arange(100).tobytes(), 1000) + 7] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        SamplesError, match=r"sample 1: .*damaged.npz: bytes \[\d+, \d+\): zip member: .* crc"
    ) as caught:
        read_samples(samples, [0, 1, 2])
    assert [(failure.at, failure.sample) for failure in caught.value.failures] == [(1, 1)]


def megatron(path, documents, dtype="<u2", code=8):
    tokens = np.concatenate([np.empty(0), *documents]).astype(dtype)
    path.with_suffix(".bin").write_bytes(tokens.tobytes())
    lengths = np.array([len(document) for document in documents])
    pointers = (np.cumsum([0, *lengths])[:-1] * tokens.itemsize).astype("<i8")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    bounds = np.arange(len(lengths) + 1, dtype="<i8")
    idx = head + lengths.astype("<i4").tobytes() + pointers.tobytes() + bounds.tobytes()
    path.with_suffix(".idx").write_bytes(idx)
    return str(path)


def test_megatron_documents_and_sequences(tmp_path, build, opened):
    one = [RANDOM.integers(0, 60_000, n) for n in (5, 0, 9, 3)]
    two = [RANDOM.integers(0, 60_000, n) for n in (4, 4)]
    prefixes = [megatron(tmp_path / "one text", one), megatron(tmp_path / "two", two)]
    documents = opened(build.megatron(prefixes))
    assert (documents.count, documents.dtype, documents.shape) == (6, np.uint16, None)
    for part, document in zip(read_samples(documents, range(6)), one + two, strict=True):
        assert np.array_equal(np.frombuffer(part, np.uint16), document)
    sequences = opened(build.megatron(prefixes, sequence_length=4))
    assert (sequences.count, sequences.shape) == (4 + 1, (5,))
    whole = [np.concatenate(one), np.concatenate(two)]
    expected = [whole[0][i * 4 : i * 4 + 5] for i in range(4)] + [whole[1][:5]]
    assert np.array_equal(rows_of(sequences, [3, 4, 0, 1, 2]), np.stack(expected)[[3, 4, 0, 1, 2]])


def test_megatron_files_that_do_not_fit(tmp_path, build):
    prefix = megatron(tmp_path / "x", [np.arange(50)])
    other = megatron(tmp_path / "y", [np.arange(50)], "<i4", 4)
    with pytest.raises(InvalidError, match=r"y.idx: tokens of int32, before they were uint16"):
        build.megatron([prefix, other])
    (tmp_path / "x.bin").write_bytes(b"12")
    assert build.megatron([prefix]).short == (f"{prefix}.bin",)
    with pytest.raises(InvalidError, match=r"x.bin: has 2 bytes, its index says 50 tokens"):
        build.megatron([prefix], sequence_length=8)
    (tmp_path / "x.idx").write_bytes(b"12")
    with pytest.raises(InvalidError, match=r"x.idx: no Megatron index"):
        build.megatron([prefix])


def test_tenplex_index_with_strange_paths_and_a_short_file(tmp_path, build, opened):
    first, second = RANDOM.bytes(100), RANDOM.bytes(50)
    (tmp_path / "mit Leer ü%.bin").write_bytes(first)
    (tmp_path / "second").write_bytes(second)
    text = f"3\n./mit Leer ü%.bin 3\n0 10\n10 10\n5 100\n{tmp_path}/second 2\n0 50\n40 60\n./second 0\n"
    (tmp_path / "idx.txt").write_text(text)
    built = build.tenplex(str(tmp_path / "idx.txt"))
    assert (built.short, built.overlapping_count, built.empty_count) == ((f"{tmp_path}/second",), 2, 1)
    samples = opened(built)
    assert [bytes(part) for part in read_samples(samples, [3, 0, 2, 1])] == [
        second,
        first[:10],
        first[5:],
        b"",
    ]
    out = memoryview(bytearray(10 + 20 + 50))
    with pytest.raises(SamplesError) as caught:
        samples.read_into(np.array([0, 4, 3]), out)
    assert caught.value.message == (
        f"sample 4: {tmp_path}/second: bytes [40, 60): the file has 50 bytes, fewer than its index says"
    )
    assert isinstance(caught.value, CorruptError)
    assert bytes(out[:10]) + bytes(out[30:]) == first[:10] + second
    (tmp_path / "idx.txt").write_text("1\nsecond 1\n9 5\n")
    with pytest.raises(InvalidError, match=r"second: sample 0: need 0 <= begin <= end, got \[9, 5\)"):
        build.tenplex(str(tmp_path / "idx.txt"))


def test_a_dataset_of_no_files(build, opened):
    for built in (build.files([]), build.members([]), build.records([], record_bytes=4)):
        samples = opened(built)
        assert samples.count == 0
        assert read_samples(samples, []) == []


def test_ids_and_buffers_that_do_not_fit(tmp_path, build, opened):
    samples = opened(build.npy([save(tmp_path / "x.npy", np.zeros((3, 2)))]))
    with pytest.raises(InvalidError, match="sample 0 to 3: need 0 <= sample < 3"):
        read_samples(samples, [0, 3])
    with pytest.raises(InvalidError, match="buffer of 1 bytes: 2 samples have 32"):
        samples.read_into(np.array([0, 1]), memoryview(bytearray(1)))
    assert read_samples(samples, []) == []


def test_an_index_is_written_whole_or_not_at_all(tmp_path, build):
    built = build.npy([save(tmp_path / "x.npy", np.zeros((3, 2)))])
    with pytest.raises(FileNotFoundError):
        write_index(built.index, tmp_path / "none" / "index")
    write_index(built.index, tmp_path / "index")
    assert (tmp_path / "index").read_bytes() == b"".join(bytes(part) for part in index_parts(built.index))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "x.npy"]
    (tmp_path / "index").write_bytes(b"")
    with pytest.raises(InvalidError, match="index: no index of samples: 0 bytes"):
        map_index(tmp_path / "index")


def test_the_same_from_a_server(tmp_path, server, objects, build):
    """All kinds of files, over HTTP: the same indexes and bytes as from the local files."""
    array = RANDOM.integers(0, 9, (40, 6, 2))
    save(tmp_path / "c.npy", array)
    save(tmp_path / "f.npy", np.asfortranarray(array))
    np.savez_compressed(tmp_path / "z.npz", *array)
    megatron(tmp_path / "m", [np.arange(30), np.arange(9)])
    server.files = {f"/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}
    reader = objects()
    remote = IndexBuilder(reader)
    for make, names, limit in [
        (lambda b, f: b.npy(f), ["c.npy", "f.npy"], 2),
        (lambda b, f: b.members(f), ["z.npz"], 1),
        (lambda b, f: b.megatron(f, sequence_length=8), ["m"], 1),
        (lambda b, f: b.files(f), ["c.npy", "z.npz"], 2),
    ]:
        local = IndexedSamples(make(build, [str(tmp_path / name) for name in names]).index, LocalReader())
        there = IndexedSamples(make(remote, [f"{server.url}/{name}" for name in names]).index, reader)
        assert (there.count, there.shape, there.dtype) == (local.count, local.shape, local.dtype)
        ids = RANDOM.permutation(local.count)
        before = reader.requests
        assert read_samples(there, ids) == read_samples(local, ids)
        assert reader.requests - before <= limit  # near ranges are joined
