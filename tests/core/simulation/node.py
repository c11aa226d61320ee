"""A node and the registry as processes: they do what the core decides, as the runtime does."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tenplexfs.core.membership import Mandate, Membership, Part, Staging, Standing
from tenplexfs.core.snapshot import Head, SnapshotId
from tenplexfs.core.transaction import is_older
from tenplexfs.errors import ConflictError, NotFoundError, TenplexError, UnavailableError

from .coordinator import CALL_S, JOB, LOCK_TTL_S, REGISTRY, Coordinator, Order
from .registry import RegistryCore
from .world import Call, CancelledError, Process, SilenceError, Steps, World

if TYPE_CHECKING:
    from .cluster import Cluster

POLL_S, RETAIN_S, TIDY_S = 4.0, 60.0, 10.0

Layout = dict[str, frozenset[int]]


@dataclass(eq=False)
class Saving:
    """What the ranks of a node have saved of a step, as `runtime.saving` knows it."""

    leader: int | None = None
    promised: Mandate | None = None


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
        self.heads, self.lock, self.look = self.core.heads, self.core.lock, self.core.look

    def start(self) -> None:
        super().start()
        self.core.restart()

    def begin_anew(self) -> None:
        """Another registry is in its place: what was under way has no lock there, whatever its token."""
        self.core.begin_anew(self.world.random.choice((0, self.world.random.randint(0, 20))))

    def renew(self, job: str, by: Mandate) -> None:
        if self.core.look(job).owner != by.owner:
            raise ConflictError(f"job {job}: the lock is lost")
        self.core.renew(job, by.token, ttl_s=LOCK_TTL_S)

    def unlock(self, job: str, by: Mandate) -> None:
        if self.core.look(job).owner == by.owner:
            self.core.unlock(job, by.token)

    def compare_and_set(self, job: str, by: Mandate, expected: Head, new: Head) -> None:
        if self.core.checks_lock and self.core.look(job).owner != by.owner:
            raise ConflictError(f"job {job}: the lock is lost")
        self.core.compare_and_set(job, by.token, expected, new)
        self.cluster.moved(expected, new)


class Node(Coordinator):
    """A daemon: its member, its coordinator, and the disk that outlives it."""

    def __init__(self, world: World, name: str, cluster: Cluster) -> None:
        super().__init__(world, name, cluster)
        self.disk: dict[str, Stored] = {}

    def start(self) -> None:
        super().start()
        self.cluster.excuse_past(self)
        self.shown: Head | None = None
        self.fence = 0
        self.staging: dict[str, bool] = {}  # txid -> whether it is to be dropped
        self.past: dict[str, float] = {}
        self.saving: dict[str, Saving] = {}
        self.idle_since: float | None = None
        self.ruling: list[str] = []  # the order that is being judged
        self.showing: list[Head] = []
        self.world.spawn(self, self.follow())

    def membership(self) -> Membership:
        promised = [txid for txid, each in self.saving.items() if each.promised is not None]
        return self.cluster.membership(
            shown=None if self.shown is None else self.shown.snapshot,
            stored={txid: Part(each.id, each.committed, each.fence) for txid, each in self.disk.items()},
            in_use=frozenset({*self.past, *self.staging, *promised}),
            fence=self.fence,
        )

    def follow(self) -> Steps:
        is_first = True
        while True:
            try:
                yield from self.show_head()
            except (SilenceError, TenplexError):
                if is_first:
                    self.show_last()
            is_first = False
            for txid in [t for t, since in self.past.items() if self.world.now - since > RETAIN_S]:
                self.cluster.excused.add(txid)
                del self.past[txid]
                self.forget(txid)
            yield POLL_S * (0.5 + self.world.random.random())
            yield from self.tidy()

    def tidy(self) -> Steps:
        """Drops what was given up, once it has been there for a while."""
        if not self.membership().has_idle_stages():
            self.idle_since = None
            return
        self.idle_since = self.idle_since or self.world.now
        if self.world.now - self.idle_since < TIDY_S:
            return
        with suppress(SilenceError, TenplexError, CancelledError):  # somebody works on it
            if self.cluster.tidies_under_lock:
                yield from self.under_lock(self.drop_abandoned)
            else:
                yield from self.drop_abandoned(None, self.shown)

    def drop_abandoned(self, by: Mandate | None, head: Head) -> Steps:
        def rule(node: Membership, now: Standing) -> None:
            self.forget_all(node.abandoned(by or Mandate(now.owner, now.token), now))

        yield from self.judge(rule)

    def judge(self, rule: Any) -> Steps:
        """Does what ``rule`` says, given what the registry says now, one after the other."""
        ruling = self.ruling  # of this life
        while ruling:
            yield 0.1
        ruling.append("")
        try:
            now = yield Call(REGISTRY, "look", (JOB,), CALL_S)
            return rule(self.membership(), now)
        finally:
            ruling.clear()

    def show_head(self) -> Steps:
        _, heads = yield Call(REGISTRY, "heads", (), CALL_S)
        yield from self.show(heads[JOB])

    def show(self, head: Head) -> Steps:
        showing = self.showing  # of this life
        while showing:
            yield 0.1
        showing.append(head)
        try:
            found = self.membership().show(head)
            if found is None:
                return
            if found.show is None:
                yield from self.describe_any(head)
            if found.commit:
                self.disk[found.show] = replace(self.disk[found.show], committed=True)
            yield 0.01  # it may die here
            self.publish(head)
            self.forget_all(set(found.drop) - self.membership().in_use)
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
        for txid in [txid for txid in self.saving if not is_older(head.snapshot, self.cluster.ids[txid])]:
            del self.saving[txid]

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
        if txid in self.staging:
            raise ConflictError(f"{txid} is being staged already")
        staging = self.staging  # of this life
        staging[txid] = False
        try:
            found = yield from self.judge(lambda node, now: self.obey(node, order, now))
            if order.leader is not None:
                yield from self.promise(order)
                return
            if found.is_there:
                return
            pieces = yield from self.pieces_of(order)
            yield self.world.random.random() * self.world.random.choice((1.0, 1.0, 8.0))
            if staging[txid]:
                raise ConflictError(f"{txid} was dropped while it was staged")
            self.disk[txid] = Stored(order.snapshot, False, order.by.fence, pieces)
        finally:
            del staging[txid]

    def obey(self, node: Membership, order: Order, now: Standing) -> Staging:
        found = node.stage(order.snapshot, order.by, now)
        self.fence = order.by.fence
        self.forget_all(found.drop)
        return found

    def promise(self, order: Order) -> Steps:
        """What `runtime.saving` does: what was staged of the same step before stays until then."""
        txid = order.snapshot.txid
        saving = self.saving.get(txid)
        if saving is None or saving.promised not in (None, order.by):
            raise NotFoundError(f"{txid}: not saved here")
        if saving.leader != order.leader and self.cluster.stages_what_was_collected:
            raise NotFoundError(f"{txid}: not saved here for {order.leader}")
        saving.promised = order.by
        yield self.world.random.random()
        if self.saving.get(txid) is not saving:
            raise ConflictError(f"{txid} was dropped while it was staged")
        pieces = dict.fromkeys(self.cluster.layouts[order.layout][self.name], f"{txid}/{saving.leader}")
        self.disk[txid] = Stored(order.snapshot, False, order.by.fence, pieces)

    def rank_saves(self, id: SnapshotId) -> None:
        """The node's ranks have saved, perhaps once more."""
        known = self.saving.get(id.txid)
        if known is None or known.promised is None:
            self.saving[id.txid] = Saving()

    def collect(self, txid: str, leader: int) -> None:
        saving = self.saving.get(txid)
        if saving is not None and saving.leader not in (None, leader):
            del self.saving[txid]  # another process is rank 0 by now
            saving = None
        if saving is None:
            raise NotFoundError(f"{txid}: nothing is saved here for {leader}")
        saving.leader = leader

    def pieces_of(self, order: Order) -> Steps:
        mine = self.cluster.layouts[order.layout][self.name]
        pieces = {}
        for piece in sorted(mine):
            source = order.sources[self.name][piece]
            if source != self.name and self.world.random.random() < self.cluster.hanging:
                raise UnavailableError(f"its source {source}", source=source)
            for left in (2, 1, 0):
                try:
                    pieces[piece] = yield Call(source, "read", (order.base, piece), CALL_S / 2)
                    break
                except (SilenceError, NotFoundError):
                    if not left:
                        raise UnavailableError(f"its source {source}", source=source) from None
        return pieces

    def switch(self, head: Head) -> Steps:
        yield from self.show_head()
        if self.shown is None or is_older(self.shown.snapshot, head.snapshot):
            raise ConflictError(f"this node's registry says {self.shown}")

    def drop(self, txid: str, by: Mandate | None) -> Steps:
        known = self.saving.get(txid)
        if known is not None and known.promised in (None, by):
            del self.saving[txid]
        if by is not None:
            yield from self.judge(lambda node, now: self.let_go(node, txid, by, now))

    def let_go(self, node: Membership, txid: str, by: Mandate, now: Standing) -> None:
        node.check_drop(txid, by, now)
        self.saving.pop(txid, None)
        self.past.pop(txid, None)
        if txid in self.staging:
            self.staging[txid] = True
        else:
            self.forget(txid)

    def forget_all(self, txids: Iterable[str]) -> None:
        for txid in sorted(txids):
            if self.shown is not None and is_older(self.cluster.ids[txid], self.shown.snapshot):
                # One that it never showed: who does still show it gets an error from here, no other bytes.
                self.cluster.excused.add(txid)
            self.forget(txid)
