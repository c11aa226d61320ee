import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from tenplexfs.core.statistics import Difference, Statistics

DTYPES = ["float64", "float32", "float16", "int8", "uint16", "int64", "bool", "bfloat16", "float8_e4m3fn"]


def made(dtype: str, values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return values.astype(getattr(ml_dtypes, dtype) if hasattr(ml_dtypes, dtype) else dtype)


FLOATS = arrays(
    np.float32, array_shapes(max_dims=1, max_side=40), elements=st.floats(width=32) | st.just(0.0)
)


@given(st.sampled_from(DTYPES), FLOATS, st.integers(1, 9))
def test_blocks_add_up_to_what_numpy_says(dtype, values, block):
    array = made(dtype, values)
    seen = Statistics()
    for begin in range(0, len(array), block):
        seen.add(array[begin : begin + block])
    wide = array.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    assert seen.count == array.size
    assert (seen.nan, seen.inf) == (int(np.isnan(wide).sum()), int(np.isinf(wide).sum()))
    assert seen.zeros == int((wide == 0).sum())
    if not finite.size:
        assert (seen.minimum, seen.maximum, seen.mean) == (None, None, None)
        return
    if dtype != "int64":
        assert (seen.minimum, seen.maximum) == (finite.min(), finite.max())
    assert seen.mean == pytest.approx(math.fsum(finite) / finite.size, rel=1e-9, abs=1e-300)


def test_complex_numbers_have_a_mean_and_texts_a_count():
    seen = Statistics()
    seen.add(np.array([1 + 2j, 3 - 4j, complex("nan"), 0]))
    assert (seen.mean, seen.minimum, seen.nan, seen.zeros) == ((4 - 2j) / 3, None, 1, 1)
    seen = Statistics()
    seen.add(np.array(["a", "b"]))
    assert (seen.count, seen.mean, seen.minimum) == (2, None, None)
    seen = Statistics()
    seen.add(np.array([2**62 + 1, -(2**62)]))
    assert (seen.minimum, seen.maximum) == (-(2**62), 2**62 + 1)


@given(st.sampled_from(DTYPES), FLOATS, st.data())
def test_differences_are_of_bits_and_distances_of_finite_numbers(dtype, values, data):
    first = made(dtype, values)
    other = data.draw(arrays(np.float32, values.shape, elements=st.floats(-100, 100, width=16)))
    changed = data.draw(arrays(np.bool_, values.shape))
    second = np.where(changed, made(dtype, other), first).astype(first.dtype)
    apart = Difference()
    for begin in range(0, len(first), 7):
        apart.add(first[begin : begin + 7], second[begin : begin + 7])
    bits = [array.view(np.uint8).reshape(len(array), -1) for array in (first, second)]
    assert apart.differing == int((bits[0] != bits[1]).any(axis=1).sum())
    wide = [array.astype(np.float64) for array in (first, second)]
    with np.errstate(all="ignore"):
        distance = np.abs(wide[1] - wide[0])
    good = distance[np.isfinite(distance)]
    assert apart.maximum == (good.max() if good.size else 0)
    assert (apart.relative == 0) == (not good.any()) or not np.square(good).sum()
