"""A read-only file system as any other: tools, names, numbers, and who may look."""

import errno
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tenplexfs.fuse.mountpoint import find_mount
from tests.fuse.memory import HUGE, HugeContent

NOBODY = 65534
LONG = "x" * 236  # 240 bytes with .npy; a component of a path has no more
NAMES = ["é/ü", "日本/語", "with space", "%2E%2E", "%2Fa", "a;b$(c)&d", "-rf", LONG, "newline\nhere"]


def run(*command: object, cwd: Path | None = None) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60, cwd=cwd)
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def job(daemon) -> Path:
    daemon("publish", version=1, names=NAMES)
    return daemon.path / "gpt"


def test_rsync_copies_all_and_finds_nothing_to_do_the_second_time(job, tmp_path):
    run("rsync", "-a", "--no-owner", "--no-group", f"{job}/", tmp_path / "copy")
    again = run(
        "rsync",
        "-a",
        "--no-owner",
        "--no-group",
        "--checksum",
        "--itemize-changes",
        f"{job}/",
        tmp_path / "copy",
    )
    assert again == ""
    by_time = run(
        "rsync", "-a", "--no-owner", "--no-group", "--itemize-changes", "-n", f"{job}/", tmp_path / "copy"
    )
    assert by_time == "", "times and sizes come along"
    subprocess.run(["chmod", "-R", "u+w", tmp_path / "copy"], check=True)


def test_df_tells_the_store_by_blocks_and_inodes(job):
    line = run("df", "-B1", "--output=size,used,avail,fstype,source", job).splitlines()[1].split()
    assert line == [str(1 << 30), str(1 << 28), str((1 << 30) - (1 << 28)), "fuse.tenplexfs", "tenplexfs"]
    assert os.statvfs(job).f_namemax == 255


def test_fio_reads(daemon):
    daemon("publish", version=1, big=8 << 20)
    file = daemon.path / "gpt/full/big.npy"
    for mode in ("read", "randread"):
        done = run(
            *("fio", "--name=t", f"--rw={mode}", "--bs=64k", "--readonly", "--ioengine=psync"),
            *(f"--filename={file}", "--output-format=json", f"--size={8 << 20}"),
        )
        (result,) = json.loads(done[done.index("{") :])["jobs"]
        assert (result["error"], result["read"]["io_bytes"]) == (0, 8 << 20)


def test_every_kind_of_name(job):
    for name in NAMES:
        file = job / "full" / f"{name}.npy"
        np.testing.assert_array_equal(np.load(file), [1, 2])
        assert file in file.parent.iterdir()
    assert max(len(file.name.encode()) for file in (job / "full").iterdir()) == 240
    assert not (job / "full" / ("x" * 255)).exists()
    with pytest.raises(OSError) as raised:
        (job / "full" / ("x" * 256)).stat()
    assert raised.value.errno == errno.ENAMETOOLONG
    for wrong in (b"\xff\xfe", "é".encode("latin-1")):
        assert not Path(os.fsdecode(os.fsencode(job / "full") + b"/" + wrong)).exists()


@pytest.mark.parametrize(
    "command",
    [
        *("touch {job}/new", "mkdir {job}/new", "rm {job}/job.json", "mv {job}/job.json {job}/other"),
        *(
            "chmod 777 {job}/job.json",
            "truncate -s 0 {job}/job.json",
            "rmdir {job}/full",
            "ln -s a {job}/link",
        ),
        *(
            "ln {job}/job.json {job}/hard",
            "touch {top}/new",
            "mkdir {top}/job2",
            "rm {top}/.tenplexfs/version",
        ),
        *("touch -d 2001-01-01 {job}/job.json", "chown 1 {job}/job.json", "mkfifo {job}/pipe"),
        *("setfattr -n user.x -v 1 {job}/job.json", "dd if=/dev/zero of={job}/job.json count=1 conv=notrunc"),
    ],
)
def test_tools_that_write_are_told_so(job, command):
    words = command.format(job=job, top=job.parent).split()
    done = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}, check=False
    )
    assert done.returncode != 0
    assert "Read-only file system" in done.stderr


def test_offsets_past_4_gib(daemon):
    daemon("publish", huge=True)
    file, wanted = daemon.path / "gpt/model/0/huge.npy", HugeContent()
    found = file.stat()
    assert (found.st_size, found.st_blocks) == (wanted.size, -(-wanted.size // 512))
    with file.open("rb", buffering=0) as stream:
        for begin in ((1 << 31) - 5, (1 << 32) - 5, (1 << 32) + 12345, wanted.size - 10, wanted.size, 0):
            stream.seek(begin)
            assert stream.read(100) == wanted.read(begin, 100), begin
    mapped = np.load(file, mmap_mode="r")
    assert mapped[(1 << 32) + 7] == ((1 << 32) + 7) % 251
    assert mapped.shape == HUGE.shape


def test_a_listing_goes_on_in_its_snapshot_across_a_switch(daemon):
    daemon("publish", version=1, count=3000)
    many = daemon.path / "gpt/model/0/many"
    seen = []
    with os.scandir(many) as entries:
        for n, entry in enumerate(entries):
            seen.append(entry.name)
            if n == 10:
                daemon("publish", version=2, count=5)
                assert len(list(many.iterdir())) == 5
    assert sorted(seen) == sorted(f"{i}.npy" for i in range(3000))


def test_a_working_directory_stays_in_its_snapshot(daemon):
    slot = daemon("publish", version=1)
    show = "import json, sys; print(json.load(open(sys.argv[1]))['version'], flush=True)"
    loop = f"while read path; do python3 -c '{show.replace(chr(39), chr(34))}' $path || echo failed; done"
    with subprocess.Popen(
        ["bash", "-c", loop],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=daemon.path / "gpt/model",
    ) as shell:

        def version_of(path: str) -> str:
            shell.stdin.write(path + "\n")
            shell.stdin.flush()
            return shell.stdout.readline().strip()

        assert version_of("../job.json") == "1"
        daemon("publish", version=2)
        assert version_of("../job.json") == "1"
        assert version_of("../ptc/1.json") == "1"
        assert version_of(f"{daemon.path}/gpt/job.json") == "2"
        assert version_of("../../gpt/job.json") == "2", "above the job is the present"
        daemon("free", slot=slot)
        assert version_of("../ptc/0.json") == "failed"
        shell.stdin.close()
        assert "Stale file handle" in shell.stderr.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="to be somebody else one has to be root")
def test_who_is_not_root_mounts_and_only_who_mounted_looks(start):
    directory = Path(tempfile.mkdtemp(dir="/tmp"))
    os.chown(directory, NOBODY, NOBODY)
    try:
        daemon = start(directory / "mnt", uid=NOBODY)
        daemon("publish", version=1)
        assert "max_background stays 12" not in daemon.log.read_text()
        as_nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        listed = run(*as_nobody, "ls", "-l", directory / "mnt/gpt")
        assert "job.json" in listed and "nobody" in listed
        sums = run(*as_nobody, "sha256sum", directory / "mnt/gpt/full/scale.npy")
        assert len(sums.split()[0]) == 64
        with pytest.raises(PermissionError):  # without allow_other not even root
            list((directory / "mnt").iterdir())
        assert daemon.stop() == 0
        assert find_mount(str(directory / "mnt")) is None
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="to be somebody else one has to be root")
@pytest.mark.parametrize("allow_other", [False, True])
def test_others_look_where_they_are_allowed_to_and_write_nowhere(start, allow_other):
    directory = Path(tempfile.mkdtemp(dir="/tmp"))
    directory.chmod(0o755)
    try:
        daemon = start(directory / "mnt", allow_other=allow_other)
        daemon("publish", version=1)
        as_nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        read = [*as_nobody, "cat", str(directory / "mnt/gpt/job.json")]
        done = subprocess.run(read, capture_output=True, text=True, check=False)
        assert ('"version": 1' in done.stdout) == allow_other, done
        assert ("Permission denied" in done.stderr) == (not allow_other), done
        write = [*as_nobody, "touch", str(directory / "mnt/gpt/new")]
        assert subprocess.run(write, capture_output=True, check=False).returncode != 0
        assert daemon.stop() == 0
    finally:
        shutil.rmtree(directory, ignore_errors=True)
