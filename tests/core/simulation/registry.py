"""A registry in memory, by whatever clock: the same contract as the real ones, which runs on it too."""

from __future__ import annotations

from collections.abc import Callable

from tenplexfs.core.membership import Standing
from tenplexfs.core.snapshot import Head, NodeInfo
from tenplexfs.errors import ConflictError


class RegistryCore:
    """Has the methods of `storage.registry_sqlite.SqliteRegistry`; `restart` is a new process on its file.

    Attributes:
        history: Every move: job, the head before, the head after.
        checks_lock: Whether a commit looks at the lock; False is a bug, which the simulation has to find.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heads: dict[str, Head] = {}
        self._locks: dict[str, tuple[str, int, float, float]] = {}
        self._tokens = 0
        self._living: dict[NodeInfo, tuple[float, float]] = {}
        self.history: list[tuple[str, Head | None, Head | None]] = []
        self.checks_lock = True
        self._name = ""

    def close(self) -> None:
        """Nothing is lost."""

    def restart(self) -> None:
        now = self._clock()
        self._locks = {
            job: (owner, token, ttl_s, min(end, now + ttl_s))
            for job, (owner, token, ttl_s, end) in self._locks.items()
        }
        self._living = {info: (ttl_s, now + ttl_s) for info, (ttl_s, _) in self._living.items()}

    def begin_anew(self, tokens: int) -> None:
        """Becomes another registry with the same heads, whose tokens count from ``tokens``."""
        self._locks.clear()
        self._tokens = tokens

    def name(self, proposed: str) -> str:
        self._name = self._name or proposed
        return self._name

    def look(self, job: str) -> Standing:
        owner, token, _, end = self._locks.get(job, ("", 0, 0.0, 0.0))
        held = (owner, token) if end > self._clock() else ()
        return Standing(self._heads.get(job), *held)

    def heads(self) -> tuple[int, dict[str, Head]]:
        return len(self.history), dict(sorted(self._heads.items()))

    def lock(self, job: str, owner: str, *, ttl_s: float) -> int:
        now = self._clock()
        held = self._locks.get(job)
        if held is not None and held[3] <= now:
            held = None
        if held is not None and held[0] != owner:
            raise ConflictError(f"job {job}: locked by {held[0]} for {held[3] - now:.1f} s more")
        self._tokens += 1
        token = self._tokens
        self._locks[job] = (owner, token, ttl_s, now + ttl_s)
        return token

    def renew(self, job: str, token: int, *, ttl_s: float) -> None:
        owner, held, _, end = self._locks.get(job, ("", 0, 0.0, 0.0))
        if held != token or end <= self._clock():
            raise ConflictError(f"job {job}: the lock is lost; nothing changed")
        self._locks[job] = (owner, token, ttl_s, self._clock() + ttl_s)

    def unlock(self, job: str, token: int) -> None:
        if job in self._locks and self._locks[job][1] == token:
            del self._locks[job]

    def compare_and_set(self, job: str, token: int, expected: Head | None, new: Head | None) -> int:
        held = self._locks.get(job)
        if self.checks_lock and (held is None or held[1] != token or held[3] <= self._clock()):
            holder = "its time is over" if held is None or held[1] == token else f"{held[0]} has it"
            raise ConflictError(f"job {job}: the lock is lost, {holder}; nothing changed")
        found = self._heads.get(job)
        if found != expected:
            names = [each.snapshot if each is not None else "none" for each in (found, expected)]
            raise ConflictError(f"job {job}: head is {names[0]}, expected {names[1]}; nothing changed")
        self._heads.pop(job, None)
        if new is not None:
            self._heads[job] = new
        self.history.append((job, expected, new))
        return len(self.history)

    def events(self, revision: int) -> list[tuple[int, str, Head | None]]:
        moves = enumerate(self.history[revision:], revision + 1)
        return [(number, job, new) for number, (job, _, new) in moves]

    def announce(self, info: NodeInfo, *, ttl_s: float) -> bool:
        is_new = self._living.get(info, (0.0, 0.0))[1] <= self._clock()
        for other in [each for each in self._living if each.node == info.node]:
            del self._living[other]
        self._living[info] = (ttl_s, self._clock() + ttl_s)
        return is_new

    def withdraw(self, info: NodeInfo) -> None:
        self._living.pop(info, None)

    def nodes(self) -> dict[str, NodeInfo]:
        living = [info for info, (_, end) in self._living.items() if end > self._clock()]
        return {info.node: info for info in sorted(living, key=lambda each: each.node)}
