import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from tenplexfs.core.dtypes import dtype_name, itemsize_of
from tenplexfs.core.paths import path_of_name
from tenplexfs.errors import InvalidError
from tenplexfs.formats.safetensors import DTYPES, parse
from tenplexfs.formats.safetensors_file import lay_out

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from(sorted(DTYPES.values()))), max_size=12))
def test_the_file_is_the_librarys_byte_for_byte(wanted):
    wanted.pop("__metadata__", None)
    rng = np.random.default_rng(1)
    data = {
        name: rng.integers(0, 2, int(np.prod(shape)) * itemsize_of(dtype), np.uint8)
        for name, (shape, dtype) in wanted.items()
    }
    tensors = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in wanted.items()
    }
    for name, tensor in tensors.items():
        if data[name].size:
            tensor.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(data[name]))
    paths = {path_of_name(name): name for name in wanted}
    layout = lay_out((path, wanted[name][1], wanted[name][0]) for path, name in paths.items())
    file = layout.header + b"".join(data[paths[path]].tobytes() for path in layout.paths)
    assert file == save(tensors)
    assert layout.size == len(file) and len(layout.header) % 8 == 0
    for entry in parse(file).values():
        assert entry.begin % itemsize_of(entry.dtype) == 0


def test_one_word_for_each_type_and_no_other():
    for dtype in ("complex128", "float8_e4m3", "float8_e3m4", dtype_name(np.dtype("<U3")), "datetime64[s]"):
        with pytest.raises(InvalidError, match=r"tensor a/b: safetensors has no type"):
            lay_out([("a/b", dtype, (2,))])


@pytest.mark.parametrize("paths", [["a/b", "a%2Eb"], ["__metadata__"]])
def test_names_that_cannot_be_told_apart_are_refused(paths):
    with pytest.raises(InvalidError, match="one name as keys joined by dots"):
        lay_out([(path, "uint8", (1,)) for path in paths])


def test_a_name_that_was_too_long_to_be_kept_is_refused():
    with pytest.raises(InvalidError, match="too long to be kept"):
        lay_out([(path_of_name("x" * 300), "uint8", (1,))])
