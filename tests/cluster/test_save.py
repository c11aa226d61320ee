"""Saves and loads of real processes through real daemons, while things die around them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenplexfs
from tenplexfs.client.arrays import source_of
from tenplexfs.client.connection import Connection
from tenplexfs.core.build import build_ptc
from tenplexfs.errors import ConflictError, InvalidError, NoRoomError, PreconditionError
from tenplexfs.formats import npy
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.formats.structure import flatten
from tests.cluster.daemons import Daemon, Daemons, check, until
from tests.cluster.rank import matches, state_of
from tests.cluster.ranks import all_do, ranks
from tests.runtime.cluster import layout_json, tensors_of

pytestmark = [pytest.mark.cluster, pytest.mark.mount]

BIG = {
    "big": {"shape": [4, 1 << 19], "dtype": "float32", "shard": [{"axis": "tp", "dim": 0}], "on": {"pp": 0}},
    "bulk": {"shape": [3, 1 << 18], "dtype": "float64", "on": {"pp": 1}},
}


def layout(**changes: object) -> bytes:
    content = json.loads(layout_json())
    content["tensors"].update(BIG)
    return json.dumps({**content, **changes}).encode()


@pytest.fixture
def two(tmp_path):
    with Daemons(tmp_path, 2, memory="512MiB") as daemons:
        file = tmp_path / "layout.json"
        file.write_bytes(layout())
        daemons.nodes[0].ok("job", "create", "gpt", "--layout", str(file))
        yield daemons


def touched(store: Path) -> set[tuple[str, int]]:
    """The files of a store, and when each was last changed; one may be used again under its name."""
    return {(file.name, file.stat().st_ctime_ns) for file in (store / "objects").iterdir()}


def whole_of(node: Daemon, seed: int) -> dict[str, np.ndarray]:
    return tensors_of(build_ptc(parse_layout((node.mount / "gpt" / "layout.json").read_bytes())), seed)


def test_save_from_all_ranks_load_anywhere_reconfigure_and_go_on(two, tmp_path):
    a, b = two.nodes
    with ranks(a, a, b, b) as group:
        (snapshot,) = set(all_do(group, "save", 1, True))
        assert snapshot.startswith("1:1:")
        for node in two.nodes:
            assert node.job()["step"] == 1
            check(node.mount, "gpt", whole_of(node, 1))
        # again and again, into files that were used before
        for seed in (2, 3, 4, 5):
            assert len(set(all_do(group, "save", seed, False))) == 1
            (snapshot,) = set(all_do(group, "wait"))
            assert snapshot.startswith(f"1:{seed}:")
            assert all_do(group, "load", seed) == [[]] * 4
        for node in two.nodes:
            check(node.mount, "gpt", whole_of(node, 5))
            assert node.ok("verify")["mismatches"] == []
            leaf = json.loads((node.mount / "gpt/model/2/per_rank/seed.json").read_text())
            assert leaf == 1002
        assert (a.mount / "gpt@4").is_dir()
        state = tenplexfs.load(a.mount / "gpt@4" / "model" / "3")  # a rank of the other node, an older step
        assert matches(state, state_of(layout(), 3, 4)) == []

        file = tmp_path / "new.json"
        tensors = {**json.loads(layout())["tensors"]}
        for name in ("layers/{i}/w", "head", "big", "bulk", "emb"):
            tensors[name] = {k: v for k, v in tensors[name].items() if k != "on"}
        changed = {"mesh": {"dp": 2, "tp": 3}, "nodes": {"node0": [0, 1], "node1": [2, 3, 4, 5]}}
        for each in tensors.values():
            for cut in each.get("shard", ()):
                if not cut.get("flat") and "pad_to" not in cut:
                    cut["rule"] = "ceil"
        file.write_bytes(layout(**changed, tensors=tensors))
        b.ok("reconfigure", "gpt", str(file))
        assert "generation" in group[0].do("save", 6, True)["message"]
    whole = whole_of(a, 5)
    for node in two.nodes:
        check(node.mount, "gpt", whole)
    new = (a.mount / "gpt" / "layout.json").read_bytes()
    for rank in range(6):
        state = tenplexfs.load((a if rank < 2 else b).mount / "gpt" / "model" / str(rank))
        wanted = state_of(new, rank, 5)
        wanted["per_rank"] = {"seed": 1000 + rank % 4, "names": ("a", None, {1, 2})}
        assert matches(state, wanted) == []


def test_a_save_in_the_background_returns_when_the_state_is_copied(two):
    a, b = two.nodes
    paths = [(a, a, b, b)[rank].mount / "gpt" / "model" / str(rank) for rank in range(4)]
    saves = []
    for rank, path in enumerate(paths):
        state = state_of(layout(), rank, 1)
        saves.append(tenplexfs.save(state, path, step=1, wait=False))
        assert rank == 3 or not saves[0].done()
        for value in state.values():
            if isinstance(value, np.ndarray):
                value.fill(0)  # what the trainer does next
    assert len({each.wait(60) for each in saves}) == 1
    check(a.mount, "gpt", whole_of(a, 1))


def test_a_save_that_waits_says_for_whom(two, monkeypatch, caplog):
    monkeypatch.setattr("tenplexfs.client.saving._SAY_S", 0.0)
    a, b = two.nodes
    paths = [(a, a, b, b)[rank].mount / "gpt" / "model" / str(rank) for rank in range(4)]
    saves = [
        tenplexfs.save(state_of(layout(), rank, 1), paths[rank], step=1, wait=False) for rank in (0, 2, 3)
    ]
    until(lambda: len(caplog.messages) == 3)
    assert sorted(caplog.messages) == [
        "save of gpt, step 1: waits for ranks 1",
        *["save of gpt, step 1: waits for ranks of other nodes"] * 2,
    ]
    saves.append(tenplexfs.save(state_of(layout(), 1, 1), paths[1], step=1, wait=False))
    assert len({each.wait(60) for each in saves}) == 1


def test_a_process_that_dies_in_its_save_drops_the_step_and_the_next_run_saves(two):
    a, b = two.nodes
    with ranks(a, a, b, b) as group:
        all_do(group, "save", 1, True)
        files = touched(b.store)
        for each in group[:3]:
            each.ask("save", 2, True)
        until(lambda: touched(b.store) - files)  # rank 2 has begun
        group[2].end()
        answers = [each.hear() for each in group[:2]]
        assert [each["error"] for each in answers] == ["ConflictError"] * 2, answers
        assert "the process of rank 2 ended in its save" in answers[0]["message"]
        assert a.job()["step"] == 1
    with ranks(a, a, b, b) as group:
        assert all_do(group, "load", 1) == [[]] * 4
        (snapshot,) = set(all_do(group, "save", 2, True))
        assert snapshot.startswith("1:2:")
    for node in two.nodes:
        check(node.mount, "gpt", whole_of(node, 2))


@pytest.mark.parametrize("which", [0, 1])
def test_a_daemon_is_killed_and_restarted_in_the_middle_of_a_save(two, which):
    a, b = two.nodes
    with ranks(a, a, b, b) as group:
        all_do(group, "save", 1, True)
        waiting = [0, 1, 2] if which else [1, 2, 3]
        last = ({0, 1, 2, 3} - set(waiting)).pop()
        for rank in waiting:
            group[rank].ask("save", 2, True)
        two.nodes[which].kill()
        two.nodes[which].start()
        group[last].ask("save", 2, True)
        answers = [each.hear() for each in group]
        assert len(set(map(str, answers))) == 1 and str(answers[0]).startswith("1:2:"), answers
        two.nodes[which].wait()
    for node in two.nodes:
        until(lambda node=node: node.job()["step"] == 2)
        check(node.mount, "gpt", whole_of(node, 2))


def test_a_store_that_is_full_refuses_the_save_and_keeps_the_step_before(tmp_path):
    with Daemons(tmp_path, 1, memory="12MiB") as daemons:
        (node,) = daemons.nodes
        path = node.mount / "gpt" / "model" / "0"
        first = {"w": np.arange(2_000_000, dtype=np.float32), "b": np.ones(3)}
        tenplexfs.save(first, path, step=1)
        with pytest.raises(NoRoomError, match="needed") as caught:
            for step in (2, 3, 4):
                tenplexfs.save({"w": first["w"] + step, "b": first["b"]}, path, step=step)
        assert caught.value.errno == 28
        kept = node.job()["step"]
        state = tenplexfs.load(path)
        expected = first["w"] + (kept if kept > 1 else 0)
        assert state["w"].tobytes() == expected.astype(np.float32).tobytes()
        assert node.ok("verify")["mismatches"] == []


def test_what_does_not_fit_is_refused_by_name(two):
    a, b = two.nodes
    path = a.mount / "gpt" / "model" / "0"
    good = state_of(layout(), 0, 1)
    with pytest.raises(InvalidError, match=r"norm: wanted float64 \[\], got float32 \[2\]") as caught:
        tenplexfs.save({**good, "norm": np.zeros(2, np.float32), "extra": np.ones(1)}, path, step=1)
    assert "extra: the layout has none on this rank" in caught.value.message
    missing = {key: value for key, value in good.items() if key != "emb"}
    with pytest.raises(InvalidError, match=r"emb: wanted float32 \[6, 6\], is missing"):
        tenplexfs.save(missing, path, step=1)
    with pytest.raises(PreconditionError, match="rank 0 is on node node0, this is node1; save there"):
        tenplexfs.save(good, b.mount / "gpt" / "model" / "0", step=1)
    with pytest.raises(InvalidError, match="no rank 9"):
        tenplexfs.save(good, a.mount / "gpt" / "model" / "9", step=1)
    with pytest.raises(ConflictError, match="generation 7"):
        tenplexfs.save(good, path, step=1, snapshot="7:1:00000000000000aa")
    assert a.job()["step"] is None


def test_replicas_that_differ_are_refused_with_tensor_and_ranks(two):
    a, b = two.nodes
    states = [state_of(layout(), rank, 1) for rank in range(4)]
    odd = states[2]["norm"].copy()
    odd.view(np.uint64)[...] ^= 1
    states[2]["norm"] = odd
    failures: list[Exception] = []

    def save(rank: int) -> None:
        node = (a, a, b, b)[rank]
        try:
            tenplexfs.save(states[rank], node.mount / "gpt" / "model" / str(rank), step=1)
        except (InvalidError, ConflictError) as error:
            failures.append(error)

    def save_all() -> None:
        threads = [threading.Thread(target=save, args=(rank,)) for rank in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)

    save_all()
    assert len(failures) == 4
    assert any("norm: ranks" in str(each) and "bytes differ" in str(each) for each in failures), failures
    assert a.job()["step"] is None

    # The same processes may try the step again.
    failures.clear()
    states[2]["norm"] = states[0]["norm"]
    save_all()
    assert not failures
    check(a.mount, "gpt", whole_of(a, 1))
    for node in two.nodes:
        assert "does not know this job" not in node.log.read_text()


def test_a_save_by_a_stale_step_or_without_saying_where_from_is_refused(tmp_path):
    with Daemons(tmp_path, 1) as daemons:
        (node,) = daemons.nodes
        path = node.mount / "lone" / "model" / "0"
        code = (
            "import sys, numpy, tenplexfs; "
            "tenplexfs.save({'w': numpy.ones(4)}, sys.argv[1], step=int(sys.argv[2]))"
        )

        def other_process(step: int) -> str:
            done = subprocess.run(
                [sys.executable, "-c", code, str(path), str(step)],
                capture_output=True,
                text=True,
                check=False,
            )
            return done.stderr

        assert other_process(1) == ""
        assert "say what this run was loaded from" in other_process(2)
        tenplexfs.load(path)
        with pytest.raises(PreconditionError, match="step 1: is at step 1 already"):
            tenplexfs.save({"w": np.ones(4)}, path, step=1)
        tenplexfs.save({"w": np.ones(4)}, path, step=2)


def test_four_ranks_stop_at_one_step_save_and_are_started_again(two, tmp_path):
    a, b = two.nodes
    with ranks(a, a, b, b) as group:
        all_do(group, "save", 1, True)
        steps = [2] * 4
        answers: dict[int, set[bool]] = {}
        ended = [False] * 4
        new = tmp_path / "new.json"
        new.write_bytes(layout(nodes={"node0": [0, 1, 2], "node1": [3]}))
        order = np.random.default_rng(0)
        reconfigure: threading.Thread | None = None
        result: list[Any] = []
        for turn in range(100_000):  # until the command has begun, however long that takes
            if turn == 40:
                reconfigure = threading.Thread(
                    target=lambda: result.append(b.ok("reconfigure", "gpt", str(new), "--stop-timeout", "50"))
                )
                reconfigure.start()
            rank = int(order.integers(4))
            if ended[rank] or steps[rank] > min(s for s, e in zip(steps, ended, strict=True) if not e):
                continue
            answer = group[rank].do("should_stop", steps[rank])
            answers.setdefault(steps[rank], set()).add(answer)
            if answer:
                ended[rank] = True
                group[rank].ask("save", steps[rank], True)
            else:
                steps[rank] += 1
            if all(ended):
                break
        (snapshot,) = {each.hear() for each in group}
        assert all(len(each) == 1 for each in answers.values()), answers
        assert [step for step, each in answers.items() if each == {True}] == [steps[0]]
        assert reconfigure is not None
        reconfigure.join(60)
        assert result and snapshot.startswith(f"1:{steps[0]}:")
    assert a.job()["generation"] == 2 and a.job()["step"] == steps[0]
    check(a.mount, "gpt", whole_of(a, steps[0]))
    found = tenplexfs.wait(Path(a.mount) / "gpt", state="ready", generation=2, timeout_s=30)
    assert (found["ranks"], found["world_size"], found["stop"]) == ([0, 1, 2], 4, None)


def test_whoever_keeps_a_file_open_cannot_change_what_was_sealed(tmp_path):
    with Daemons(tmp_path, 1, memory="256MiB") as daemons:
        (node,) = daemons.nodes
        path = node.mount / "gpt" / "model" / "0"
        array = np.arange(1 << 19, dtype=np.float32)
        tenplexfs.save({"w": array}, path, step=1)
        with Connection(str(node.socket)) as client:
            document = flatten({"w": array + 1}, source_of).document
            begun = client.ask(
                "save.begin",
                job="gpt",
                rank=0,
                step=2,
                snapshot=tenplexfs.env(path)["snapshot"],
                process="1-a",
                run="",
                paths=["w"],
                kinds=[["float32", [1 << 19]]],
                of=bytes(4),
                ties={},
                document=document,
                consumed=None,
                world=1,
            )
            _, (fd,) = client.ask_fds("save.files", save=begun["save"], first=0, count=1)
            header = npy.header(array.shape, "float32")
            offset = len(header)
            os.pwritev(fd, [header, (array + 1).tobytes()], 0)
            client.ask("save.seal", save=begun["save"])
            until(lambda: client.ask("save.wait", job="gpt", step=2)["snapshot"])
            os.pwrite(fd, b"\xff" * 4096, offset)
            os.close(fd)
        assert tenplexfs.load(path)["w"].tobytes() == (array + 1).tobytes()
        assert np.load(path / "w.npy").tobytes() == (array + 1).tobytes()
        assert node.ok("verify")["mismatches"] == []


def test_threads_and_forked_children_load_and_what_is_loaded_stays(tmp_path):
    with Daemons(tmp_path, 1, memory="256MiB") as daemons:
        (node,) = daemons.nodes
        path = node.mount / "gpt" / "model" / "0"
        array = np.arange(1 << 20, dtype=np.float32)
        tenplexfs.save({"w": array, "s": array[:5]}, path, step=1)
        kept = tenplexfs.load(path)
        found: list[bytes] = []

        def load() -> None:
            for _ in range(5):
                found.append(tenplexfs.load(path)["w"].tobytes())

        threads = [threading.Thread(target=load) for _ in range(4)]
        for each in threads:
            each.start()
        child = os.fork()
        if not child:  # a data loader's worker
            try:
                good = kept["w"].tobytes() == array.tobytes()
                good = good and tenplexfs.load(path)["s"].tobytes() == array[:5].tobytes()
                os._exit(0 if good else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        for each in threads:
            each.join(60)
        assert set(found) == {array.tobytes()} and len(found) == 20
        for step in range(2, 7):  # its file is dropped, and never used again while it is mapped
            tenplexfs.save({"w": array * step, "s": array[:5]}, path, step=step)
        assert kept["w"].tobytes() == array.tobytes()
        kept["w"][:] = 0
        assert tenplexfs.load(path)["w"].tobytes() == (array * 6).tobytes()
