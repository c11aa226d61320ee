"""`dcp.save` and `dcp.async_save` into a job: every rank saves all that it holds, as its part of the step.

DCP plans each replica and each value onto one rank only; a node is to keep all that its ranks hold. So the
plan is not what is written: the planner still has everything, and placements say what the boxes are.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tenplexfs.client.arrays import Source
from tenplexfs.client.jobs import env
from tenplexfs.client.regions import create_job, node_of, place_of_job
from tenplexfs.client.saving import save_held
from tenplexfs.client.session import loaded_from, run_name
from tenplexfs.core.layout import Layout, TensorEntry
from tenplexfs.core.ptc import PTC
from tenplexfs.core.snapshot import NodeName, parse_snapshot
from tenplexfs.errors import ConflictError, InvalidError, NotFoundError, PreconditionError
from tenplexfs.formats.layout_json import layout_text
from tenplexfs.formats.structure import Flat
from tenplexfs.sharded import committed
from tenplexfs.torch.exchange import Exchange, world_size
from tenplexfs.torch.held import check_spec
from tenplexfs.torch.layout import layout_of_ranks
from tenplexfs.torch.placements import StateSpec
from tenplexfs.torch.state import Values, values_of

__all__ = ["Writer"]

_PAUSE_S = 0.2
_DIFFER = "bytes differ"


@dataclass(frozen=True)
class _Card:
    """What a rank tells the others before it saves.

    Attributes:
        digests: Key of its digests.
        node: Whose daemon it speaks to, where the job is not there.
        spec: Key of its spec and ties, likewise.
    """

    digests: str
    node: str = ""
    spec: str | None = None


class Writer(StorageWriter):
    """Saves a step of a job, given to `dcp.save` as its ``storage_writer``, by all ranks.

    Args:
        path: ``<mount>/<job>``. A job that is not there is made, with the layout of the state.
        step: Must be past the newest one that is committed.
        snapshot: What the job was loaded from; default ``TENPLEXFS_SNAPSHOT``, else what this process last
            loaded or saved, else none, which only a job without state accepts.
        rank_local: Patterns of names, as ``rng.*``, of which each rank keeps its own value. Of anything else
            that is no DTensor and differs, the lowest rank's is kept, as DCP would, with a warning.
        allow_pickle: Whether objects are kept that need pickle.
        replica_mismatch: What to do when replicas of a DTensor differ: refuse, or take the lowest rank's.
        consumed: As for `tenplexfs.save`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int,
        snapshot: str | None = None,
        rank_local: Sequence[str] = (),
        allow_pickle: bool = False,
        replica_mismatch: Literal["refuse", "lowest"] = "refuse",
        consumed: int | None = None,
    ) -> None:
        self._place = place_of_job(path)
        if self._place.step is not None:
            raise InvalidError(f"{path}: a kept step never changes; need <mount>/<job>")
        if replica_mismatch not in ("refuse", "lowest"):
            raise InvalidError(f"replica_mismatch {replica_mismatch!r}: need 'refuse' or 'lowest'")
        if isinstance(rank_local, str):
            raise InvalidError(f"rank_local {rank_local!r}: need a list of patterns")
        self._path = self._place.mount / self._place.job
        self._step = step
        self._snapshot = snapshot
        self._rank_local = tuple(rank_local)
        self._allow_pickle = allow_pickle
        self._replica_mismatch = replica_mismatch
        self._consumed = consumed

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
            raise InvalidError(f"checkpoint_id {checkpoint_id!r}: give Writer(path, step=) alone")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Has nothing to do."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns ``plan`` without its items, which are not what is written: ranks need not exchange them.

        So the metadata that `dcp.save` returns name nothing.
        """
        return replace(plan, items=[])

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Returns ``plans`` as they are.

        Raises:
            InvalidError: They are not those of all ranks.
        """
        world = world_size()
        if len(plans) != world:
            raise InvalidError(
                f"job {self._place.job}: {len(plans)} of {world} ranks save: all must, with no process_group "
                "of some of them, no_dist or use_collectives=False"
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Returns once the step is committed, or failed on some rank.

        Raises:
            TenplexError: It failed; the step before stays.
        """
        self._write(planner, whole=self._replica_mismatch == "lowest")
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Has nothing to do: every rank has waited for the commit."""

    def _write(self, planner: SavePlanner, *, whole: bool) -> None:
        exchange = Exchange(f"save/{self._place.job}")
        try:
            values = values_of(planner)
            local = values.keep_local(self._rank_local)
            ready = values.prepare(allow_pickle=self._allow_pickle)
            lowest = self._agree(exchange, values, ready, local, whole=whole)
            if lowest:
                self._take_lowest(exchange, values, lowest)
                ready = values.prepare(allow_pickle=self._allow_pickle)
            self._save(exchange, ready)
            if lowest and exchange.rank == 0:
                self._warn(lowest)
        except (InvalidError, ConflictError) as error:
            # Only some bytes of big tensors were compared; the daemons compare all.
            if _DIFFER in error.message and not whole and exchange.world > 1:
                self._write(planner, whole=True)
                return
            exchange.fail(error)
            raise
        except BaseException as error:
            exchange.fail(error)
            raise

    def _agree(
        self,
        exchange: Exchange,
        values: Values,
        ready: Flat[Source],
        local: frozenset[str],
        *,
        whole: bool,
    ) -> Mapping[str, int]:
        """Returns what differs by rank, and the lowest rank that has it; the job is there then."""
        names = [
            name
            for name in values.values
            if name not in local and (name not in values.spread or self._replica_mismatch == "lowest")
        ]
        digests = values.digests(names, whole=whole, allow_pickle=self._allow_pickle)
        known = committed(self._place, exchange.world)
        spec = values.spec(ready)
        if known is not None:
            self._check(known, spec, exchange.rank)
        card = _Card(exchange.post_shared(digests))
        if known is None:
            key = exchange.post_shared((spec, dict(ready.ties)))
            card = replace(card, node=node_of(self._place), spec=key)

        def decide(cards: list[_Card]) -> dict[str, int]:
            lowest = _lowest(cards, {key: exchange.get(key) for key in {card.digests for card in cards}})
            if known is None:
                create_job(self._place, self._layout_of(exchange, cards))
            return lowest

        lowest = exchange.agree(card, decide)
        if known is None and exchange.rank:
            # Made by rank 0 a moment ago, perhaps on another node.
            _wait_for(self._path, exchange)
        return lowest

    def _check(self, known: PTC, spec: StateSpec, rank: int) -> None:
        try:
            check_spec(self._place.job, known, spec, rank)
        except (InvalidError, PreconditionError):
            loaded = self._snapshot or loaded_from(self._path.parent, self._place.job)
            now = env(self._path)["generation"]
            if loaded is None or parse_snapshot(loaded).generation == now:
                raise
            # The job was reconfigured under this run: the daemon refuses that, and says what to do.

    def _layout_of(self, exchange: Exchange, cards: Sequence[_Card]) -> bytes:
        found = {key: exchange.get(key) for key in {card.spec for card in cards} if key is not None}
        missing = [rank for rank, card in enumerate(cards) if card.spec is None]
        if missing:
            raise ConflictError(f"job {self._place.job}: was made while it was first saved; save again")
        specs: list[StateSpec] = []
        ties: dict[str, str] = {}
        for card in cards:
            spec, own = found[str(card.spec)]
            specs.append(spec)
            ties.update(own)
        nodes: dict[NodeName, list[int]] = {}
        for rank, card in enumerate(cards):
            nodes.setdefault(NodeName(card.node), []).append(rank)
        layout = _tied(layout_of_ranks(specs), ties)
        return layout_text(replace(layout, nodes=tuple((n, tuple(ranks)) for n, ranks in nodes.items())))

    def _take_lowest(self, exchange: Exchange, values: Values, lowest: Mapping[str, int]) -> None:
        for key, rank in sorted(lowest.items()):
            name = values.named(key)
            if name is None:
                continue
            if rank == exchange.rank:
                exchange.post(f"value/{key}", values.values[name])
            else:
                values.values[name] = exchange.get(f"value/{key}")

    def _warn(self, lowest: Mapping[str, int]) -> None:
        names = sorted({key.partition("\0")[0] for key in lowest})
        shown = f"{', '.join(names[:10])}{', ...' if len(names) > 10 else ''}"
        warnings.warn(
            f"tenplexfs: job {self._place.job}, step {self._step}: {len(names)} values differ by rank, "
            f"and the lowest rank's are kept: {shown}; "
            "name those in rank_local that each rank is to keep its own of",
            stacklevel=2,
        )

    def _save(self, exchange: Exchange, ready: Flat[Source]) -> None:
        made = save_held(
            ready,
            self._path / "model" / str(exchange.rank),
            step=self._step,
            consumed=self._consumed,
            snapshot=self._snapshot,
            # A step that failed may be saved again by the same processes.
            run=f"{run_name()}.{exchange.turn}",
        )
        while not made.ended_within(_PAUSE_S):
            try:
                exchange.check()
            except BaseException:
                made.abandon()
                raise
        made.wait()


def _wait_for(path: os.PathLike[str], exchange: Exchange) -> None:
    while True:
        try:
            env(path)
        except NotFoundError:
            exchange.check()
        else:
            return


def _lowest(cards: Sequence[_Card], tables: Mapping[str, Mapping[str, bytes]]) -> dict[str, int]:
    """Returns what differs by rank, and the lowest rank that has it."""
    first: dict[str, tuple[bytes, int]] = {}
    differ: dict[str, int] = {}
    seen: set[str] = set()
    for rank, card in enumerate(cards):
        if card.digests in seen:
            continue
        seen.add(card.digests)
        for key, digest in tables[card.digests].items():
            known = first.setdefault(key, (digest, rank))
            if known[0] != digest:
                differ[key] = known[1]
    return differ


def _tied(layout: Layout, ties: Mapping[str, str]) -> Layout:
    """Returns ``layout`` with the ties that its entries can say; others are ties of the structure alone."""
    entries = {entry.key: entry for entry in layout.tensors}
    made: Iterable[TensorEntry] = (
        replace(entry, alias=ties[entry.key])
        if entry.key in ties and _is_same(entry, entries.get(ties[entry.key]))
        else entry
        for entry in layout.tensors
    )
    return replace(layout, tensors=tuple(made))


def _is_same(entry: TensorEntry, other: TensorEntry | None) -> bool:
    return other is not None and replace(other, key=entry.key) == entry
