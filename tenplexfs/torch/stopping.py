"""Whether to stop, asked by all ranks together."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from tenplexfs.client.jobs import should_stop as ask
from tenplexfs.errors import NotFoundError, UnavailableError

__all__ = ["should_stop"]


def should_stop(path: str | os.PathLike[str], step: int, *, group: dist.ProcessGroup | None = None) -> bool:
    """Returns whether to save this step and end with `tenplexfs.EXIT_RECONFIGURE`; the same on all ranks.

    A collective: all ranks of ``group`` call it once a step, rank 0 asks for all. While there is no such job,
    which its first save makes, it is False.

    Args:
        path: ``<mount>/<job>``.
        step: The one that is being finished.
        group: Default: all ranks.

    Raises:
        UnavailableError: The daemon stayed away.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return _ask(path, step, rank=0)
    failure: BaseException | None = None
    answer = 0
    if dist.get_rank(group) == 0:
        try:
            answer = int(_ask(path, step, rank=dist.get_rank()))
        except BaseException as error:  # the others wait for an answer
            failure, answer = error, 2
    device = "cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"
    told = torch.tensor(answer, device=device)
    dist.broadcast(told, dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    if failure is not None:
        raise failure
    if (heard := int(told)) == 2:
        raise UnavailableError(f"should_stop {path}: rank 0 got no answer")
    return bool(heard)


def _ask(path: str | os.PathLike[str], step: int, *, rank: int) -> bool:
    try:
        return ask(path, step, rank=rank, for_all=True)
    except NotFoundError:
        return False
