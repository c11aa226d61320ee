import os
import subprocess

import pytest


@pytest.fixture
def small_tmpfs(tmp_path):
    """A tmpfs of 1 MiB, to be filled up; needs root, as CI has it."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", path], check=True)
    yield path
    subprocess.run(["umount", "-l", path], check=True)
