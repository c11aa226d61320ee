"""What adapters on top of `torch.distributed` do on all ranks: go on where all can, else fail on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tenplexfs.client.connection import Place
from tenplexfs.client.regions import create_job, node_of
from tenplexfs.client.session import run_name
from tenplexfs.core.layout import Layout
from tenplexfs.core.ptc import PTC
from tenplexfs.core.snapshot import NodeName
from tenplexfs.formats.layout_json import layout_text
from tenplexfs.sharded import committed, save_ranks
from tenplexfs.torch.exchange import Exchange

__all__ = ["save_together", "together"]

T = TypeVar("T")


def together(name: str, work: Callable[[Exchange], T]) -> T:
    """Returns what ``work`` does here, once it is done on every rank.

    Args:
        name: What is done; all ranks do it in the same order.
        work: Is given a round of its own.

    Raises:
        TenplexError: It failed on some rank; all know.
    """
    exchange = Exchange(name)
    try:
        done = work(exchange)
        exchange.post(f"done{exchange.rank}", True)
        for rank in range(exchange.world):
            exchange.get(f"done{rank}")
    except BaseException as error:
        exchange.fail(error)
        raise
    finally:
        exchange.end()
    return done


def save_together(
    place: Place,
    spec: object,
    layout_of: Callable[[list[Any]], Layout],
    state_of: Callable[[PTC], Mapping[str, object]],
    **options: Any,  # noqa: ANN401 - of `save_ranks`
) -> None:
    """Saves this rank's part of a step, as all ranks do theirs; makes the job where it is not there.

    Args:
        place: ``<mount>/<job>``.
        spec: What this rank holds; plain data.
        layout_of: Returns the layout of the specs of all ranks, by rank.
        state_of: Returns what this rank saves, given how the job is laid out.
        options: Step and others, for `tenplexfs.sharded.save_ranks`.

    Raises:
        PreconditionError: The job is laid out in another way.
        TenplexError: Some rank failed; the step before stays.
    """

    def prepare(exchange: Exchange) -> tuple[int, str, Mapping[str, object]]:
        known = committed(place, exchange.world)
        key = exchange.post_shared(spec) if known is None else None

        def decide(cards: Sequence[tuple[str, str | None]]) -> None:
            if known is None:
                _create(place, layout_of([exchange.get(str(key)) for _, key in cards]), [n for n, _ in cards])

        exchange.agree((node_of(place), key), decide)
        while known is None:  # made by rank 0 a moment ago, perhaps on another node
            exchange.check()
            known = committed(place, exchange.world)
        return exchange.rank, f"{run_name()}.{exchange.turn}", state_of(known)

    rank, run, state = together(f"save/{place.job}", prepare)
    save_ranks(
        place,
        {rank: state},
        lambda begin: together(f"begin/{place.job}", lambda _: begin()),
        run=run,
        **options,
    )


def _create(place: Place, layout: Layout, of_rank: Sequence[str]) -> None:
    nodes: dict[NodeName, list[int]] = {}
    for rank, node in enumerate(of_rank):
        nodes.setdefault(NodeName(node), []).append(rank)
    placed = tuple((node, tuple(ranks)) for node, ranks in nodes.items())
    create_job(place, layout_text(replace(layout, nodes=placed)))
