"""The commands of docs/http.md, as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tenplexfs.client.connection import Connection

pytestmark = [pytest.mark.cluster, pytest.mark.mount]

PAGE = Path(__file__).parents[2] / "docs" / "http.md"


def test_the_examples_do_what_the_page_says(node, tmp_path):
    page = PAGE.read_text()
    (layout,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    examples = re.findall(r"```bash\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    assert len(examples) == page.count("```bash") == page.count("```text") == 4
    with Connection(str(node.daemon.socket)) as connection:
        connection.ask("create", job="gpt", layout=layout.encode())
    for script, shown in examples:
        done = subprocess.run(
            ["bash", "-euo", "pipefail"],
            input=script.replace("20010", str(node.http.port)),
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.stdout, done.stderr, done.returncode) == (shown, "", 0), script
