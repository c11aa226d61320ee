"""Torch's tensors through a state and back, without the client importing torch by itself."""

import numpy as np
import pytest
import torch

from tenplexfs.client.arrays import source_of, to_torch
from tenplexfs.errors import InvalidError
from tenplexfs.formats.structure import flatten, unflatten

DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int64, torch.complex64),
]


def there_and_back(state):
    flat = flatten(state, source_of)
    back = unflatten(flat.document, lambda path: to_torch(np.array(flat.tensors[path].array(), order="C")))
    return back, flat


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4)])
def test_bits_shape_and_dtype(dtype, shape):
    bits = torch.randint(0, 2, (*shape, torch.empty((), dtype=dtype).itemsize), dtype=torch.uint8)
    tensor = bits.reshape(-1).view(dtype).reshape(shape) if bits.numel() else torch.empty(shape, dtype=dtype)
    found = there_and_back({"w": tensor})[0]["w"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert found.contiguous().reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def test_views_ties_parameters_and_what_only_torch_has():
    w = torch.arange(20.0).reshape(4, 5)
    state = {
        "w": w,
        "tied": w,
        "transposed": w.t(),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "parameter": torch.nn.Parameter(w),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": w.shape,
    }
    back, flat = there_and_back(state)
    assert dict(flat.ties) == {"tied": "w", "parameter": "w"}
    assert back["w"] is back["tied"]
    assert back["transposed"].equal(w.t()) and back["conjugate"].equal(torch.tensor([1 - 2j]))
    assert [back[name] for name in ("dtype", "device", "size")] == [
        torch.bfloat16,
        torch.device("cpu"),
        w.shape,
    ]
    assert type(back["size"]) is torch.Size


@pytest.mark.parametrize("tensor", [torch.empty(2, device="meta"), torch.eye(2).to_sparse()])
def test_tensors_without_bytes_are_refused_with_their_path(tensor):
    with pytest.raises(InvalidError, match="state 'a/b'"):
        flatten({"a": {"b": tensor}}, source_of)
