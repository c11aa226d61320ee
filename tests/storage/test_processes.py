import os
import subprocess
import sys
from pathlib import Path

import pytest

from tenplexfs.storage.processes import find_processes

HOLD = {
    "open": "f = open(sys.argv[1])",
    "mapped": "import mmap; f = open(sys.argv[1]); m = mmap.mmap(f.fileno(), 0, access=1); f.close()",
}


def identity(path: Path) -> tuple[str, int]:
    found = path.stat()
    return f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}", found.st_ino


@pytest.mark.parametrize("how", sorted(HOLD))
@pytest.mark.parametrize("unlinked", [False, True])
def test_it_finds_who_has_a_file(tmp_path, how, unlinked):
    file, other = tmp_path / "file", tmp_path / "other"
    for each in (file, other):
        each.write_bytes(bytes(5000))
    wanted, not_held = identity(file), identity(other)
    program = f"import sys; {HOLD[how]}; print(flush=True); sys.stdin.read()"
    with (
        subprocess.Popen(
            [sys.executable, "-c", program, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process,
        file.open(),
    ):
        process.stdout.readline()
        if unlinked:
            file.unlink()
        (found,) = find_processes(lambda *each: each == wanted)
        assert (found.pid, found.name[:6]) == (process.pid, "python")
        assert str(found).startswith(f"{process.pid} (python")
        assert find_processes(lambda *each: each == not_held) == []
        process.stdin.close()
    assert find_processes(lambda *each: each == wanted) == []
