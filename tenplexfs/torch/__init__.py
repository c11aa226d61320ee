"""PyTorch: layouts from DTensors and from what `torch.distributed.checkpoint` wrote.

Needs torch, which importing `tenplexfs` never does: ``pip install tenplexfs[torch]``.
"""

from tenplexfs.torch.checkpoint import layout_of_checkpoint, layout_of_metadata
from tenplexfs.torch.dataset import Dataset
from tenplexfs.torch.layout import describe, layout_of, layout_of_ranks, shard_of
from tenplexfs.torch.placements import MeshSpec, Split, StateSpec, TensorSpec

__all__ = [
    "Dataset",
    "MeshSpec",
    "Split",
    "StateSpec",
    "TensorSpec",
    "describe",
    "layout_of",
    "layout_of_checkpoint",
    "layout_of_metadata",
    "layout_of_ranks",
    "shard_of",
]
