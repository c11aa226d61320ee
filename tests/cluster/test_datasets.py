"""Datasets of real daemons, read through their mounts."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tenplexfs
from tests.cluster.daemons import Daemon, Daemons, until
from tests.cluster.trainers import Job, layout, order_of, rows_of
from tests.storage.samples.conftest import RangeServer

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.mount,
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse is not there"),
]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    with Daemons(tmp_path_factory.mktemp("datasets"), 2) as daemons:
        yield daemons


def test_each_sample_once_in_the_order_of_one_rank_over_resizes_in_mid_epoch(two):
    job = Job(two, "once", 2)
    job.add("train", rows_of(two.base, 40), options=["--seed", "5"])
    job.train(2)
    job.save()
    assert job.meta("train")["cursor"] == {"epoch": 0, "consumed": 8, "global_batch": 4, "seed": 5}
    assert [json.loads((job.data("train", r) / "meta.json").read_text())["next"] for r in (0, 1)] == [4, 4]
    planned = job.first.ok("plan", "--job", "once", str(job.file(layout(4))))["dataset"]["train"]
    assert (planned["degree"], planned["samples_left"]) == ({"old": 2, "new": 4}, 32)
    job.reconfigure(layout(4))
    np.testing.assert_array_equal(np.load(job.data("train", 3) / "order.npy"), order_of(40, 5, 0)[11::4])
    job.train(3)
    assert (
        json.loads((job.root() / "job.json").read_text())["datasets"]["train"]["consumed"] == 8
    )  # not saved
    job.save()
    status, _, error = job.first.run("reconfigure", "once", "--mesh", "dp=3", "--nodes", "node0:3")
    assert (status, "degrees that divide 4 are 1, 2, 4" in (error or json.dumps(_))) == (1, True)
    job.reconfigure(layout(1))
    job.train(5)
    job.save()
    assert job.meta("train")["cursor"] == {"epoch": 1, "consumed": 0, "global_batch": 4, "seed": 5}
    job.train(10)
    job.save()
    wanted = [*order_of(40, 5, 0), *order_of(40, 5, 1)]
    assert job.reads == [wanted[at : at + 4] for at in range(0, 80, 4)]
    for node in two.nodes:
        assert node.ok("dataset", "verify", "once", "train")["ranks"] == 1


def test_another_batch_and_a_cursor_that_a_save_gives(two):
    job = Job(two, "batches", 2)
    job.add("train", rows_of(two.base, 64), options=["--no-shuffle"])
    job.train(3)
    job.save()
    job.reconfigure(layout(2, batch=8))
    assert job.meta("train")["cursor"] == {"epoch": 0, "consumed": 12, "global_batch": 8, "seed": 0}
    job.train(1)
    assert job.reads[-1] == list(range(12, 20))
    job.save(consumed=30)
    assert job.meta("train")["cursor"]["consumed"] == 30
    assert job.meta("train")["row_0"]["consumed"] == 12
    job.train(1)  # the rows of the generation stay where they were
    job.save()
    assert job.meta("train")["cursor"]["consumed"] == 38
    job.reconfigure(layout(1, batch=8))
    assert np.load(job.data("train") / "order.npy")[0] == 38


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
def test_loaders_with_any_number_of_workers_see_one_stream_and_consume_nothing(two):
    loader = pytest.importorskip("torch.utils.data")
    import tenplexfs.torch

    job = Job(two, "workers", 2)
    job.add("train", rows_of(two.base, 60), options=["--seed", "1"])
    job.train(1)
    job.save()
    dataset = tenplexfs.torch.Dataset(job.root() / "dataset/train", rank=1)
    assert (len(dataset), dataset.first) == (28, 2)
    streams = []
    for workers in (0, 1, 4):
        batches = loader.DataLoader(dataset, batch_size=dataset.local_batch, num_workers=workers)
        streams.append([batch[:, 0].tolist() for batch in batches])
    assert streams[0] == streams[1] == streams[2]
    order = order_of(60, 1, 0)
    assert streams[0] == [order[at + 2 : at + 4] for at in range(4, 60, 4)]
    assert job.meta("train")["cursor"]["consumed"] == 4  # read three times, ahead and over
    fork = os.fork()
    if not fork:
        os._exit(0 if int(dataset[0][0]) == streams[0][0][0] else 1)
    assert os.waitpid(fork, 0)[1] == 0


@pytest.fixture(scope="module")
def formats(two: Daemons) -> Job:
    return Job(two, "formats", 2, with_state=False)


def test_sources_of_npy_files_of_every_kind(two, formats):
    base = two.base / "läden mit %41 und\nZeile"
    base.mkdir()
    record = np.dtype([("wörter", "<i4", (2,)), ("x", ">f8")])
    rows = np.zeros(6, record)
    rows["wörter"] = np.arange(12).reshape(6, 2)
    rows["x"] = np.arange(6)
    np.save(base / "a 1.npy", rows)
    grid = np.arange(48, dtype=np.float32).reshape(8, 2, 3)
    np.save(base / "fortran.npy", np.asfortranarray(grid))
    with (base / "v2.npy").open("wb") as file:
        np.lib.format.write_array(file, grid, version=(2, 0))
    formats.add("structured", base / "a 1.npy", options=["--no-shuffle"])
    formats.add("fortran", base / "fortran.npy", base / "v2.npy", options=["--seed", "2"])
    found = [np.load(formats.data("structured", rank) / "data.npy") for rank in (0, 1)]
    assert found[0].dtype == record
    assert found[0].tobytes() == rows[:2].tobytes()
    both = np.concatenate([grid, grid])
    for rank in (0, 1):
        order = np.load(formats.data("fortran", rank) / "order.npy")
        mapped = np.load(formats.data("fortran", rank) / "data.npy", mmap_mode="r")
        np.testing.assert_array_equal(mapped[3:5], both[order[3:5]])
        np.testing.assert_array_equal(mapped, both[order])
        np.testing.assert_array_equal(
            np.load(formats.data("fortran", rank) / "samples/0/1.npy"), both[order[1]]
        )
    np.save(base / "objects.npy", np.array([{}, []], object), allow_pickle=True)
    status, _, _ = formats.first.run(
        "dataset", "add", "formats", "bad", "--source", str(base / "objects.npy")
    )
    assert status == 1
    assert not (formats.root() / "dataset/bad").exists()
    assert formats.first.run("dataset", "add", "formats", "fortran", "--source", str(base / "v2.npy"))[0] == 1


def test_sources_of_bytes_archives_and_holes(two, formats):
    base = two.base
    np.savez_compressed(base / "packed.npz", a=np.arange(5), b=np.arange(5) * 2, c=np.ones(5, np.int64))
    formats.add("members", base / "packed.npz", options=["--members", "--no-shuffle", "--tail", "keep"])
    assert np.load(formats.data("members", 1) / "data.npy").tolist() == [[1] * 5]
    (base / "any").mkdir()
    bodies = [b"one", b"", b"three\0", os.urandom(70_000), b"5", b"six", b"7", b""]
    for number, body in enumerate(bodies):
        (base / "any" / f"{number}.txt").write_bytes(body)
    formats.add("any", base / "any", options=["--seed", "4"])
    for rank in (0, 1):
        directory = formats.data("any", rank)
        order = np.load(directory / "order.npy")
        blob, index = (directory / "data.bin").read_bytes(), np.load(directory / "index.npy")
        for row, sample in enumerate(order.tolist()):
            assert blob[slice(*index[row].tolist())] == bodies[sample]
            assert (directory / "samples/0" / f"{row}.txt").read_bytes() == bodies[sample]
        assert list(tenplexfs.Dataset(directory)) == [bodies[sample] for sample in order]
    far = base / "far.bin"
    with far.open("wb") as file:
        for at, text in ((1 << 31, b"beyond 31 bits"), ((1 << 32) + 5, b"beyond 32")):
            file.seek(at)
            file.write(text)
    ranges = [(1 << 31, 14), ((1 << 32) + 5, 9), (0, 4), (0, 0)]
    lines = "".join(f"{at} {at + size}\n" for at, size in ranges)
    (base / "far.txt").write_text(f"2\n./far.bin 4\n{lines}./none.bin 0\n")
    (base / "none.bin").touch()
    formats.add("far", base / "far.txt", options=["--kind", "tenplex", "--no-shuffle"])
    parts = [(formats.data("far", rank) / "data.bin").read_bytes() for rank in (0, 1)]
    assert parts == [b"beyond 31 bitsbeyond 32", b"\0" * 4]
    assert (formats.root(1) / "dataset/far/0/1/samples/0/1.bin").read_bytes() == b""


def test_a_sample_whose_source_is_short_fails_alone(two, formats):
    records = two.base / "records.bin"
    records.write_bytes(os.urandom(8 * 8192))
    options = ["--kind", "records", "--record-bytes", "8192", "--no-shuffle"]
    formats.add("short", records, options=options)
    whole = records.read_bytes()
    os.truncate(records, 7 * 8192 + 100)
    with (formats.data("short", 1) / "data.npy").open("rb", buffering=0) as file:
        file.seek(128)
        assert file.read(8192) == whole[2 * 8192 : 3 * 8192]
        file.seek(128 + 3 * 8192 + 4096)
        with pytest.raises(OSError) as caught:
            file.read(4096)
        assert caught.value.errno == errno.EIO
        file.seek(128 + 2 * 8192)
        assert file.read(4096) == whole[6 * 8192 : 6 * 8192 + 4096]
    log = formats.first.log.read_text()
    assert "records.bin: bytes [" in log
    assert "sample 7" in log


def test_tails_ranks_and_sets_that_are_not_split(two):
    job = Job(two, "tails", 1, batch=2, with_state=False)
    five = rows_of(two.base, 5, "five.npy")
    job.add("drop", five, options=["--seed", "1"])
    job.add("keep", five, options=["--seed", "1", "--tail", "keep"])
    job.add("valid", five, options=["--unsplit"])
    order = order_of(5, 1, 0)
    assert np.load(job.data("drop") / "order.npy").tolist() == order[:4]
    assert job.meta("drop")["dropped"] == order[4:]
    assert [len(batch) for batch in tenplexfs.Dataset(job.data("keep")).batches()] == [2, 2, 1]
    job.reconfigure(layout(2, batch=2))
    for rank in (0, 1):
        assert np.load(job.data("valid", rank) / "order.npy").tolist() == [0, 1, 2, 3, 4]
        assert np.load(job.data("keep", rank, epoch=9) / "order.npy").tolist() == order_of(5, 1, 9)[rank::2]
    assert len(np.load(job.data("keep", 1) / "data.npy")) == 2
    for rank in (-1, 5):
        with pytest.raises(ValueError, match=f"rank {rank}: need 0 <= rank < 2"):
            tenplexfs.Dataset(job.root() / "dataset/keep", rank=rank)
    assert job.first.ok("dataset", "show", "tails")["datasets"]["valid"]["unsplit"] is True
    found = subprocess.run(["find", job.root() / "dataset", "-type", "f"], capture_output=True, text=True)
    assert found.stderr == ""
    assert len(found.stdout.splitlines()) > 40
    assert subprocess.run(["du", "-sb", job.root()], capture_output=True).returncode == 0


def test_a_dataset_that_is_removed_frees_its_name_and_then_its_index(two):
    job = Job(two, "removed", 2)
    job.add("train", rows_of(two.base, 48, "gone.npy"), options=["--seed", "5"])
    job.add("valid", rows_of(two.base, 8, "valid.npy"), options=["--unsplit"])
    job.train(2)
    job.save()
    first, second = two.nodes
    digest = first.ok("dataset", "show", "removed")["datasets"]["train"]["digest"]
    indexes = [node.store / "indexes" / digest for node in two.nodes]
    other = rows_of(two.base, 16, "other.npy")
    status, said, _ = second.run("dataset", "add", "removed", "train", "--source", str(other))
    assert (status, said["error"]["code"]) == (1, "ALREADY_EXISTS")
    assert "first `tenplexfs dataset remove removed train`" in said["error"]["message"]
    generation = first.job("removed")["generation"]
    again = job.add("train", two.base / "gone.npy", options=["--seed", "5"])  # as it is, though it went on
    assert (again, first.job("removed")["generation"]) == ("48 samples of 1 files (npy)", generation)
    job.add("train", two.base / "gone.npy", options=["--seed", "5", "--consumed", "8"])
    for options, how in [
        (["--seed", "6"], "another batch, tail, seed or order"),
        (["--seed", "5", "--consumed", "4"], "at epoch 0, 8 consumed"),
        (["--seed", "5", "--kind", "records", "--record-bytes", "8"], "of other samples"),
    ]:
        given = ["dataset", "add", "removed", "train", "--source", str(two.base / "gone.npy"), *options]
        status, said, _ = second.run(*given)
        assert (status, how in said["error"]["message"]) == (1, True), said
    status, said, _ = second.run("dataset", "remove", "removed", "test")
    assert (status, said["error"]["code"]) == (1, "NOT_FOUND")
    assert said["error"]["message"] == "job removed: no dataset test; there are: train, valid"
    assert first.job("removed")["generation"] == 3
    with (job.data("train") / "data.npy").open("rb", buffering=0) as file:
        assert second.ok("dataset", "remove", "removed", "train")["job"]["generation"] == 4
        for node in (0, 1):
            assert [each.name for each in (job.root(node) / "dataset").iterdir()] == ["valid"]
        file.seek(128)
        assert np.frombuffer(file.read(32), np.int64)[::2].tolist() == order_of(48, 5, 0)[:2]
    assert np.load(job.data("valid") / "order.npy").tolist() == list(range(8))
    assert all(index.exists() for index in indexes)  # a step that is kept names it
    job.step += 1
    job.save()
    until(lambda: not any(index.exists() for index in indexes))
    job.add("train", other)
    np.testing.assert_array_equal(np.load(job.data("train") / "order.npy")[:2], order_of(16, 0, 0)[:2])
    assert job.meta("train")["cursor"]["consumed"] == 0


def test_context_parallel_ranks_get_parts_of_each_sample(two):
    context = {"axis": "cp", "dim": 0, "order": "zigzag"}
    text = json.loads(layout(2, context=context))
    text["mesh"] = {"dp": 2, "cp": 2}
    text["nodes"] = {"node0": [0, 1], "node1": [2, 3]}
    path = two.base / "context.json"
    path.write_text(json.dumps(text))
    two.nodes[0].ok("job", "create", "context", "--layout", str(path))
    tokens = np.arange(16 * 8, dtype=np.int32).reshape(16, 8)
    np.save(two.base / "tokens.npy", tokens)
    job = Job.__new__(Job)
    job.two, job.name, job.first = two, "context", two.nodes[0]
    job.add("train", two.base / "tokens.npy")
    order = np.load(job.data("train", 1) / "order.npy")
    for part, columns in ((0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])):
        found = np.load(job.data("train", 1) / "cp" / str(part) / "data.npy")
        np.testing.assert_array_equal(found, tokens[order][:, columns])
        one = tenplexfs.Dataset(job.root() / "dataset/train", rank=1, part=part)[3]
        np.testing.assert_array_equal(one, tokens[order[3], columns])


def test_the_loader_of_tenplex_reads_its_own_layout(two):
    job = Job(two, "old", 2)
    directory = two.base / "npzs"
    directory.mkdir()
    for number in range(20):
        np.savez(directory / f"{number:02}.npz", text=np.full(number + 1, number))
    job.add("train", directory, options=["--seed", "7"])
    order = order_of(20, 7, 0)

    def read(rank: int) -> list[int]:
        """As `MLFSPath.filenames` walks, and the datasets read."""
        root = str(job.root() / "tenplex")
        (head,) = Path(f"{root}/job/old/head.txt").read_text().split()
        part = Path(root + head).read_text().split()[rank]
        samples = []
        for name in Path(f"{root}{part}/list.txt").read_text().split():
            lines = Path(f"{root}{name}.idx").read_text().splitlines()
            assert (lines[0], lines[1].split()[1]) == ("1", str(len(lines) - 2))
            with Path(root + name).open("rb") as file:
                for line in lines[2:]:
                    begin, end = map(int, line.split())
                    file.seek(begin)
                    (two.base / "one.npz").write_bytes(file.read(end - begin))
                    samples.append(int(np.load(two.base / "one.npz")["text"][0]))
            assert len(samples) == len(Path(f"{root}{name}.meta").read_text().split())
        return samples

    assert [read(0)[:4], read(1)[:4]] == [
        [order[at] for at in (0, 1, 4, 5)],
        [order[at] for at in (2, 3, 6, 7)],
    ]
    job.step = 2
    job.save()
    assert "progress-8-cluster-of-2" in (job.root() / "tenplex/job/old/head.txt").read_text()
    assert read(1)[:2] == [order[10], order[11]]
    assert (job.root() / "tenplex/job/old/progress/0/cluster-of-2/rank-000/list.txt").exists()
    assert (job.root() / "tenplex/job/old/progress/4/cluster-of-2/rank-001/0000.tf_record.idx").exists()
    assert not (job.root() / "tenplex/job/old/progress/5").exists()


def _sample_bytes(node: Daemon) -> dict[str, float]:
    """Where the samples of the one remote dataset came from."""
    text = (node.mount / ".tenplexfs/metrics").read_text()
    found = re.findall(r'tenplexfs_sample_bytes\{index="\w+",source="(\w+)"\} (\S+)', text)
    return {source: float(count) for source, count in found}


def test_a_remote_source_is_fetched_ahead_and_peers_serve_it_after_a_resize(two):
    server = RangeServer()
    try:
        size, count = 4096, 256
        body = np.random.default_rng(0).integers(0, 256, (count, size), np.uint8)
        server.files["/far%20away.bin"] = server.files["/far away.bin"] = body.tobytes()
        job = Job(two, "remote", 2)
        options = ["--kind", "records", "--record-bytes", str(size)]
        job.add("train", f"{server.url}/far%20away.bin", options=options)
        # Each node fetches ahead what its rank will read: half of everything, the window has room for it.
        for node in two.nodes:
            until(lambda node=node: _sample_bytes(node).get("source") == size * count / 2)
        asked = len(server.requests)
        job.reconfigure(layout(4, nodes={"node0": [0, 2], "node1": [1, 3]}))
        order = order_of(count, 0, 0)
        for rank, node in enumerate(job.ranks()):
            loader = tenplexfs.Dataset(node.mount / "remote/dataset/train", rank=rank)
            for at in range(0, len(loader), 16):
                np.testing.assert_array_equal(loader[at : at + 16], body[order[rank::4][at : at + 16]])
        assert len(server.requests) == asked
        for node in two.nodes:
            counts = _sample_bytes(node)
            assert counts["source"] == size * count / 2
            assert counts["peers"] > 0
        server.files.clear()  # nothing is asked of it any more: the nodes have all of it
        later = np.load(job.data("train", 0, epoch=3) / "data.npy")
        np.testing.assert_array_equal(later, body[order_of(count, 0, 3)[0::4]])
        job.first.ok("job", "remove", "remote")
    finally:
        server.close()


def test_a_killed_daemon_comes_back_with_its_datasets(two):
    job = Job(two, "again", 2, with_state=False)
    job.add("train", rows_of(two.base, 40), options=["--seed", "6"])
    node = two.nodes[1]
    node.kill()
    node.start()
    node.wait()
    until((job.root(1) / "dataset/train/0/1/data.npy").exists)
    assert np.load(job.root(1) / "dataset/train/0/1/data.npy")[:, 0].tolist() == [
        sample for at in range(0, 40, 4) for sample in order_of(40, 6, 0)[at + 2 : at + 4]
    ]
    assert node.ok("dataset", "verify", "again", "train")["samples"] == 40
