"""Runs the command line in this process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from tenplexfs.cli.app import run


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def cli(capsys, monkeypatch, tmp_path):
    """A function that runs ``tenplexfs`` with the given arguments, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TENPLEXFS_SOCKET", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def invoke(*arguments: object) -> Outcome:
        status = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return invoke


@pytest.fixture
def layout(tmp_path):
    """A function that writes a layout of one tensor, cut over tp, and returns its path."""

    def write(name: str, tp: int, *nodes: str, **entry: object) -> Any:
        ranks = {node: [r for r in range(tp) if r % len(nodes) == n] for n, node in enumerate(nodes)}
        tensor = {"shape": [8, 6], "dtype": "float32", "shard": [{"axis": "tp", "dim": 0}], **entry}
        document = {
            "format": "tenplexfs-layout",
            "version": 1,
            "mesh": {"tp": tp},
            "nodes": ranks,
            "tensors": {"w": tensor},
        }
        path = tmp_path / name
        path.write_text(json.dumps(document))
        return path

    return write
