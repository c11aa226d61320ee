"""The random-number states of a process, as plain values that any save takes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["rng_state", "set_rng_state"]


def rng_state() -> dict[str, Any]:
    """Returns the states of Python's, numpy's and torch's generators, and of CUDA devices once CUDA is used.

    Keep it under a key that has the word ``rng``, and with `Writer` by rank: ``rank_local=["rng.*"]``. When
    the job gets more ranks, a rank that lives on has its own again, and a new one gets one that is derived.
    """
    kind, words, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (str(kind), [int(word) for word in words], *rest),
        "torch": _bytes(torch.get_rng_state()),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = {str(i): _bytes(each) for i, each in enumerate(torch.cuda.get_rng_state_all())}
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Makes the generators go on from ``state``; those of devices that are not here are left out."""
    random.setstate(state["python"])
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, np.array(words, np.uint32), *rest))
    torch.set_rng_state(_tensor(state["torch"]))
    for name, data in state.get("cuda", {}).items():
        if int(name) < torch.cuda.device_count():
            torch.cuda.set_rng_state(_tensor(data), int(name))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
