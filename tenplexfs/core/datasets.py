"""The datasets of a job as its snapshots carry them: which samples, in which order, and how far it is.

Row 0 of a rank's files is where the generation began. Where training is follows from the steps since then,
unless a save said otherwise; a change of generation begins at that place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tenplexfs.core.context import ContextOrder
from tenplexfs.core.cursor import Cursor, Extent, Tail
from tenplexfs.core.layout import Layout
from tenplexfs.core.partition import Partition
from tenplexfs.errors import InvalidError

__all__ = ["Context", "DatasetState", "Spread", "spread_of"]


@dataclass(frozen=True, slots=True)
class Context:
    """How the ranks of a context-parallel axis cut each sample."""

    degree: int
    dim: int
    order: ContextOrder


@dataclass(frozen=True, slots=True)
class Spread:
    """What a layout says about datasets.

    Attributes:
        ranks: The ranks of each coordinate on the data-parallel axis.
        global_batch: Or None where the layout says nothing.
        uneven: Whether a batch may be split into unequal parts.
        tail: Or None where the layout says nothing.
        context: Or None.
    """

    ranks: tuple[tuple[int, ...], ...]
    global_batch: int | None = None
    uneven: bool = False
    tail: Tail | None = None
    context: Context | None = None

    @property
    def degree(self) -> int:
        """Number of data-parallel ranks."""
        return len(self.ranks)


def spread_of(layout: Layout) -> Spread:
    """Returns how ``layout`` spreads samples: by its dataset section, else over ``dp`` where it has one.

    Raises:
        InvalidError: The section names an axis that the mesh lacks, or a wrong order or dim.
    """
    given, sizes = layout.dataset, dict(layout.mesh.axes)
    axis = given.axis if given is not None else ("dp",) if "dp" in sizes else ()
    coordinates = layout.mesh.coordinates(axis).tolist() if axis else [0] * layout.mesh.size
    degree = layout.mesh.size_of(axis) if axis else 1
    ranks: list[list[int]] = [[] for _ in range(degree)]
    for rank, coordinate in enumerate(coordinates):
        ranks[coordinate].append(rank)
    spread = Spread(tuple(map(tuple, ranks)))
    if given is None:
        return spread
    return replace(
        spread,
        global_batch=given.global_batch,
        uneven=given.uneven is not None,
        tail=None if given.tail is None else Tail(given.tail),
        context=None if given.context is None else _context(given.context, layout),
    )


def _context(given: Mapping[str, object], layout: Layout) -> Context:
    axis, dim, order = given.get("axis"), given.get("dim", 0), given.get("order", ContextOrder.CONTIGUOUS)
    if given.keys() - {"axis", "dim", "order"} or type(dim) is not int or order not in list(ContextOrder):
        raise InvalidError(
            f"dataset: context {dict(given)}: need axis, dim (a number) and order (contiguous or zigzag)"
        )
    names = (axis,) if isinstance(axis, str) else tuple(axis) if isinstance(axis, list | tuple) else ()
    if not names:
        raise InvalidError(f"dataset: context: axis {axis!r}: need the name of an axis, or several")
    return Context(layout.mesh.size_of(tuple(map(str, names))), dim, ContextOrder(str(order)))


@dataclass(frozen=True, slots=True)
class DatasetState:
    """One dataset of a snapshot.

    Attributes:
        name: Below ``dataset/``.
        digest: Of its index, which names the file of the index.
        index_bytes: Size of that file.
        kind: Of the index.
        sources: As they were given.
        added_by: The node that built the index.
        count: Samples.
        unsplit: Every rank sees all samples, from the start: a validation set.
        shuffle: Whether the order is a permutation.
        own_batch: The global batch that was given with the dataset, or None: the layout's.
        own_tail: The same of the tail.
        tail: In force.
        start: Row 0 of every rank.
        start_step: The step at which the generation began.
        given: A later step, and the cursor that its save gave.
    """

    name: str
    digest: str
    index_bytes: int
    kind: str
    sources: tuple[str, ...]
    added_by: str
    count: int
    unsplit: bool
    shuffle: bool
    own_batch: int | None
    own_tail: Tail | None
    tail: Tail
    start: Cursor
    start_step: int
    given: tuple[int, Cursor] | None = None

    @property
    def extent(self) -> Extent:
        """What an epoch is made of."""
        return Extent(self.count, self.tail)

    def cursor_at(self, step: int | None) -> Cursor:
        """Returns where training is after ``step``: derived from the last cursor that is known."""
        if self.unsplit or step is None:
            return self.start
        since, cursor = self.start_step, self.start
        if self.given is not None and self.given[0] <= step:
            since, cursor = self.given
        return cursor.advance(max(step - since, 0), self.extent)

    def begun(self, cursor: Cursor, step: int | None, spread: Spread) -> DatasetState:
        """Returns the dataset of a new generation that begins at ``cursor`` with ``step``.

        Raises:
            DegreeError: The ranks of ``spread`` do not divide the batch; the message lists those that do.
            InvalidError: No batch is given, or no epoch has one.
        """
        if self.unsplit:
            return replace(self, start_step=step or 0, given=None)
        batch = self.own_batch or spread.global_batch
        if batch is None:
            raise InvalidError(
                f'dataset {self.name}: no global batch; give --global-batch, or "dataset" in the layout'
            )
        tail = self.own_tail or spread.tail or Tail.DROP
        new = replace(self, tail=tail, start_step=step or 0, given=None)
        try:
            new = replace(new, start=cursor.with_batch(batch, new.extent))
            new.partition(new.start.epoch, spread)
        except InvalidError as error:
            raise type(error)(f"dataset {self.name}: {error.message}", **error.details) from error
        return new

    def with_given(self, step: int, consumed: int, epoch: int | None = None) -> DatasetState:
        """Returns the dataset with the cursor that the save of ``step`` gave; row 0 does not move.

        Raises:
            InvalidError: The epoch has fewer samples.
        """
        cursor = self.cursor_at(step).given(consumed, self.extent, epoch=epoch)
        return replace(self, given=(step, cursor))

    def partition(self, epoch: int, spread: Spread) -> Partition:
        """Returns who reads what of an epoch, from row 0 on; of one that is unsplit: one rank reads all.

        Raises:
            InvalidError: The epoch was over when the generation began, or the degree does not fit.
        """
        if self.unsplit:
            start = replace(self.start, epoch=epoch, consumed=0)
            return Partition.of(start, self.extent, degree=1, shuffle=self.shuffle)
        return Partition.of(
            self.start.start_of(epoch),
            self.extent,
            degree=spread.degree,
            shuffle=self.shuffle,
            uneven=spread.uneven,
        )
