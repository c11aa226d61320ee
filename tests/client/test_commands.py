"""`tenplexfs env` and `wait` without the daemon's packages, against a real daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import tenplexfs
from tenplexfs.client.commands import of_base_install, run
from tests.cluster.daemons import Daemons
from tests.test_base_install import BLOCK

NAMES = ("JOB", "MOUNT", "STATE", "GENERATION", "STEP", "SNAPSHOT", "MESH", "WORLD_SIZE", "RANKS", "NNODES")


def tenplex(*arguments, cwd=None, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TENPLEXFS_")}
    done = subprocess.run(
        [sys.executable, "-c", BLOCK + "from tenplexfs.__main__ import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
    )
    return done.returncode, done.stdout, done.stderr


def test_global_options_may_stand_before_the_command():
    assert of_base_install(["--json", "--socket=s", "wait", "j"]) == ["wait", "--json", "--socket=s", "j"]
    assert of_base_install(["job", "env"]) is None
    assert of_base_install(["--socket"]) is None
    assert of_base_install([]) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["env", "--json"], "the following arguments are required: JOB (see tenplexfs env --help)"),
        (
            ["--json", "wait", "gpt", "--fro", "x"],
            "unrecognized arguments: --fro x (see tenplexfs wait --help)",
        ),
        (["wait", "--format", "json", "gpt", "--timeout", "x"], "argument --timeout: invalid float value"),
        (["run", "--json", "--job", "gpt"], "need the training script"),
        (["--json", "run", "--job", "gpt", "--nproc", "0", "--", "t.py"], "--nproc 0: need 1 or more"),
        (["run", "--job", "gpt", "--nproc", "0", "--", "t.py", "--json"], "--nproc 0: need 1 or more"),
    ],
)
def test_wrong_usage_is_json_where_that_is_asked_for(capsys, arguments, said):
    assert run(of_base_install(arguments)) == 2
    out, error = capsys.readouterr()
    if arguments[-1] == "--json" and arguments[0] == "run":  # the script's
        assert (out, error.startswith(f"tenplexfs run: {said}")) == ("", True)
        return
    content = json.loads(out)
    assert (content["format"], content["error"]["code"]) == ("tenplexfs-error", "INVALID_ARGUMENT")
    assert (content["error"]["message"].startswith(said), error) == (True, "")


@pytest.mark.cluster
@pytest.mark.mount
def test_what_a_job_is_started_with_and_when(tmp_path):
    layout = {"format": "tenplexfs-layout", "version": 1, "mesh": {"dp": 2}, "nodes": {"node0": [0, 1]}}
    layout["tensors"] = {"w": {"shape": [4], "dtype": "float32"}}
    (tmp_path / "layout.json").write_text(json.dumps(layout))
    with Daemons(tmp_path, 1) as daemons:
        (node,) = daemons.nodes
        socket, mount = str(node.socket), str(node.mount)
        assert tenplex("env", "gpt", "--socket", socket)[::2] == (1, "tenplexfs: job gpt: no such job\n")
        status, out, said = tenplex("--json", "wait", "gpt", "--timeout", "0.2", "--socket", socket)
        error = json.loads(out)["error"]
        assert (status, error["code"]) == (124, "DEADLINE_EXCEEDED")
        assert error["message"] == "job gpt: not at state ready within 0.2 s: there is no such job"
        assert said == "tenplexfs wait: job gpt: no such job yet; waiting for it\n"

        node.ok("job", "create", "gpt", "--layout", str(tmp_path / "layout.json"))
        found = json.loads(tenplex("env", "gpt", "--format", "json", "--socket", socket)[1])
        assert (found["format"], found["version"], found["step"]) == ("tenplexfs-env", 1, None)
        assert (found["ranks"], found["mount"], found["state"]) == ([0, 1], mount, "empty")
        assert tenplex("wait", "gpt", "--for", "generation=1", TENPLEXFS_SOCKET=socket)[::2] == (0, "")
        status, _, said = tenplex("wait", "gpt", "--timeout", "0", "--socket", socket)
        assert (status, said) == (124, "tenplexfs: job gpt: not at state ready within 0 s\n")

        begun = subprocess.Popen(
            [sys.executable, "-m", "tenplexfs", "wait", f"{mount}/gpt", "--for", "state=ready,step=3"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1):
            state = {"w": np.zeros(4, "f4")}
            made = tenplexfs.save(state, f"{mount}/gpt/model/{rank}", step=3, wait=rank == 1)
        shell, _ = begun.communicate(timeout=30)
        assert begun.returncode == 0
        printed = subprocess.run(
            [
                "bash",
                "-c",
                f'eval "$1"; printf "%s\\n" {" ".join(f"$TENPLEXFS_{n}" for n in NAMES)}',
                "-",
                shell,
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        wanted = ["gpt", mount, "ready", "1", "3", made.snapshot, "dp=2", "2", "0,1", "1"]
        assert printed.stdout.split() == wanted
        assert tenplex("env", "gpt", cwd=f"{mount}/gpt")[1] == shell
        assert tenplexfs.env("gpt", socket=socket) == tenplexfs.env(f"{mount}/gpt")
        assert tenplexfs.wait("gpt", socket=socket, state=None, step=3)["step"] == 3
        for wrong in ("step", "step=x", "fate=ready"):
            status, out, said = tenplex("wait", "gpt", "--for", wrong, "--socket", socket)
            assert (status, out) == (2, "") and said.startswith(f"tenplexfs: --for '{wrong}': need")
        status, _, said = tenplex("wait", "gpt", "--for", "state=well", "--socket", socket)
        assert status == 1 and "need one of empty, ready" in said
    assert tenplex("env", "gpt", "--socket", socket)[0] == 3
    assert tenplex("wait", "gpt", "--timeout", "0", "--socket", socket)[0] == 3
    assert tenplex("env", "gpt", cwd=tmp_path)[0] == 3
    assert tenplex("env")[0] == 2
