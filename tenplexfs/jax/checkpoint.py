"""`save` and `load` of pytrees of sharded arrays: each process saves and fetches what is on its own devices.

The rank of a device is its place in the mesh, so one process may be several ranks. All processes know the
whole layout from the shardings; what they tell each other is their nodes, and whether all can go on.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from tenplexfs.client.connection import patiently
from tenplexfs.client.jobs import wait
from tenplexfs.client.regions import OpenSnapshot, create_job, node_of, place_of_job
from tenplexfs.core.build import build_ptc
from tenplexfs.core.dtypes import dtype_name, dtype_of
from tenplexfs.core.layout import Layout
from tenplexfs.core.ptc import PTC, Shard
from tenplexfs.core.region import Region
from tenplexfs.core.snapshot import NodeName
from tenplexfs.errors import ConflictError, InvalidError, TenplexError
from tenplexfs.formats.layout_json import layout_text
from tenplexfs.jax.layout import layout_of, ranks_of
from tenplexfs.jax.tree import (
    ABSENT,
    Slot,
    is_array,
    nested,
    paths_of,
    sharding_of,
    slots_of,
    with_keys,
    without_keys,
)
from tenplexfs.sharded import OpenJob, check_held, committed, save_ranks, wanted_snapshot

__all__ = ["load", "save"]

T = TypeVar("T")
Array = npt.NDArray[np.generic]

_CARD_BYTES = 4096
_FAILURE_CHARS = 500
_VISIBLE_S = 60.0


def save(
    tree: object,
    path: str | os.PathLike[str],
    *,
    step: int,
    mesh: Mesh | None = None,
    snapshot: str | None = None,
    consumed: int | None = None,
) -> None:
    """Saves a step of a job; all processes call it. Returns once the step is committed on all nodes.

    A job that is not there is made, with the layout of the arrays. Arrays on one device, and numpy's, are
    taken for the same on all ranks, and refused where they differ. Other leaves are kept by rank.

    Args:
        tree: Of `jax.Array`, numpy arrays, random keys, and plain values.
        path: ``<mount>/<job>``.
        step: Must be past the newest one that is committed.
        mesh: Whose devices, row-major, are the ranks; default: the largest mesh of the arrays, else one
            device of each process.
        snapshot: As for `tenplexfs.save`.
        consumed: As for `tenplexfs.save`.

    Raises:
        InvalidError: The tree holds what cannot be kept, or replicas differ.
        PreconditionError: The job is laid out in another way: reconfigure it first.
        TenplexError: Some process failed; the step before stays.
    """
    place = place_of_job(path)
    if place.step is not None:
        raise InvalidError(f"{path}: a kept step never changes; need <mount>/<job>")

    def prepare() -> tuple[_Run, PTC | None, str]:
        made = _Run(without_keys(tree), mesh)
        return made, committed(place, len(made.ranks)), node_of(place)

    (run, known, _), cards = _together(
        prepare, lambda ready: [ready[2], secrets.token_hex(8), ready[1] is None]
    )
    is_new = all(card[2] for card in cards)

    def ready() -> dict[int, object]:
        if known is not None:
            run.check(place.job, known)
        elif not is_new:
            raise ConflictError(f"job {place.job}: was made while it was first saved; save again")
        elif jax.process_index() == 0:
            create_job(place, run.layout_on([card[0] for card in cards]))
        return run.states()

    states, _ = _together(ready, lambda _: [])
    if is_new:
        wait(place.mount / place.job, state="empty", timeout_s=_VISIBLE_S)
    save_ranks(
        place,
        states,
        lambda begin: _together(begin, lambda _: []),
        step=step,
        run=cards[0][1],
        snapshot=snapshot,
        consumed=consumed,
    )


def load(
    path: str | os.PathLike[str],
    *,
    like: T,
    step: int | None = None,
    snapshot: str | None = None,
) -> T:
    """Returns a tree like ``like``, of what was saved, whatever mesh and shardings it was saved with.

    All processes call it. Each fetches what its devices are to hold, each box once.

    Args:
        path: ``<mount>/<job>``, or ``<mount>/<job>@<step>``.
        like: A tree with, for each array, one of the wanted shape, dtype and sharding, or a
            `ShapeDtypeStruct` that has all three; numpy arrays come as such; anything else stands for a
            plain value.
        step: A kept one; default the newest.
        snapshot: The one that is wanted; default ``TENPLEXFS_SNAPSHOT``, unless a step is asked for.

    Raises:
        NotFoundError: There is no such job, step, or value.
        InvalidError: Arrays are not there, or of other shapes or dtypes; all are named.
        TenplexError: Some process failed.
    """
    place = place_of_job(path)
    wanted = wanted_snapshot(place, step, snapshot)

    def prepare() -> tuple[list[Slot], Any, str | None]:
        slots, structure = slots_of(without_keys(like))
        for slot in slots:
            if isinstance(slot.value, jax.ShapeDtypeStruct) and slot.value.sharding is None:
                raise InvalidError(f"load: {'/'.join(map(str, slot.keys))}: give it a sharding")
        if jax.process_index() or jax.process_count() == 1:
            return slots, structure, wanted[1]  # the first says for all which it is
        with patiently(lambda: OpenSnapshot(place, step=wanted[0], snapshot=wanted[1])) as opened:
            return slots, structure, opened.snapshot

    (slots, structure, _), cards = _together(prepare, lambda ready: [ready[2]])

    def fetch() -> list[object]:
        with OpenJob(place, step=wanted[0], snapshot=cards[0][0]) as opened:
            return _fetch(opened, slots)

    leaves, _ = _together(lambda: patiently(fetch), lambda _: [])
    made: T = with_keys(like, jax.tree_util.tree_unflatten(structure, leaves))
    return made


class _Run:
    """What the processes hold together.

    Attributes:
        ranks: Of the devices.
    """

    def __init__(self, tree: object, mesh: Mesh | None) -> None:
        self._slots, _ = slots_of(tree)
        self._paths = paths_of(self._slots)
        arrays = {path: slot.value for path, slot in self._paths.items() if is_array(slot.value)}
        shardings = [found for value in arrays.values() if (found := sharding_of(value)) is not None]
        if mesh is None and not shardings:
            firsts = {device.process_index: device for device in reversed(jax.devices())}
            mesh = Mesh(np.array([firsts[i] for i in sorted(firsts)]), ("rank",))
        whole, self.ranks = ranks_of(mesh, shardings)
        self._layout: Layout = layout_of(
            {path: (value.shape, value.dtype, sharding_of(value)) for path, value in arrays.items()},
            mesh=mesh,
        )
        assert self._layout.mesh == whole
        here = jax.process_index()
        self._own = {device: rank for device, rank in self.ranks.items() if device.process_index == here}

    def layout_on(self, nodes: Sequence[str]) -> bytes:
        """Returns the layout, ``nodes`` being those of the processes."""
        of_node: dict[NodeName, list[int]] = {}
        for device, rank in self.ranks.items():
            of_node.setdefault(NodeName(nodes[device.process_index]), []).append(rank)
        placed = tuple((node, tuple(sorted(ranks))) for node, ranks in of_node.items())
        return layout_text(replace(self._layout, nodes=placed))

    def check(self, job: str, known: PTC) -> None:
        """Refuses a job that is laid out in another way."""
        mine = build_ptc(self._layout)
        held: Mapping[int, Mapping[str, Shard]] = {
            rank: {path: mine.shard(rank, path) for path in mine.rank_paths(rank)}
            for rank in self._own.values()
        }
        check_held(job, known, held)

    def states(self) -> dict[int, object]:
        """Returns the state of each rank of this process, of numpy's arrays."""
        local: dict[int, dict[jax.Device, jax.Array]] = {}
        for slot in self._slots:
            if isinstance(slot.value, jax.Array) and sharding_of(slot.value) is not None:
                shards = {each.device: each.data for each in slot.value.addressable_shards}
                local[id(slot)] = shards
                for data in shards.values():
                    data.copy_to_host_async()

        def value_on(device: jax.Device) -> Callable[[Slot], object]:
            def value(slot: Slot) -> object:
                if id(slot) in local:
                    found = local[id(slot)].get(device)
                    return ABSENT if found is None else np.asarray(found)
                return np.asarray(slot.value) if is_array(slot.value) else slot.value

            return value

        return {rank: nested(self._slots, value_on(device)) for device, rank in self._own.items()}


def _fetch(opened: OpenJob, slots: Sequence[Slot]) -> list[object]:
    named = paths_of(list(slots))
    path_of = {id(slot): path for path, slot in named.items()}
    arrays = {path: slot.value for path, slot in named.items() if is_array(slot.value)}
    opened.check({path: (value.shape, _dtype(path, value.dtype)) for path, value in arrays.items()})
    boxes: dict[tuple[str, Region], int] = {}
    places: dict[str, dict[Any, Region]] = {}
    for path, value in arrays.items():
        places[path] = _boxes(value)
        for box in places[path].values():
            boxes.setdefault((path, box), len(boxes))
    found = opened.read(list(boxes))
    rank = _first_rank(arrays.values())
    out: list[object] = []
    for slot in slots:
        path = path_of[id(slot)]
        if path not in arrays:
            out.append(opened.leaf(path, rank))
        elif isinstance(slot.value, np.ndarray):
            out.append(np.array(found[boxes[path, places[path][None]]]))
        else:
            shape, dtype, sharding = slot.value.shape, slot.value.dtype, slot.value.sharding
            parts = [
                jax.device_put(found[boxes[path, box]], _on(device, sharding))
                for device, box in places[path].items()
            ]
            out.append(jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=dtype))
    return out


def _dtype(path: str, dtype: Any) -> str:  # noqa: ANN401
    try:
        name = dtype_name(np.dtype(dtype))
        dtype_of(name)
    except (TypeError, InvalidError) as error:
        raise InvalidError(f"tensor {path!r}: dtype {dtype}: cannot be loaded: {error}") from None
    return name


def _boxes(value: Any) -> dict[Any, Region]:  # noqa: ANN401
    """Returns what each device of this process is to hold; of numpy's arrays, under None, all."""
    shape = tuple(value.shape)
    if isinstance(value, np.ndarray):
        return {None: Region((0,) * len(shape), shape)}
    out = {}
    for device, index in value.sharding.addressable_devices_indices_map(shape).items():
        runs = [range(*each.indices(size)) for each, size in zip(index, shape, strict=True)]
        out[device] = Region(tuple(run.start for run in runs), tuple(run.stop for run in runs))
    return out


def _on(device: jax.Device, sharding: Sharding) -> Sharding:
    return SingleDeviceSharding(device, memory_kind=sharding.memory_kind)


def _first_rank(arrays: Any) -> int:  # noqa: ANN401
    shardings = [found for value in arrays if (found := sharding_of(value)) is not None]
    _, ranks = ranks_of(None, shardings)
    here = jax.process_index()
    return min((rank for device, rank in ranks.items() if device.process_index == here), default=here)


def _together(work: Callable[[], T], tell: Callable[[T], list[Any]]) -> tuple[T, list[list[Any]]]:
    """Returns what ``work`` does here, and what ``tell`` says of it on every process.

    Raises:
        TenplexError: It failed on some process; all know.
    """
    failure: BaseException | None = None
    card: list[Any] = []
    try:
        done = work()
        card = tell(done)
    except BaseException as error:  # the others wait for a card
        failure = error
    text = json.dumps([str(failure)[:_FAILURE_CHARS] if failure is not None else None, card])
    cards = [json.loads(each) for each in _gathered(text)]
    if failure is not None:
        raise failure
    for process, (message, _) in enumerate(cards):
        if message is not None:
            raise TenplexError(f"process {process}: {message}")
    return done, [card for _, card in cards]


def _gathered(text: str) -> list[str]:
    if jax.process_count() == 1:
        return [text]
    card = np.zeros(_CARD_BYTES, np.uint8)
    data = text.encode()
    card[: len(data)] = np.frombuffer(data, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(card))
    return [row.tobytes().rstrip(b"\0").decode() for row in rows]
