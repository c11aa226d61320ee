"""Layouts from JAX shardings.

What each device holds is asked of the sharding itself (`devices_indices_map`); a `NamedSharding` also says
which mesh axes cut which dim, and where those cuts give the same boxes they are what the layout says, so that
it can follow another mesh. The rank of a device is its place in the mesh, row-major.

Needs jax, which importing `tenplexfs` never does: ``pip install tenplexfs[jax]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from tenplexfs.core.dtypes import dtype_name, dtype_of
from tenplexfs.core.held import cuts_give, explicit_layout, on_of_ranks, whole_shard
from tenplexfs.core.layout import Cut, ExplicitShard, Layout, Mesh, TensorEntry, has_braces
from tenplexfs.core.region import Region
from tenplexfs.errors import InvalidError

__all__ = ["ArrayLike", "layout_of", "ranks_of"]

ArrayLike: TypeAlias = jax.Array | np.ndarray[Any, Any] | tuple[Sequence[int], Any, Sharding | None]
"""An array, or (global shape, dtype, sharding). One of numpy, or without a sharding, is on every rank."""


def layout_of(state: Mapping[str, ArrayLike], *, mesh: jax.sharding.Mesh | None = None) -> Layout:
    """Returns the layout of arrays and their shardings, all processes' devices included.

    Args:
        state: Tensor path (a dot is read as ``/``) and array.
        mesh: Whose devices, row-major, are the ranks; default: the largest mesh of the shardings.

    Raises:
        InvalidError: A sharding has devices outside of the mesh or a pending reduction, two names give one
            path, or a value is no array; names the tensor.
    """
    arrays: dict[str, tuple[tuple[int, ...], str, Sharding | None]] = {}
    for name, value in state.items():
        path = name.replace(".", "/")
        if path in arrays:
            raise InvalidError(f"tensor {path!r}: two names of the state give this path")
        arrays[path] = _array(f"tensor {path!r}", value)
    whole, ranks = ranks_of(mesh, [s for _, _, s in arrays.values() if s is not None])
    entries: list[TensorEntry] = []
    explicit: dict[str, tuple[tuple[int, ...], Mapping[int, ExplicitShard]]] = {}
    known: dict[tuple[tuple[int, ...], str, Sharding], tuple[dict[int, ExplicitShard], bool]] = {}
    for path, (shape, dtype, sharding) in arrays.items():
        if sharding is None and not has_braces(path):
            entries.append(TensorEntry(path, shape, dtype))
            continue
        if sharding is None:
            explicit[path] = (shape, dict.fromkeys(range(whole.size), whole_shard(shape, dtype)))
            continue
        cuts, on = _cuts(sharding), None
        if (shape, dtype, sharding) not in known:
            held = _held(f"tensor {path!r}", shape, dtype, sharding, ranks)
            agree = cuts is not None and cuts_give(shape, cuts, whole, held)
            known[shape, dtype, sharding] = held, agree
        held, agree = known[shape, dtype, sharding]
        if agree:
            on = on_of_ranks(whole, held)
        if cuts is not None and on is not None and not has_braces(path):
            entries.append(TensorEntry(path, shape, dtype, cuts, on))
        else:
            explicit[path] = (shape, held)
    return explicit_layout(whole, explicit, entries)


def _array(what: str, value: object) -> tuple[tuple[int, ...], str, Sharding | None]:
    sharding: Sharding | None
    if isinstance(value, np.ndarray):
        shape, dtype, sharding = value.shape, value.dtype, None
    elif isinstance(value, jax.Array):
        shape, dtype, sharding = value.shape, value.dtype, value.sharding
    elif isinstance(value, tuple):
        shape, dtype, sharding = value
    else:
        raise InvalidError(
            f"{what}: {type(value).__name__}: need a jax.Array, or a shape, dtype and sharding"
        )
    try:
        name = dtype_name(np.dtype(dtype))
    except TypeError:
        raise InvalidError(
            f"{what}: dtype {dtype}: unknown; keys are stored by jax.random.key_data"
        ) from None
    dtype_of(name)
    pending = getattr(getattr(sharding, "spec", None), "unreduced", None)
    if pending:
        raise InvalidError(
            f"{what}: sums over {sorted(map(str, pending))} are not yet taken: reduce it first"
        )
    return tuple(shape), name, sharding


def ranks_of(
    mesh: jax.sharding.Mesh | None, shardings: Sequence[Sharding]
) -> tuple[Mesh, Mapping[jax.Device, int]]:
    """Returns the mesh of a layout and the rank of each device.

    Args:
        mesh: Whose devices, row-major, are the ranks; default: the largest mesh of the shardings, else their
            devices by id.
        shardings: Of all arrays.
    """
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    whole = mesh if mesh is not None else max(meshes, key=lambda m: m.size, default=None)
    if whole is not None:
        axes = tuple((str(name), size) for name, size in whole.shape.items())
        return Mesh(axes or (("rank", 1),)), {d: rank for rank, d in enumerate(whole.devices.flat)}
    found: set[Any] = {device for sharding in shardings for device in sharding.device_set}
    devices = sorted(found, key=lambda device: int(device.id))
    return Mesh((("rank", max(len(devices), 1)),)), {d: rank for rank, d in enumerate(devices)}


def _cuts(sharding: Sharding) -> tuple[Cut, ...] | None:
    """Returns the cuts that the partition spec names; they are still to be proved."""
    if not isinstance(sharding, NamedSharding):
        return () if sharding.is_fully_replicated else None
    cuts: list[Cut] = []
    # A newer spec may say more than its partitions, and then refuses to be iterated over itself.
    for dim, axes in enumerate(getattr(sharding.spec, "partitions", sharding.spec)):
        if axes is None or axes == ():
            continue
        if not isinstance(axes, str | tuple):
            return None
        cuts.append(Cut((axes,) if isinstance(axes, str) else tuple(map(str, axes)), dim))
    return tuple(cuts)


def _held(
    what: str, shape: tuple[int, ...], dtype: str, sharding: Sharding, ranks: Mapping[jax.Device, int]
) -> dict[int, ExplicitShard]:
    pending = getattr(getattr(sharding, "spec", None), "unreduced", None)
    if pending:
        raise InvalidError(
            f"{what}: sums over {sorted(map(str, pending))} are not yet taken: reduce it first"
        )
    try:
        indices = sharding.devices_indices_map(shape)
    except (NotImplementedError, ValueError) as error:
        raise InvalidError(f"{what}: shape {list(shape)}: {str(error).splitlines()[0]}") from error
    held = {}
    for device, slices in indices.items():
        if device not in ranks:
            raise InvalidError(f"{what}: {device} is not of the mesh whose places are the ranks: give mesh")
        runs = [range(*s.indices(n)) for s, n in zip(slices, shape, strict=True)]
        box = Region(tuple(run.start for run in runs), tuple(run.stop for run in runs))
        pieces = ((box, (0,) * len(shape)),) if box.volume else ()
        held[ranks[device]] = ExplicitShard(box.shape, dtype, pieces)
    return held
