"""Where training is in a dataset, and how that moves: by steps, epochs, batch sizes, skipped samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum

from tenplexfs.errors import InvalidError

__all__ = ["Cursor", "Extent", "Tail"]


class Tail(StrEnum):
    """What becomes of the samples at the end of an epoch that are fewer than a batch."""

    DROP = "drop"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Extent:
    """What an epoch is made of.

    Attributes:
        count: Samples of the dataset.
        tail: Whether the last, shorter batch of an epoch is one.
    """

    count: int
    tail: Tail

    def __post_init__(self) -> None:
        if self.count < 0:
            raise InvalidError(f"samples: need >= 0, got {self.count}")


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in the stream of samples: what comes next is at ``consumed`` in the order of ``epoch``.

    A settled cursor has a whole batch (with `Tail.KEEP`: a sample) before it in its epoch; every method that
    moves one gives a settled one, so that the end of an epoch is the start of the next.

    Attributes:
        epoch: From 0.
        consumed: Positions of this epoch that are behind, whether trained on or skipped.
        global_batch: Samples of a step, over all ranks.
        seed: Of the order.
    """

    epoch: int
    consumed: int
    global_batch: int
    seed: int

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.consumed < 0:
            raise InvalidError(f"cursor: need epoch, consumed >= 0, got epoch {self.epoch}, {self.consumed}")
        if self.global_batch < 1:
            raise InvalidError(f"global batch: need >= 1, got {self.global_batch}")
        if not 0 <= self.seed < 1 << 64:
            raise InvalidError(f"seed: need 0 <= seed < 2^64, got {self.seed}")

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> Cursor:
        """Returns the cursor that `to_json` wrote.

        Raises:
            InvalidError: A field is missing, unknown, no integer or out of bounds.
        """
        names = [field.name for field in fields(cls)]
        given = {name: number for name, number in value.items() if type(number) is int}
        if given.keys() != set(names) or value.keys() != set(names):
            raise InvalidError(f"cursor {dict(value)}: need the integers {', '.join(names)}")
        return cls(**given)

    def to_json(self) -> dict[str, int]:
        """Returns the fields, for a manifest or ``meta.json``."""
        return asdict(self)

    def batches_left(self, extent: Extent) -> int:
        """Returns the steps from here to the end of the epoch."""
        left = max(extent.count - self.consumed, 0)
        return -(-left // self.global_batch) if extent.tail is Tail.KEEP else left // self.global_batch

    def dropped(self, extent: Extent) -> tuple[int, int]:
        """Returns the positions [begin, end) of this epoch that no step from here on takes."""
        after = self.consumed + self.batches_left(extent) * self.global_batch
        return min(after, extent.count), extent.count

    def settle(self, extent: Extent) -> Cursor:
        """Returns this position, or the start of the next epoch where this one has no batch left.

        Raises:
            InvalidError: ``consumed`` is beyond the epoch, or no epoch has a batch.
        """
        if self.consumed > extent.count:
            raise InvalidError(f"consumed {self.consumed}: epoch {self.epoch} has {extent.count} samples")
        if self.batches_left(extent):
            return self
        start = replace(self, epoch=self.epoch + 1, consumed=0)
        if not start.batches_left(extent):
            raise InvalidError(
                f"global batch {self.global_batch}: no epoch of {extent.count} samples has a batch; "
                "take a smaller batch, or keep the tail"
            )
        return start

    def advance(self, steps: int, extent: Extent) -> Cursor:
        """Returns where training is after ``steps`` steps, over as many epochs as they take.

        Raises:
            InvalidError: ``steps`` is negative, or no epoch has a batch.
        """
        if steps < 0:
            raise InvalidError(f"steps: need >= 0, got {steps}")
        here = self.settle(extent)
        left = here.batches_left(extent)
        if steps < left:
            return replace(here, consumed=here.consumed + steps * here.global_batch)
        start = replace(here, epoch=here.epoch + 1, consumed=0)
        epochs, steps = divmod(steps - left, start.batches_left(extent))
        moved = replace(start, epoch=start.epoch + epochs, consumed=steps * start.global_batch)
        return moved.settle(extent)

    def skip(self, samples: int, extent: Extent) -> Cursor:
        """Returns the cursor ``samples`` positions on; those that a tail would drop count as well.

        Raises:
            InvalidError: ``samples`` is negative, or no epoch has a batch.
        """
        if samples < 0:
            raise InvalidError(f"samples to skip: need >= 0, got {samples}")
        here = self.settle(extent)
        epochs, consumed = divmod(here.consumed + samples, extent.count)
        return replace(here, epoch=here.epoch + epochs, consumed=consumed).settle(extent)

    def given(self, consumed: int, extent: Extent, *, epoch: int | None = None) -> Cursor:
        """Returns the cursor as the trainer gives it, which knows its batch schedule and what it skipped.

        Args:
            consumed: Positions behind in ``epoch``.
            extent: Of the dataset.
            epoch: None: this cursor's.

        Raises:
            InvalidError: The epoch has fewer samples.
        """
        return replace(self, epoch=self.epoch if epoch is None else epoch, consumed=consumed).settle(extent)

    def with_batch(self, global_batch: int, extent: Extent) -> Cursor:
        """Returns the same position under another global batch; its batches start here.

        What the new batch drops of this epoch is `dropped` of the cursor before it was settled.
        """
        return replace(self, global_batch=global_batch).settle(extent)

    def start_of(self, epoch: int) -> Cursor:
        """Returns where row 0 of ``epoch`` is: this cursor, or the start of a later epoch.

        Raises:
            InvalidError: The epoch is over.
        """
        if epoch < self.epoch:
            raise InvalidError(f"epoch {epoch}: is over, the cursor is in epoch {self.epoch}")
        return self if epoch == self.epoch else replace(self, epoch=epoch, consumed=0)
