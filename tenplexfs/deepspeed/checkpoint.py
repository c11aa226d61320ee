"""`save` and `load` of a DeepSpeed engine, at any number of ranks, and with another stage of ZeRO.

What is stored are the parameters, their fp32 masters and the optimizer's states by the names of parameters,
so that neither the order of groups nor the partition matters to a load.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from tenplexfs.client.arrays import to_torch
from tenplexfs.client.connection import patiently
from tenplexfs.client.regions import OpenSnapshot, place_of_job
from tenplexfs.core.paths import unescape_component
from tenplexfs.core.ptc import PTC
from tenplexfs.core.region import Region, flat_boxes
from tenplexfs.deepspeed.fragments import (
    BIT16,
    FP32,
    Fragment,
    fragments_of,
    groups_of,
    path_of,
    plain_of,
    specs_of,
)
from tenplexfs.deepspeed.layout import layout_of_specs, relayout
from tenplexfs.errors import InvalidError, NotFoundError, PreconditionError
from tenplexfs.formats.layout_json import layout_text, parse_layout
from tenplexfs.sharded import OpenJob, wanted_snapshot
from tenplexfs.torch.exchange import Exchange, this_rank, world_size
from tenplexfs.torch.together import save_together, together

__all__ = ["layout_for", "load", "save"]

Engine: TypeAlias = Any

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_PLAIN = (bool, int, float, str, type(None))


def save(
    engine: Engine,
    path: str | os.PathLike[str],
    *,
    step: int,
    client_state: Mapping[str, Any] | None = None,
    snapshot: str | None = None,
    consumed: int | None = None,
    allow_pickle: bool = False,
) -> None:
    """Saves a step of a job; all ranks call it. Returns once the step is committed on all nodes.

    A job that is not there is made, over one axis, ``dp``.

    Args:
        engine: As `deepspeed.initialize` gives it, with ZeRO 1, 2 or 3, without model parallelism.
        path: ``<mount>/<job>``.
        step: Must be past the newest one that is committed.
        client_state: Anything else; a rank's own random-number states under a key with the word ``rng``.
        snapshot: As for `tenplexfs.save`.
        consumed: As for `tenplexfs.save`.
        allow_pickle: Whether objects are kept that need pickle.

    Raises:
        InvalidError: The optimizer is none of ZeRO, or ranks do not hold each element once.
        PreconditionError: The job is laid out in another way: reconfigure it first (`layout_for`).
        TenplexError: Some rank failed; the step before stays.
    """
    place = place_of_job(path)
    if place.step is not None:
        raise InvalidError(f"{path}: a kept step never changes; need <mount>/<job>")
    fragments = fragments_of(engine, this_rank(), world_size())
    plain = plain_of(engine)
    specs = specs_of(fragments, plain)

    def state_of(ptc: PTC) -> dict[str, Any]:
        rank = this_rank()
        here = set(ptc.rank_paths(rank))
        for each in here | specs.keys():
            spec = specs.get(each)
            held = [p.region for p in ptc.shard(rank, each).pieces] if each in here else []
            whole = spec is not None and spec.run is None
            wanted = _regions(spec.shape, spec.run) if spec is not None and spec.run is not None else []
            if not whole and wanted != held:
                raise PreconditionError(
                    f"job {place.job}: {each} on rank {rank}: is {_shown(held)} in its layout, "
                    f"{_shown(wanted)} in this run; reconfigure it first (tenplexfs.deepspeed.layout_for)"
                )
        values = {"values": _values(engine), "client": dict(client_state or {})}
        return {**_state(fragments, plain, ptc, rank), **values}

    save_together(
        place,
        specs,
        layout_of_specs,
        state_of,
        step=step,
        snapshot=snapshot,
        consumed=consumed,
        allow_pickle=allow_pickle,
    )


def load(
    engine: Engine,
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    snapshot: str | None = None,
    allow_pickle: bool = False,
) -> Any:  # noqa: ANN401
    """Fills an engine in place; all ranks call it. Returns the client state, that of this rank.

    Args:
        engine: With ZeRO 1, 2 or 3, over any number of ranks; its stage may be another than that of the save.
        path: ``<mount>/<job>``, or ``<mount>/<job>@<step>``.
        step: A kept one; default the newest.
        snapshot: The one that is wanted; default ``TENPLEXFS_SNAPSHOT``, unless a step is asked for.
        allow_pickle: Whether objects that were saved with pickle are made again.

    Raises:
        NotFoundError: There is no such job or step.
        InvalidError: Tensors are not there, or of other shapes or dtypes; all are named. Or a group of the
            optimizer has parameters that were saved with different settings.
        TenplexError: Some rank failed.
    """
    place = place_of_job(path)
    wanted = wanted_snapshot(place, step, snapshot)

    def work(exchange: Exchange) -> Any:  # noqa: ANN401
        if exchange.rank == 0:
            with patiently(lambda: OpenSnapshot(place, step=wanted[0], snapshot=wanted[1])) as opened:
                exchange.post("snapshot", opened.snapshot)
        name = exchange.get("snapshot")

        def fetch() -> Any:  # noqa: ANN401
            with OpenJob(place, step=wanted[0], snapshot=name) as opened:
                return _fill(engine, opened, exchange.rank, exchange.world, allow_pickle=allow_pickle)

        return patiently(fetch)

    return together(f"load/{place.job}", work)


def layout_for(path: str | os.PathLike[str], ranks: int) -> bytes:
    """Returns the layout of a job for another number of ranks, for `tenplexfs reconfigure`.

    ZeRO 1 and 2 pad a group to twice the number of ranks, which a mesh alone (``--mesh dp=4``) does not say.

    Args:
        path: ``<mount>/<job>``.
        ranks: How many the next run has.

    Raises:
        NotFoundError: There is no such job.
        InvalidError: Its layout does not follow ZeRO's rule.
    """
    place = place_of_job(path)
    try:
        text = (place.mount / place.job / "layout.json").read_bytes()
    except OSError as error:
        raise NotFoundError(f"{path}: no layout: {error.strerror}") from error
    return layout_text(relayout(parse_layout(text), ranks))


def _regions(shape: tuple[int, ...], run: tuple[int, int]) -> list[Region]:
    boxes = flat_boxes(shape, run[0], run[0] + run[1]).tolist() if run[1] else []
    return [Region(tuple(low), tuple(high)) for low, high in boxes]


def _shown(regions: list[Region]) -> str:
    return " ".join(map(str, regions[:4])) or "nothing"


def _state(
    fragments: list[Fragment], plain: Mapping[str, torch.Tensor], ptc: PTC, rank: int
) -> dict[str, Any]:
    """Returns the tensors that this rank saves, of the shapes that the layout says."""
    here = set(ptc.rank_paths(rank))
    kinds = {unescape_component(path.split("/")[1]) for path in here if path.startswith("optimizer/")}
    tops: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in (BIT16, FP32, *kinds)}
    tops[BIT16].update(plain)
    for each in fragments:
        for kind, top in tops.items():
            path = path_of(kind, each.name)
            if kind == BIT16 and not each.is_part:
                top[each.name] = each.bit16
            elif path in here:
                # The rule gives each rank a part of everything, which may be empty, or end with padding.
                size = ptc.shard(rank, path).local_shape[0]
                made = torch.zeros(size, dtype=getattr(torch, ptc.tensors[path].dtype))
                if kind == BIT16 or kind in each.kinds:
                    part = each.bit16 if kind == BIT16 else each.read(kind)
                    made = part if len(part) == size else torch.cat([part.to("cpu"), made[len(part) :]])
                top[each.name] = made
    return {BIT16: tops.pop(BIT16), FP32: tops.pop(FP32), "optimizer": tops}


def _values(engine: Engine) -> dict[str, Any]:
    optimizer = engine.optimizer
    groups: dict[str, Any] = {}
    for number, names, flats in groups_of(engine):
        given = optimizer.optimizer.param_groups[number]
        kept = {key: _number(value) for key, value in given.items() if key != "params"}
        kept = {key: value for key, value in kept.items() if isinstance(value, (*_PLAIN, tuple, list))}
        steps = [_number(optimizer.optimizer.state.get(flat, {}).get("step")) for flat in flats]
        for name in names:
            groups[name] = {**kept, "state_step": steps[0]}
    scheduler = getattr(engine, "lr_scheduler", None)
    scaler = vars(optimizer.loss_scaler) if getattr(optimizer, "loss_scaler", None) is not None else {}
    return {
        "groups": groups,
        "engine": {name: getattr(engine, name) for name in _COUNTERS},
        "scaler": {key: value for key, value in scaler.items() if isinstance(value, _PLAIN)},
        "schedule": scheduler.state_dict() if scheduler is not None else None,
    }


def _number(value: Any) -> Any:  # noqa: ANN401
    return value.item() if torch.is_tensor(value) and value.numel() == 1 else value


def _fill(engine: Engine, opened: OpenJob, rank: int, world: int, *, allow_pickle: bool) -> Any:  # noqa: ANN401
    fragments = fragments_of(engine, rank, world)
    plain = plain_of(engine)
    specs = specs_of(fragments, plain)
    opened.check({path: (spec.shape, spec.dtype) for path, spec in specs.items()})
    wanted: list[tuple[str, Region]] = []
    counts: dict[str, int] = {}
    for path, spec in specs.items():
        whole = Region((0,) * len(spec.shape), spec.shape)
        regions = [whole] if spec.run is None else _regions(spec.shape, spec.run)
        wanted += [(path, region) for region in regions]
        counts[path] = len(regions)
    arrays = iter(opened.read(wanted))
    found = {path: [_torch(next(arrays)) for _ in range(count)] for path, count in counts.items()}
    for each in fragments:
        parts = found[path_of(BIT16, each.name)]
        if not each.is_part:
            each.bit16.copy_(parts[0])
        elif each.count:
            each.bit16.copy_(torch.cat([part.reshape(-1) for part in parts]))
        for kind in each.kinds:
            if each.count:
                each.write(kind, torch.cat([p.reshape(-1) for p in found[path_of(kind, each.name)]]))
    for name, buffer in plain.items():
        buffer.copy_(found[path_of(BIT16, name)][0])
    persistent = getattr(engine.optimizer, "persistent_parameters", None)
    if persistent:  # they are kept gathered, from what was here before
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)
    state = next(opened.states(rank, allow_pickle=allow_pickle))
    _set_values(engine, state["values"])
    return state.get("client", {})


def _torch(array: Any) -> torch.Tensor:  # noqa: ANN401
    made = to_torch(np.ascontiguousarray(array).reshape(np.shape(array)))
    assert isinstance(made, torch.Tensor)
    return made


def _set_values(engine: Engine, values: Mapping[str, Any]) -> None:
    optimizer = engine.optimizer
    for number, names, flats in groups_of(engine):
        kept = [values["groups"][name] for name in names if name in values["groups"]]
        if any(each != kept[0] for each in kept):
            differ = [name for name in names if values["groups"].get(name) != kept[0]]
            raise InvalidError(
                f"group {number} of the optimizer: {names[0]} and {differ[0]} were saved with other settings"
            )
        if not kept:
            continue
        given = optimizer.optimizer.param_groups[number]
        for key, value in kept[0].items():
            if key != "state_step":
                _set(given, key, value)
        for flat in flats:
            if kept[0]["state_step"] is not None and "step" in optimizer.optimizer.state.get(flat, {}):
                _set(optimizer.optimizer.state[flat], "step", kept[0]["state_step"])
    for name, value in values["engine"].items():
        setattr(engine, name, value)
    for name, value in values["scaler"].items():
        setattr(optimizer.loss_scaler, name, value)
    if values["schedule"] is not None and getattr(engine, "lr_scheduler", None) is not None:
        engine.lr_scheduler.load_state_dict(values["schedule"])


def _set(container: Any, key: str, value: Any) -> None:  # noqa: ANN401
    """Sets a number where it is: in a tensor, if it is in one."""
    if torch.is_tensor(container.get(key)):
        container[key].fill_(value)
    else:
        container[key] = value
