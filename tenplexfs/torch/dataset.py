"""The samples of one rank for torch's `DataLoader`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset as TorchDataset

from tenplexfs.client.dataset import Dataset as Samples

__all__ = ["Dataset"]


class Dataset(Samples, TorchDataset[Any]):
    """A map-style dataset over the samples that a rank has left, in the order to consume.

    Items are tensors where torch has the dtype; other arrays, and bytes, come as they are. Give the loader
    ``batch_size=dataset.local_batch, shuffle=False``: the order is the daemon's. Any number of workers gives
    the same stream.

    Args and attributes are those of `tenplexfs.client.dataset.Dataset`.
    """

    def __getitem__(self, item: Any) -> Any:  # noqa: ANN401 - what the loader asks, and what a sample is
        """Returns a sample, or those of a slice."""
        return _tensor(super().__getitem__(item))

    def __getitems__(self, items: Any) -> list[Any]:  # noqa: ANN401
        """Returns several samples; runs of them are read at once."""
        return [_tensor(sample) for sample in super().__getitems__(items)]


def _tensor(sample: Any) -> Any:  # noqa: ANN401
    if not isinstance(sample, np.ndarray):
        return sample
    try:
        return torch.from_numpy(sample)
    except TypeError:  # torch has no such dtype
        return sample
