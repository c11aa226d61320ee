import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tenplexfs.errors import CorruptError, InvalidError, NotFoundError
from tenplexfs.storage.safetensors_source import SafetensorsSource

A = {"layers.0.w": np.arange(12, dtype="f4").reshape(3, 4), "layers.0.w.scale": np.full((), 2, "f4")}
B = {"head": np.arange(5).astype(ml_dtypes.bfloat16), "odd.": np.zeros((0, 3), "u1")}


@pytest.fixture
def model(tmp_path):
    save_file(A, tmp_path / "1.safetensors")
    save_file(B, tmp_path / "2.safetensors")
    index(tmp_path, {**dict.fromkeys(A, "1.safetensors"), **dict.fromkeys(B, "2.safetensors")})
    return tmp_path


def index(directory, weight_map):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_directory_with_index(model):
    source = SafetensorsSource.open(model)
    assert dict(source.tensors) == {
        "head": ((5,), "bfloat16"),
        "layers/0/w": ((3, 4), "float32"),
        "layers/0/w/scale": ((), "float32"),
        "odd/%00": ((0, 3), "uint8"),
    }
    for name, array in {"layers/0/w": A["layers.0.w"], "head": B["head"], "odd/%00": B["odd."]}.items():
        got = source.array(0, name)
        assert got.dtype == array.dtype and np.array_equal(got, array) and not got.flags.writeable
    assert source.array(1, "head") is None and source.array(0, "tail") is None
    assert SafetensorsSource.open(model / "model.safetensors.index.json").tensors == source.tensors


def test_file_and_directory_with_one_file(model, tmp_path):
    assert list(SafetensorsSource.open(model / "2.safetensors").tensors) == ["head", "odd/%00"]
    (model / "model.safetensors.index.json").unlink()
    with pytest.raises(NotFoundError, match="holds neither"):
        SafetensorsSource.open(model)
    (model / "1.safetensors").rename(model / "model.safetensors")
    assert list(SafetensorsSource.open(model).tensors) == ["layers/0/w", "layers/0/w/scale"]


@pytest.mark.parametrize(
    "file", ["../1.safetensors", "/etc/passwd", "..", "", ".", "sub/1.safetensors", "a\0", 7]
)
def test_index_may_not_lead_out(model, file):
    index(model, {"head": file})
    with pytest.raises(InvalidError, match="not in the directory"):
        SafetensorsSource.open(model)


def test_index_and_files_must_agree(model):
    index(model, {"layers.0.w": "1.safetensors", "gone": "1.safetensors"})
    with pytest.raises(InvalidError, match=r"'gone' \(index only\), 'layers.0.w.scale' \(file only\)"):
        SafetensorsSource.open(model)
    index(model, {"head": "3.safetensors"})
    with pytest.raises(NotFoundError, match=r"3\.safetensors"):
        SafetensorsSource.open(model)


def test_a_symbolic_link_is_a_file_of_the_directory(model, tmp_path_factory):
    real = tmp_path_factory.mktemp("blobs") / "blob"
    (model / "2.safetensors").rename(real)
    (model / "2.safetensors").symlink_to(real)
    assert "head" in SafetensorsSource.open(model).tensors


def test_errors_name_the_file(model):
    (model / "1.safetensors").write_bytes((model / "1.safetensors").read_bytes()[:-1])
    with pytest.raises(CorruptError, match=r"1\.safetensors: cut short"):
        SafetensorsSource.open(model)
    (model / "1.safetensors").write_bytes(b"")
    with pytest.raises(CorruptError, match=r"1\.safetensors: .*0 bytes"):
        SafetensorsSource.open(model)
    (model / "model.safetensors.index.json").write_text("{")
    with pytest.raises(InvalidError, match="no valid JSON"):
        SafetensorsSource.open(model)
    (model / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InvalidError, match="weight_map"):
        SafetensorsSource.open(model)
    with pytest.raises(NotFoundError, match="no such file"):
        SafetensorsSource.open(model / "none.safetensors")
