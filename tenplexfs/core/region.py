"""Half-open boxes: one as an object, many as arrays.

`Region` is what people and messages handle. Whatever has many boxes keeps them as one int64 array of shape
(n, 2, ndim), ``boxes[k, 0]`` the start and ``boxes[k, 1]`` the stop of the k-th, and works on all of them at
once. A tensor without dims has one element, and one box: (1, 2, 0).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tenplexfs.errors import InvalidError

__all__ = [
    "Boxes",
    "Ints",
    "Region",
    "box_volumes",
    "disjoint_atoms",
    "expand_spans",
    "find_hole",
    "find_overlap",
    "flat_boxes",
    "join",
    "ravel_strides",
    "region_text",
    "runs_to_boxes",
    "split_runs",
    "union_volume",
]

Ints = npt.NDArray[np.int64]
Boxes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Region:
    """A half-open box, in elements.

    Attributes:
        start: First index in each dim.
        stop: Past the last index in each dim; equal to the start where the box is empty.

    Raises:
        InvalidError: The bounds differ in length, are negative or reversed.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise InvalidError(
                f"region: start {list(self.start)} and stop {list(self.stop)} differ in length"
            )
        for dim, (a, b) in enumerate(zip(self.start, self.stop, strict=True)):
            if not 0 <= a <= b:
                raise InvalidError(f"region: dim {dim}: need 0 <= start <= stop, got [{a}, {b})")

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements in each dim."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def volume(self) -> int:
        """Elements in all."""
        return math.prod(self.shape)

    def check_inside(self, shape: Sequence[int], what: str) -> None:
        """Refuses a region that does not lie in ``shape``.

        Raises:
            InvalidError: Names ``what``, the dim and the values.
        """
        if len(shape) != self.ndim:
            raise InvalidError(
                f"{what}: region {self} has {self.ndim} dims, the array {list(shape)} has {len(shape)}"
            )
        for dim, (stop, size) in enumerate(zip(self.stop, shape, strict=True)):
            if stop > size:
                raise InvalidError(f"{what}: dim {dim}: need stop <= {size}, got [{self.start[dim]}, {stop})")

    def as_slices(self) -> tuple[slice, ...]:
        """Returns what indexes an array with this region."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def box_volumes(boxes: Boxes) -> Ints:
    """Returns the elements of each box, int64 (n,)."""
    return np.asarray((boxes[:, 1] - boxes[:, 0]).prod(axis=1), np.int64)


def expand_spans(lows: Ints, highs: Ints) -> tuple[Ints, Ints]:
    """Returns (owner, value) for every value of every half-open span ``[lows[k], highs[k])``, in order."""
    counts = np.maximum(highs - lows, 0)
    owner = np.repeat(np.arange(len(lows)), counts)
    first = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - first[owner] + lows[owner]


def join(a: Boxes, b: Boxes) -> tuple[Ints, Ints]:
    """Returns the index pairs (i, j), sorted, for which ``a[i]`` and ``b[j]`` share at least one element.

    Cost: sorts ``b`` along each dim, takes the one in which the fewest boxes meet, and looks only at those:
    linear in the overlaps where the boxes are cut along one dim more than along the others.
    """
    ndim = a.shape[2]
    if not len(a) or not len(b):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    if ndim == 0:
        first, second = np.divmod(np.arange(len(a) * len(b)), len(b))
        return first, second
    found: list[tuple[int, Ints, Ints, Ints]] = []
    for dim in range(ndim):
        order = np.argsort(b[:, 0, dim], kind="stable")
        reach = np.maximum.accumulate(b[order, 1, dim])
        lows = np.searchsorted(reach, a[:, 0, dim], side="right")
        highs = np.searchsorted(b[order, 0, dim], a[:, 1, dim], side="left")
        found.append((int(np.maximum(highs - lows, 0).sum()), order, lows, highs))
    _, order, lows, highs = min(found, key=lambda candidate: candidate[0])
    i, place = expand_spans(lows, highs)
    j = order[place]
    shared = np.minimum(a[i, 1], b[j, 1]) > np.maximum(a[i, 0], b[j, 0])
    hit = shared.all(axis=1)
    i, j = i[hit], j[hit]
    by = np.lexsort((j, i))
    return i[by], j[by]


def find_overlap(boxes: Boxes) -> tuple[int, int] | None:
    """Returns the indices of two boxes that share an element, or None when all are disjoint."""
    i, j = join(boxes, boxes)
    twice = np.flatnonzero(i < j)
    return (int(i[twice[0]]), int(j[twice[0]])) if len(twice) else None


def disjoint_atoms(boxes: Boxes) -> tuple[Boxes, Ints, Ints]:
    """Cuts boxes into disjoint ones such that each box is a union of some of them.

    Returns:
        atoms (m, 2, ndim), in lexicographic order, none empty; and the pairs (box, atom) that say which atoms
        each box is made of, sorted. Equal boxes share their atoms; disjoint boxes stay whole.
    """
    ndim = boxes.shape[2]
    solid = np.flatnonzero(box_volumes(boxes) > 0)
    if ndim == 0 or not len(solid):
        return boxes[solid[:1]], solid, np.zeros(len(solid), np.int64)
    unique, inverse = np.unique(boxes[solid].reshape(len(solid), 2 * ndim), axis=0, return_inverse=True)
    unique = unique.reshape(-1, 2, ndim)
    inverse = inverse.reshape(-1)
    if find_overlap(unique) is None:
        return unique, solid, inverse
    # Slab by slab: along each dim a slab is cut where boxes in it begin or end, and nowhere else.
    owner, slab = np.arange(len(unique)), np.zeros(len(unique), np.int64)
    atoms = np.zeros((1, 2, 0), np.int64)
    for dim in range(ndim):
        cuts = np.unique(unique[:, :, dim])
        ends = slab[:, None] * len(cuts) + np.searchsorted(cuts, unique[owner][:, :, dim])
        points = np.unique(ends)
        again, at = expand_spans(*np.searchsorted(points, ends.T))
        thinner, slab = np.unique(at, return_inverse=True)
        inside, first = np.divmod(points[thinner], len(cuts))
        span = np.stack([cuts[first], cuts[points[thinner + 1] % len(cuts)]], axis=1)
        atoms = np.concatenate([atoms[inside], span[:, :, None]], axis=2)
        owner, slab = owner[again], slab.reshape(-1)
    of_unique = np.argsort(owner, kind="stable")
    bounds = np.searchsorted(owner[of_unique], np.arange(len(unique) + 1))
    box, place = expand_spans(bounds[inverse], bounds[inverse + 1])
    members = slab[of_unique][place]
    by = np.lexsort((members, box))
    return atoms, solid[box[by]], members[by]


def find_hole(whole: Boxes, boxes: Boxes) -> Boxes | None:
    """Returns a box (2, ndim) inside ``whole`` (2, ndim) that none of ``boxes`` touches, or None.

    The boxes lie in ``whole``.
    """
    atoms = disjoint_atoms(boxes)[0]
    if int(box_volumes(atoms).sum()) == int(box_volumes(whole[None])[0]):
        return None
    refined = disjoint_atoms(np.concatenate([whole[None], atoms]))[0]
    holes = refined[np.setdiff1d(np.arange(len(refined)), join(refined, atoms)[0])]
    return np.asarray(holes[0] if len(holes) else whole)


def region_text(box: Boxes) -> str:
    """Returns a box (2, ndim) as people write it.

    >>> region_text(np.array([[0, 4], [2, 8]]))
    '[0:2, 4:8]'
    """
    return f"[{', '.join(f'{a}:{b}' for a, b in zip(*box.tolist(), strict=True))}]"


def union_volume(boxes: Boxes) -> int:
    """Returns the number of elements that at least one box holds."""
    return int(box_volumes(disjoint_atoms(boxes)[0]).sum())


def runs_to_boxes(shape: Sequence[int], begins: Ints, ends: Ints) -> tuple[Ints, Boxes]:
    """Cuts runs of the C-order elements of an array into boxes.

    Args:
        shape: Of the array that is raveled.
        begins: First element of each run.
        ends: Past the last element of each run.

    Returns:
        (run, box): for each box the run that it is of; sorted by run and by place within the run, so that the
        boxes of a run, each raveled, follow each other. At most 2 ndim - 1 boxes a run; none for empty ones.
    """
    ndim = len(shape)
    runs = np.flatnonzero(ends > begins)
    owner, boxes = _runs_to_boxes(tuple(shape), begins[runs], ends[runs], ndim)
    strides = np.array([math.prod(shape[d + 1 :]) for d in range(ndim)], np.int64)
    place = (boxes[:, 0] * strides).sum(axis=1)
    by = np.lexsort((place, owner))
    return runs[owner[by]], boxes[by]


def _runs_to_boxes(shape: tuple[int, ...], begins: Ints, ends: Ints, ndim: int) -> tuple[Ints, Boxes]:
    count = len(begins)
    if ndim == 0 or count == 0:
        return np.arange(count), np.zeros((count, 2, ndim), np.int64)
    if ndim == 1:
        return np.arange(count), np.stack([begins, ends], axis=1)[:, :, None]
    inner = math.prod(shape[1:])
    row0, begin = np.divmod(begins, inner)
    row1, end = np.divmod(ends, inner)
    single = row0 == row1
    head = ~single & (begin > 0)
    tail = ~single & (end > 0)
    parts = [
        (np.flatnonzero(single), row0[single], begin[single], end[single]),
        (np.flatnonzero(head), row0[head], begin[head], np.full(int(head.sum()), inner)),
        (np.flatnonzero(tail), row1[tail], np.zeros(int(tail.sum()), np.int64), end[tail]),
    ]
    owner, row, low, high = (np.concatenate(column) for column in zip(*parts, strict=True))
    sub, sub_boxes = _runs_to_boxes(shape[1:], low, high, ndim - 1)
    rows = np.stack([row[sub], row[sub] + 1], axis=1)[:, :, None]
    partial = np.concatenate([rows, sub_boxes], axis=2)
    first = row0 + head
    whole = np.flatnonzero(~single & (first < row1))
    full = np.zeros((len(whole), 2, ndim), np.int64)
    full[:, 0, 0], full[:, 1, 0], full[:, 1, 1:] = first[whole], row1[whole], shape[1:]
    return np.concatenate([owner[sub], whole]), np.concatenate([partial, full])


def flat_boxes(shape: Sequence[int], begin: int, end: int) -> Boxes:
    """Returns the boxes, (n, 2, ndim), whose C-order elements, one box after the other, are [begin, end).

    Raises:
        InvalidError: The run does not lie in an array of ``shape``.
    """
    if not 0 <= begin <= end <= math.prod(shape):
        raise InvalidError(f"run: need 0 <= begin <= end <= {math.prod(shape)}, got [{begin}, {end})")
    return runs_to_boxes(shape, np.array([begin], np.int64), np.array([end], np.int64))[1]


def ravel_strides(extents: Ints) -> Ints:
    """Returns the strides, in elements, of arrays of the given shapes in C order, (n, ndim)."""
    strides = np.ones_like(extents)
    for dim in range(extents.shape[1] - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * extents[:, dim + 1]
    return strides


def split_runs(extents: Ints, boxes: Boxes) -> tuple[Ints, Boxes, Ints]:
    """Cuts boxes so that each part is one run of the raveled region that holds it.

    Args:
        extents: (n, ndim), the shape of the region that holds each box.
        boxes: (n, 2, ndim), relative to the start of that region; none empty.

    Returns:
        (owner, parts, offsets): parts (m, 2, ndim) relative as before, and where in the raveled region each
        begins. Sorted by owner and offset. A box that is a run already stays whole.
    """
    n, _, ndim = boxes.shape
    if ndim == 0:
        return np.arange(n), boxes, np.zeros(n, np.int64)
    sizes = boxes[:, 1] - boxes[:, 0]
    strides = ravel_strides(extents)
    # The innermost dim that is not full ends the run: all dims before it are taken one index at a time.
    full = np.ones(n, bool)
    last = np.zeros(n, np.int64)
    for dim in range(ndim - 1, -1, -1):
        last = np.where(full, dim, last)
        full &= sizes[:, dim] == extents[:, dim]
    owner, parts = np.arange(n), boxes
    for dim in range(ndim - 1):
        single = dim < last[owner]
        if not single.any():
            continue
        lows = np.where(single, parts[:, 0, dim], 0)
        highs = np.where(single, parts[:, 1, dim], 1)
        again, value = expand_spans(lows, highs)
        cut = single[again]
        owner, parts = owner[again], parts[again]
        parts[cut, 0, dim], parts[cut, 1, dim] = value[cut], value[cut] + 1
    return owner, parts, np.asarray((parts[:, 0] * strides[owner]).sum(axis=1), np.int64)
