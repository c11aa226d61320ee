import io

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplexfs.core.dtypes import EXTENDED, dtype_of
from tenplexfs.errors import InvalidError
from tenplexfs.formats import npy

NAMES = [
    "bool",
    "int8",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "<U3",
    "S5",
    "<M8[ns]",
]


@given(
    st.lists(st.sampled_from([0, 1, 2, 3, 17]), max_size=4).map(tuple), st.sampled_from([*NAMES, *EXTENDED])
)
def test_numpy_reads_it(shape, name):
    dtype = dtype_of(name)
    data = np.random.default_rng(0).bytes(int(np.prod(shape)) * dtype.itemsize)
    if name == "bool":
        data = bytes(byte & 1 for byte in data)
    elif name == "<U3":
        data = np.frombuffer(data, "u4").__mod__(0x3000).astype("u4").tobytes()
    head = npy.header(shape, name)
    array = np.load(io.BytesIO(head + data))
    assert array.shape == shape and array.dtype.itemsize == dtype.itemsize
    assert array.view(dtype).tobytes() == data
    assert len(head) % 64 == 0 and npy.header_size(shape, name) == len(head)
    assert npy.file_size(shape, name) == len(head) + len(data)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (3, 4), (2**40, 0), (1,) * 32])
def test_the_same_bytes_as_numpy_writes(shape, name):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, np.lib.format.header_data_from_array_1_0(np.empty(shape, name))
    )
    assert npy.header(shape, name) == file.getvalue()


def test_extended_types_show_as_void():
    assert b"'<V2'" in npy.header((2,), "bfloat16")
    for name, dtype in EXTENDED.items():
        if dtype.itemsize == 1:
            assert b"'|V1'" in npy.header((2,), name)
    array = np.arange(3).astype(ml_dtypes.float8_e5m2)
    loaded = np.load(io.BytesIO(npy.header((3,), "float8_e5m2") + array.tobytes()))
    assert loaded.dtype == "V1" and np.array_equal(loaded.view(ml_dtypes.float8_e5m2), array)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((2,), "O"),
        ((2,), "V4"),
        ((2,), "i4,f4"),
        ((-1,), "int8"),
        ((2**62, 4), "int8"),
        ((1,) * 65, "int8"),
        ((2,), "no"),
    ],
)
def test_refused(shape, name):
    with pytest.raises(InvalidError):
        npy.header(shape, name)
