"""Layouts of checkpoints that real ranks saved, against their files and against what each rank held."""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tenplexfs.errors import InvalidError, NotFoundError
from tenplexfs.torch import layout_of_checkpoint, layout_of_metadata
from tests.holding import held, indices, ptc_of

WORLD = 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    where = tmp_path_factory.mktemp("dcp")
    worker = Path(__file__).with_name("save_checkpoint.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(WORLD), str(where)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(WORLD)
    ]
    try:
        for rank in ranks:
            text, _ = rank.communicate(timeout=300)
            assert rank.returncode == 0, text
    finally:
        for rank in ranks:  # the others wait for one that failed
            rank.kill()
            rank.communicate()
    return where


def test_each_chunk_is_on_the_rank_that_wrote_it(saved):
    ptc = ptc_of(layout_of_checkpoint(saved / "checkpoint"))
    assert sorted(ptc.tensors) == [
        *("copies", "grid", "half", "hybrid", "opt/state/w/a/m", "opt/state/w/a/step"),
        *("plain", "rows/w", "scalar", "short"),
    ]
    assert ptc.tensors["half"].dtype == "bfloat16"
    for rank in range(WORLD):
        with np.load(saved / f"rank{rank}.npz") as file:
            had = dict(file)
        for name, local in had.items():
            path = name.replace(".", "/")
            if path in ptc.rank_paths(rank):
                got = held(ptc, rank, path)
                assert set(got.ravel()) <= set(local.ravel()), (rank, name)
                if name in ("rows.w", "grid", "half"):  # no replicas: all that the rank had
                    np.testing.assert_array_equal(got, local)


def test_the_files_hold_what_the_layout_says(saved):
    directory = saved / "checkpoint"
    metadata = FileSystemReader(directory).read_metadata()
    ptc = ptc_of(layout_of_metadata(metadata, world_size=WORLD))
    assert ptc.world_size == WORLD
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        path = name.replace(".", "/")
        held_by = {r: held(ptc, r, path) for r in range(WORLD) if path in ptc.rank_paths(r)}
        for chunk in entry.chunks:
            stored = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            raw = (directory / stored.relative_path).read_bytes()[stored.offset :][: stored.length]
            values = torch.load(io.BytesIO(raw), weights_only=True).to(torch.int64).numpy()
            rank = int(stored.relative_path.split("_")[2])
            assert set(values.ravel()) <= set(held_by[rank].ravel())


def metadata(shape, chunks, files=None):
    entry = TensorStorageMetadata(
        TensorProperties(dtype=torch.float32),
        torch.Size(shape),
        [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n, _ in chunks],
    )
    stored = {
        MetadataIndex("a.w", o): _StorageInfo(files or f"__{rank}_0.distcp", 0, 1) for o, _, rank in chunks
    }
    return Metadata({"a.w": entry}, storage_data=stored)


def test_chunks_of_one_rank_are_joined_or_raveled():
    rows = ptc_of(
        layout_of_metadata(metadata((6, 2), [((0, 0), (2, 2), 0), ((4, 0), (2, 2), 0), ((2, 0), (2, 2), 2)]))
    )
    assert held(rows, 0, "a/w").tolist() == indices((6, 2))[[0, 1, 4, 5]].tolist()
    assert rows.world_size == 3
    corners = [((0, 0), (2, 1), 0), ((2, 1), (2, 2), 0), ((0, 1), (2, 2), 1), ((2, 0), (2, 1), 1)]
    flat = ptc_of(layout_of_metadata(metadata((4, 3), corners)))
    assert held(flat, 0, "a/w").tolist() == [0, 3, 7, 8, 10, 11]
    assert held(flat, 1, "a/w").tolist() == [1, 2, 4, 5, 6, 9]


def test_metadata_that_does_not_hold_is_refused():
    with pytest.raises(
        InvalidError, match=r"'a\.w': \[0:3, 0:2\] of rank 0 and \[2:4, 0:2\] of rank 1 overlap"
    ):
        layout_of_metadata(metadata((4, 2), [((0, 0), (3, 2), 0), ((2, 0), (2, 2), 1)]))
    with pytest.raises(InvalidError, match=r"'a\.w': 4 of 8 elements"):
        layout_of_metadata(metadata((4, 2), [((0, 0), (2, 2), 0)]))
    with pytest.raises(InvalidError, match=r"need a name like __0_0\.distcp"):
        layout_of_metadata(metadata((2,), [((0,), (2,), 0)], "model.safetensors"))
    lost = metadata((2,), [((0,), (2,), 0)])
    lost.storage_data.clear()
    with pytest.raises(InvalidError, match="names no file"):
        layout_of_metadata(lost)


def test_a_directory_without_metadata_is_refused(tmp_path):
    with pytest.raises(NotFoundError, match=r"it has no \.metadata"):
        layout_of_checkpoint(tmp_path)
