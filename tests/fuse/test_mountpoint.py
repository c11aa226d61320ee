import errno
import os
from pathlib import Path

import pytest

from tenplexfs.errors import ExistsError, InvalidError, PreconditionError
from tenplexfs.fuse import mountpoint
from tenplexfs.fuse.mountpoint import Mounted, claim, find_mount, parse_mountinfo


@pytest.fixture(autouse=True)
def device(tmp_path_factory, monkeypatch):
    """These tests need no FUSE: any file stands for the device."""
    monkeypatch.setattr(mountpoint, "_DEVICE", tmp_path_factory.mktemp("dev"))


LINES = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 22 0:50 / /mnt/x ro,nosuid shared:4 master:1 - fuse.tenplexfs tenplexfs ro,user_id=0
41 22 0:51 / /mnt/with\\040space rw - fuse.sshfs host:/\\134data rw
"""


def test_mountinfo():
    assert parse_mountinfo(LINES) == [
        Mounted("254:0", "/", "ext4", "/dev/vda"),
        Mounted("0:50", "/mnt/x", "fuse.tenplexfs", "tenplexfs"),
        Mounted("0:51", "/mnt/with space", "fuse.sshfs", "host:/\\data"),
    ]


def test_the_last_mount_of_a_path_is_the_one_seen(tmp_path, monkeypatch):
    table = tmp_path / "mountinfo"
    table.write_text(LINES + "42 40 0:60 / /mnt/x ro - tmpfs none rw\n")
    monkeypatch.setattr(mountpoint, "_MOUNTINFO", table)
    assert find_mount("/mnt/x") == Mounted("0:60", "/mnt/x", "tmpfs", "none")
    assert find_mount("/mnt/y") is None


def test_a_missing_directory_is_made(tmp_path):
    assert claim(tmp_path / "a" / "b") == str(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "link").symlink_to("a/b")
    assert claim(tmp_path / "link") == str(tmp_path / "a" / "b")


def test_what_cannot_be_mounted_on(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "data").touch()
    with pytest.raises(ExistsError, match=r"not empty \('data' is there\); choose an empty directory"):
        claim(tmp_path / "full")
    with pytest.raises(InvalidError, match="not a directory"):
        claim(tmp_path / "full" / "data")
    with pytest.raises(InvalidError, match="not a directory"):
        claim(tmp_path / "full" / "data" / "below")
    with pytest.raises(PreconditionError, match=os.strerror(errno.ENAMETOOLONG)):
        claim(tmp_path / ("x" * 300))


def test_without_fuse(tmp_path, monkeypatch):
    monkeypatch.setattr(mountpoint, "_DEVICE", tmp_path / "fuse")
    with pytest.raises(
        PreconditionError, match="fuse is missing: load the module fuse, or serve with --no-mount"
    ):
        claim(tmp_path / "mnt")
    (tmp_path / "fuse").touch(0o600)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PreconditionError, match="this user may not open it"):
        claim(tmp_path / "mnt")
    assert not (tmp_path / "mnt").exists()


def test_somebody_elses_dead_mount_is_left_alone(tmp_path, monkeypatch):
    table = tmp_path / "mountinfo"
    table.write_text(f"41 22 0:51 / {tmp_path} rw - fuse.sshfs host:/data rw\n")
    monkeypatch.setattr(mountpoint, "_MOUNTINFO", table)

    def dead(self: Path):
        raise OSError(errno.ENOTCONN, "not connected")

    monkeypatch.setattr(Path, "iterdir", dead)
    with pytest.raises(ExistsError, match=r"dead mount of fuse.sshfs \(host:/data\)"):
        claim(tmp_path)
