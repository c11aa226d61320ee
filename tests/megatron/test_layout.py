"""Layouts of Megatron's sharded state dicts, over tensors of flat indices cut as Megatron cuts them."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

from tenplexfs.core.layout import Mesh
from tenplexfs.errors import InvalidError
from tenplexfs.megatron import layout_of_ranks, objects_of_ranks, parts_of
from tests.holding import held, ptc_of
from tests.megatron.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_swiglu_sharded_factory,
)


def whole(*shape):
    return torch.arange(int(np.prod(shape))).reshape(shape)


def assert_all_hold_their_parts(layout, states):
    """Fills each local array from the parts of the rank's state: they are the elements that it must hold."""
    ptc = ptc_of(layout)
    for rank, state in enumerate(states):
        parts = parts_of(layout, rank, state)
        assert sorted(parts) == list(ptc.rank_paths(rank))
        for path, pieces in parts.items():
            wanted = held(ptc, rank, path)
            local = np.full(wanted.shape, -1)
            for part in pieces:
                data = part.data.numpy()
                if data.ndim == local.ndim:
                    place = tuple(slice(a, a + n) for a, n in zip(part.at, data.shape, strict=True))
                    local[place] = data
                else:
                    local[part.at[0] : part.at[0] + data.size] = data.ravel()
            np.testing.assert_array_equal(local, wanted, err_msg=f"{path} on {rank}")
    return ptc


def test_tensor_parallel_with_data_parallel_replicas():
    tensor = whole(8, 6)
    states = []
    for dp, tp in itertools.product(range(2), range(2)):
        column = tensor.chunk(2, dim=0)[tp]
        row = tensor.chunk(2, dim=1)[tp]
        states.append(
            {
                "model": {
                    "column": ShardedTensor.from_rank_offsets(
                        "col.weight", column, (0, tp, 2), replica_id=(0, 0, dp)
                    ),
                    "row": [
                        ShardedTensor.from_rank_offsets("row.weight", row, (1, tp, 2), replica_id=(0, 0, dp))
                    ],
                    "norm": ShardedTensor.from_rank_offsets("norm", whole(6), replica_id=(0, tp, dp)),
                },
                "iteration": 7,
                "local": LocalNonpersistentObject(torch.ones(3)),
                "common": whole(2),
            }
        )
    layout = layout_of_ranks(states, mesh=Mesh((("dp", 2), ("tp", 2))))
    ptc = assert_all_hold_their_parts(layout, states)
    assert ptc.rank_paths(3) == ("col/weight", "common", "norm", "row/weight")
    assert [holder.keys for holder in ptc.holders("col/weight")] == [
        ((0, "col/weight"), (2, "col/weight")),
        ((1, "col/weight"), (3, "col/weight")),
    ]


@pytest.mark.parametrize("layers_per_stage", [[2, 2], [1, 3]])
def test_layers_stacked_in_front_over_pipeline_stages(layers_per_stage):
    tensor, states = whole(4, 6, 5), []
    for pp, tp in itertools.product(range(2), range(3)):
        first = sum(layers_per_stage[:pp])
        states.append(
            {
                f"layers.{i}.w": ShardedTensor.from_rank_offsets(
                    "layers.w", tensor[i].chunk(3)[tp], (0, i, 4), (1, tp, 3), prepend_axis_num=1
                )
                for i in range(first, first + layers_per_stage[pp])
            }
        )
    ptc = assert_all_hold_their_parts(layout_of_ranks(states), states)
    assert ptc.tensors["layers/w"].shape == (4, 6, 5)
    assert (
        held(ptc, 4, "layers/w").tolist()
        == np.concatenate([tensor[i, 2:4].ravel() for i in range(layers_per_stage[0], 4)]).tolist()
    )


@pytest.mark.parametrize("lead", [0, 1, 2])
@pytest.mark.parametrize("singleton", [False, True])
def test_swiglu_halves_are_never_scrambled(lead, singleton):
    """The tensor is [gate; value] over all ranks; each rank's own weight is [its gate; its value]."""
    tp, layers, states = 4, 2, []
    shape = (16, 3)
    tensor = whole(*((layers,) * lead), *shape)
    for rank in range(tp):
        state = {}
        for place in itertools.product(range(layers), repeat=lead):
            gate, value = (half.chunk(tp)[rank] for half in tensor[place].chunk(2))
            offsets = tuple((axis, place[axis], layers) for axis in range(lead))
            original = ShardedTensor.from_rank_offsets(
                "fc1.weight", torch.cat([gate, value]), *offsets, (lead, rank, tp), prepend_axis_num=lead
            )
            state["fc1" + str(place)] = apply_swiglu_sharded_factory(original, offsets, singleton)
        states.append(state)
    layout = layout_of_ranks(states)
    if singleton:
        ptc = ptc_of(layout)
        assert sorted(ptc.tensors) == ["fc1/weight_v", "fc1/weight_w"]
        assert ptc.tensors["fc1/weight_w"].shape == (layers,) * lead + (8, 3)
        return
    ptc = assert_all_hold_their_parts(layout, states)
    assert ptc.tensors["fc1/weight"].shape == (layers,) * lead + shape
    assert ptc.shard(1, "fc1/weight").flat == bool(lead)
    if not lead:
        assert held(ptc, 1, "fc1/weight")[:, 0].tolist() == [6, 9, 30, 33]


@pytest.mark.parametrize(("rows", "padded", "tp"), [(5, 8, 2), (5, 8, 4), (5, 12, 4), (8, 8, 2)])
def test_a_padded_vocabulary_has_labelled_padding(rows, padded, tp):
    data = torch.full((padded, 3), -1)
    data[:rows] = whole(rows, 3)
    states = [
        {
            "w": ShardedTensor.from_rank_offsets(
                "word.weight", data.chunk(tp)[rank], (0, rank, tp), allow_shape_mismatch=True
            )
        }
        for rank in range(tp)
    ]
    layout = layout_of_ranks(states, shapes={"word.weight": (rows, 3)})
    ptc = ptc_of(layout)
    assert ptc.tensors["word/weight"].shape == (rows, 3)
    for rank in range(tp):
        np.testing.assert_array_equal(held(ptc, rank, "word/weight"), data.chunk(tp)[rank].numpy())
        for part in parts_of(layout, rank, states[rank])["word/weight"]:
            assert (part.data >= 0).all()
    whole_shape = ptc_of(layout_of_ranks(states)).tensors["word/weight"].shape
    assert whole_shape == (padded, 3), "without a word of its true shape the padded one is it"
    with pytest.raises(InvalidError, match=r"true shape \[99, 3\]: need one within"):
        layout_of_ranks(states, shapes={"word.weight": (99, 3)})
    with pytest.raises(InvalidError, match="no such tensors"):
        layout_of_ranks(states, shapes={"word.bias": (99, 3)})


def test_padding_of_two_dims_is_cut_into_disjoint_boxes():
    data = torch.full((6, 4), -1)
    data[:4, :3] = whole(4, 3)
    states = [
        {"w": ShardedTensor.from_rank_offsets("w", block, (0, r, 2), (1, c, 2), allow_shape_mismatch=True)}
        for r, row in enumerate(data.chunk(2))
        for c, block in enumerate(row.chunk(2, dim=1))
    ]
    ptc = ptc_of(layout_of_ranks(states, shapes={"w": (4, 3)}))
    for rank, state in enumerate(states):
        np.testing.assert_array_equal(held(ptc, rank, "w"), state["w"].data.numpy())


def test_experts_by_an_axis_in_front():
    tensor = whole(4, 6, 2)
    states = [
        {
            f"experts.{e}": ShardedTensor.from_rank_offsets(
                "experts.fc2", tensor[e].chunk(2)[tp], (0, e, 4), (1, tp, 2), prepend_axis_num=1
            )
            for e in (2 * ep, 2 * ep + 1)
        }
        for ep, tp in itertools.product(range(2), range(2))
    ]
    ptc = assert_all_hold_their_parts(layout_of_ranks(states), states)
    assert held(ptc, 3, "experts/fc2").tolist() == tensor[2:, 3:].ravel().tolist()


def test_a_factory_that_splits_under_several_names():
    def build(key, data, replica_id, flattened_range):
        del flattened_range
        return {
            name: ShardedTensor.from_rank_offsets(f"{key}.{name}", part, replica_id=replica_id)
            for name, part in zip("zx", data.split([3, 5]), strict=True)
        }

    states = [
        {"in_proj": ShardedTensorFactory("in_proj", whole(8, 2), build, torch.cat, r)} for r in range(2)
    ]
    ptc = ptc_of(layout_of_ranks(states))
    assert {path: t.shape for path, t in ptc.tensors.items()} == {"in_proj/x": (5, 2), "in_proj/z": (3, 2)}


def sharded(data, offset, shape, **options):
    return ShardedTensor("w", data, data.dtype, tuple(data.shape), shape, offset, None, **options)


def test_irregular_boxes_and_one_rank_with_several():
    tensor = whole(4, 4)
    states = [
        {"a": sharded(tensor[:3, :1], (0, 0), (4, 4)), "b": sharded(tensor[3:, 1:], (3, 1), (4, 4))},
        {"a": sharded(tensor[:3, 1:], (0, 1), (4, 4)), "b": sharded(tensor[3:, :1], (3, 0), (4, 4))},
    ]
    ptc = assert_all_hold_their_parts(layout_of_ranks(states), states)
    assert ptc.shard(0, "w").flat


def test_main_replicas_must_hold_each_element_once():
    tensor = whole(4, 2)
    low, high = tensor.chunk(2)
    ok = [{"w": sharded(low, (0, 0), (4, 2))}, {"w": sharded(high, (2, 0), (4, 2))}]
    with pytest.raises(InvalidError, match=r"'w': 4 of 8 elements are there: the main replicas"):
        layout_of_ranks(ok[:1])
    with pytest.raises(InvalidError, match=r"'w': \[0:2, 0:2\] of rank 0 and \[0:2, 0:2\] of rank 2 overlap"):
        layout_of_ranks([*ok, ok[0]])
    with pytest.raises(InvalidError, match=r"'w': 4 of 8 elements"):
        layout_of_ranks([ok[0], {"w": sharded(high, (2, 0), (4, 2), replica_id=(0, 1))}])
    with pytest.raises(InvalidError, match=r"'w': rank 1: \[4, 3\] int64, elsewhere \[4, 2\] int64"):
        layout_of_ranks([ok[0], {"w": sharded(whole(2, 3), (2, 0), (4, 3))}])
    with pytest.raises(InvalidError, match=r"'w': dim 0: need stop <= 4, got \[3, 5\)"):
        layout_of_ranks([{"w": sharded(high, (3, 0), (4, 2))}])


def test_objects_keep_their_grid():
    def state(rank, *, main=0):
        return {
            "rng": ShardedObject("rng_state", {"seed": rank}, (2, 1), (rank % 2, 0), replica_id=rank // 2),
            "extra": ShardedObject("layer._extra_state", None, (1,), (0,), replica_id=(0, rank - main)),
        }

    states = [state(rank) for rank in range(4)]
    found = objects_of_ranks(states)
    assert [(o.path, o.main, o.ranks) for o in found] == [
        ("layer/_extra_state/shard_0_1", 0, (0, 1, 2, 3)),
        ("rng_state/shard_0-0_2-1", 0, (0, 2)),
        ("rng_state/shard_1-0_2-1", 1, (1, 3)),
    ]
    assert layout_of_ranks(states).explicit is None
    with pytest.raises(InvalidError, match=r"'layer/_extra_state' at \(0,\): need one main replica"):
        objects_of_ranks([state(0), state(1, main=1)])
    with pytest.raises(InvalidError, match=r"'rng_state': grid \(2, 1\): \[\(1, 0\)\] missing"):
        objects_of_ranks(states[:1])


def test_neither_megatron_nor_torch_is_imported():
    code = "import sys, tenplexfs.megatron; print({'torch', 'jax', 'megatron'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "set()"
