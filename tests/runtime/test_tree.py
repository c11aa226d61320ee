import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplexfs.core.layout import Layout, Mesh, TensorEntry
from tenplexfs.core.ptc import PTC
from tenplexfs.errors import CorruptError, InvalidError
from tenplexfs.formats.safetensors import parse
from tenplexfs.runtime.path_tree import PathTree
from tenplexfs.runtime.tree import SLOT_SHIFT, BytesContent, SnapshotTree
from tests.fuse.memory import CREATED_NS, MemoryView, local, npy, small_ptc, whole

SLOT = 5


def snapshot(version: int = 0, slot: int = SLOT) -> SnapshotTree:
    ptc = small_ptc()
    return SnapshotTree(slot, MemoryView("gpt", version, ptc), ptc)


def walk(tree: SnapshotTree, ino: int | None = None, prefix: str = "") -> dict[str, int]:
    """Every path of the tree by readdir, and its inode."""
    found = {}
    for name, attributes, _ in tree.entries(tree.root if ino is None else ino, 0):
        path = prefix + name.decode()
        found[path] = attributes.ino
        if attributes.is_dir:
            found |= walk(tree, attributes.ino, path + "/")
    return found


def find(tree: SnapshotTree, path: str) -> int:
    """The inode of a path by lookups."""
    ino = tree.root
    for name in path.split("/"):
        entry = tree.lookup(ino, name.encode())
        assert entry is not None, path
        ino = entry.ino
    return ino


def test_the_tree_is_what_the_ptc_holds():
    tree = snapshot()
    ptc = small_ptc()
    files = {"job.json", "layout.json", *(f"ptc/{rank}.json" for rank in range(4))}
    files |= {f"model/{rank}/{path}.npy" for rank in range(4) for path in ptc.rank_paths(rank)}
    files |= {f"full/{path}.npy" for path in ptc.tensors}
    files |= {"full/model.safetensors", *(f"model/{rank}.safetensors" for rank in range(4))}
    seen = walk(tree)
    assert {path for path, ino in seen.items() if not tree.attributes(ino).is_dir} == files
    assert len(set(seen.values())) == len(seen)
    assert all(ino >> SLOT_SHIFT == SLOT for ino in seen.values())


def test_lookup_readdir_and_attributes_agree():
    tree = snapshot()
    for path, ino in walk(tree).items():
        assert find(tree, path) == ino
        assert tree.attributes(ino).ino == ino
    directories = [tree.root, *(ino for ino in walk(tree).values() if tree.attributes(ino).is_dir)]
    for ino in directories:
        entries = list(tree.entries(ino, 0))
        assert all(attributes == tree.attributes(attributes.ino) for _, attributes, _ in entries)
        assert tree.attributes(ino).nlink == 2 + sum(attributes.is_dir for _, attributes, _ in entries)
        for at, (_, _, position) in enumerate(entries):
            assert list(tree.entries(ino, position)) == entries[at + 1 :]


def test_bytes_and_sizes():
    tree, ptc = snapshot(version=3), small_ptc()
    for path, ino in walk(tree).items():
        attributes = tree.attributes(ino)
        assert attributes.mtime_ns == CREATED_NS + 3
        if attributes.is_dir:
            continue
        data = bytes(tree.open(ino).read(0, 1 << 20))
        assert attributes.size == len(data)
        kind, _, rest = path.partition("/")
        if path.endswith(".safetensors"):
            parse(data)
        elif kind == "model":
            rank, _, tensor = rest.removesuffix(".npy").partition("/")
            assert data == npy(local(ptc, int(rank), tensor, 3), ptc.tensors[tensor].dtype)
        elif kind == "full":
            tensor = rest.removesuffix(".npy")
            assert data == npy(whole(ptc, tensor, 3), ptc.tensors[tensor].dtype)
        else:
            assert json.loads(data) == {"name": path, "version": 3}


@pytest.mark.parametrize(
    "path",
    [
        *(
            "model/00",
            "model/4",
            "model/+1",
            "model/99999999999",
            "ptc/01.json",
            "ptc/4.json",
            "ptc/0",
            "nothing",
        ),
        *(
            "model/4.safetensors",
            "model/00.safetensors",
            "model/0/model.safetensors",
            "model/model.safetensors",
        ),
        *("ptc/0.safetensors", "full/layers/model.safetensors", "full/0.safetensors"),
    ],
)
def test_names_that_are_not_there(path):
    tree = snapshot()
    *parents, name = path.split("/")
    parent = find(tree, "/".join(parents)) if parents else tree.root
    assert tree.lookup(parent, name.encode()) is None


def test_no_safetensors_where_they_have_no_word_for_a_type():
    ptc = small_ptc(extra=(TensorEntry("wide", (2,), "complex128"),))
    tree = SnapshotTree(1, MemoryView("gpt", 0, ptc), ptc)
    assert not [path for path in walk(tree) if path.endswith(".safetensors")]
    for path in ("model/0", "full"):
        assert b"no type complex128" in tree.xattrs(find(tree, path))[b"user.tenplexfs.no_safetensors"]
    assert tree.xattrs(find(tree, "full/layers")) == {}
    assert tree.lookup(find(tree, "model"), b"0.safetensors") is None


def test_without_state_only_the_documents():
    tree = SnapshotTree(1, MemoryView("gpt", 0, small_ptc()), None)
    assert list(walk(tree)) == ["job.json", "layout.json"]
    assert tree.lookup(tree.root, b"model") is None
    assert tree.attributes(tree.root).nlink == 2


def test_ranks_that_show_the_same_share_one_tree():
    many = tuple(TensorEntry(f"t{i}", (2,), "int8") for i in range(3))
    ptc = small_ptc(8, extra=many)
    tree = SnapshotTree(1, MemoryView("gpt", 0, ptc), ptc)
    assert len({id(paths) for paths in tree._ranks}) == 2


def test_xattrs():
    tree = snapshot()
    xattrs = tree.xattrs(find(tree, "model/1/embedding/weight.npy"))
    assert xattrs[b"user.tenplexfs.dtype"] == b"float32"
    assert json.loads(xattrs[b"user.tenplexfs.global_shape"]) == [7, 6]
    assert json.loads(xattrs[b"user.tenplexfs.pieces"]) == [{"start": [4, 0], "stop": [7, 6], "at": [0, 0]}]
    xattrs = tree.xattrs(find(tree, "full/layers/3/w.npy"))
    assert xattrs[b"user.tenplexfs.dtype"] == b"bfloat16"
    assert json.loads(xattrs[b"user.tenplexfs.pieces"]) == [{"start": [0, 0], "stop": [4, 8], "at": [0, 0]}]
    assert tree.xattrs(find(tree, "job.json")) == tree.xattrs(find(tree, "model/1")) == {}


def test_a_content_of_another_size_is_refused():
    class Short(MemoryView):
        def open_full(self, path):
            return BytesContent(b"short")

    ptc = small_ptc()
    tree = SnapshotTree(1, Short("gpt", 0, ptc), ptc)
    with pytest.raises(CorruptError, match="head of job gpt: 5 bytes, stat says 296"):
        tree.open(find(tree, "full/head.npy"))


NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=4)


@given(st.sets(st.lists(NAMES, min_size=1, max_size=4).map("/".join), max_size=30))
def test_path_trees_hold_exactly_their_paths(paths):
    # A name that ends in .npy may be the file of another tensor; that is another test.
    paths = sorted(path for path in paths if ".npy/" not in path)
    tree = PathTree(paths)
    for path in paths:
        node = 0
        for name in (path + ".npy").split("/"):
            node = tree.child(node, name.encode())
            assert node
        assert tree.paths[node] == path
    assert sum(path is not None for path in tree.paths) == len(paths)
    for node in range(len(tree.names)):
        names = tree.names[tree.first[node] : tree.first[node] + tree.count[node]]
        assert names == sorted(set(names))


@pytest.mark.parametrize("paths", [["a", "a.npy/b"], ["a.npy/b", "a"], ["a", "a"]])
def test_two_entries_of_one_name_are_refused(paths):
    with pytest.raises(InvalidError, match="tensor 'a"):
        PathTree([str(path) for path in paths])


def test_too_many_entries_are_refused():
    with pytest.raises(InvalidError, match="tree: 1048577 entries, need at most 1048576 a rank"):
        PathTree([str(i) for i in range(1 << 20)])


def test_a_mesh_at_the_limit_has_room():
    ptc = PTC(Layout(Mesh((("dp", 1 << 17),))), [], [], [])
    ptc_view = MemoryView("gpt", 0, ptc)
    tree = SnapshotTree((1 << 24) - 1, ptc_view, ptc)
    last = tree.lookup(find(tree, "model"), b"131071")
    assert last is not None
    assert last.ino < 1 << 64
    assert np.uint64(last.ino) >> np.uint64(SLOT_SHIFT) == (1 << 24) - 1
