"""The base install is the client alone: it runs inside training processes, which fork."""

from __future__ import annotations

import os
import subprocess
import sys

HEAVY = ("grpc", "trio", "pyfuse3", "typer", "rich", "torch", "google.protobuf", "msgspec", "xxhash")

BLOCK = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
""".format(tuple(name.partition(".")[0] for name in HEAVY))


def python(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_importing_the_package_imports_nothing_of_the_daemon():
    done = python(f"import sys, tenplexfs; print(sorted(set({HEAVY!r}) & sys.modules.keys()))")
    assert done.stdout.strip() == "[]", done.stderr


def test_the_command_without_the_daemons_packages_says_so_in_one_line():
    done = python(BLOCK + "from tenplexfs.__main__ import main; main()", "status")
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "pip install 'tenplexfs[daemon]'" in done.stderr
