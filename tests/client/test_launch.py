"""`tenplexfs run` with torchrun and a real daemon: failures, stops, and the status that a job ends with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.daemons import Daemon, Daemons

pytestmark = [pytest.mark.cluster, pytest.mark.mount]

SCRIPT = """
import os, sys
import numpy as np
import tenplexfs

job = os.environ["TENPLEXFS_MOUNT"] + "/" + os.environ["TENPLEXFS_JOB"]
step = int(os.environ.get("TENPLEXFS_STEP", 0))
seen = [os.environ.get("TENPLEXFS_" + name, "-") for name in ("GENERATION", "STEP")]
print(*sys.argv[1:], *seen, os.environ["RANK"], os.environ["WORLD_SIZE"], flush=True)
if step:
    assert tenplexfs.load(job + "/model/0")["w"][0] == step
    assert os.environ["TENPLEXFS_SNAPSHOT"].startswith(f"1:{step}:")
if step < 2:
    tenplexfs.save({"w": np.full(3, step + 1)}, job + "/model/0", step=step + 1)
sys.exit({0: 3, 1: 75, 2: int(sys.argv[1])}[step])
"""


def run(
    node: Daemon, script: Path, *arguments: str, options: tuple[str, ...] = ()
) -> tuple[int, list[str], str]:
    command = [
        sys.executable,
        "-m",
        "tenplexfs",
        "run",
        "--mount",
        str(node.mount),
        "--job",
        "lone",
        *options,
    ]
    done = subprocess.run(
        [*command, "--", str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_a_run_goes_on_after_failures_and_stops_and_ends_with_the_status_of_its_job(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with Daemons(tmp_path, 1) as daemons:
        (node,) = daemons.nodes
        status, seen, said = run(node, script, "0")
        assert (status, seen) == (0, ["0 - - 0 1", "0 1 1 0 1", "0 1 2 0 1"]), said
        assert "failed with status 3: starting again from step 1" in said
        status, seen, said = run(node, script, "9", options=("--max-failures", "0"))
        assert (status, seen) == (9, ["9 1 2 0 1"]), said
        assert "failed 1 times without a new step: giving up" in said


def test_what_is_wrong_is_said_in_a_line(tmp_path, monkeypatch):
    monkeypatch.delenv("TENPLEXFS_MOUNT", raising=False)
    command = [sys.executable, "-m", "tenplexfs", "run", "--job", "x"]
    done = subprocess.run([*command, "--", "t.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 3 and "which daemon? give --socket" in done.stderr
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "need the training script" in done.stderr
