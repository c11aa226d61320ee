"""Small values between the ranks of a run, through the store of their process group.

No collectives: `dcp.async_save` runs beside the training loop, whose collectives must not be mixed with ours,
and the backend may know no CPU tensors. Nothing waits inside the store, which would hold back other threads.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tenplexfs.errors import TenplexError, TimedOutError

__all__ = ["Exchange", "this_rank", "world_size"]

T = TypeVar("T")

_POLL_S = 0.002
_FIRST_POLL_S = 0.0003  # they come together, mostly
_PATIENCE_S = 600.0
_LAST_S = 30.0


def this_rank() -> int:
    """Returns the rank in the default process group, 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Returns the size of the default process group, 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Exchange:
    """One round of values among all ranks, who all make it, in the same order for each name.

    Attributes:
        rank, world: Of the default process group; 0 and 1 without one.
        turn: Which round of this name it is.
    """

    def __init__(self, name: str) -> None:
        self.rank = this_rank()
        self.world = world_size()
        self._local: dict[str, bytes] = {}
        # Its stubs lack `append`, and know text alone.
        self._store: Any = distributed_c10d._get_default_store() if self.world > 1 else None
        self._prefix = ""
        self._posted = ""
        self.turn = 0
        if self._store is not None:
            turn = self.turn = int(self._store.add(f"tenplexfs/{name}/turn{self.rank}", 1))
            self._prefix = f"tenplexfs/{name}/{turn}/"
            self._tidy(f"tenplexfs/{name}/posted{self.rank}", turn)

    def post(self, key: str, value: object) -> None:
        """Lets the others have ``value``."""
        data = pickle.dumps(value)
        if self._store is None:
            self._local[key] = data
        else:
            self._store.set(self._prefix + key, data)
            self._store.append(self._posted, f"{self._prefix}{key}\n")

    def post_shared(self, value: object) -> str:
        """Lets the others have ``value`` once for all ranks that have the same; returns its key."""
        key = "shared" + blake2b(pickle.dumps(value), digest_size=16).hexdigest()
        self.post(key, value)
        return key

    def has(self, *keys: str) -> bool:
        """Returns whether all of ``keys`` were posted."""
        if self._store is None:
            return all(key in self._local for key in keys)
        return bool(self._store.check([self._prefix + key for key in keys]))

    def get(self, key: str) -> Any:  # noqa: ANN401
        """Returns what was posted as ``key``, by any rank.

        Raises:
            TimedOutError: Nobody did.
            TenplexError: Another rank has failed.
        """
        self._wait(key)
        data = self._local[key] if self._store is None else self._store.get(self._prefix + key)
        return pickle.loads(data)

    def fail(self, error: BaseException) -> None:
        """Tells the others that this rank cannot go on."""
        if self.has("failure"):
            return  # perhaps the very one
        kind = type(error) if isinstance(error, TenplexError) else TenplexError
        self.post("failure", (kind, f"rank {self.rank}: {error}"))

    def check(self) -> None:
        """Raises what another rank failed of."""
        if self.has("failure"):
            data = (
                self._local["failure"] if self._store is None else self._store.get(f"{self._prefix}failure")
            )
            kind, message = pickle.loads(data)
            raise kind(message)

    def end(self) -> None:
        """Returns once every rank has ended this round, well or not; a rank that died is not waited for long.

        After that, a failed round may be tried again.
        """
        self.post(f"ended{self.rank}", True)
        ended = [f"ended{rank}" for rank in range(self.world)]
        until = time.monotonic() + _LAST_S
        while not self.has(*ended) and time.monotonic() < until:
            time.sleep(_POLL_S)

    def agree(self, card: object, decide: Callable[[list[Any]], T]) -> T:
        """Returns what rank 0 decides of the cards of all ranks, in the order of ranks.

        Raises:
            TenplexError: Some rank has failed.
        """
        self.post(f"card{self.rank}", card)
        if self.rank == 0:
            self.post("verdict", decide([self.get(f"card{rank}") for rank in range(self.world)]))
        verdict: T = self.get("verdict")
        return verdict

    def _tidy(self, posted: str, turn: int) -> None:
        """Deletes what this rank posted two rounds before; of the last one, some may not have heard all."""
        assert self._store is not None
        self._posted = f"{posted}/{turn}"
        last = f"{posted}/{turn - 2}"
        if turn > 2 and self._store.check([last]):
            for key in self._store.get(last).decode().split():
                self._store.delete_key(key)
            self._store.delete_key(last)

    def _wait(self, key: str) -> None:
        end, poll_s = time.monotonic() + _PATIENCE_S, _FIRST_POLL_S
        while not self.has(key):
            self.check()
            if time.monotonic() > end:
                raise TimedOutError(
                    f"rank {self.rank} of {self.world}: the others did not come within {_PATIENCE_S:g} s; "
                    "all ranks must call dcp.save or dcp.load with the same step"
                )
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _POLL_S)
