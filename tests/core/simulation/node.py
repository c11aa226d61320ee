"""A node and the registry as processes: they do what the core decides, as the runtime does."""

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
    fence_of,
)
from tenplexfs.core.membership import Membership, Part
from tenplexfs.core.snapshot import Head, SnapshotId
from tenplexfs.core.transaction import is_older, next_snapshot
from tenplexfs.errors import ConflictError, NotFoundError, TenplexError, UnavailableError

from .registry import RegistryCore
from .world import Call, CancelledError, Process, Queue, SilenceError, Steps, Task, World

if TYPE_CHECKING:
    from .cluster import Cluster

JOB = "gpt"
REGISTRY = "registry"
LOCK_TTL_S, POLL_S, CALL_S, STAGE_S, RETAIN_S = 15.0, 4.0, 5.0, 25.0, 60.0

Layout = dict[str, frozenset[int]]


@dataclass(frozen=True)
class Order:
    snapshot: SnapshotId
    head: str
    base: str | None
    sources: dict[str, dict[int, str]]  # node -> piece -> who sends it
    layout: str
    fence: int


@dataclass(frozen=True)
class Stored:
    id: SnapshotId
    committed: bool
    fence: int
    pieces: dict[int, str]


class Registry(Process):
    def __init__(self, world: World, cluster: Cluster) -> None:
        super().__init__(world, REGISTRY)
        self.core = RegistryCore(lambda: world.now)
        self.cluster = cluster
        self.heads, self.lock, self.unlock = self.core.heads, self.core.lock, self.core.unlock

    def start(self) -> None:
        super().start()
        self.core.restart()

    def compare_and_set(self, job: str, token: int, expected: Head, new: Head) -> None:
        self.core.compare_and_set(job, token, expected, new)
        self.cluster.moved(expected, new)


class Node(Process):
    """A daemon: its member, its coordinator, and the disk that outlives it."""

    def __init__(self, world: World, name: str, cluster: Cluster) -> None:
        super().__init__(world, name)
        self.cluster = cluster
        self.disk: dict[str, Stored] = {}

    def start(self) -> None:
        super().start()
        self.cluster.excuse_past(self)
        self.shown: Head | None = None
        self.fence = 0
        self.staging: dict[str, bool] = {}  # txid -> whether it is to be dropped
        self.past: dict[str, float] = {}
        self.revision = -1
        self.showing: list[Head] = []
        self.world.spawn(self, self.follow())

    # The member.

    def membership(self) -> Membership:
        return self.cluster.membership(
            shown=None if self.shown is None else self.shown.snapshot,
            stored={txid: Part(each.id, each.committed, each.fence) for txid, each in self.disk.items()},
            in_use=frozenset({*self.past, *self.staging}),
            fence=self.fence,
        )

    def follow(self) -> Steps:
        is_first = True
        while True:
            try:
                revision, heads = yield Call(REGISTRY, "heads", (), CALL_S)
                if revision >= self.revision and JOB in heads:
                    self.revision = revision
                    yield from self.show(heads[JOB], is_hearsay=False)
            except (SilenceError, TenplexError):
                if is_first:
                    self.show_last()
            is_first = False
            for txid in [t for t, since in self.past.items() if self.world.now - since > RETAIN_S]:
                self.cluster.excused.add(txid)
                del self.past[txid]
                self.forget(txid)
            yield POLL_S * (0.5 + self.world.random.random())

    def show(self, head: Head, *, is_hearsay: bool) -> Steps:
        showing = self.showing  # of this life
        while showing:
            yield 0.1
        showing.append(head)
        try:
            found = self.membership().show(head, is_hearsay=is_hearsay)
            if found is None:
                return
            if found.show is None:
                yield from self.describe_any(head)
            if found.commit:
                self.disk[found.show] = replace(self.disk[found.show], committed=True)
            yield 0.01  # it may die here
            self.publish(head)
            for txid in set(found.drop) - self.membership().in_use:
                # One that it never showed: who does still show it gets an error from here, no other bytes.
                self.cluster.excused.add(txid)
                self.forget(txid)
        finally:
            showing.clear()

    def describe_any(self, head: Head) -> Steps:
        for node in head.nodes:
            try:
                yield Call(node, "describe", (head.snapshot.txid,), CALL_S)
            except (SilenceError, TenplexError):
                continue
            return
        raise UnavailableError("nobody tells")

    def publish(self, head: Head) -> None:
        before, self.shown = self.shown, head
        self.cluster.check_shown(self, before, head)
        if before is None:  # who still reads what was before, it cannot know
            self.cluster.excused.update(self.disk.keys() - {head.snapshot.txid})
        elif before.snapshot.txid in self.disk:
            self.past[before.snapshot.txid] = self.world.now

    def show_last(self) -> None:
        committed = [each for each in self.disk.values() if each.committed]
        for each in committed:
            if (
                self.shown is None
                and not self.showing
                and not any(is_older(each.id, other.id) for other in committed)
            ):
                self.publish(self.cluster.heads[each.id.txid])

    def forget(self, txid: str) -> None:
        if self.disk.pop(txid, None) is not None:
            self.cluster.check_forgotten(self, txid)

    def describe(self, txid: str) -> bool:
        if txid not in self.disk:
            raise NotFoundError(f"node {self.name}: stores no {txid}")
        return True

    def read(self, txid: str, piece: int) -> str:
        if txid not in self.disk:
            raise NotFoundError(f"node {self.name}: stores no {txid}")
        return self.disk[txid].pieces[piece]

    def stage(self, order: Order) -> Steps:
        txid = order.snapshot.txid
        found = self.membership().stage(order.snapshot, order.head, order.fence)
        self.fence = max(self.fence, order.fence)
        for other in found.drop:
            self.forget(other)
        if found.is_there:
            return
        if txid in self.staging:
            raise ConflictError(f"{txid} is being staged already")
        staging = self.staging  # of this life
        staging[txid] = False
        try:
            pieces = yield from self.pieces_of(order)
            yield self.world.random.random()
            if staging[txid]:
                raise ConflictError(f"{txid} was dropped while it was staged")
            self.disk[txid] = Stored(order.snapshot, False, order.fence, pieces)
        finally:
            del staging[txid]

    def pieces_of(self, order: Order) -> Steps:
        mine = self.cluster.layouts[order.layout][self.name]
        if order.base is None:
            return dict.fromkeys(mine, order.snapshot.txid)
        pieces = {}
        for piece in sorted(mine):
            source = order.sources[self.name][piece]
            for left in (2, 1, 0):
                try:
                    pieces[piece] = yield Call(source, "read", (order.base, piece), CALL_S / 2)
                    break
                except (SilenceError, NotFoundError):
                    if not left:
                        raise UnavailableError(f"its source {source}", source=source) from None
        return pieces

    def switch(self, head: Head) -> Steps:
        yield from self.show(head, is_hearsay=True)

    def drop(self, txid: str) -> None:
        self.membership().check_drop(txid)
        if txid in self.staging:
            self.staging[txid] = True
            return
        self.past.pop(txid, None)
        self.forget(txid)

    # The coordinator.

    def reconfigure(self, layout: str) -> Steps:
        return self.under_lock(lambda token, head: self.move(token, head, layout))

    def save(self) -> Steps:
        return self.under_lock(self.commit_save)

    def under_lock(self, body: Any) -> Steps:
        owner = f"{self.name}:{self.cluster.new_txid()}"
        token = yield Call(REGISTRY, "lock", (JOB, owner), CALL_S)
        outcome = Queue()
        task = self.world.spawn(
            self, self.with_head(token, body), lambda value, error: self.world.put(outcome, (value, error))
        )
        renewing = self.world.spawn(self, self.renew(owner, task))
        value, error = yield outcome
        self.world.cancel(renewing)
        with suppress(SilenceError):
            yield Call(REGISTRY, "unlock", (JOB, token), CALL_S)
        if error is not None:
            raise error
        return value

    def with_head(self, token: int, body: Any) -> Steps:
        _, heads = yield Call(REGISTRY, "heads", (), CALL_S)
        return (yield from body(token, heads[JOB]))

    def renew(self, owner: str, task: Task) -> Steps:
        while True:
            yield LOCK_TTL_S / 3
            try:
                yield Call(REGISTRY, "lock", (JOB, owner), CALL_S)
            except ConflictError:
                self.world.cancel(task)
                return
            except SilenceError:
                continue

    def commit_save(self, token: int, head: Head) -> Steps:
        now = head.snapshot
        snapshot = SnapshotId(now.generation, (now.step or 0) + 1, self.cluster.new_txid())
        fence = fence_of(token, 0)
        order = Order(snapshot, head.snapshot.txid, None, {}, head.layout_digest, fence)
        end = yield from self.carry_out(token, head, order, frozenset())
        return end.verdict is Verdict.DONE

    def move(self, token: int, head: Head, layout: str) -> Steps:
        lost = yield from self.survey(head)
        for attempt in count():
            sources = self.cluster.plan(head, layout, lost)
            snapshot = next_snapshot(head, self.cluster.new_txid(), step=head.snapshot.step)
            fence = fence_of(token, attempt)
            order = Order(snapshot, head.snapshot.txid, head.snapshot.txid, sources, layout, fence)
            end = yield from self.carry_out(token, head, order, lost)
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

    def carry_out(self, token: int, head: Head, order: Order, lost: frozenset[str]) -> Steps:
        """What `runtime.switching` does."""
        nodes = tuple(sorted(self.cluster.layouts[order.layout]))
        new = Head(order.snapshot, order.layout, nodes)
        self.cluster.begun(head, new, order.base, lost)
        machine = self.cluster.coordination(self.name, head, new, lost=lost)
        actions = machine.begin()
        try:
            while not isinstance(actions[-1], End):
                actions = yield from self.do(actions[-1], machine, token, head, new, order, lost)
                for action in actions[:-1]:
                    yield from self.do(action, machine, token, head, new, order, lost)
        except CancelledError:
            for action in machine.given_up()[:-1]:
                yield from self.do(action, machine, token, head, new, order, lost)
            raise
        return actions[-1]

    def do(
        self,
        action: Any,
        machine: Coordination,
        token: int,
        head: Head,
        new: Head,
        order: Order,
        lost: frozenset[str],
    ) -> Steps:
        match action:
            case Stage(nodes):
                return (yield from self.have_staged(nodes, machine, head, order, lost))
            case Commit():
                return (yield from self.commit(machine, token, head, new))
            case Tell(nodes):
                answers = yield from self.ask_all(nodes, "switch", (new,), CALL_S)
                for node in nodes:
                    following = machine.told(node, acknowledged=answers[node] is None)
                return following
            case Drop(txid, nodes):
                yield from self.ask_all(nodes, "drop", (txid,), CALL_S / 2)
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

    def commit(self, machine: Coordination, token: int, head: Head, new: Head) -> Steps:
        """What `runtime.heads` does."""
        moving = Commitment(head, new)
        while True:
            reply = Reply.MOVED
            try:
                yield Call(REGISTRY, "compare_and_set", (JOB, token, head, new), CALL_S)
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
