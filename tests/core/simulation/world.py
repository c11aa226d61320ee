"""Virtual time, and processes whose messages are lost, late or doubled, and which die at any step.

A process is generators: ``yield`` a `Call` for its reply, a number to sleep, a `Queue` for its next item.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from random import Random
from types import GeneratorType
from typing import Any

from tenplexfs.errors import TenplexError

Steps = Generator[Any, Any, Any]


class SilenceError(Exception):
    """No reply in time: the call was made or not."""


class CancelledError(Exception):
    """Somebody wants the task to end."""


@dataclass(slots=True)
class Call:
    to: str
    method: str
    arguments: tuple[Any, ...]
    timeout_s: float


class Queue:
    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.waiting: tuple[Task, int] | None = None


class Process:
    """Something that answers calls; `life` counts how often it was started, 0 for never."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.life = 0
        self.is_up = False
        world.processes[name] = self

    def start(self) -> None:
        self.life += 1
        self.is_up = True

    def crash(self) -> None:
        self.is_up = False


class Task:
    """A generator of a process; ends with it."""

    __slots__ = ("done", "life", "owner", "steps", "waits")

    def __init__(self, owner: Process, steps: Steps, done: Callable[[Any, Exception | None], None]) -> None:
        self.owner, self.steps, self.done = owner, steps, done
        self.life = owner.life
        self.waits = 0  # how often it has waited: what wakes it for an earlier wait is late

    @property
    def is_alive(self) -> bool:
        return self.owner.is_up and self.owner.life == self.life


class World:
    """The clock and the network.

    Attributes:
        loss, doubling, lateness: Probabilities for each message; a late one takes up to ``late_s``.
        cut: Pairs of processes that do not hear each other.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now = 0.0
        self.processes: dict[str, Process] = {}
        self.loss = self.doubling = self.lateness = 0.0
        self.late_s = 40.0
        self.cut: set[tuple[str, str]] = set()
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, delay_s: float, what: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._count, what, arguments))

    def run(self, until_s: float) -> None:
        queue = self._queue
        while queue and queue[0][0] <= until_s:
            self.now, _, what, arguments = heapq.heappop(queue)
            what(*arguments)
        self.now = until_s

    def spawn(
        self,
        owner: Process,
        steps: Steps,
        done: Callable[[Any, Exception | None], None] = lambda value, error: None,
    ) -> Task:
        task = Task(owner, steps, done)
        self._step(task, 0, None, None)
        return task

    def cancel(self, task: Task) -> None:
        self.at(0.0, self._cancel, task)

    def _cancel(self, task: Task) -> None:
        self._step(task, task.waits, None, CancelledError())

    def put(self, queue: Queue, item: Any) -> None:
        queue.items.append(item)
        if queue.waiting is not None:
            task, wait = queue.waiting
            queue.waiting = None
            self.at(0.0, self._step, task, wait, queue.items.popleft(), None)

    def _step(self, task: Task, wait: int, value: Any, error: Exception | None) -> None:
        if task.waits != wait or wait < 0 or not task.is_alive:
            return
        task.waits += 1
        try:
            effect = task.steps.send(value) if error is None else task.steps.throw(error)
        except StopIteration as stop:
            task.waits = -1
            task.done(stop.value, None)
        except (TenplexError, SilenceError, CancelledError) as failure:
            task.waits = -1
            task.done(None, failure)
        else:
            self._wait(task, effect)

    def _wait(self, task: Task, effect: Any) -> None:
        wait = task.waits
        if isinstance(effect, Call):
            self.at(effect.timeout_s, self._step, task, wait, None, SilenceError())
            source, target = task.owner.name, effect.to

            def reply(value: Any, error: Exception | None) -> None:
                if not isinstance(error, SilenceError):  # who asked hears nothing either
                    self._send(target, source, self._step, task, wait, value, error)

            self._send(source, target, self._arrive, effect, reply)
        elif isinstance(effect, Queue):
            if effect.items:
                self.at(0.0, self._step, task, wait, effect.items.popleft(), None)
            else:
                effect.waiting = (task, wait)
        else:
            self.at(effect, self._step, task, wait, None, None)

    def _send(self, source: str, target: str, what: Callable[..., None], *arguments: Any) -> None:
        random = self.random.random
        if source != target and (random() < self.loss or (source, target) in self.cut):
            return
        for _ in range(2 if random() < self.doubling else 1):
            late = random() < self.lateness
            self.at(random() * (self.late_s if late else 0.1), what, *arguments)

    def _arrive(self, call: Call, reply: Callable[[Any, Exception | None], None]) -> None:
        process = self.processes[call.to]
        if not process.is_up:
            return
        try:
            answer = getattr(process, call.method)(*call.arguments)
        except TenplexError as error:
            reply(None, error)
            return
        if isinstance(answer, GeneratorType):
            self.spawn(process, answer, reply)
        else:
            reply(answer, None)
