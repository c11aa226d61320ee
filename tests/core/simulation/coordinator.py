"""A coordinator as a process: it does what the core decides, as the runtime does, and calls nodes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from tenplexfs.core.coordination import (
    Commit,
    Commitment,
    Coordination,
    Drop,
    End,
    Next,
    Reply,
    Stage,
    Tell,
    Verdict,
)
from tenplexfs.core.membership import Mandate
from tenplexfs.core.snapshot import Head, SnapshotId
from tenplexfs.core.transaction import is_older, next_snapshot
from tenplexfs.errors import ConflictError, NotFoundError, TenplexError, UnavailableError

from .world import Call, CancelledError, Process, Queue, SilenceError, Steps, Task, World

if TYPE_CHECKING:
    from .cluster import Cluster

JOB = "gpt"
REGISTRY = "registry"
LOCK_TTL_S, CALL_S, STAGE_S = 15.0, 5.0, 25.0


@dataclass(frozen=True)
class Order:
    snapshot: SnapshotId
    base: str | None
    sources: dict[str, dict[int, str]]  # node -> piece -> who sends it
    layout: str
    by: Mandate
    leader: int | None = None  # of a save


class Coordinator(Process):
    """What a daemon does to switch a job."""

    def __init__(self, world: World, name: str, cluster: Cluster) -> None:
        super().__init__(world, name)
        self.cluster = cluster

    def reconfigure(self, layout: str) -> Steps:
        return self.under_lock(lambda by, head: self.move(by, head, layout))

    def save(self, head: Head) -> Steps:
        """Leads a save of the next step, which every node's ranks make, some of them again."""
        leader, id = self.cluster.new_number(), self.cluster.id_of_save(head)
        for node in head.nodes:
            self.world.spawn(self, self.ranks_save(node, id))
        try:
            for node in head.nodes:
                yield from self.collect_from(node, id, leader)
            return (yield from self.under_lock(lambda by, found: self.commit_save(by, found, id, leader)))
        except (SilenceError, TenplexError):
            yield from self.ask_all(head.nodes, "drop", (id.txid, None), CALL_S / 2)
            raise

    def ranks_save(self, node: str, id: SnapshotId) -> Steps:
        yield self.world.random.random()
        self.cluster.rank_saves(node, id)
        if self.world.random.random() < 0.3:  # its ranks begin again
            yield 2 * self.world.random.random()
            self.cluster.rank_saves(node, id)

    def collect_from(self, node: str, id: SnapshotId, leader: int) -> Steps:
        for left in (3, 2, 1, 0):
            try:
                yield Call(node, "collect", (id.txid, leader), CALL_S / 2)
            except (SilenceError, NotFoundError):
                if not left:
                    raise
                yield 1.0
            else:
                return

    def under_lock(self, body: Any) -> Steps:
        owner = f"{self.name}:{self.cluster.new_txid()}"
        by = Mandate(owner, (yield Call(REGISTRY, "lock", (JOB, owner), CALL_S)))
        outcome = Queue()
        task = self.world.spawn(
            self, self.with_head(by, body), lambda value, error: self.world.put(outcome, (value, error))
        )
        renewing = self.world.spawn(self, self.renew(by, task))
        value, error = yield outcome
        self.world.cancel(renewing)
        with suppress(SilenceError):
            yield Call(REGISTRY, "unlock", (JOB, by), CALL_S)
        if error is not None:
            raise error
        return value

    def with_head(self, by: Mandate, body: Any) -> Steps:
        _, heads = yield Call(REGISTRY, "heads", (), CALL_S)
        return (yield from body(by, heads[JOB]))

    def renew(self, by: Mandate, task: Task) -> Steps:
        while True:
            yield LOCK_TTL_S / 3
            try:
                yield Call(REGISTRY, "renew", (JOB, by), CALL_S)
            except ConflictError:
                self.world.cancel(task)
                return
            except SilenceError:
                continue

    def commit_save(self, by: Mandate, head: Head, id: SnapshotId, leader: int) -> Steps:
        if head.snapshot == id:
            return True
        if not is_older(head.snapshot, id) or head.snapshot.generation != id.generation:
            raise ConflictError(f"{id}: comes too late")
        order = Order(id, None, {}, head.layout_digest, by, leader)
        end = yield from self.carry_out(head, order, frozenset())
        return end.verdict is Verdict.DONE

    def move(self, by: Mandate, head: Head, layout: str) -> Steps:
        lost = yield from self.survey(head)
        for attempt in count():
            sources = self.cluster.plan(head, layout, lost)
            snapshot = next_snapshot(head, self.cluster.new_txid(), step=head.snapshot.step)
            order = Order(snapshot, head.snapshot.txid, sources, layout, replace(by, attempt=attempt))
            end = yield from self.carry_out(head, order, lost)
            if end.verdict is not Verdict.SOURCES_LOST or end.lost <= lost:
                return end.verdict is Verdict.DONE
            lost |= end.lost
        return False

    def survey(self, head: Head) -> Steps:
        answers = yield from self.ask_all(head.nodes, "describe", (head.snapshot.txid,), CALL_S)
        return frozenset(node for node, error in answers.items() if error is not None)

    def ask_all(self, nodes: tuple[str, ...], method: str, arguments: Any, timeout_s: float) -> Steps:
        queue, answers = Queue(), {}
        for node in nodes:
            self.ask(queue, node, method, arguments, timeout_s)
        while len(answers) < len(nodes):
            node, error = yield queue
            answers[node] = error
        return answers

    def ask(self, queue: Queue, node: str, method: str, arguments: Any, timeout_s: float) -> None:
        def one() -> Steps:
            yield Call(node, method, arguments, timeout_s)

        self.world.spawn(self, one(), lambda _, error: self.world.put(queue, (node, error)))

    def carry_out(self, head: Head, order: Order, lost: frozenset[str]) -> Steps:
        """What `runtime.switching` does."""
        nodes = tuple(sorted(self.cluster.layouts[order.layout]))
        new = Head(order.snapshot, order.layout, nodes)
        self.cluster.begun(head, new, order.base, lost)
        machine = self.cluster.coordination(self.name, head, new, lost=lost)
        actions = machine.begin()
        try:
            while not isinstance(actions[-1], End):
                actions = yield from self.do(actions[-1], machine, head, new, order, lost)
                for action in actions[:-1]:
                    yield from self.do(action, machine, head, new, order, lost)
        except CancelledError:
            for action in machine.given_up()[:-1]:
                yield from self.do(action, machine, head, new, order, lost)
            raise
        return actions[-1]

    def do(
        self,
        action: Any,
        machine: Coordination,
        head: Head,
        new: Head,
        order: Order,
        lost: frozenset[str],
    ) -> Steps:
        match action:
            case Stage(nodes):
                return (yield from self.have_staged(nodes, machine, head, order, lost))
            case Commit():
                return (yield from self.commit(machine, order.by, head, new))
            case Tell(nodes):
                guests = tuple(each for each in self.cluster.living() if each not in nodes)
                answers = yield from self.ask_all((*guests, *nodes), "switch", (new,), CALL_S)
                for node in (*guests, *nodes):
                    following = machine.told(node, acknowledged=answers[node] is None)
                return following
            case Drop(txid, nodes):
                yield from self.ask_all(nodes, "drop", (txid, order.by), CALL_S / 2)
        return ()

    def have_staged(
        self, nodes: tuple[str, ...], machine: Coordination, head: Head, order: Order, lost: frozenset[str]
    ) -> Steps:
        queue = Queue()
        for node in nodes:
            self.ask(queue, node, "stage", (order,), STAGE_S)
        self.world.spawn(self, self.watch(queue, head, order, lost))
        while True:
            node, error = yield queue
            if isinstance(error, frozenset):
                following = machine.sources_gone(error)
            elif error is None:
                following = machine.staged(node)
            else:
                source = error.details.get("source") if isinstance(error, TenplexError) else None
                following = machine.stage_failed({str(source)} if source else ())
            if following:
                return following

    def watch(self, queue: Queue, head: Head, order: Order, lost: frozenset[str]) -> Steps:
        """What leases tell."""
        senders = {source for row in order.sources.values() for source in row.values()} - order.sources.keys()
        while True:
            yield 3.0
            gone = frozenset(each for each in senders if not self.world.processes[each].is_up)
            try:
                if gone and self.cluster.plan(head, order.layout, lost | gone):
                    self.world.put(queue, ("", gone))
                    return
            except UnavailableError:
                continue

    def commit(self, machine: Coordination, by: Mandate, head: Head, new: Head) -> Steps:
        """What `runtime.heads` does."""
        moving = Commitment(head, new)
        while True:
            reply = Reply.MOVED
            try:
                yield Call(REGISTRY, "compare_and_set", (JOB, by, head, new), CALL_S)
            except ConflictError:
                reply = Reply.REFUSED
            except SilenceError:
                reply = Reply.SILENT
            following = moving.replied(reply)
            if following is Next.READ:
                try:
                    _, heads = yield Call(REGISTRY, "heads", (), CALL_S)
                    following = moving.read(heads.get(JOB))
                except SilenceError:
                    following = Next.AGAIN
            if following is Next.DONE:
                return machine.committed()
            if following is Next.REFUSED:
                return machine.refused()
            yield 1.0
