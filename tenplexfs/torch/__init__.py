"""PyTorch: `Writer` and `Reader` for `torch.distributed.checkpoint` (DCP), and layouts from DTensors.

Needs torch, which importing `tenplexfs` never does: ``pip install tenplexfs[torch]``.
"""

from tenplexfs.torch.checkpoint import layout_of_checkpoint, layout_of_metadata
from tenplexfs.torch.dataset import Dataset
from tenplexfs.torch.layout import describe, layout_of, layout_of_ranks, shard_of
from tenplexfs.torch.placements import MeshSpec, Split, StateSpec, TensorSpec
from tenplexfs.torch.randomness import rng_state, set_rng_state
from tenplexfs.torch.reader import Reader
from tenplexfs.torch.state import LocalTensor
from tenplexfs.torch.stopping import should_stop
from tenplexfs.torch.writer import Writer

__all__ = [
    "Dataset",
    "LocalTensor",
    "MeshSpec",
    "Reader",
    "Split",
    "StateSpec",
    "TensorSpec",
    "Writer",
    "describe",
    "layout_of",
    "layout_of_checkpoint",
    "layout_of_metadata",
    "layout_of_ranks",
    "rng_state",
    "set_rng_state",
    "shard_of",
    "should_stop",
]
