"""DeepSpeed: `save` and `load` of an engine with ZeRO 1, 2 or 3, by its own fragment mappings.

DeepSpeed is never imported: its engine, optimizers and parameters are known by their attributes. Needs torch.
"""

from tenplexfs.deepspeed.checkpoint import layout_for, load, save

__all__ = ["layout_for", "load", "save"]
