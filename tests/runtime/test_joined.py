import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tenplexfs.core.build import build_ptc
from tenplexfs.core.dtypes import dtype_of
from tenplexfs.core.layout import Layout, Mesh, TensorEntry
from tenplexfs.core.paths import name_of_path
from tenplexfs.errors import NotFoundError
from tenplexfs.formats.safetensors import parse
from tenplexfs.runtime.joined import JoinedFiles
from tests.fuse.memory import MemoryView, local, small_ptc, whole

RANKS = [None, 0, 1, 2, 3]


def whole_file(view, rank) -> bytes:
    file = JoinedFiles(view, view.ptc).open(rank)
    return bytes(file.read(0, file.size))


@pytest.mark.parametrize("rank", RANKS)
def test_it_holds_what_the_rank_or_the_model_holds(rank):
    ptc = small_ptc()
    data = whole_file(MemoryView("gpt", 3, ptc), rank)
    entries = parse(data)
    paths = ptc.tensors if rank is None else ptc.rank_paths(rank)
    assert set(entries) == {name_of_path(path) for path in paths}
    for path in paths:
        entry = entries[name_of_path(path)]
        wanted = whole(ptc, path, 3) if rank is None else local(ptc, rank, path, 3)
        assert data[entry.begin : entry.end] == wanted.tobytes()
        assert (entry.shape, dtype_of(entry.dtype)) == (wanted.shape, wanted.dtype)


PTC = small_ptc()
WHOLE = {rank: whole_file(MemoryView("gpt", 1, PTC), rank) for rank in RANKS}


@settings(deadline=None)
@given(st.sampled_from(RANKS), st.integers(0, 700), st.integers(1, 900), st.integers(-1, 3))
def test_any_read_here_or_elsewhere(rank, offset, size, remote):
    gate = trio.Event()
    files = JoinedFiles(MemoryView("gpt", 1, PTC, remote_rank=remote, gate=gate), PTC)
    file = files.open(rank)
    assert file.size == files.size(rank) == len(WHOLE[rank])
    wanted = WHOLE[rank][offset : offset + size]

    async def read() -> bytes:
        data = file.read(offset, size)
        if data is None:
            assert rank == remote
            gate.set()
            data = await file.read_wait(offset, size)
        return bytes(data)

    assert trio.run(read) == wanted
    file.close()


def test_ranks_of_the_same_shapes_share_a_layout_and_others_do_not():
    ptc = small_ptc(8)
    files = JoinedFiles(MemoryView("gpt", 0, ptc), ptc)
    sizes = {rank: files.size(rank) for rank in range(16)}
    for rank, size in sizes.items():
        assert size == len(whole_file(MemoryView("gpt", 0, ptc), rank))
    assert len(files._known) < 8


def test_what_safetensors_cannot_hold_has_no_file_and_says_why():
    layout = Layout(
        Mesh((("tp", 2),)), (TensorEntry("a", (2,), "complex128"), TensorEntry("b", (2,), "int8"))
    )
    ptc = build_ptc(layout)
    files = JoinedFiles(MemoryView("gpt", 0, ptc), ptc)
    for rank in (None, 1):
        assert files.size(rank) is None
        assert "tensor a: safetensors has no type complex128" in files.reason(rank)
        with pytest.raises(NotFoundError, match="no type complex128"):
            files.open(rank)
    assert np.dtype("complex128") == whole(ptc, "a", 0).dtype
