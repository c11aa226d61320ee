"""Namespace and store against a dict: whatever is staged, committed, shown, opened, dropped, or killed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from tenplexfs.core.build import build_ptc
from tenplexfs.core.layout import Layout, Mesh, TensorEntry
from tenplexfs.core.snapshot import JobName, SnapshotId, TxId
from tenplexfs.errors import NoRoomError, PreconditionError, StaleError
from tenplexfs.formats import npy
from tenplexfs.formats.layout_json import layout_digest, layout_text
from tenplexfs.runtime.namespace import ROOT_INO, Control, Namespace, StoreNumbers
from tenplexfs.runtime.snapshot import Snapshot
from tenplexfs.storage.store import Store, Wanted
from tests.runtime.test_reading import World

JOB = JobName("gpt")
LIMIT = 4 << 20
SHAPES = {"big": (300_000,), "small": (5, 3), "empty": (0, 2), "scalar": ()}
LAYOUT = Layout(
    Mesh((("dp", 1),)), tuple(TensorEntry(path, shape, "float32") for path, shape in SHAPES.items())
)
PTC = build_ptc(LAYOUT)


def content(seed: int, path: str) -> np.ndarray:
    return np.random.default_rng([seed, len(path)]).random(SHAPES[path], "f4")


class Machine(RuleBasedStateMachine):
    """The model: which seed each tensor of each snapshot came from, what is committed, what is shown."""

    staged = Bundle("staged")
    files = Bundle("files")

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.seeds: dict[str, dict[str, int]] = {}
        self.committed: set[str] = set()
        self.shown: str | None = None
        self.slots: dict[int, str] = {}
        self.expected: dict[int, bytes] = {}
        self.count = 0
        self.store: Store
        self.start()

    def start(self) -> None:
        self.store = Store.open(self.path / "store", node="n", limit_bytes=LIMIT)
        numbers = lambda: StoreNumbers(self.store.limit_bytes, self.store.used_bytes)  # noqa: E731
        self.tree = Namespace(Control({}, list, {}), numbers, clock_ns=lambda: 1)
        self.views: dict[int, Snapshot] = {}
        self.slots, self.expected = {}, {}

    def view(self, txid: str) -> Snapshot:
        stored = next(each for each in self.store.snapshots() if each.id.txid == txid)
        fetcher = World("node0").view.fetcher
        return Snapshot(
            job=JOB,
            snapshot=stored.id,
            layout_json=stored.layout_json,
            layout_digest=layout_digest(LAYOUT),
            ptc=PTC,
            created_ns=1,
            arrays=self.store.arrays(stored),
            fetcher=fetcher,
        )

    @rule(
        target=staged,
        seed=st.integers(0, 5),
        shared=st.sets(st.sampled_from(sorted(SHAPES))),
        half=st.booleans(),
    )
    def stage(self, seed: int, shared: set[str], half: bool):
        """Stages a snapshot, sharing some arrays with the newest one; or leaves it half done."""
        self.count += 1
        txid = f"{self.count:016x}"
        base = self.store.snapshots()[-1] if self.seeds else None
        ingest = self.store.ingest(JOB, SnapshotId(1, self.count, TxId(txid)), layout_text(LAYOUT), 1)
        own = [path for path in SHAPES if base is None or path not in shared]
        for path in SHAPES:
            if path not in own:
                ingest.share((0, path), base.arrays[0, path])
        try:
            ingest.reserve([Wanted(((0, path),), SHAPES[path], "float32") for path in own])
        except NoRoomError as error:
            assert error.details["used_bytes"] + error.details["needed_bytes"] > LIMIT
            ingest.drop()
            return multiple()
        for path in own[: len(own) // 2 if half else None]:
            ingest.pwrite((0, path), 0, content(seed, path))
        if half:
            if seed % 2:
                ingest.drop()
            else:
                self.crash()
            return multiple()
        ingest.seal({(0, path): PTC.shard(0, path) for path in SHAPES})
        self.seeds[txid] = {path: seed if path in own else self.seeds[base.id.txid][path] for path in SHAPES}
        return txid

    @rule(txid=staged)
    def commit_and_show(self, txid: str) -> None:
        if txid not in self.seeds:
            return
        self.store.commit(JOB, txid)
        self.committed.add(txid)
        self.show(txid)

    def show(self, txid: str) -> None:
        view = self.view(txid)
        slot = self.tree.publish(JOB, view, PTC)
        self.views[slot], self.slots[slot], self.shown = view, txid, txid

    @precondition(lambda self: self.shown is not None)
    @rule(target=files, path=st.sampled_from(sorted(SHAPES)), full=st.booleans())
    def open(self, path: str, full: bool):
        ino = ROOT_INO
        for name in ("gpt", "full" if full else "model", *([] if full else ["0"]), f"{path}.npy"):
            ino = self.tree.lookup(ino, name.encode()).ino
        fh = self.tree.open(ino)
        array = content(self.seeds[self.shown][path], path)
        self.expected[fh] = npy.header(array.shape, "float32") + array.tobytes()
        assert self.tree.getattr(ino).size == len(self.expected[fh])
        return fh

    @rule(fh=files, begin=st.integers(0, 1_300_000), size=st.integers(1, 5000))
    def read(self, fh: int, begin: int, size: int) -> None:
        """An open file keeps its bytes, whatever was dropped and freed since."""
        if fh in self.expected:
            found = self.tree.content(fh).read(begin, size)
            assert bytes(found) == self.expected[fh][begin : begin + size]

    @rule(fh=consumes(files))
    def release(self, fh: int) -> None:
        if self.expected.pop(fh, None) is not None:
            self.tree.release(fh)

    @rule()
    def free_the_past(self) -> None:
        """Frees and drops all that is not shown."""
        current = self.tree.slot(JOB)
        for slot, txid in list(self.slots.items()):
            if slot == current:
                with pytest.raises(PreconditionError):
                    self.tree.free(slot)
                continue
            self.tree.free(slot)
            self.views.pop(slot).arrays.release()
            del self.slots[slot]
            with pytest.raises(StaleError):
                self.tree.lookup(slot << 40, b"job.json")
            if txid != self.shown:
                self.drop(txid)

    @rule(txid=staged)
    def drop(self, txid: str) -> None:
        if txid in self.seeds and txid not in self.slots.values():
            self.store.drop(JOB, txid)
            del self.seeds[txid]
            self.committed.discard(txid)

    @rule()
    def crash(self) -> None:
        """The process is gone: its lock and maps are; the next owner finds what was named."""
        self.store._directory.close()
        self.tree.release_all()
        self.start()
        if self.shown is not None:
            self.show(self.shown)

    @invariant()
    def the_store_is_what_the_dict_says(self) -> None:
        found = {each.id.txid: each for each in self.store.snapshots()}
        assert {txid: each.committed for txid, each in found.items()} == {
            txid: txid in self.committed for txid in self.seeds
        }
        assert self.store.used_bytes <= LIMIT
        files = {ref.file for each in found.values() for ref in each.arrays.values()}
        there = {
            f"{kind}/{f.name}" for kind in ("objects", "segments") for f in (self.store.path / kind).iterdir()
        }
        assert files <= there

    def teardown(self) -> None:
        assert list(self.store.verify()) == []
        for txid in self.seeds:
            with self.view(txid).arrays as arrays:
                for path in SHAPES:
                    wanted = content(self.seeds[txid][path], path)
                    np.testing.assert_array_equal(arrays.array(0, path), wanted)
        self.tree.release_all()
        for view in self.views.values():
            view.arrays.release()
        for txid in list(self.seeds):
            self.store.drop(JOB, txid)
        assert self.store.used_bytes == 0, "memory of what is gone is back"
        self.store.close()
        shutil.rmtree(self.path)


TestNamespaceAndStore = Machine.TestCase
TestNamespaceAndStore.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
