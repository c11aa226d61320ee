"""The GPT trained with (dp, tp, pp) changing in mid-run, at the smallest size."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ELASTIC = Path(__file__).resolve().parents[2] / "examples" / "gpt" / "elastic.py"


@pytest.mark.cluster
@pytest.mark.mount
def test_the_loss_is_that_of_the_run_that_never_changes(tmp_path):
    command = [
        sys.executable,
        ELASTIC,
        "--losses",
        tmp_path / "loss.csv",
        "--steps",
        "2",
        "--dtype",
        "float64",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ELASTIC.parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "changed after [2, 4, 6]" in done.stdout
    with (tmp_path / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [*range(1, 9)]
    never = [float(row["never changed"]) for row in rows]
    assert [float(row["elastic"]) for row in rows] == pytest.approx(never, rel=1e-9)
    assert len(set(never)) == 8 and never[-1] < 5.3
