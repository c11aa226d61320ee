"""Joins transfers of neighbouring boxes into one, so that a plan has no more of them than it must."""

from __future__ import annotations

import numpy as np

from tenplexfs.core.region import Boxes, Ints

__all__ = ["join_neighbours"]


def join_neighbours(source: Boxes, target: Boxes) -> tuple[Boxes, Boxes]:
    """Joins pairs of boxes that follow each other and are one box in both local arrays.

    >>> rows = np.array([[[0, 0], [1, 4]], [[1, 0], [2, 4]]])
    >>> join_neighbours(rows, rows + 5)[1].tolist()
    [[[5, 5], [7, 9]]]
    >>> join_neighbours(rows, rows[::-1])[1].tolist()
    [[[1, 0], [2, 4]], [[0, 0], [1, 4]]]

    Args:
        source: (n, 2, ndim of one array), in lexicographic order of the tensor, or nearly so.
        target: (n, 2, ndim of the other array), where each goes. With other dims than ``source`` the elements
            of a box go in C order, and those of a joined one too.

    Cost: linear; a few passes.
    """
    dims = max(source.shape[2], target.shape[2])
    before = 0
    while len(source) != before and len(source) > 1:
        before = len(source)
        for dim in reversed(range(dims)):
            source, target = _joined_along(source, target, dim)
    return source, target


def _joined_along(source: Boxes, target: Boxes, dim: int) -> tuple[Boxes, Boxes]:
    raveled = source.shape[2] != target.shape[2]
    joins = np.ones(len(source) - 1, bool)
    for boxes in (source, target):
        ndim = boxes.shape[2]
        along = dim if ndim > dim else 0
        if not joins.any():
            return source, target
        joins &= boxes[:-1, 1, along] == boxes[1:, 0, along]
        others = np.arange(ndim) != along
        if ndim > 1 and joins.any():
            joins &= (boxes[:-1][:, :, others] == boxes[1:][:, :, others]).all(axis=(1, 2))
            if raveled:  # one after the other they are the joined box only if nothing varies before ``along``
                joins &= (boxes[:-1, 1, :along] - boxes[:-1, 0, :along] == 1).all(axis=1)
    firsts = np.flatnonzero(np.concatenate([[True], ~joins]))
    lasts = np.append(firsts[1:], len(source)) - 1
    return _spanned(source, firsts, lasts), _spanned(target, firsts, lasts)


def _spanned(boxes: Boxes, firsts: Ints, lasts: Ints) -> Boxes:
    return np.stack([boxes[firsts, 0], boxes[lasts, 1]], axis=1)
