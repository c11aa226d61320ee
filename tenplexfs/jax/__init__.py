"""JAX: `save` and `load` for pytrees of sharded arrays, and layouts from their shardings.

Needs jax, which importing `tenplexfs` never does: ``pip install tenplexfs[jax]``.
"""

from tenplexfs.jax.checkpoint import load, save
from tenplexfs.jax.layout import ArrayLike, layout_of

__all__ = ["ArrayLike", "layout_of", "load", "save"]
