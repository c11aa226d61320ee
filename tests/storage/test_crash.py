import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("crash_driver.py")
ROOT = DRIVER.parents[2]


@pytest.mark.parametrize(("mode", "least_kills"), [("audit", 60), ("timed", 3)])
def test_whenever_the_process_dies_the_store_opens_at_a_state_that_was_named(tmp_path, mode, least_kills):
    command = [sys.executable, str(DRIVER), str(tmp_path / "store"), mode, "7"]
    done = subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= least_kills
