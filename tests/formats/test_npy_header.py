import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tenplexfs.errors import CorruptError, InvalidError, TenplexError
from tenplexfs.formats.npy_header import HEADER_BYTES_MAX, descr_text, dtype_of_descr, header_bytes, parse_npy

PAIR = np.dtype([("x", "<f4"), ("数量", ">i2", (2, 3)), ("in", [("a", "u1")])])


def saved(array, version=None):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version)
    return file.getvalue()


@given(
    st.sampled_from(["f4", ">f4", "?", "c16", "S3", "<U2", "M8[s]", "V2"]).map(np.dtype),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    st.sampled_from("CF"),
    st.sampled_from([(1, 0), (2, 0), (3, 0)]),
)
def test_what_numpy_writes(dtype, shape, order, version):
    array = np.zeros(shape, dtype, order=order)
    data = saved(array, version)
    header = parse_npy(data)
    assert (header.shape, header.dtype) == (shape, dtype)
    assert header.data_at + header.data_bytes == len(data)
    assert header_bytes(data) == header.data_at
    assert header.fortran_order == (not array.flags.c_contiguous)
    assert dtype_of_descr(descr_text(dtype)) == dtype


def test_structured_needs_version_3_for_its_names():
    with pytest.warns(UserWarning, match="format 3.0"):
        data = saved(np.zeros(4, PAIR))
    assert data[6] == 3
    assert parse_npy(data).dtype == PAIR
    assert dtype_of_descr(descr_text(PAIR)) == PAIR


def test_cut_short():
    data = saved(np.zeros(4))
    with pytest.raises(CorruptError, match=r"header of 128 bytes: the file ends after 60"):
        parse_npy(data[:60])


def crafted(text, version=1):
    width = 2 if version == 1 else 4
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(width, "little") + text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04 and so on..", "no .npy file: begins with b'PK"),
        (b"", "no .npy file"),
        (crafted(b"{}", 9), "format 9.0"),
        (crafted(b"x" * (HEADER_BYTES_MAX + 1), 2), "need at most 1048576"),
        (crafted(b"[1, 2"), "no Python literal"),
        (crafted(b"{'descr': '<f4', 'shape': (2,)}"), "need descr, fortran_order and shape"),
        (crafted(b"{'descr': '<f4', 'fortran_order': 0, 'shape': (2,)}"), "fortran_order 0"),
        (crafted(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-2,)}"), r"shape \(-2,\)"),
        (crafted(b"{'descr': 'nope', 'fortran_order': False, 'shape': (2,)}"), "unknown descr 'nope'"),
        (crafted(b"{'descr': '|O', 'fortran_order': False, 'shape': (2,)}"), "objects are not read"),
        (crafted(b"{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (2,)}"), "objects are not read"),
        (crafted(b"{'descr': " + b"(" * 5000 + b")" * 5000 + b"}"), "no Python literal"),
    ],
)
def test_refusals(data, message):
    with pytest.raises(InvalidError, match=message):
        parse_npy(data)


@given(st.binary(max_size=200), st.integers(0, 127))
def test_damage_is_an_error_or_a_header(noise, at):
    data = saved(np.zeros((3, 4)))
    try:
        header = parse_npy(data[:at] + noise + data[at + len(noise) :])
    except TenplexError:
        return
    assert header.data_bytes >= 0


def test_descrs_that_numpy_itself_stumbles_over():
    header = saved(np.zeros((2, 3), np.float32))
    for descr in (b"',f4'", b"'(f4'", b"'<'  "):
        with pytest.raises(InvalidError, match="unknown descr"):
            parse_npy(header.replace(b"'<f4'", descr))
