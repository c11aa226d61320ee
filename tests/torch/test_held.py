"""Whether a rank holds what its job's layout says, where torch reads the same placements in two ways."""

from dataclasses import replace

import numpy as np
import pytest

from tenplexfs.errors import InvalidError, PreconditionError
from tenplexfs.torch import layout_of_ranks
from tenplexfs.torch.held import check_spec
from tenplexfs.torch.placements import MeshSpec, Split, StateSpec, TensorSpec, readings
from tests.holding import ptc_of

MESH = MeshSpec((3, 4), tuple(range(12)), ("dp", "tp"))
STRIDED = TensorSpec((27,), "float32", MESH, (Split(0, 4), Split(0)))
WAYS = [[readings(STRIDED, place)[way] for place in np.ndindex(MESH.shape)] for way in (0, -1)]


def specs(way):
    """What all ranks say that hold the tensor as the one or the other way has it."""
    return [
        StateSpec(rank, 12, MESH, {"w": replace(STRIDED, local_shape=shard.local_shape)})
        for rank, shard in enumerate(WAYS[way])
    ]


def refusing(ptc, states):
    ranks = []
    for rank, state in enumerate(states):
        try:
            check_spec("gpt", ptc, state, rank)
        except PreconditionError as error:
            ranks.append(rank)
            assert f"w on rank {rank}: is [" in str(error)
    return ranks


@pytest.mark.parametrize("way", [0, 1])
def test_one_way_is_taken_for_itself_and_refused_for_the_other(way):
    a, b = (shards[10] for shards in WAYS)
    assert a.local_shape == b.local_shape and a.pieces != b.pieces
    ptc = ptc_of(layout_of_ranks(specs(way)))
    assert refusing(ptc, specs(way)) == []
    assert refusing(ptc, specs(1 - way))


def test_a_layout_of_neither_way_is_refused_on_ranks_whose_shape_tells_nothing():
    plain = replace(STRIDED, splits=(Split(0), Split(0)))
    shards = [readings(plain, place)[0] for place in np.ndindex(MESH.shape)]
    states = [
        StateSpec(rank, 12, MESH, {"w": replace(plain, local_shape=shard.local_shape)})
        for rank, shard in enumerate(shards)
    ]
    ptc = ptc_of(layout_of_ranks(states))
    assert refusing(ptc, states) == []
    for way in (0, 1):
        with pytest.raises(PreconditionError, match=r"w on rank \d+: is .* in its layout, .* in this run"):
            check_spec("gpt", ptc, specs(way)[10], 10)


def test_local_arrays_that_placements_do_not_give_are_refused():
    ptc = ptc_of(layout_of_ranks(specs(0)))
    odd = StateSpec(0, 12, MESH, {"w": replace(STRIDED, local_shape=(5,))})
    with pytest.raises(InvalidError, match=r"'w': rank 0: the local array is \[5\], its placements say"):
        check_spec("gpt", ptc, odd, 0)
