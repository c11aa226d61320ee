"""Keeps the state of a training job outside the job, and changes its parallelism while the job lives.

What a training process calls; each is imported when it is first asked for:

- `save` and `load` the state of a rank, `read` a file of the mounted tree,
- `Dataset`: the samples that a rank has left,
- `should_stop`: whether to save and end with `EXIT_RECONFIGURE`, asked once a step.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tenplexfs.client.dataset import Dataset
    from tenplexfs.client.jobs import env, should_stop, wait
    from tenplexfs.client.loading import load, read
    from tenplexfs.client.saving import Save, save

__all__ = ["EXIT_RECONFIGURE", "Dataset", "Save", "env", "load", "read", "save", "should_stop", "wait"]

EXIT_RECONFIGURE = 75
"""Exit status of a training process that stopped to be started again."""

_HOMES = {
    "Dataset": "dataset",
    "Save": "saving",
    "env": "jobs",
    "load": "loading",
    "read": "loading",
    "save": "saving",
    "should_stop": "jobs",
    "wait": "jobs",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.client.{_HOMES[name]}"), name)
