"""What ranks do in the tests of `Writer` and `Reader`; each runs on all ranks of a group."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tenplexfs.errors import TenplexError
from tenplexfs.torch import Reader, Writer, rng_state, set_rng_state
from tests.torch.context import Context
from tests.torch.states import Net, bits, blank, by_name, grouped, leaves, same, spread, states


def every_kind(at: Context) -> list[str]:
    """Saves and loads each kind of state, against DCP's own files."""
    kinds = states(at.world)
    for kind, make in kinds.items():
        state = make()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            dcp.save(state, storage_writer=Writer(at.mount / f"{kind}-{at.world}", step=1))
        dcp.save(state, storage_writer=FileSystemWriter(at.where / f"{kind}-{at.world}"))
        ours, theirs = blank(state), blank(state)
        dcp.load(ours, storage_reader=Reader(at.mount / f"{kind}-{at.world}"))
        dcp.load(theirs, storage_reader=FileSystemReader(at.where / f"{kind}-{at.world}"))
        same(ours, theirs)
        same(ours, state) if kind != "plain" else None
    return sorted(kinds)


def other_meshes(at: Context, saved: int) -> None:
    """Loads what a group of ``saved`` ranks saved into this group's meshes, against DCP's own files."""
    for kind, make in states(at.world).items():
        name = f"{kind}-{saved}"
        if not (at.where / name).is_dir():
            continue
        state = make()
        ours, theirs = blank(state), blank(state)
        dcp.load(ours, storage_reader=Reader(at.mount / name))
        dcp.load(theirs, storage_reader=FileSystemReader(at.where / name))
        same(ours, theirs)
    meshes = [init_device_mesh("cpu", (at.world,))]
    if at.world >= 4:
        meshes.append(init_device_mesh("cpu", (2, at.world // 2)))
    for mesh in meshes:
        for dim in (0, 1):
            cut = [Replicate()] * (mesh.ndim - 1) + [Shard(dim)]
            found = {"f": torch.zeros_like(spread((300, 1100), mesh, cut)), "a": spread((5, 7), mesh, cut)}
            if (at.where / f"uneven-{saved}").is_dir():
                dcp.load(found, storage_reader=Reader(at.mount / f"uneven-{saved}"))
                same(found, {"f": spread((300, 1100), mesh, cut), "a": spread((5, 7), mesh, cut)})


def save_traps(at: Context) -> dict[str, Any]:
    """One job, saved again and again in the ways that DCP makes hard."""
    mesh = init_device_mesh("cpu", (at.world,), mesh_dim_names=("dp",))
    state = {
        "w": spread((6, 3), mesh, [Shard(0)]),
        "copies": spread((4, 2), mesh, [Replicate()]),
        "plain": torch.zeros(70000),
        "rng": torch.get_rng_state(),
        "own": {"seed": 0},
        "step": 0,
    }

    def change(step: int) -> None:
        state["step"] = step
        state["plain"].fill_(step)
        state["w"].to_local().fill_(step * 10 + at.rank)
        state["copies"].to_local().fill_(step)
        state["own"]["seed"] = 100 * step + at.rank
        state["rng"] = torch.full((5056,), (step + at.rank) % 250, dtype=torch.uint8)

    def save(step: int, **options: Any) -> None:
        planner = options.pop("planner", None)
        writer = Writer(at.job, step=step, rank_local=("rng", "own.*"), **options)
        dcp.save(state, storage_writer=writer, planner=planner)

    def check(wanted: Any = None) -> None:
        found = blank(state)
        dcp.load(found, storage_reader=Reader(at.job))
        same(found, state if wanted is None else wanted)

    change(1)
    save(1)
    check()
    for step in (2, 3, 4):  # from the second on, local plans are empty
        change(step)
        save(step, planner=DefaultSavePlanner(enable_plan_caching=True))
        check()
    change(5)
    before = copy.deepcopy(state)
    writer = Writer(at.job, step=5, rank_local=("rng", "own.*"))
    aside = dist.new_group(list(range(at.world)))  # DCP's collectives must not meet those of the loop
    future = dcp.async_save(state, storage_writer=writer, process_group=aside)
    change(77)
    for _ in range(5):
        dist.all_reduce(torch.ones(1000))
    future.result()
    check(before)

    # What differs is the lowest rank's, and is named.
    change(6)
    state["step"], state["plain"] = 6 + at.rank, torch.full((70000,), 6.0)
    state["plain"][40000] = at.rank  # where nobody looks at first
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save(6)
    said = [str(each.message) for each in caught if "differ by rank" in str(each.message)]
    assert len(said) == (1 if at.rank == 0 else 0), said
    assert not said or ("2 values" in said[0] and "plain, step" in said[0]), said
    state["step"] = 6
    state["plain"][40000] = 0
    check()

    # Replicas of a DTensor that differ.
    change(7)
    state["copies"].to_local()[1, 1] = at.rank
    try:
        save(7)
    except CheckpointException as error:
        assert "copies: ranks 0 and 1 hold the same part, and their bytes differ" in str(error), error
    else:
        raise AssertionError("replicas differ")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(7, replica_mismatch="lowest")
    state["copies"].to_local()[1, 1] = 0
    check()

    # A rank that fails takes all with it, at once, and the step before stays.
    change(8)
    broken = {**state, "own": {"seed": object() if at.rank == at.world - 1 else 1}}
    for each, wanted in [(broken, "needs pickle"), ({**state, "w": torch.ones(2)}, "w on rank")]:
        try:
            dcp.save(each, storage_writer=Writer(at.job, step=8, rank_local=("rng", "own.*")))
        except CheckpointException as error:
            assert wanted in str(error), error
        else:
            raise AssertionError(wanted)
    change(7)
    state["copies"].to_local()[1, 1] = 0
    check()

    refusals = refused(at, state)
    change(8)
    save(8)
    check()
    return refusals


class _Bare(dcp.SavePlanner):
    """A planner that shows nothing."""

    def __init__(self) -> None:
        self._inner = DefaultSavePlanner()

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        self._inner.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self):
        return self._inner.create_local_plan()

    def create_global_plan(self, all_plans):
        return self._inner.create_global_plan(all_plans)

    def finish_plan(self, new_plan):
        return self._inner.finish_plan(new_plan)

    def resolve_data(self, write_item):
        return self._inner.resolve_data(write_item)


def refused(at: Context, state: dict[str, Any]) -> dict[str, str]:
    """What is refused, and how it is said."""
    said: dict[str, str] = {}

    def attempt(name: str, do: Callable[[], object]) -> None:
        try:
            do()
        except (CheckpointException, TenplexError) as error:
            said[name] = str(error)
        else:
            said[name] = "done"

    groups = [dist.new_group([rank]) for rank in range(at.world)]
    own = groups[at.rank]
    attempt("bare", lambda: dcp.save(state, storage_writer=Writer(at.job, step=9), planner=_Bare()))
    attempt(
        "step", lambda: dcp.save(state, storage_writer=Writer(at.job, step=3, rank_local=("rng", "own.*")))
    )
    attempt("part", lambda: dcp.save(state, storage_writer=Writer(at.job, step=9), process_group=own))
    attempt("id", lambda: dcp.save(state, checkpoint_id="x", storage_writer=Writer(at.job, step=9)))
    attempt(
        "other", lambda: dcp.save({}, storage_writer=Writer(at.job, step=9, snapshot="9:1:00000000000000aa"))
    )
    attempt("absent", lambda: dcp.load({"w": torch.ones(1)}, storage_reader=Reader(at.mount / "absent")))
    attempt("missing", lambda: dcp.load({"nope": torch.ones(1)}, storage_reader=Reader(at.job)))
    attempt("shape", lambda: dcp.load({"plain": torch.ones(3)}, storage_reader=Reader(at.job)))
    return said


def stages(at: Context) -> None:
    """Pipeline stages: each has a mesh, parameters and values of its own, and a weight is on two of them."""
    grid = init_device_mesh("cpu", (2, at.world // 2), mesh_dim_names=("pp", "dp"))
    stage = grid.get_local_rank("pp")
    state: dict[str, Any] = {f"layers.{stage}.w": spread((5, 3), grid["dp"], [Shard(0)]), "common": 1}
    state[f"only{stage}"] = {"seed": stage, "t": torch.full((2,), float(stage))}
    if at.world == 8 or stage == 0:
        state["shared"] = spread((4, 4), grid["dp"], [Shard(1)])
    dcp.save(state, storage_writer=Writer(at.job, step=1))
    found = blank(state)
    dcp.load(found, storage_reader=Reader(at.job))
    same(found, state)
    everything = {f"layers.{i}.w": torch.zeros(5, 3) for i in range(2)}
    everything |= {f"only{i}": {"seed": None, "t": torch.zeros(2)} for i in range(2)}
    dcp.load(everything, storage_reader=Reader(at.job))
    whole = (torch.arange(15) % 249).reshape(5, 3).float()
    same(
        everything,
        {f"layers.{i}.w": whole for i in range(2)}
        | {f"only{i}": {"seed": i, "t": torch.full((2,), float(i))} for i in range(2)},
    )


def strided(at: Context) -> None:
    """FSDP2 over tensor parallelism on a dim that does not divide, where DCP's box is wrong."""
    grid = init_device_mesh("cpu", (at.world // 2, 2), mesh_dim_names=("dp", "tp"))
    for width in (9, 18):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, width))
        parallelize_module(net, grid["tp"], {"0": ColwiseParallel()})
        fully_shard(net, mesh=grid["dp"])
        state = dict(net.state_dict())
        job = at.mount / f"strided{width}"
        dcp.save(state, storage_writer=Writer(job, step=1))
        dcp.save(state, storage_writer=Writer(job, step=2))
        found = blank(state)
        dcp.load(found, storage_reader=Reader(job))
        same(found, state)
        torch.manual_seed(3)
        plain = nn.Sequential(nn.Linear(4, width)).state_dict()
        whole = blank(dict(plain))
        dcp.load(whole, storage_reader=Reader(job))
        same(whole, dict(plain))


def lone(at: Context) -> None:
    """No process group at all, a planner that flattens nothing, and objects that need pickle."""
    state = {"w": torch.arange(6.0), "args": {"a": [1, torch.ones(2)]}, "at": (torch.zeros(1), "x")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=Writer(at.mount / "lone", step=1))
        found = blank(state)
        dcp.load(found, storage_reader=Reader(at.mount / "lone"))
        same(found["w"], state["w"])
        same(found["args"], state["args"])
        assert torch.equal(found["at"][0], state["at"][0]) and found["at"][1] == "x"
        flat = {**state, "path": Path("x")}
        dcp.save(
            flat,
            storage_writer=Writer(at.mount / "flat", step=1, allow_pickle=True),
            planner=DefaultSavePlanner(flatten_state_dict=False),
        )
        found = {"w": torch.zeros(6), "args": None, "path": None}
        dcp.load(
            found,
            storage_reader=Reader(at.mount / "flat", allow_pickle=True),
            # DCP fills a copy of the state otherwise, and gives back nothing.
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )
        same(found["args"], state["args"])
        assert found["path"] == Path("x")


def elastic_save(at: Context, step: int, seed: int) -> None:
    """Trains from what is there, or from the start, and saves; returns nothing that depends on the mesh."""
    mesh = init_device_mesh("cpu", (at.world,), mesh_dim_names=("dp",))
    torch.manual_seed(seed)
    net = Net(8)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    model, optim = get_state_dict(net, optimizer)
    state = {"model": model, "optim": optim, "rng": torch.full((16,), at.rank), "step": 0}
    if step > 1:
        dcp.load(state, storage_reader=Reader(at.job))
        assert state["step"] == step - 1
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    model, optim = get_state_dict(net, optimizer)
    state = {"model": model, "optim": optim, "rng": state["rng"], "step": step}
    dcp.save(state, storage_writer=Writer(at.job, step=step, rank_local=("rng",)))


def elastic_read(at: Context) -> dict[str, Any]:
    """The whole state, as one rank sees it."""
    net = Net(8)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    model, optim = get_state_dict(net, optimizer)
    state = {"model": model, "optim": optim, "rng": torch.zeros(16, dtype=torch.int64), "step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=Reader(at.job))
    return {path: str(bits(value)) for path, value in leaves(state)}


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def draws() -> list[float]:
    return torch.rand(3).tolist()


def policies_save(context: Context) -> dict[str, Any]:
    net, optimizer = grouped(context, reverse=False)
    for factor in (1.0, 0.5):
        for i, p in enumerate(net.parameters()):
            p.grad = torch.ones_like(p) * (0.1 * i + factor)
        optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    model, optim = get_state_dict(net, optimizer, options=FLAT)
    torch.manual_seed(100 + context.rank)
    state = {"model": model, "optim": optim, "rng": rng_state(), "step": 7, "schedule": {"last_epoch": 7}}
    dcp.save(state, storage_writer=Writer(context.job, step=7, rank_local=["rng.*"]))
    return {"draws": draws(), "trained": by_name(net, optimizer)}


def policies_load(context: Context) -> dict[str, Any]:
    net, optimizer = grouped(context, reverse=True)
    model, optim = get_state_dict(net, optimizer, options=FLAT)
    state = {"model": model, "optim": optim, "rng": rng_state(), "step": 0, "schedule": {"last_epoch": 0}}
    dcp.load(state, storage_reader=Reader(context.job))
    set_state_dict(
        net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=FLAT
    )
    assert (state["step"], state["schedule"]) == (7, {"last_epoch": 7})
    set_rng_state(state["rng"])
    return {"draws": draws(), "trained": by_name(net, optimizer)}
