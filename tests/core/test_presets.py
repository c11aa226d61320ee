"""Presets have their published sizes, and change their parallelism for the least bytes."""

import itertools
import json
import math

import pytest

from tenplexfs.core.build import build_ptc
from tenplexfs.core.planner import plan
from tenplexfs.core.presets import PRESETS, parameter_count, preset_layout, preset_tensors
from tenplexfs.errors import InvalidError, NotFoundError
from tenplexfs.formats.layout_json import parse_layout

NODES = [f"node{n}" for n in range(4)]
BASE = {"tp": 2, "pp": 2, "dp": 2}


def ptc(name, nodes=NODES, **sizes):
    return build_ptc(parse_layout(json.dumps(preset_layout(name, nodes=nodes, **{**BASE, **sizes}))))


# As published with the weights (exact), or in the paper (GPT-3: table D.1, in millions).
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("bert-large", 336_226_108),
        ("llama3-8b", 8_030_261_248),
        ("llama3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("resnet50", 25_557_032),
    ],
)
def test_the_parameters_are_those_of_the_published_weights(name, count):
    assert parameter_count(name) == count


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt3-1.3b", 1320), ("gpt3-2.7b", 2650), ("gpt3-6.7b", 6660), ("gpt3-175b", 174_600)],
)
def test_the_parameters_of_gpt3_are_those_of_the_paper(name, millions):
    assert parameter_count(name) == pytest.approx(millions * 1e6, rel=0.004)


@pytest.mark.parametrize("name", PRESETS)
def test_the_layout_holds_the_tensors_of_the_model_and_nothing_else(name):
    canonical = {t.path: (t.shape, t.dtype) for t in ptc(name).tensors.values()}
    assert canonical == preset_tensors(name)
    with_adam = {t.path for t in ptc(name, optimizer="adam").tensors.values()}
    assert {path for path in with_adam if not path.startswith("optimizer/")} == set(canonical)


def test_adam_is_twelve_bytes_a_parameter_of_two():
    tensors = {t.path: t for t in ptc("llama3-8b", optimizer="adam").tensors.values()}
    assert sum(t.nbytes for t in tensors.values()) == 14 * parameter_count("llama3-8b")
    assert {t.dtype for path, t in tensors.items() if path.startswith("optimizer/")} == {"float32"}


def test_zero_cuts_the_state_over_the_replicas():
    whole, cut = (ptc("gpt3-1.3b", optimizer="adam", zero=zero) for zero in (False, True))
    path = "optimizer/m/decoder/layers/0/mlp/linear_fc1/weight"
    (size,) = cut.shard(0, path).local_shape
    assert size == math.prod(whole.shard(0, path).local_shape) // 2


CHANGES = [
    {"dp": 4},
    {"dp": 1},
    {"tp": 1},
    {"tp": 4},
    {"pp": 1},
    {"pp": 4},
    {"tp": 4, "pp": 1, "dp": 3},
    {"pp": 1, "tp": 1, "dp": 1},
]


@pytest.mark.parametrize(("optimizer", "zero"), [(None, False), ("adam", True)])
@pytest.mark.parametrize("name", PRESETS)
def test_every_change_of_every_preset_moves_the_least(name, optimizer, zero):
    layouts = [
        ptc(name, optimizer=optimizer, zero=zero),
        *(ptc(name, optimizer=optimizer, zero=zero, **change) for change in CHANGES),
    ]
    for new in layouts[1:]:
        for pair in ((layouts[0], new), (new, layouts[0])):
            size = plan(*pair).totals
            assert size["moved"] == size["moved_lower_bound"]
            assert size["needed"] == size["kept"] + size["local"] + size["moved"]
    same = plan(layouts[0], layouts[0]).totals
    assert same["kept"] == same["needed"]


def test_experts_move_the_least_whatever_axes_they_are_spread_over():
    layouts = [
        ptc("mixtral-8x7b", optimizer="adam", zero=True, **sizes)
        for sizes in (
            {"ep": 1, "dp": 4},
            {"ep": 2, "dp": 4},
            {"ep": 4, "dp": 4},
            {"ep": 4, "dp": 2, "tp": 4},  # over dp x tp: a mesh of their own
            {"ep": 3, "dp": 3},  # 8 experts over 3 ranks
        )
    ]
    assert layouts[3].layout.meshes[0][0] == "expert"
    for pair in itertools.permutations(layouts, 2):
        size = plan(*pair).totals
        assert size["moved"] == size["moved_lower_bound"]


def test_grouped_heads_and_gated_halves_are_cut_each_on_its_own():
    wide = ptc("llama3-8b", tp=16, pp=1, dp=1)
    qkv = wide.shard(5, "decoder/layers/0/self_attention/linear_qkv/weight")
    # 4096 query rows in 16 parts; 8 key-value heads of 128, each on two ranks.
    assert [(p.region.start[0], p.region.stop[0]) for p in qkv.pieces] == [
        (5 * 256, 6 * 256),
        (4096 + 2 * 128, 4096 + 3 * 128),
        (5120 + 2 * 128, 5120 + 3 * 128),
    ]
    gate = wide.shard(5, "decoder/layers/0/mlp/linear_fc1/weight")
    assert [p.region.start[0] for p in gate.pieces] == [5 * 896, 14336 + 5 * 896]


def test_the_vocabulary_is_padded_and_tied_on_the_last_stage():
    gpt = ptc("gpt3-2.7b")
    assert gpt.shard(0, "embedding/word_embeddings/weight").local_shape == (50432 // 2, 2560)
    assert gpt.tensors["output_layer/weight"].path == "embedding/word_embeddings/weight"
    assert "output_layer/weight" not in gpt.rank_paths(0)
    assert "output_layer/weight" in gpt.rank_paths(7)


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("gpt3-2.7b", {"tp": 3}, "tp 3 does not divide 32 heads"),
        ("gpt3-2.7b", {"pp": 33}, "pp 33: the model has 32 layers"),
        ("gpt3-2.7b", {"ep": 2}, "ep 2: the model has no experts"),
        ("mixtral-8x7b", {"ep": 16, "dp": 16}, "ep 16: the model has 8 experts"),
        ("mixtral-8x7b", {"ep": 3}, "ep 3 divides neither dp 2 nor dp x tp 4"),
        ("resnet50", {"dp": 0}, "dp: need a size >= 1, got 0"),
        ("resnet50", {"zero": True}, "zero cuts the state of an optimizer"),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_refused(name, sizes, words):
    with pytest.raises(InvalidError, match=words):
        ptc(name, **sizes)


def test_an_unknown_model_names_the_known_ones():
    with pytest.raises(NotFoundError, match=r"no model 'gpt5': known are bert-large, .*resnet50"):
        preset_tensors("gpt5")


def test_nodes_take_ranks_by_their_devices_or_evenly():
    by_devices = preset_layout("resnet50", tp=1, pp=1, dp=3, nodes={"a": 2, "b": 4})
    assert by_devices["nodes"] == {"a": [0, 1], "b": [2]}
    with pytest.raises(InvalidError, match="nodes: need distinct names"):
        ptc("resnet50", nodes=["a", "a"])
    with pytest.raises(InvalidError, match="2 devices"):
        ptc("resnet50", nodes={"a": 2})
