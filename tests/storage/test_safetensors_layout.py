"""Layouts of safetensors models, against the library that wrote their files."""

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from tenplexfs.core.build import build_ptc
from tenplexfs.errors import InvalidError, NotFoundError
from tenplexfs.formats.safetensors_layout import layout_of_files
from tenplexfs.storage.safetensors_layout import layout_of_model

NAMES = [
    "model-00001-of-00003.safetensors",
    "model-00002-of-00003.safetensors",
    "model-00003-of-00003.safetensors",
]
TENSORS = [
    {"embed.weight": np.zeros((7, 4), np.float32), "layers.0.w": np.zeros((4, 4), np.float16)},
    {"layers.1.w": np.zeros((4, 4), np.float16), "scale": np.zeros((), np.float64)},
    {"head": np.zeros((0, 3), np.int8)},
]


@pytest.fixture
def model(tmp_path):
    weights = {}
    for name, tensors in zip(NAMES, TENSORS, strict=True):
        save_file(tensors, tmp_path / name)
        weights |= dict.fromkeys(tensors, name)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weights})
    )
    return tmp_path


def test_a_rank_for_each_file_holds_what_is_in_it(model):
    ptc = build_ptc(layout_of_model(model, rank_per_file=True))
    assert ptc.world_size == len(NAMES)
    for rank, name in enumerate(NAMES):
        with safe_open(model / name, "numpy") as file:
            assert sorted(key.replace(".", "/") for key in file.keys()) == list(ptc.rank_paths(rank))  # noqa: SIM118
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                array = file.get_tensor(key)
                shard = ptc.shard(rank, key.replace(".", "/"))
                assert (shard.local_shape, ptc.tensors[key.replace(".", "/")].dtype) == (
                    array.shape,
                    array.dtype.name,
                )


def test_one_rank_holds_all(model):
    for path in (model, model / "model.safetensors.index.json"):
        ptc = build_ptc(layout_of_model(path))
        assert ptc.world_size == 1
        assert ptc.rank_paths(0) == ("embed/weight", "head", "layers/0/w", "layers/1/w", "scale")
    single = build_ptc(layout_of_model(model / NAMES[0], rank_per_file=True))
    assert single.rank_paths(0) == ("embed/weight", "layers/0/w")


def test_what_does_not_fit_is_refused(model):
    with pytest.raises(NotFoundError):
        layout_of_model(model / "missing")
    tensor = {"w": ((1,), "float32")}
    with pytest.raises(InvalidError, match=r"'w': in a\.safetensors and in b\.safetensors"):
        layout_of_files({"a.safetensors": tensor, "b.safetensors": tensor}, rank_per_file=True)
