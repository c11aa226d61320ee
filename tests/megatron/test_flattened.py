"""Runs of raveled local arrays: how Megatron-Core up to 0.14 described its distributed optimizer."""

import itertools

import pytest

from tenplexfs.errors import InvalidError
from tenplexfs.megatron import layout_of_ranks
from tests.megatron.test_layout import assert_all_hold_their_parts, whole


class FlatTensor:
    """A double of what later versions refuse to make: data is ``local.ravel()[flattened_range]``."""

    def __init__(self, local, shape, offset, run, replica_id=0):
        self.key, self.dtype, self.data = "m", local.dtype, local.ravel()[run]
        self.local_shape, self.global_shape, self.global_offset = tuple(local.shape), shape, offset
        self.axis_fragmentations, self.replica_id = None, replica_id
        self.prepend_axis_num, self.allow_shape_mismatch, self.flattened_range = 0, False, run


@pytest.mark.parametrize("points", [(0, 5, 12), (0, 0, 12), (0, 7, 7, 12), (0, 3, 6, 9, 12)])
def test_runs_of_a_tensor_parallel_shard(points):
    tensor, states = whole(8, 3), []
    for tp in range(2):
        local = tensor.chunk(2)[tp]
        for begin, end in itertools.pairwise(points):
            states.append({"m": FlatTensor(local, (8, 3), (4 * tp, 0), slice(begin, end))})
    assert_all_hold_their_parts(layout_of_ranks(states), states)


def test_data_of_another_length_than_the_run_is_refused():
    tensor = FlatTensor(whole(4, 3), (4, 3), (0, 0), slice(0, 5))
    tensor.flattened_range = slice(0, 6)
    with pytest.raises(InvalidError, match=r"'m': data \[5\]: its object says \[6\]"):
        layout_of_ranks([{"m": tensor}])
