"""What decides how a job is parallelised on the devices that it is given.

A parallelizer is asked with what the job is and what there is, and answers with proposals, the best first; or
with none, in words: then the job pauses until there are other devices.

Prior art: Tenplex (SOSP 2024, section 5.4) asks Megatron-LM or Alpa; its runs use a table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tenplexfs.core.cost import Devices, Training, best_first, fits_on_nodes
from tenplexfs.core.presets import Transformer
from tenplexfs.errors import InvalidError

__all__ = ["Answer", "Auto", "Command", "Committed", "Parallelizer", "Proposal", "Table", "same_on_nodes"]


@dataclass(frozen=True, slots=True)
class Committed:
    """What the job is now.

    Attributes:
        mesh: Axis -> size, in order.
        global_batch: Of its dataset, if it has one.
    """

    mesh: Mapping[str, int]
    global_batch: int | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """How the job could be parallelised.

    Attributes:
        mesh: Axis -> size; axes that are not named keep theirs.
        together: Axes whose ranks are to be on one node.
        layout_json: A whole layout instead; empty for none.
    """

    mesh: Mapping[str, int]
    together: tuple[str, ...] = ()
    layout_json: bytes = b""


@dataclass(frozen=True, slots=True)
class Answer:
    """Proposals, the best first; where there are none, ``why``."""

    proposals: Sequence[Proposal]
    why: str = ""


class Parallelizer(Protocol):
    """Decides; pure."""

    def propose(self, job: Committed, nodes: Mapping[str, int]) -> Answer:
        """Returns what ``job`` could be on ``nodes``, which are given by their devices, each > 0.

        Raises:
            InvalidError: It does not go with the job's mesh; names what does not.
        """
        ...


@dataclass(frozen=True, slots=True)
class Table:
    """A mesh for each number of devices; of the rows that fit the largest counts.

    Attributes:
        rows: Number of devices -> axis -> size.
    """

    rows: Mapping[int, Mapping[str, int]]

    def propose(self, job: Committed, nodes: Mapping[str, int]) -> Answer:
        """Returns the row. Implements `Parallelizer`."""
        total = sum(nodes.values())
        size = max((size for size in self.rows if size <= total), default=None)
        if size is None:
            return Answer((), f"the table begins with {min(self.rows)} devices, there are {total}")
        row = _known("table", job, self.rows[size])
        is_whole = math.prod(row.values()) == size  # then the axes that it leaves out have one rank
        mesh = {axis: row.get(axis, 1 if is_whole else held) for axis, held in job.mesh.items()}
        if math.prod(mesh.values()) != size:
            given = ", ".join(f"{axis}={n}" for axis, n in mesh.items())
            raise InvalidError(f"parallelizer: table: the row of {size} devices gives the mesh {given}")
        return Answer((Proposal(mesh, _together(mesh, nodes)),))


@dataclass(frozen=True, slots=True)
class Auto:
    """Tensor, pipeline and data parallelism by `core.cost`.

    Attributes:
        model: What is trained.
        devices: On what.
        training: How; a global batch of None is the one of the job's dataset.
        axes: What the job's mesh calls ``tp``, ``pp`` and ``dp``.
    """

    model: Transformer
    devices: Devices
    training: Mapping[str, int | str | bool]
    axes: Mapping[str, str] = field(default_factory=dict)

    def propose(self, job: Committed, nodes: Mapping[str, int]) -> Answer:
        """Returns what fits, the quickest first."""
        names = {axis: self.axes.get(axis, axis) for axis in ("tp", "pp", "dp")}
        there = tuple(axis for axis, name in names.items() if name in job.mesh)
        each = math.prod(size for name, size in job.mesh.items() if name not in names.values())
        found, why = best_first(self.model, self.training_of(job), self.devices, nodes, each=each, axes=there)
        return Answer(
            tuple(
                Proposal(
                    {names[axis]: getattr(estimate.degrees, axis) for axis in there},
                    tuple(names[axis] for axis in estimate.together if axis in there) if each == 1 else (),
                )
                for estimate in found
            ),
            why,
        )

    def training_of(self, job: Committed) -> Training:
        """Returns how ``job`` is trained.

        Raises:
            InvalidError: Nothing says what its global batch is.
        """
        given = {"global_batch": job.global_batch, **self.training}
        if given["global_batch"] is None:
            raise InvalidError(
                "parallelizer: auto: global_batch: give it; the layout has no dataset that says"
            )
        return Training(**given)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Command:
    """A program that decides; `runtime.parallelizing` runs it.

    Attributes:
        argv: The program and its arguments.
        timeout_s: How long it may take.
    """

    argv: tuple[str, ...]
    timeout_s: float = 60.0


def same_on_nodes(held: Mapping[str, int], nodes: Mapping[str, int]) -> bool:
    """Says whether ranks that are on nodes, so many on each, can stay where they are."""
    return all(count <= nodes.get(node, 0) for node, count in held.items())


def _known(who: str, job: Committed, mesh: Mapping[str, int]) -> dict[str, int]:
    """Returns ``mesh`` without axes of size 1 that the job does not have."""
    unknown = [axis for axis, size in mesh.items() if size > 1 and axis not in job.mesh]
    if unknown:
        raise InvalidError(
            f"parallelizer: {who}: axis {unknown[0]}: the job's mesh has {', '.join(job.mesh) or 'none'}"
        )
    return {axis: size for axis, size in mesh.items() if axis in job.mesh}


def _together(mesh: Mapping[str, int], nodes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes to keep on one node: what shares matrices, where it fits."""
    tp = mesh.get("tp", 1)
    return ("tp",) if tp > 1 and fits_on_nodes(tp, math.prod(mesh.values()) // tp, nodes) else ()
