"""The directories that the datasets of a job add to its snapshots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tenplexfs.runtime.dataset_tree import DatasetTree
from tenplexfs.runtime.dataset_view import DatasetView
from tenplexfs.runtime.tenplex_tree import TenplexTree
from tenplexfs.runtime.tree import Tree

__all__ = ["dataset_parts"]

# Of inodes; the state itself has 0 to 4.
_TENPLEX, _DATASET = 6, 7


def dataset_parts(
    job: str, views: Sequence[DatasetView], mtime_ns: int, base: Callable[[int], int]
) -> Mapping[int, tuple[bytes, Tree]]:
    """Returns ``dataset`` and ``tenplex`` by section, as far as the job has what they show."""
    parts: dict[int, tuple[bytes, Tree]] = {}
    if views:
        parts[_DATASET] = (b"dataset", DatasetTree(base(_DATASET), views, mtime_ns))
    split = next((view for view in views if not view.state.unsplit), None)
    if split is not None:
        parts[_TENPLEX] = (b"tenplex", TenplexTree(base(_TENPLEX), job, split, mtime_ns))
    return parts
