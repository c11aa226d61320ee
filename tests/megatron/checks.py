"""What ranks do in the tests of `tenplexfs.megatron`: a model as Megatron cuts it, of values that differ."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from tenplexfs.errors import TenplexError
from tenplexfs.megatron import load, load_common, save
from tests.megatron.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_swiglu_sharded_factory,
)
from tests.torch.context import Context

LAYERS, ROWS, EXPERTS = 4, 50, 8
SHAPES = {"word_embeddings.weight": (ROWS, 3)}


def whole(salt: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return ((torch.arange(int(np.prod(shape))) * 3 + salt) % 251).reshape(shape).to(dtype)


def padded_rows(tp: int) -> int:
    return -(-ROWS // (4 * tp)) * 4 * tp


def sharded_state(rank: int, mesh: dict[str, int], salt: int, *, blank: bool = False) -> dict[str, Any]:
    """Returns the state of a rank; a blank one has the same shapes, and other values."""
    pp_size, dp_size, tp_size = mesh["pp"], mesh["dp"], mesh["tp"]
    pp, dp, tp = (int(i) for i in np.unravel_index(rank, (pp_size, dp_size, tp_size)))

    def make(
        key: str, data: torch.Tensor, *offsets: tuple[int, int, int], lead: int = 0, **options: Any
    ) -> Any:
        data = torch.zeros_like(data) - 7 if blank else data.clone()
        options = {"replica_id": (0, 0, dp), **options}
        return ShardedTensor.from_rank_offsets(key, data, *offsets, prepend_axis_num=lead, **options)

    state: dict[str, Any] = {"iteration": salt, "args": {"lr": 0.5, "betas": (0.9, salt)}}
    state["common"] = torch.zeros(2) if blank else whole(salt, 2)
    if blank:
        state["iteration"], state["args"] = 0, {"lr": None, "betas": None}
    model: dict[str, Any] = {}
    if pp == 0:
        table = torch.full((padded_rows(tp_size), 3), -1.0)
        table[:ROWS] = whole(salt, ROWS, 3)
        part = table.chunk(tp_size)[tp]
        model["word"] = make("word_embeddings.weight", part, (0, tp, tp_size), allow_shape_mismatch=True)
    first, last = LAYERS * pp // pp_size, LAYERS * (pp + 1) // pp_size
    for i in range(first, last):
        layer = (0, i, LAYERS)
        stacked = whole(salt + 1, LAYERS, 6, 8, dtype=torch.bfloat16)[i]
        model[f"layers.{i}.proj"] = make(
            "decoder.layers.proj.weight", stacked.chunk(tp_size, 1)[tp], layer, (2, tp, tp_size), lead=1
        )
        gate, value = (half.chunk(tp_size)[tp] for half in whole(salt + 2 + i, 16, 3).chunk(2))
        fc1 = make(f"decoder.layers.{i}.fc1.weight", torch.cat([gate, value]), (0, tp, tp_size))
        model[f"layers.{i}.fc1"] = apply_swiglu_sharded_factory(fc1, ())
        norm = whole(salt + 9, LAYERS, 5)[i]
        model[f"layers.{i}.norm"] = make(
            "decoder.layers.norm.weight", norm, layer, lead=1, replica_id=(0, tp, dp)
        )
        extra = None if blank else {"amax": whole(salt + i, 3), "name": f"layer {i}"}
        model[f"layers.{i}.extra"] = ShardedObject(
            f"decoder.layers.{i}.attention._extra_state", extra, (1,), (0,), replica_id=(0, tp, dp)
        )
    ep_size = dp_size * tp_size  # experts of the last stage, over all of its ranks
    if pp == pp_size - 1:
        each = EXPERTS // ep_size
        for e in range((dp * tp_size + tp) * each, (dp * tp_size + tp + 1) * each):
            data = whole(salt + 4, EXPERTS, 4, 2)[e]
            model[f"experts.{e}"] = make("experts.fc2", data, (0, e, EXPERTS), lead=1, replica_id=0)
    state["model"] = model
    state["optimizer"] = {
        "param_groups": [{"lr": LocalNonpersistentObject(0.1), "step": 0 if blank else salt}],
        "state": {
            name: make(f"optimizer.state.exp_avg.{value.key}.{name}", 2 * value.data)
            for name, value in model.items()
            if name.endswith("norm") and tp == 0
        },
    }
    for value in state["optimizer"]["state"].values():
        value.replica_id = dp
    seed = 100 * pp + tp
    states = [{"random_rng_state": random.Random(seed).getstate(), "cuda_rng_state": cuda(seed)}]
    np_state = np.random.RandomState(seed).get_state()
    states[0].update(np_rng_state=np_state, torch_rng_state=torch.Generator().manual_seed(seed).get_state())
    grid = (pp_size, tp_size)
    state["rng_state"] = ShardedObject("rng_state", None if blank else states, grid, (pp, tp), replica_id=dp)
    return state


def cuda(seed: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(seed.to_bytes(8, "little") + bytes(8)), dtype=torch.uint8)


def filled(state: Any) -> Any:
    """Returns what a load of ``state`` gives."""
    if isinstance(state, dict):
        return {key: filled(value) for key, value in state.items()}
    if isinstance(state, list):
        return [filled(value) for value in state]
    if isinstance(state, ShardedTensorFactory):
        return state.data
    if isinstance(state, LocalNonpersistentObject):
        return state.obj
    return state.data if isinstance(state, ShardedTensor | ShardedObject) else state


def same(found: Any, wanted: Any, at: str = "") -> None:
    assert type(found) is type(wanted), (at, type(found), type(wanted))
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), (at, found.keys() ^ wanted.keys())
        for key in wanted:
            same(found[key], wanted[key], f"{at}/{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), at
        for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
            same(x, y, f"{at}/{i}")
    elif isinstance(wanted, torch.Tensor | np.ndarray):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), at
        assert bool((found == wanted).all()), (at, found, wanted)
    else:
        assert found == wanted, at


def save_at(context: Context, mesh: dict[str, int], step: int) -> None:
    state = sharded_state(context.rank, mesh, step)
    save(state, context.job, step=step, mesh=mesh, shapes=SHAPES)


def load_at(context: Context, mesh: dict[str, int], step: int, grid: list[int]) -> list[Any]:
    """Loads a step that was saved with another ``grid`` of random states; returns those of this rank."""
    wanted = filled(sharded_state(context.rank, mesh, step))
    target = sharded_state(context.rank, mesh, step, blank=True)
    found = load(target, context.job)
    if mesh["pp"] == 1 or "word" in wanted["model"]:  # what is padding is zeros
        wanted["model"]["word"] = wanted["model"]["word"].clamp(min=0)
    random_states, own = found.pop("rng_state"), wanted.pop("rng_state")
    same(found, wanted)
    if grid == [mesh["pp"], mesh["tp"]]:
        same(random_states, own)
    for name, leaf in target["model"].items():
        if isinstance(leaf, ShardedTensor):
            assert leaf.data.data_ptr() == found["model"][name].data_ptr(), "filled in place"
    common = load_common(context.job)
    assert common["iteration"] == step and common["args"]["betas"] == (0.9, step)
    assert set(common) == {"iteration", "args", "optimizer"}, common.keys()
    (states,) = random_states
    return [
        random_of(states["random_rng_state"]),
        float(np_random(states["np_rng_state"]).random_sample()),
        float(torch.rand(1, generator=generator(states["torch_rng_state"]))),
        states["cuda_rng_state"].tolist(),
    ]


def random_of(state: Any) -> float:
    made = random.Random()
    made.setstate(state)
    return made.random()


def np_random(state: Any) -> np.random.RandomState:
    made = np.random.RandomState()
    made.set_state(state)
    return made


def generator(state: torch.Tensor) -> torch.Generator:
    made = torch.Generator()
    made.set_state(state)
    return made


def refusals(context: Context, mesh: dict[str, int]) -> dict[str, str]:
    """What is refused, on all ranks; the step that was there stays."""

    def state(**options: Any) -> dict[str, Any]:
        return sharded_state(context.rank, mesh, 1, **options)

    def said(work: Any) -> str:
        try:
            work()
        except TenplexError as error:
            return error.message
        return "was taken"

    turned = {"pp": mesh["pp"], "dp": mesh["tp"], "tp": mesh["dp"]}
    load(state(blank=True), context.job)
    odd = state()
    if context.rank == 1:
        odd["args"]["lr"] = object()
    differ = state()
    if context.rank == 1:
        differ["common"] += 1
    absent = {"x": ShardedTensor.from_rank_offsets("nope", torch.zeros(2))}
    other = {"x": ShardedObject("gone", None, (1,), (0,))}
    return {
        "turned": said(lambda: save(sharded_state(context.rank, turned, 1), context.job, step=9)),
        "object": said(lambda: save(odd, context.job, step=9)),
        "differ": said(lambda: save(differ, context.job, step=9)),
        "absent": said(lambda: load(absent, context.job)),
        "gone": said(lambda: load(other, context.job)),
    }


def load_and_save(context: Context, mesh: dict[str, int], step: int) -> None:
    load(sharded_state(context.rank, mesh, step - 1, blank=True), context.job)
    save_at(context, mesh, step)
