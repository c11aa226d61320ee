"""`tenplexfs run` with torchrun and a real daemon: failures, stops, and the status that a job ends with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tenplexfs
from tests.cluster.daemons import Daemon, Daemons, until
from tests.ports import free_port

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


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


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
        env=environment(),
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
        # an option of the script that is like some of torchrun's is none of them
        status, seen, said = run(node, script, "9", "--log", "x", options=("--max-failures", "0"))
        assert (status, seen) == (9, ["9 --log x 1 2 0 1"]), said
        assert "failed 1 times without a new step: giving up" in said


def test_what_is_wrong_is_said_in_a_line(tmp_path, monkeypatch):
    monkeypatch.delenv("TENPLEXFS_MOUNT", raising=False)
    command = [sys.executable, "-m", "tenplexfs", "run", "--job", "x"]
    done = subprocess.run([*command, "--", "t.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 3 and "which daemon? give --mount" in done.stderr
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "need the training script" in done.stderr


NODES_SCRIPT = """
import os, sys
from pathlib import Path
import numpy as np
import tenplexfs

job = os.environ["TENPLEXFS_MOUNT"] + "/" + os.environ["TENPLEXFS_JOB"]
base, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
step = int(os.environ.get("TENPLEXFS_STEP", 0))
place = f"{job}/model/{rank}"
if step:
    assert (tenplexfs.load(place)["w"] == step).all()
with (base / "starts").open("a") as file:
    file.write(f"{os.environ.get('TENPLEXFS_GENERATION', 0)} {world} {step} {rank} {os.getpid()}\\n")
while step < int((base / "last").read_text()):
    step += 1
    stop = tenplexfs.should_stop(job, step)
    tenplexfs.save({"w": np.full(8 // world, step, "i8")}, place, step=step)
    if stop:
        sys.exit(tenplexfs.EXIT_RECONFIGURE)
"""


def test_two_nodes_agree_on_each_start_through_changes_and_a_killed_rank(tmp_path):
    """The ranks meet in their saves alone, where those of one node would wait for a dead one of the other."""
    layout = {
        "format": "tenplexfs-layout",
        "version": 1,
        "mesh": {"dp": 2},
        "nodes": {"node0": 1, "node1": 1},
    }
    layout["tensors"] = {"w": {"shape": [8], "dtype": "int64", "shard": [{"axis": "dp", "dim": 0}]}}
    (tmp_path / "layout.json").write_text(json.dumps(layout))
    (tmp_path / "train.py").write_text(NODES_SCRIPT)
    (tmp_path / "last").write_text("1000000")
    place = f"127.0.0.1:{free_port()}"

    def started() -> list[list[int]]:
        return sorted(list(map(int, line.split())) for line in (tmp_path / "starts").read_text().splitlines())

    def until_it_goes_on(generation: int, after: int) -> None:
        tenplexfs.wait(a.mount / "gpt", state=None, generation=generation, step=after + 3, timeout_s=60)

    with Daemons(tmp_path, 2) as daemons:
        a, b = daemons.nodes
        a.ok("job", "create", "gpt", "--layout", str(tmp_path / "layout.json"))
        runs = []
        for node in (a, b):
            command = [sys.executable, "-m", "tenplexfs", "run", "--job", "gpt", "--mount", str(node.mount)]
            command += ["--rendezvous", place, "--", str(tmp_path / "train.py"), str(tmp_path)]
            with (tmp_path / f"{node.name}.run").open("w") as said:
                runs.append(subprocess.Popen(command, stderr=said, env=environment()))
        try:
            until_it_goes_on(1, 0)
            a.ok("reconfigure", "gpt", "--mesh", "dp=4", "--nodes", "node0:2,node1:2")
            until_it_goes_on(2, a.job()["step"])
            os.kill(next(pid for gen, _, _, rank, pid in started() if (gen, rank) == (2, 3)), signal.SIGKILL)
            until(lambda: len(started()) == 10)  # again, on both nodes
            until_it_goes_on(2, started()[-1][2])
            b.ok("reconfigure", "gpt", "--mesh", "dp=2", "--nodes", "node1:2")  # none where they meet
            until_it_goes_on(3, a.job()["step"])
            (tmp_path / "last.new").write_text(str(a.job()["step"] + 50))
            (tmp_path / "last.new").rename(tmp_path / "last")
            assert [each.wait(30) for each in runs] == [0, 0]
        finally:
            for each in runs:
                each.kill()
                each.wait()
        starts = started()
        assert a.job()["step"] == int((tmp_path / "last").read_text())
    ranks = [(generation, world, rank) for generation, world, _, rank, _ in starts]
    four = [(2, 4, rank) for rank in range(4)]
    assert sorted(ranks) == sorted([(1, 2, 0), (1, 2, 1), *four, *four, (3, 2, 0), (3, 2, 1)])
    steps = {(generation, step) for generation, _, step, _, _ in starts}
    assert len(steps) == 4  # all ranks of a start begin at one step
    said = (tmp_path / "node1.run").read_text()
    assert said.count("starting again from step") == 1, said
    said = (tmp_path / "node0.run").read_text()
    assert "the job has another start: ending what runs here" in said
    assert "waiting for a layout with ranks here" in said
