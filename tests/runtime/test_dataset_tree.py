"""The tree of datasets without a mount: names, numbers and sizes, also of very many samples."""

from __future__ import annotations

import io
import tempfile
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tenplexfs.core.context import ContextOrder
from tenplexfs.core.cursor import Cursor, Tail
from tenplexfs.core.datasets import Context, DatasetState, Spread
from tenplexfs.errors import InvalidError, StaleError
from tenplexfs.runtime.dataset_parts import dataset_parts
from tenplexfs.runtime.dataset_tree import DatasetTree
from tenplexfs.runtime.dataset_view import DatasetView
from tenplexfs.runtime.datasets import NearReader
from tenplexfs.runtime.protocols import UncomputedError
from tenplexfs.runtime.tree import Attributes, Tree
from tenplexfs.storage.samples.build import IndexBuilder
from tenplexfs.storage.samples.reader import LocalReader
from tenplexfs.storage.samples.source import IndexedSamples

BASE = 5 << 40


class Endless(LocalReader):
    """Files of any size that nobody reads."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def sizes(self, files):
        return [self.size for _ in files]


def view_of(
    index, reader, *, batch=8, degree=2, cursor=None, step=None, unsplit=False, context=None, name="train"
):
    state = DatasetState(
        name=name,
        digest="0" * 32,
        index_bytes=1,
        kind=index.kind,
        sources=("/x",),
        added_by="node0",
        count=index.count,
        unsplit=unsplit,
        shuffle=not unsplit,
        own_batch=None,
        own_tail=None,
        tail=Tail.KEEP,
        start=cursor or Cursor(0, 0, batch, 3),
        start_step=0,
    )
    spread = Spread(tuple((rank,) for rank in range(degree)), batch, context=context)
    return DatasetView(state, spread, index, NearReader(IndexedSamples(index, reader)), step)


def walk(tree: Tree, ino: int, path: str = "") -> Iterator[tuple[str, Attributes]]:
    for name, entry, _ in tree.entries(ino, 0):
        yield f"{path}/{name.decode()}", entry
        if entry.is_dir:
            yield from walk(tree, entry.ino, f"{path}/{name.decode()}")


def find(tree: Tree, path: str) -> Attributes | None:
    found = tree.attributes(BASE)
    for part in path.split("/"):
        if found is not None:
            found = tree.lookup(found.ino, part.encode())
    return found


def read(tree: Tree, ino: int, chunk: int = 1 << 20) -> bytes:
    content = tree.open(ino)

    async def run() -> bytes:
        parts = []
        for at in range(0, content.size, chunk):
            data = content.read(at, chunk)
            parts.append(bytes(data if data is not None else await content.read_wait(at, chunk)))
        return b"".join(parts)

    return trio.run(run)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    bodies = [bytes([n]) * (n * 37 % 11) for n in range(53)]
    names = [tmp_path / f"{n:02}.{'npz' if n % 2 else 'bin'}" for n in range(53)]
    for name, body in zip(names, bodies, strict=True):
        name.write_bytes(body)
    return [str(name) for name in names]


def test_every_entry_is_found_again_by_name_and_number_and_reads_as_stat_says(files, tmp_path):
    reader = LocalReader()
    np.save(tmp_path / "rows.npy", np.arange(40 * 6, dtype=np.int16).reshape(40, 6))
    rows = IndexBuilder(reader).npy([str(tmp_path / "rows.npy")]).index
    context = Context(3, 0, ContextOrder.ZIGZAG)
    views = [
        view_of(IndexBuilder(reader).files(files).index, reader, cursor=Cursor(0, 16, 8, 3), step=2),
        view_of(rows, reader, name="cut", context=context, degree=4),
        view_of(rows, reader, name="valid", unsplit=True),
    ]
    parts = dataset_parts("gpt", views, 1, lambda section: BASE | section << 37)
    assert [name for name, _ in parts.values()] == [b"dataset", b"tenplex"]
    seen: dict[int, str] = {}
    for section, (_, tree) in parts.items():
        entries = dict(walk(tree, BASE | section << 37))
        assert len(entries) > 20
        for path, entry in entries.items():
            assert seen.setdefault(entry.ino, path) == path
            assert tree.attributes(entry.ino) == entry
            if entry.is_dir:
                assert entry.nlink == 2 + sum(each.is_dir for _, each, _ in tree.entries(entry.ino, 0))
                listed = [name for name, _, _ in tree.entries(entry.ino, 0)]
                for begin in (1, 3):
                    assert [name for name, _, _ in tree.entries(entry.ino, begin)] == listed[begin:]
                with pytest.raises(StaleError):
                    tree.open(entry.ino)
            else:
                assert len(read(tree, entry.ino)) == entry.size, path
    names = {path.rpartition("/")[2] for path in seen.values()}
    assert {"data.bin", "cp", "0000.tf_record.idx", "batch-sizes.txt"} <= names
    order = views[0].view(0, 1).rows.span(0, 3).tolist()
    for row, sample in enumerate(order):
        assert f"/train/0/1/samples/0/{row}.{'npz' if sample % 2 else 'bin'}" in seen.values()
    for wrong in (b"07", b"-1", b"x", b"9" * 30, "ü".encode(), b""):
        for entry in [
            parts[7][1].attributes(BASE | 7 << 37),
            *(e for _, e in walk(parts[7][1], BASE | 7 << 37)),
        ]:
            if entry.is_dir:
                assert parts[7][1].lookup(entry.ino, wrong) is None


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 700), st.integers(0, 10**9), st.integers(0, 3000), st.integers(1, 400), st.data())
def test_any_read_of_samples_of_different_sizes_is_that_of_all(count, seed, at, size, data):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, data.draw(st.sampled_from([1, 3, 40])) + 1, count)
    body = rng.integers(0, 256, int(sizes.sum()), np.uint8).tobytes()
    edges = np.concatenate([[0], np.cumsum(sizes)])
    directory = tempfile.TemporaryDirectory()
    path = Path(directory.name) / "body"
    path.write_bytes(body)
    text = f"1\n{path} {count}\n" + "".join(f"{a} {b}\n" for a, b in pairwise(edges))
    listing = path.with_suffix(".txt")
    listing.write_text(text)
    with directory:
        reader = LocalReader()
        view = view_of(IndexBuilder(reader).tenplex(str(listing)).index, reader, degree=1)
        rank = view.view(0, 0)
        whole = b"".join(body[edges[i] : edges[i + 1]] for i in rank.rows.span(0, rank.count).tolist())
        assert rank.data_bytes == len(whole)
        begin, end = min(at, len(whole)), min(at + size, len(whole))
        assert bytes(trio.run(rank.read, begin, end)) == whole[begin:end]
        first = min(at, count)
        wanted = np.cumsum([0, *(sizes[i] for i in rank.rows.span(0, count).tolist())])[first:]
        assert rank.edges(first, count).tolist() == wanted.tolist()


def test_many_sizes_are_summed_up_elsewhere_and_once_for_all_steps(tmp_path):
    count = 70_000
    sizes = np.random.default_rng(1).integers(0, 9, count)
    edges = np.concatenate([[0], np.cumsum(sizes)])
    body = tmp_path / "body"
    body.write_bytes(np.random.default_rng(2).integers(0, 256, int(edges[-1]), np.uint8).tobytes())
    listing = tmp_path / "list.txt"
    ranges = (f"{a} {b}\n" for a, b in pairwise(edges.tolist()))
    listing.write_text(f"1\n{body} {count}\n" + "".join(ranges))
    reader = LocalReader()
    index = IndexBuilder(reader).tenplex(str(listing)).index
    view, later = (view_of(index, reader, degree=1, step=step) for step in (0, 5))
    tree = DatasetTree(BASE, [view], 1)
    directory = find(tree, "train/0/0")
    assert directory is not None
    for ask in (
        lambda: tree.lookup(directory.ino, b"data.bin"),
        lambda: list(tree.entries(directory.ino, 0)),
        lambda: tree.open(find(tree, "train/0/0/samples/0/7.bin").ino),
    ):
        with pytest.raises(UncomputedError) as caught:
            ask()
    numbers = find(tree, "train/0/0/index.npy")
    assert numbers is not None
    assert tree.open(numbers.ino).read(0, 4096) is None
    caught.value.compute()
    ids = view.view(0, 0).rows.span(0, count)
    assert find(tree, "train/0/0/data.bin").size == sizes.sum()
    assert np.load(io.BytesIO(read(tree, numbers.ino)))[:, 1].tolist() == np.cumsum(sizes[ids]).tolist()
    assert later.has_rows_of(view)
    assert later.sharing(view).view(0, 0).is_computed
    assert not later.has_rows_of(view_of(index, reader, degree=2, step=5))
    assert not later.has_rows_of(view_of(index, reader, degree=1, cursor=Cursor(0, 8, 8, 3)))


def test_ten_billion_samples_cost_no_memory_and_have_numbers():
    count = 10**10
    reader = Endless(8 * count)
    index = IndexBuilder(reader).records(["/none"], record_bytes=8).index
    tracemalloc.start()
    tree = DatasetTree(BASE, [view_of(index, reader, degree=64, batch=1024)], 1)
    for epoch in (0, 1, 5):
        data = find(tree, f"train/{epoch}/63/data.npy")
        assert data is not None
        assert data.size == 128 + 8 * count // 64
    rows = count // 64
    last = find(tree, f"train/1/63/samples/{(rows - 1) // 10_000}/{rows - 1}.npy")
    assert last is not None
    assert tree.attributes(last.ino) == last
    assert find(tree, f"train/1/63/samples/{rows // 10_000}/{rows}.npy") is None
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_what_cannot_be_cut_is_refused(tmp_path):
    reader = LocalReader()
    np.save(tmp_path / "rows.npy", np.zeros((8, 6), np.int16))
    index = IndexBuilder(reader).npy([str(tmp_path / "rows.npy")]).index
    with pytest.raises(InvalidError, match="a dim of 6 does not divide into 4 equal parts"):
        view_of(index, reader, context=Context(4, 0, ContextOrder.CONTIGUOUS))
    with pytest.raises(InvalidError, match=r"dim 2, samples have shape \(6,\)"):
        view_of(index, reader, context=Context(2, 2, ContextOrder.CONTIGUOUS))
