"""What tools and numpy see in a real mount."""

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tenplexfs.core.dtypes import dtype_of
from tests.fuse.memory import CREATED_NS, local, npy, small_ptc, whole

PTC = small_ptc()


def run(*command: object) -> str:
    done = subprocess.run(
        [str(word) for word in command], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    return done.stdout


def load(path: Path, dtype: str, **options: object) -> np.ndarray:
    array = np.load(path, **options)
    return array if array.dtype == dtype_of(dtype) else array.view(dtype_of(dtype))


@pytest.fixture
def job(daemon) -> Path:
    daemon("publish", version=1)
    return daemon.path / "gpt"


def test_every_file_has_the_bytes_of_its_shard(job):
    for rank in range(PTC.world_size):
        for path in PTC.rank_paths(rank):
            file = job / f"model/{rank}/{path}.npy"
            np.testing.assert_array_equal(load(file, PTC.tensors[path].dtype), local(PTC, rank, path, 1))
    for path, tensor in PTC.tensors.items():
        np.testing.assert_array_equal(load(job / f"full/{path}.npy", tensor.dtype), whole(PTC, path, 1))


@pytest.mark.parametrize("mode", ["r", "c"])
def test_numpy_maps(job, mode):
    array = np.load(job / "full/embedding/weight.npy", mmap_mode=mode)
    np.testing.assert_array_equal(array, whole(PTC, "embedding/weight", 1))


def test_writing_is_erofs(job):
    for attempt in (
        lambda: np.load(job / "full/head.npy", mmap_mode="r+"),
        lambda: (job / "new").touch(),
        lambda: (job / "new").mkdir(),
        lambda: (job / "job.json").unlink(),
        lambda: (job / "job.json").rename(job / "other"),
        lambda: (job / "job.json").chmod(0o777),
        lambda: os.setxattr(job / "job.json", "user.x", b"1"),
        lambda: os.truncate(job / "job.json", 0),
    ):
        with pytest.raises(OSError) as raised:
            attempt()
        assert raised.value.errno == errno.EROFS


def test_tools_agree(job, tmp_path):
    files = sorted(run("find", job, "-type", "f").split())
    assert len(files) == sum(len(names) for _, _, names in os.walk(job)) > 20
    sizes = dict(
        line.split()[::-1] for line in run("find", job, "-type", "f", "-printf", r"%s %p\n").splitlines()
    )
    blocks = sum(-(-int(size) // 512) for size in sizes.values())
    assert int(run("du", "-s", "--block-size=512", job).split()[0]) == blocks
    assert sum(map(int, sizes.values())) == int(run("du", "-s", "--apparent-size", "-b", job).split()[0])
    listed = run("ls", "-lR", job)
    assert listed.count(".npy") == sum(file.endswith(".npy") for file in files)

    run("cp", "-r", job, tmp_path / "copy")
    run("tar", "-C", job.parent, "-cf", tmp_path / "tar", "gpt")
    (tmp_path / "out").mkdir()
    run("tar", "-C", tmp_path / "out", "-xf", tmp_path / "tar")
    sums = {Path(line[66:]).relative_to(job): line[:64] for line in run("sha256sum", *files).splitlines()}
    for copy in (tmp_path / "copy", tmp_path / "out" / "gpt"):
        copied = [copy / file for file in sums]
        assert [line[:64] for line in run("sha256sum", *copied).splitlines()] == list(sums.values())
        subprocess.run(["chmod", "-R", "u+w", copy], check=True)


def test_stat(job):
    status = (job / "full/scale.npy").stat()
    assert (status.st_mode, status.st_nlink, status.st_size, status.st_blocks) == (0o100444, 1, 136, 1)
    assert (status.st_uid, status.st_gid) == (os.getuid(), os.getgid())
    assert status.st_mtime_ns == CREATED_NS + 1
    for directory, directories, _ in os.walk(job.parent):
        assert Path(directory).stat().st_nlink == 2 + len(directories), directory
    free = shutil.disk_usage(job)
    assert (free.total, free.used) == (1 << 30, 1 << 28)
    assert run("stat", "-f", "-c", "%T", job).strip() == "fuseblk" or "fuse" in run(
        "stat", "-f", "-c", "%T", job
    )


def test_xattrs(job):
    file = job / "model/0/layers/0/w.npy"
    assert os.getxattr(file, "user.tenplexfs.dtype") == b"bfloat16"
    assert json.loads(os.getxattr(file, "user.tenplexfs.global_shape")) == [4, 8]
    assert len(os.listxattr(file)) == 3
    assert os.listxattr(job / "job.json") == []
    with pytest.raises(OSError) as raised:
        os.getxattr(file, "user.other")
    assert raised.value.errno == errno.ENODATA


def test_safetensors_opens_a_rank_and_the_model(job):
    for name in ("full/model", *(f"model/{rank}" for rank in range(PTC.world_size))):
        file = job / f"{name}.safetensors"
        assert file.stat().st_size == len(file.read_bytes())
        rank = None if name.startswith("full") else int(name[6:])
        paths = PTC.tensors if rank is None else PTC.rank_paths(rank)
        tensors = load_file(file)
        assert set(tensors) == {path.replace("/", ".") for path in paths}
        with safe_open(file, "pt") as opened:
            for path in paths:
                wanted = whole(PTC, path, 1) if rank is None else local(PTC, rank, path, 1)
                for found in (tensors[path.replace("/", ".")], opened.get_tensor(path.replace("/", "."))):
                    assert tuple(found.shape) == wanted.shape
                    assert bytes(found.contiguous().reshape(-1).view(torch.uint8).numpy()) == wanted.tobytes()


def test_control_files_are_made_at_each_open(daemon, job):
    top = daemon.path / ".tenplexfs"
    assert sorted(entry.name for entry in top.iterdir()) == ["jobs", "status.json", "version"]
    assert (top / "jobs/gpt/stop").read_text() == "-\n"
    assert json.loads((top / "jobs/gpt/status.json").read_text()) == {"job": "gpt"}
    assert (top / "status.json").read_text() == "{}"
    daemon("storm", first=7, last=8, grace_s=5)
    assert (top / "status.json").read_text() == "7"


def test_a_job_without_state_shows_its_documents(daemon):
    daemon("publish", job="new", state=False)
    assert sorted(entry.name for entry in (daemon.path / "new").iterdir()) == ["job.json", "layout.json"]


def test_a_big_file_reads_whole_and_in_any_order(daemon):
    size = 48 << 20
    daemon("publish", big=size)
    file = daemon.path / "gpt/full/big.npy"
    expected = npy((np.arange(size) % 50).astype(np.uint8), "uint8")
    assert file.read_bytes() == expected
    with file.open("rb", buffering=0) as stream:
        for begin in (size - 100, 5, 1 << 20, size + 127, 0):
            stream.seek(begin)
            assert stream.read(3000) == expected[begin : begin + 3000]


def test_a_directory_of_many_entries(daemon):
    daemon("publish", count=20_000)
    lines = run("ls", "-l", daemon.path / "gpt/model/0/many").splitlines()[1:]
    assert len({line.split()[-1] for line in lines}) == len(lines) == 20_000
    assert {line.split()[4] for line in lines} == {"136"}


def test_remote_reads_wait_and_local_ones_do_not(daemon):
    daemon("publish", remote=3)
    remote = daemon.path / "gpt/model/3/head.npy"
    readers = [subprocess.Popen(["sha256sum", remote], stdout=subprocess.PIPE, text=True) for _ in range(20)]
    try:
        for path in PTC.rank_paths(0):
            (daemon.path / f"gpt/model/0/{path}.npy").read_bytes()
        assert remote.stat().st_size == 128 + 3 * 6 * 4
        assert all(reader.poll() is None for reader in readers)
        daemon("open_gate")
        sums = {reader.communicate(timeout=60)[0].split()[0] for reader in readers}
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
            reader.stdout.close()
    assert len(sums) == 1
    np.testing.assert_array_equal(np.load(remote), local(PTC, 3, "head", 0))


def test_a_remote_read_that_fails_is_eio(daemon):
    daemon("publish", remote=3, fails=True)
    with pytest.raises(OSError) as raised:
        (daemon.path / "gpt/model/3/head.npy").read_bytes()
    assert raised.value.errno == errno.EIO
    assert "node1 did not answer" in daemon.log.read_text()
    (daemon.path / "gpt/model/0/scale.npy").read_bytes()
