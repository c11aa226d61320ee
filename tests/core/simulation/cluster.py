"""Nodes, coordinators and a registry in one virtual world, and what must hold whatever happens to them.

What a snapshot holds is one word for each of its pieces: which save it is of. A node that shows a mix, or has
lost what was committed, is found by comparing words.
"""

from __future__ import annotations

from random import Random
from typing import Any

from tenplexfs.core.coordination import Coordination
from tenplexfs.core.membership import Membership
from tenplexfs.core.snapshot import Head, SnapshotId
from tenplexfs.core.transaction import is_older
from tenplexfs.errors import UnavailableError

from .coordinator import JOB, LOCK_TTL_S, STAGE_S
from .node import POLL_S, RETAIN_S, Layout, Node, Registry, Stored
from .world import Process, World


class Cluster:
    """All of it, and what must always hold.

    Args:
        seed: Gives everything.
    """

    coordination = Coordination
    membership = Membership
    tidies_under_lock = True
    stages_what_was_collected = True

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.world = World(self.random)
        self.hanging = 0.0  # how probably a source does not send a piece
        self.registry = Registry(self.world, self)
        # The lock's time is the registry's to know.
        core = self.registry.core
        self.registry.lock = lambda job, owner: core.lock(job, owner, ttl_s=LOCK_TTL_S)
        self.pieces = range(self.random.randint(2, 3))
        self.names = [f"n{number}" for number in range(self.random.randint(3, 7))]
        self.nodes = {name: Node(self.world, name, self) for name in self.names}
        self.layouts: dict[str, Layout] = {}
        self.heads: dict[str, Head] = {}
        self.content: dict[str, str] = {}
        self.ids: dict[str, SnapshotId] = {}
        self.excused: set[str] = set()
        self.wiped: set[tuple[str, str]] = set()
        self.done_count = 0
        self._numbers = 0
        self._begin()

    def _begin(self) -> None:
        layout = self.new_layout()
        txid = self.new_txid()
        head = Head(SnapshotId(1, 0, txid), layout, tuple(sorted(self.layouts[layout])))
        self.content[txid], self.heads[txid], self.ids[txid] = txid, head, head.snapshot
        for name, mine in self.layouts[layout].items():
            self.nodes[name].disk[txid] = Stored(head.snapshot, True, 0, dict.fromkeys(mine, txid))
        core = self.registry.core
        core.compare_and_set(JOB, core.lock(JOB, "first", ttl_s=1.0), None, head)
        core.unlock(JOB, 1)
        for process in (self.registry, *self.nodes.values()):
            process.start()

    @property
    def head(self) -> Head:
        return self.registry.core.heads()[1][JOB]

    def new_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def new_txid(self) -> str:
        return f"{self.new_number():04x}"

    def id_of_save(self, head: Head) -> SnapshotId:
        """The same one each time that the step is saved."""
        generation, step = head.snapshot.generation, (head.snapshot.step or 0) + 1
        id = SnapshotId(generation, step, f"save{generation}.{step}")
        return self.ids.setdefault(id.txid, id)

    def rank_saves(self, node: str, id: SnapshotId) -> None:
        """Training processes are where their daemon is, and see only that."""
        if self.nodes[node].is_up:
            self.nodes[node].rank_saves(id)

    def living(self) -> list[str]:
        return [name for name in self.names if self.nodes[name].is_up]

    def new_layout(self) -> str:
        layout: dict[str, set[int]] = {}
        for piece in self.pieces:
            for name in self.random.sample(self.names, self.random.choice((1, 2, 2, 3))):
                layout.setdefault(name, set()).add(piece)
        name = f"layout{len(self.layouts)}"
        self.layouts[name] = {node: frozenset(pieces) for node, pieces in layout.items()}
        return name

    def plan(self, head: Head, layout: str, lost: frozenset[str]) -> dict[str, dict[int, str]]:
        """Returns who sends what to whom: who has it himself; else who else has it."""
        held = self.layouts[head.layout_digest]
        plan: dict[str, dict[int, str]] = {}
        for node, pieces in self.layouts[layout].items():
            plan[node] = {}
            for piece in pieces:
                able = sorted(each for each in held if piece in held[each] and each not in lost)
                if not able:
                    raise UnavailableError(f"no node that is left holds {piece}; lost: {sorted(lost)}")
                plan[node][piece] = node if node in able else able[(piece + len(node)) % len(able)]
        return plan

    # What must hold.

    def begun(self, head: Head, new: Head, base: str | None, lost: frozenset[str]) -> None:
        self.heads[new.snapshot.txid] = new
        self.ids[new.snapshot.txid] = new.snapshot
        if base is not None:
            self.content[new.snapshot.txid] = self.content[base]
        if lost:
            self.excused.add(head.snapshot.txid)

    def moved(self, before: Head, after: Head) -> None:
        """One history, and at the moment of the commit every node has its part."""
        assert is_older(before.snapshot, after.snapshot), (before, after)
        self.done_count += 1
        txid = after.snapshot.txid
        if txid not in self.content:  # a save: which of those who led it has it
            found = [self.nodes[name].disk[txid] for name in after.nodes if txid in self.nodes[name].disk]
            self.content[txid] = next((word for each in found for word in each.pieces.values()), "lost")
        for name in after.nodes:
            self.check_part(self.nodes[name], after)

    def check_part(self, node: Node, head: Head) -> None:
        txid = head.snapshot.txid
        if (node.name, txid) in self.wiped:
            return
        assert txid in node.disk, f"{self.world.now}: node {node.name} has lost its part of {head}"
        pieces = node.disk[txid].pieces
        assert set(pieces) == self.layouts[head.layout_digest][node.name], (node.name, head, pieces)
        assert set(pieces.values()) <= {self.content[txid]}, f"a mix: {pieces} in {head}"

    def check_forgotten(self, node: Node, txid: str) -> None:
        assert self.head.snapshot.txid != txid, f"{self.world.now}: node {node.name} drops the head {txid}"

    def check_shown(self, node: Node, before: Head | None, head: Head) -> None:
        txid = head.snapshot.txid
        assert any(new == head for _, _, new in self.registry.core.history), f"{head} was never committed"
        assert before is None or is_older(before.snapshot, head.snapshot), (node.name, before, head)
        if txid in node.disk:
            self.check_part(node, head)

    def check_readers(self) -> None:
        """Whatever a node shows is all there, here or elsewhere, and of one save."""
        for node in self.nodes.values():
            head = node.shown if node.is_up else None
            if head is None or head.snapshot.txid in self.excused:
                continue
            txid = head.snapshot.txid
            for name in head.nodes:
                self.check_part(self.nodes[name], head)
            assert txid == self.head.snapshot.txid or is_older(head.snapshot, self.head.snapshot)

    def excuse_past(self, node: Node) -> None:
        """A daemon that starts again does not know who still reads what is past."""
        now = self.head.snapshot
        self.excused.update(txid for txid, each in node.disk.items() if is_older(each.id, now))

    def wipe(self, node: Node) -> None:
        self.wiped.update((node.name, txid) for txid in node.disk)
        node.disk.clear()

    # What happens to it.

    def chaos(self, duration_s: float) -> None:
        """Transactions everywhere, and everything that can go wrong."""
        random, world = self.random, self.world
        world.loss = random.choice((0.0, 0.0, 0.02, 0.1))
        world.doubling = random.choice((0.0, 0.05))
        world.lateness = random.choice((0.0, 0.0, 0.05, 0.2))
        self.hanging = random.choice((0.0, 0.03, 0.1))
        end_s = world.now + duration_s
        while world.now < end_s:
            world.run(world.now + random.expovariate(0.35))
            what = random.random()
            if what < 0.55:
                self.transact()
            elif what < 0.75:
                self.kill(self.nodes[random.choice(self.names)], wipes=random.random() < 0.15)
            elif what < 0.82:
                self.kill(self.registry, wipes=False)
                if random.random() < 0.4:
                    self.registry.begin_anew()
            elif what < 0.92:
                self.cut_off()
            self.check_readers()

    def transact(self) -> None:
        if self.random.random() < 0.4:
            self.save(self.head, 4)
            return
        node = self.nodes[self.random.choice(self.names)]
        if node.is_up:
            self.world.spawn(node, node.reconfigure(self.new_layout()))

    def save(self, head: Head, tries: int) -> None:
        """Saves the next step; a training process whose save failed tries it again."""
        node = self.nodes[head.nodes[0]]
        if not tries or self.head != head:
            return
        again = self.random.choice((0.5, 5.0)), self.save, head, tries - 1
        if node.is_up:
            self.world.spawn(node, node.save(head), lambda _, error: error and self.world.at(*again))
        else:
            self.world.at(*again)

    def kill(self, process: Process, *, wipes: bool) -> None:
        if not process.is_up:
            return
        process.crash()
        if wipes and isinstance(process, Node):
            self.wipe(process)
        self.world.at(self.random.choice((0.2, 2.0, 12.0)), self.restart, process)

    def restart(self, process: Process) -> None:
        if not process.is_up:
            process.start()

    def cut_off(self) -> None:
        some = {name for name in self.world.processes if self.random.random() < 0.4}
        cut = {
            (a, b) for a in self.world.processes for b in self.world.processes if (a in some) != (b in some)
        }
        if self.random.random() < 0.3:  # in one direction
            cut = {(a, b) for a, b in cut if a in some}
        self.world.cut |= cut
        self.world.at(self.random.choice((3.0, 20.0)), self.world.cut.difference_update, cut)

    def heal(self) -> None:
        """Nothing goes wrong any more; returns when all that was under way has ended."""
        world = self.world
        world.run(world.now + 1.0)
        world.loss = world.doubling = world.lateness = self.hanging = 0.0
        world.cut.clear()
        for process in world.processes.values():
            self.restart(process)
        world.run(world.now + 3 * STAGE_S + LOCK_TTL_S)
        world.cut.clear()

    def check_end(self) -> None:
        """Who asks then is served, if the bytes are somewhere; all show it; nothing is left over."""
        head, world = self.head, self.world
        held = self.layouts[head.layout_digest]
        txid = head.snapshot.txid
        is_there = all(
            any(piece in held.get(name, ()) and txid in self.nodes[name].disk for name in self.names)
            for piece in self.pieces
        )
        node = self.nodes[self.random.choice(self.names)]
        outcome: list[Any] = []
        world.spawn(node, node.reconfigure(self.new_layout()), lambda *ended: outcome.append(ended))
        world.run(world.now + 3 * STAGE_S)
        assert outcome, "it does not end"
        if not is_there:
            assert isinstance(outcome[0][1], UnavailableError), (outcome, "its bytes are nowhere")
            return
        assert outcome[0] == (True, None), outcome
        world.run(world.now + RETAIN_S + 4 * POLL_S)
        for each in self.nodes.values():
            assert each.shown == self.head, (each.name, each.shown, self.head)
            kept = {self.head.snapshot.txid} if each.name in self.head.nodes else set()
            assert set(each.disk) == kept, (each.name, each.disk, self.head)
        for name in self.head.nodes:
            self.check_part(self.nodes[name], self.head)


def run(seed: int, kind: type[Cluster] = Cluster) -> Cluster:
    """Runs one history to its end; an AssertionError says what did not hold."""
    cluster = kind(seed)
    cluster.chaos(70.0)
    cluster.heal()
    cluster.check_end()
    return cluster
