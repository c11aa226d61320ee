"""`dcp.load` from a job, at whatever mesh: each rank takes the boxes of its own shards, wherever they are.

To DCP each tensor is one chunk of its global size, so that what it asks for is in global coordinates. What is
on this node is mapped and copied once into the target; the rest the daemon fetches, once for all ranks here.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from tenplexfs.client.arrays import to_torch
from tenplexfs.client.connection import patiently
from tenplexfs.client.regions import LocalArray, OpenSnapshot, RegionOf, place_of_job
from tenplexfs.client.sources import Part, Sources
from tenplexfs.core.layout import ExplicitShard
from tenplexfs.errors import ConflictError, InvalidError
from tenplexfs.sharded import laid_out
from tenplexfs.torch.catalog import Catalog, Stored
from tenplexfs.torch.exchange import this_rank
from tenplexfs.torch.layout import shards_of

__all__ = ["Reader"]

_READ_BYTES = 64 << 10  # below, a system call costs more than page faults

_Pieces: TypeAlias = Mapping[str, ExplicitShard]
Remote: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Path, start and stop of what is not on this node."""


@dataclass(frozen=True)
class _Wants:
    """What a rank wants from other nodes."""

    snapshot: str
    node: str
    remote: tuple[Remote, ...]


@dataclass(frozen=True)
class _Order:
    """What a rank is to ask for: what the same ranks of its node want, together, and how many they are."""

    snapshot: str
    groups: tuple[tuple[int, tuple[Remote, ...]], ...]


class Reader(StorageReader):
    """Loads a snapshot of a job, given to `dcp.load` as its ``storage_reader``.

    Args:
        path: ``<mount>/<job>``, or ``<mount>/<job>@<step>``.
        step: A kept one; default the newest.
        snapshot: The one that is wanted; default ``TENPLEXFS_SNAPSHOT``, unless a step is asked for.
        allow_pickle: Whether objects that were saved with pickle are made again.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        snapshot: str | None = None,
        allow_pickle: bool = False,
    ) -> None:
        self._place = place_of_job(path)
        if self._place.step is not None and step not in (None, self._place.step):
            raise InvalidError(f"{path}: step {step}: the path says another one")
        self._step = self._place.step if self._place.step is not None else step
        self._wanted = snapshot or (os.environ.get("TENPLEXFS_SNAPSHOT") if self._step is None else None)
        self._allow_pickle = allow_pickle
        self._snapshot: OpenSnapshot | None = None
        self._catalog: Catalog | None = None
        self._sources: Sources | None = None
        self._items: list[ReadItem] = []

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns False: DCP never chooses this one by itself."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Takes no ``checkpoint_id``.

        Raises:
            InvalidError: One is given.
        """
        if checkpoint_id is not None:
            raise InvalidError(f"checkpoint_id {checkpoint_id!r}: give Reader(path) alone")

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:  # noqa: ANN401
        """Returns what there is, each tensor as one chunk.

        Raises:
            TenplexError: There is no such snapshot, or no daemon.
        """
        patiently(lambda: self._open(self._wanted))
        assert self._catalog is not None
        return self._catalog.metadata()

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Has nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns what this rank wants from other nodes; the items stay here, no other rank needs them."""
        assert self._snapshot is not None and self._sources is not None
        remote: list[Remote] = []
        for item in plan.items:
            if (region := self._region(item)) is not None:
                remote += [part.remote for part in self._sources.parts(region) if part.key is None]
        wants = _Wants(self._snapshot.snapshot, self._snapshot.node, tuple(dict.fromkeys(remote)))
        self._items = plan.items
        return replace(plan, items=[], storage_data=wants)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns ``plans`` with one snapshot for all, and what ranks of a node want together."""
        wants = [cast(_Wants, plan.storage_data) for plan in plans]
        askers: dict[tuple[str, Remote], list[int]] = defaultdict(list)
        for rank, want in enumerate(wants):
            for each in want.remote:
                askers[want.node, each].append(rank)
        out = []
        for plan, want in zip(plans, wants, strict=True):
            groups: dict[tuple[int, ...], list[Remote]] = {}
            for each in want.remote:
                groups.setdefault(tuple(askers[want.node, each]), []).append(each)
            order = tuple((len(ranks), tuple(sorted(found))) for ranks, found in sorted(groups.items()))
            out.append(replace(plan, storage_data=_Order(wants[0].snapshot, order)))
        return out

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Returns once everything is in the targets of ``planner``.

        Raises:
            TenplexError: Some of it cannot be had.
        """
        order = cast(_Order, plan.storage_data)
        plan = replace(plan, items=plan.items or self._items)
        # Found once: what is exchanged between ranks must not be exchanged again when a daemon was away.
        pieces = dict(self._pieces(plan, planner))
        patiently(lambda: self._read(plan, planner, order, pieces))
        self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _open(self, wanted: str | None) -> None:
        self._close()
        opened = OpenSnapshot(self._place, step=self._step, snapshot=wanted)
        try:
            ptc = laid_out(opened.layout_json)
            catalog = Catalog(ptc, opened, this_rank(), allow_pickle=self._allow_pickle)
        except BaseException:
            opened.close()
            raise
        self._snapshot, self._catalog, self._sources = opened, catalog, Sources(ptc, opened.node)

    def _close(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()

    def _region(self, item: ReadItem) -> RegionOf | None:
        """Returns what of a stored tensor ``item`` wants, or None where it is a value."""
        assert self._catalog is not None
        found = self._catalog.items[item.storage_index.fqn]
        if item.type == LoadItemType.BYTE_IO or not isinstance(found, Stored):
            return None
        start = tuple(item.storage_offsets)
        stop = tuple(a + n for a, n in zip(start, item.lengths, strict=True))
        return RegionOf(found.path, start, stop, found.dtype)

    def _pieces(self, plan: LoadPlan, planner: LoadPlanner) -> Iterator[tuple[str, ExplicitShard]]:
        """Yields the shards of DTensors that are not the one box that DCP takes them for."""
        assert self._catalog is not None
        state: Mapping[str, object] = getattr(planner, "state_dict", {})
        # From the state, not from the plan: ranks whose part is empty must come along, and DCP may be wrong.
        spread = {
            name: tensor
            for name, tensor in sorted(state.items())
            if isinstance(tensor, DTensor)
            and tensor.device_mesh.get_coordinate() is not None
            and isinstance(self._catalog.items.get(name), Stored)
        }
        boxes = {
            item.dest_index.fqn: (tuple(item.storage_offsets), tuple(item.lengths)) for item in plan.items
        }
        for name, shard in shards_of(spread).items():
            whole = [(piece.start, piece.shape) for piece, _ in shard.pieces or ()]
            if whole != ([boxes[name]] if name in boxes else []):
                yield name, shard

    def _read(self, plan: LoadPlan, planner: LoadPlanner, order: _Order, pieces: _Pieces) -> None:
        if self._snapshot is None or self._snapshot.snapshot != order.snapshot or self._snapshot.is_closed:
            before = self._snapshot.layout_json if self._snapshot is not None else None
            self._open(order.snapshot)
            if before is not None and self._snapshot is not None and self._snapshot.layout_json != before:
                raise ConflictError(
                    f"job {self._place.job}: got another layout in the middle of a load; load again"
                )
        try:
            self._fill(plan, planner, order, pieces)
        except BaseException:
            self._close()
            raise

    def _fill(self, plan: LoadPlan, planner: LoadPlanner, order: _Order, pieces: _Pieces) -> None:
        assert self._catalog is not None and self._sources is not None
        targets: list[tuple[RegionOf, torch.Tensor]] = []
        commits: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            name = item.dest_index.fqn
            found = self._catalog.items[item.storage_index.fqn]
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _saved(self._value(found)))
            elif name not in pieces:
                target = planner.resolve_tensor(item).detach()
                region = self._region(item)
                if region is None:
                    source = cast(torch.Tensor, found)
                    for dim, (start, length) in enumerate(
                        zip(item.storage_offsets, item.lengths, strict=True)
                    ):
                        source = source.narrow(dim, start, length)
                    target.copy_(source)
                else:
                    targets.append((region, target))
                commits.append((item, target))
        for name, shard in pieces.items():
            stored = cast(Stored, self._catalog.items[name])
            local = cast(Any, planner).lookup_tensor(MetadataIndex(name)).detach()
            for box, at in shard.pieces or ():
                place = tuple(slice(a, a + n) for a, n in zip(at, box.shape, strict=True))
                targets.append((RegionOf(stored.path, box.start, box.stop, stored.dtype), local[place]))
        self._copy(targets, order)
        for item, target in commits:
            planner.commit_tensor(item, target)

    def _value(self, found: object) -> object:
        """Returns a value, with the tensors that it holds."""
        assert self._catalog is not None
        inner = self._catalog.tensors_in(found)
        if not inner:
            return found
        made = {each.path: each.empty() for each in inner}
        self._copy(
            [
                (RegionOf(each.path, (0,) * len(each.shape), each.shape, each.dtype), made[each.path])
                for each in inner
            ],
            None,
        )
        return self._catalog.filled(found, made)

    def _copy(self, targets: Sequence[tuple[RegionOf, torch.Tensor]], order: _Order | None) -> None:
        assert self._snapshot is not None and self._sources is not None
        here: dict[tuple[int, str], list[tuple[Part, torch.Tensor]]] = {}
        away: dict[Remote, list[torch.Tensor]] = {}
        dtypes: dict[str, str] = {}
        for region, target in targets:
            dtypes[region.path] = region.dtype
            for part in self._sources.parts(region):
                place = target[part.target]
                if part.key is None:
                    away.setdefault(part.remote, []).append(place)
                else:
                    here.setdefault(part.key, []).append((part, place))
        wanted = [(key, parts[0][0].dtype, parts[0][0].local_shape) for key, parts in here.items()]
        for key, local in self._snapshot.visit(wanted):
            for part, place in here[key]:
                _copy_part(local, part, place)
        groups = order.groups if order is not None else ()
        planned = [(uses, [each for each in group if each in away]) for uses, group in groups]
        known = {each for _, group in planned for each in group}
        rest = [each for each in away if each not in known]
        for uses, group in [*planned, (1, rest)]:
            regions = [RegionOf(*each, dtypes[each[0]]) for each in group]
            for i, inner, array in self._snapshot.read(regions, uses=uses):
                for place in away[group[i]]:
                    place[inner].copy_(cast(torch.Tensor, to_torch(array)))


def _copy_part(local: LocalArray, part: Part, place: torch.Tensor) -> None:
    view = part.of(local.array)
    source = cast(torch.Tensor, to_torch(view))
    is_same = place.is_contiguous() and place.device.type == "cpu" and place.dtype == source.dtype
    if is_same and view.flags.c_contiguous and view.nbytes >= _READ_BYTES:
        local.read_into(view, place.view(-1).view(torch.uint8).numpy().data)
    else:
        place.copy_(source)


def _saved(value: object) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream
