from __future__ import annotations

import numpy as np
import pytest

from tenplexfs.core.dtypes import dtype_of
from tenplexfs.errors import InvalidError


def test_names():
    assert dtype_of("float32") == np.float32
    assert dtype_of("bfloat16").itemsize == 2


@pytest.mark.parametrize(
    "name", ["", ",f4", "(f4", "f4,f4", "object", "V3", ">f4", "S", "float33", "(" * 5000 + ",f4"]
)
def test_what_is_no_fixed_size_number_is_refused(name):
    with pytest.raises(InvalidError, match="dtype"):
        dtype_of(name)
