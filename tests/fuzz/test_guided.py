"""Fuzzing by coverage, for a moment; `make fuzz` goes on for longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_nothing_but_refusals(tmp_path: Path):
    runs = os.environ.get("FUZZ_RUNS", "10000")
    command = [sys.executable, "-m", "tests.fuzz.guided", f"-runs={runs}", f"-artifact_prefix={tmp_path}/"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, done.stderr[-6000:]
    assert f"Done {runs} runs" in done.stderr
