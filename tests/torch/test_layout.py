"""Layouts of DTensors, against what torch itself puts on each rank.

A fake process group stands for each rank in turn: `distribute_tensor` and `fully_shard` then cut tensors of
flat indices as they would, without communication, and the local tensors are what must come out.
"""

import contextlib
import itertools
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tenplexfs.core.derive import derive_layout
from tenplexfs.core.layout import place_in_order
from tenplexfs.errors import InvalidError
from tenplexfs.torch import describe, layout_of, layout_of_ranks, shard_of
from tests.holding import held, indices, ptc_of


@contextlib.contextmanager
def as_rank(rank, world):
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def by_rank(world, make):
    """Returns the specs and the local tensors of every rank, ``make(rank)`` giving its state."""
    specs, locals_ = [], []
    for rank in range(world):
        with as_rank(rank, world):
            state = make(rank)
            specs.append(pickle.loads(pickle.dumps(describe(state))))
            locals_.append(
                {k: (v.to_local() if isinstance(v, DTensor) else v).detach() for k, v in state.items()}
            )
    return specs, locals_


def spread(shape, mesh, placements):
    return distribute_tensor(torch.from_numpy(indices(shape)), mesh, placements, src_data_rank=None)


def assert_same(ptc, locals_, skip=()):
    for rank, state in enumerate(locals_):
        for name, local in state.items():
            path = name.replace(".", "/")
            if (rank, name) not in skip:
                np.testing.assert_array_equal(
                    held(ptc, rank, path), local.numpy(), err_msg=f"{path} on {rank}"
                )


S, R, SS = Shard, Replicate, _StridedShard
CASES = [
    *(((4,), placements) for placements in [(S(0),), (S(1),), (R(),)]),
    *(((2, 3), (a, b)) for a, b in itertools.product((S(0), S(1), R()), repeat=2)),
    *(((2, 3), (SS(dim, split_factor=3), S(dim))) for dim in (0, 1)),
    ((2, 3), (SS(0, split_factor=3), R())),
    ((2, 3), (SS(0, split_factor=2), S(1))),
    *(((2, 2, 2), (R(), a, S(b))) for a in (S(0), SS(0, split_factor=2)) for b in (0, 1)),
    ((2, 2, 2), (S(0), S(0), S(0))),
    ((2, 2, 2), (S(0), S(1), S(0))),
    ((2, 2, 2), (SS(0, split_factor=2), SS(0, split_factor=2), S(0))),
    ((2, 2, 2), (SS(0, split_factor=4), S(0), S(0))),
]


@pytest.mark.parametrize(("mesh_shape", "placements"), CASES, ids=str)
def test_every_rank_holds_what_distribute_tensor_gives_it(mesh_shape, placements):
    world = int(np.prod(mesh_shape))
    names = ("a", "b", "c")[: len(mesh_shape)]

    def make(rank):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        shapes = [(12, 12), (11, 7), (5, 3), (1, 2), (0, 4), (13, 2, 3)]
        return {f"t{i}.w": spread(shape, mesh, placements) for i, shape in enumerate(shapes)}

    specs, locals_ = by_rank(world, make)
    layout = layout_of_ranks(specs)
    assert layout.mesh.axes == tuple(zip(names, mesh_shape, strict=True))
    ptc = ptc_of(layout)
    assert_same(ptc, locals_)
    with as_rank(0, world):  # tuples alone say the same, wherever torch has one answer
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        alone = ptc_of(layout_of({"w": ((24, 24), torch.int64, mesh, placements)}))
    for rank in range(world):
        coordinate = [int(i) for i in np.unravel_index(rank, mesh_shape)]
        shape, offset = _compute_local_shape_and_global_offset((24, 24), mesh_shape, coordinate, placements)
        shard = alone.shard(rank, "w")
        assert shard.local_shape == shape
        assert min(piece.region.start for piece in shard.pieces) == offset


def test_strided_over_dims_of_every_size_up_to_forty_is_right_or_refused():
    """For each size: what torch's placements and the true order give, told apart by local shapes."""
    ambiguous = 0
    for tp, dp, size in itertools.product((2, 3), (2, 3, 4), range(1, 41)):
        placements = (_StridedShard(0, split_factor=tp), Shard(0))
        coordinates = list(itertools.product(range(dp), range(tp)))
        with as_rank(0, dp * tp):
            mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
            state = {"w": ((size,), torch.int64, mesh, placements)}
            chunks = [c.chunk(dp) for c in torch.arange(size).chunk(tp)]
            true = [
                list(chunks[t][d]) if t < len(chunks) and d < len(chunks[t]) else [] for d, t in coordinates
            ]
            cut = [distribute_indices(size, (dp, tp), placements, c) for c in coordinates]
            if cut == true:
                layout = layout_of(state)
                assert layout.explicit is None, "the true order says it, so cuts over the axes do"
                ptc = ptc_of(layout)
                assert [held(ptc, r, "w").tolist() for r in range(dp * tp)] == true
                continue
            ambiguous += 1
            with pytest.raises(InvalidError, match="states of all ranks"):
                layout_of(state)
    assert ambiguous


def distribute_indices(size, mesh_shape, placements, coordinate):
    """Applies each placement's own cutting, as torch's redistribution does."""
    left = torch.arange(size)
    for placement, ways, place in zip(placements, mesh_shape, coordinate, strict=True):
        left = placement._split_tensor(left, ways, with_padding=False, contiguous=True)[0][place]
    return left.tolist()


@pytest.mark.parametrize(
    ("dp", "tp", "rows"), [(2, 2, 8), (2, 2, 5), (3, 2, 7), (3, 2, 9), (2, 4, 10), (4, 2, 3)]
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_fsdp2_over_tensor_parallelism_with_and_without_replicas(dp, tp, rows, replicas):
    """At (3, 2, 7) torch's own placements put row 6 on another rank than holds it."""
    names = ("rep", "dp", "tp") if replicas > 1 else ("dp", "tp")

    def make(rank):
        shape = (replicas, dp, tp) if replicas > 1 else (dp, tp)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        module = torch.nn.Linear(4, rows)
        bias = torch.arange(rows, dtype=torch.float32)
        module.weight = torch.nn.Parameter(
            distribute_tensor(
                torch.from_numpy(indices((rows, 4))).float(), mesh["tp"], [Shard(0)], src_data_rank=None
            )
        )
        module.bias = torch.nn.Parameter(
            distribute_tensor(bias, mesh["tp"], [Replicate()], src_data_rank=None)
        )
        fully_shard(module, mesh=mesh[("rep", "dp") if replicas > 1 else "dp"])
        return module.state_dict()

    specs, locals_ = by_rank(replicas * dp * tp, make)
    layout = layout_of_ranks(specs)
    assert [name for name, _ in layout.mesh.axes] == list(names)
    assert layout.explicit is None
    assert_same(ptc_of(layout), locals_)
    smaller = ptc_of(derive_layout(place_in_order(layout), {"tp": 1, "dp": 2}, None))
    assert smaller.world_size == 2 * replicas


def test_fsdp2_alone_on_one_dim_and_hybrid():
    for shape, names in (((4,), ("dp",)), ((2, 3), ("rep", "shard"))):

        def make(rank, shape=shape, names=names):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            module = torch.nn.Sequential(torch.nn.Linear(3, 10), torch.nn.LayerNorm(7))
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.copy_(torch.from_numpy(indices(parameter.shape)))
            fully_shard(module, mesh=mesh)
            return module.state_dict()

        specs, locals_ = by_rank(int(np.prod(shape)), make)
        layout = layout_of_ranks(specs)
        assert layout.explicit is None
        assert_same(ptc_of(layout), locals_)


def test_stages_of_a_pipeline_exist_where_their_mesh_is():
    def make(rank):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        stage = rank // 4
        inner = mesh["dp", "tp"]
        return {
            f"layers.{stage}.w": spread((6, 4), inner, (Shard(0), Shard(1))),
            f"layers.{stage}.norm": spread((5,), mesh["tp"], (Replicate(),)),
            "shared": torch.from_numpy(indices((3,))),
        }

    specs, locals_ = by_rank(8, make)
    layout = layout_of_ranks(specs)
    ptc = ptc_of(layout)
    assert layout.explicit is None
    assert {e.key: e.on for e in layout.tensors}["layers/1/w"] == ((("pp",), (1,)),)
    assert_same(ptc, locals_)
    assert ptc.rank_paths(0) == ("layers/0/norm", "layers/0/w", "shared")
    with as_rank(5, 8):  # one process alone: its own stage, on the ranks of the tensor's mesh
        alone = ptc_of(layout_of(make(5)))
    assert alone.rank_paths(4) == ("layers/1/norm", "layers/1/w", "shared")
    assert alone.rank_paths(6) == ("layers/1/w", "shared")


def test_a_flattened_dim_is_a_list_of_axes():
    def make(rank):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        flat = mesh["dp", "cp"]._flatten("dp_cp")
        return {"w": spread((9, 2), flat, (Shard(0),))}

    specs, locals_ = by_rank(8, make)
    layout = layout_of_ranks(specs)
    assert layout.tensors[0].shard[0].axis == ("dp", "cp")
    assert_same(ptc_of(layout), locals_)


def test_ranks_in_another_order_are_said_rank_by_rank():
    order = [[3, 1], [0, 2]]

    def make(rank):
        mesh = DeviceMesh("cpu", order, mesh_dim_names=("dp", "tp"))
        return {"w": spread((5, 4), mesh, (Shard(0), Shard(1))), "p": torch.zeros(2, dtype=torch.int64)}

    specs, locals_ = by_rank(4, make)
    layout = layout_of_ranks(specs)
    assert layout.mesh.axes == (("rank", 4),)
    assert layout.explicit is not None
    for state in locals_:
        del state["p"]
    assert_same(ptc_of(layout), locals_)


def test_meshes_that_are_no_part_of_the_root_are_said_rank_by_rank():
    def make(rank):
        root = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        experts = DeviceMesh("cpu", torch.arange(6).view(3, 2), mesh_dim_names=("edp", "ep"))
        columns = DeviceMesh("cpu", [1, 5])
        state = {"w": spread((7, 4), root, (Shard(0), Shard(1))), "e": spread((4, 3), experts, (R(), S(0)))}
        if rank in (1, 5):
            state["c"] = spread((3,), columns, (Shard(0),))
        return state

    specs, locals_ = by_rank(6, make)
    layout = layout_of_ranks(specs)
    assert [e.key for e in layout.tensors] == ["w"]
    assert_same(ptc_of(layout), locals_)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.bool, torch.uint16, torch.complex64, torch.float8_e4m3fn]
)
def test_every_dtype_has_a_name(dtype):
    assert layout_of({"a.b": torch.zeros(2, dtype=dtype), "0d": torch.tensor(1.0)}).tensors[0].dtype == str(
        dtype
    ).removeprefix("torch.")


def test_what_cannot_be_stored_is_refused_by_name():
    with as_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        partial = DTensor.from_local(torch.ones(2), mesh, (Partial(), Replicate()))
        wrong = DTensor.from_local(
            torch.ones(2, 2), mesh, (Shard(0), Replicate()), run_check=False, shape=(6, 2), stride=(2, 1)
        )
        with pytest.raises(InvalidError, match=r"'a/b': Partial\(sum\)"):
            layout_of({"a.b": partial})
        with pytest.raises(InvalidError, match=r"'w': rank 0: the local array is \[2, 2\], .* \[3, 2\]"):
            layout_of({"w": wrong})
        with pytest.raises(InvalidError, match="'s': str"):
            layout_of({"s": "text"})
        with pytest.raises(InvalidError, match="'a/b': two names"):
            layout_of({"a.b": torch.ones(1), "a/b": torch.ones(1)})
        with pytest.raises(InvalidError, match="1 placements for a mesh of 2"):
            layout_of({"w": ((4,), torch.float32, mesh, (Shard(0),))})
        with pytest.raises(InvalidError, match="'w': dtype 'quint8': unknown"):
            layout_of({"w": ((4,), torch.quint8, mesh, (S(0), R()))})
        with pytest.raises(InvalidError, match="need >= 4"):
            layout_of({"w": spread((4,), mesh, (S(0), R()))}, world_size=2)
        one, other = describe({"w": torch.ones(2)}), describe({"w": torch.ones(3)})
    with pytest.raises(InvalidError, match="place 1 holds rank 0"):
        layout_of_ranks([one, other])


def test_ranks_that_disagree_are_refused():
    a, b = describe({"w": torch.ones(2)}), describe({"w": torch.ones(3)})
    with pytest.raises(InvalidError, match=r"'w': its shape and dtype differ by rank: \[2\] float32, \[3\]"):
        layout_of_ranks([a, b])


def test_boxes_of_one_rank():
    with as_rank(2, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tensor = spread((8, 3), mesh, (SS(0, split_factor=2), Replicate()))
        shard = shard_of(tensor)
        assert [(r.start, r.stop, at) for r, at in shard.pieces] == [
            ((2, 0), (4, 3), (0, 0)),
            ((6, 0), (8, 3), (2, 0)),
        ]
        assert shard_of(tensor, 0).pieces[0][0].start == (0, 0)
        part = spread((8, 3), mesh["tp"], (Shard(0),))
        with pytest.raises(InvalidError, match="rank 0: not of the tensor's mesh"):
            shard_of(part, 0)
