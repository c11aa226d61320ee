"""What is predicted must be legal, fit, and change in the direction that hardware changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenplexfs.core.cost import Degrees, Devices, Training, best_first, estimate, fits_on_nodes, parameters
from tenplexfs.core.presets import PRESETS, Transformer, parameter_count
from tenplexfs.errors import InvalidError

# Four machines of four A6000 with PCIe 4.0, and 100 Gbit/s between them.
PAPER = Devices(
    memory_bytes=48e9, flops_per_s=70e12, intra_node_bytes_per_s=20e9, inter_node_bytes_per_s=12.5e9
)
FOUR_BY_FOUR = {f"node{n}": 4 for n in range(4)}
TRAINING = Training(global_batch=128, sequence=1024, micro_batch=4)

models = st.builds(
    lambda layers, heads, width, kv, vocab, gated, tied: Transformer(
        layers,
        heads * width,
        heads,
        heads // kv if heads % kv == 0 else heads,
        4 * heads * width,
        vocab,
        gated=gated,
        is_tied=tied,
    ),
    st.integers(1, 96),
    st.integers(1, 96),
    st.sampled_from([64, 128]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 130_000),
    st.booleans(),
    st.booleans(),
)
trainings = st.builds(
    lambda micro, count, sequence, zero, recompute: Training(
        global_batch=micro * count, sequence=sequence, micro_batch=micro, zero=zero, recompute=recompute
    ),
    st.integers(1, 8),
    st.integers(1, 96),
    st.sampled_from([512, 2048, 8192]),
    st.booleans(),
    st.sampled_from(["none", "selective", "full"]),
)
clusters = st.dictionaries(st.sampled_from([f"n{i}" for i in range(6)]), st.integers(1, 9), min_size=1)


@pytest.mark.parametrize("name", [name for name, m in PRESETS.items() if m is not None and not m.experts])
def test_parameters_are_those_of_the_models(name):
    model = PRESETS[name]
    assert model is not None
    assert parameters(model) == pytest.approx(parameter_count(name), rel=0.01)


@pytest.mark.parametrize("name", ["gpt3-1.3b", "gpt3-2.7b", "gpt3-6.7b", "bert-large"])
def test_tensor_parallelism_inside_nodes_beats_it_across_them(name):
    """Figure 3 of the paper: 16 GPUs, (T, P, D) = (2, 4, 2) is good and (16, 1, 1) the worst."""
    model = PRESETS[name]
    assert model is not None

    def step_s(*degrees: int) -> float:
        return estimate(model, TRAINING, PAPER, Degrees(*degrees), FOUR_BY_FOUR).step_s

    assert step_s(16, 1, 1) > 3 * step_s(2, 4, 2)
    ranked = [e.degrees for e in best_first(model, TRAINING, PAPER, FOUR_BY_FOUR)[0] if e.degrees.size == 16]
    assert ranked.index(Degrees(2, 4, 2)) < len(ranked) / 2
    assert ranked[-1] == Degrees(16, 1, 1)


def test_the_best_of_a_large_model_on_the_papers_cluster():
    model = PRESETS["gpt3-6.7b"]
    assert model is not None
    best = best_first(model, TRAINING, PAPER, FOUR_BY_FOUR)[0][0]
    assert (best.degrees, best.together) == (Degrees(2, 4, 2), ("tp", "dp"))


@settings(max_examples=200, deadline=None)
@given(models, trainings, clusters, st.integers(1, 3))
def test_every_answer_is_legal_and_fits(model, training, nodes, each):
    found, why = best_first(model, training, PAPER, nodes, each=each)
    assert bool(why) == (not found)
    times = [one.step_s for one in found]
    assert times == sorted(times)
    for one in found:
        degrees = one.degrees
        assert degrees.size * each <= sum(nodes.values())
        assert model.heads % degrees.tp == 0 and model.ffn % degrees.tp == 0
        assert model.kv_heads % degrees.tp == 0 or degrees.tp % model.kv_heads == 0
        assert model.layers % degrees.pp == 0
        assert training.global_batch % (degrees.dp * training.micro_batch) == 0
        assert 0 < one.memory_bytes <= PAPER.memory_bytes * PAPER.memory_fraction
        if "tp" in one.together:
            assert fits_on_nodes(degrees.tp, degrees.pp * degrees.dp, nodes)


@settings(max_examples=150, deadline=None)
@given(models, trainings, st.integers(1, 4), st.integers(1, 8))
def test_better_hardware_is_never_slower(model, training, count, width):
    nodes = {f"n{i}": width for i in range(count)}

    def best(devices: Devices, where: dict[str, int]) -> float:
        found, _ = best_first(model, training, devices, where)
        return found[0].step_s if found else float("inf")

    now = best(PAPER, nodes) * (1 + 1e-9)
    for field in ("memory_bytes", "flops_per_s", "intra_node_bytes_per_s", "inter_node_bytes_per_s"):
        assert best(replace(PAPER, **{field: 2 * getattr(PAPER, field)}), nodes) <= now, field
    assert best(PAPER, {**nodes, "more": width}) <= now
    assert best(PAPER, {"n0": width}) >= best(PAPER, nodes) / (1 + 1e-9)


@given(models, trainings)
def test_a_larger_model_takes_longer_and_more(model, training):
    small, large = (
        estimate(m, training, PAPER, Degrees(), {"n": 1})
        for m in (model, replace(model, layers=model.layers + 1))
    )
    assert small.step_s < large.step_s and small.memory_bytes < large.memory_bytes


def test_zero_and_recomputation_save_memory():
    model = PRESETS["gpt3-2.7b"]
    assert model is not None

    def memory(**changes: object) -> float:
        training = replace(TRAINING, **changes)
        return estimate(model, training, PAPER, Degrees(1, 2, 8), FOUR_BY_FOUR).memory_bytes

    assert memory(zero=True) < memory()
    assert memory(recompute="full") < memory(recompute="selective") < memory(recompute="none")


def test_why_nothing_fits():
    model = PRESETS["gpt3-175b"]
    assert model is not None
    found, why = best_first(model, TRAINING, PAPER, FOUR_BY_FOUR)
    assert not found
    assert why.startswith("no degrees fit on 16 devices: the least is ")
    assert best_first(model, TRAINING, PAPER, {"a": 3}, each=4)[1].startswith("3 devices")


def test_numbers_that_are_none_are_refused():
    with pytest.raises(InvalidError, match="flops_per_s: need a number > 0, got 0"):
        Devices(flops_per_s=0)
    with pytest.raises(InvalidError, match="memory_bytes: need a number > 0, got nan"):
        Devices(memory_bytes=float("nan"))
    with pytest.raises(InvalidError, match="micro_batch 3 does not divide the global batch 8"):
        Training(global_batch=8, micro_batch=3)
