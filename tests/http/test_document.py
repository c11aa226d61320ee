"""The commands of docs/http.md, as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tenplexfs.client.connection import Connection
from tests.cluster.daemons import Daemons, free_port

pytestmark = [pytest.mark.cluster, pytest.mark.mount]

PAGE = Path(__file__).parents[2] / "docs" / "http.md"


def test_the_examples_do_what_the_page_says(tmp_path):
    page = PAGE.read_text()
    (layout,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    examples = re.findall(r"```bash\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    assert len(examples) == page.count("```bash") == page.count("```text") == 4
    port, work = free_port(), tmp_path / "work"
    work.mkdir()
    with Daemons(tmp_path, 1, http=f"127.0.0.1:{port}") as daemons:
        with Connection(str(daemons.nodes[0].socket)) as connection:
            connection.ask("create", job="gpt", layout=layout.encode())
        for script, shown in examples:
            own = script.replace("20010", str(port))
            done = subprocess.run(
                ["bash", "-euo", "pipefail"],
                input=own,
                cwd=work,
                env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert (done.stdout, done.stderr, done.returncode) == (shown, "", 0), script
