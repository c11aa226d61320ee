"""``inspect`` and ``diff`` against a real daemon."""

from __future__ import annotations

import os

import numpy as np
import pytest
from daemons import cluster
from safetensors.numpy import save_file

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.mount,
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="no /dev/fuse"),
]

W = np.arange(48, dtype=np.float32).reshape(8, 6)
SPECIAL = W.copy()
SPECIAL[0, :3] = [np.nan, np.inf, -7]


def test_inspect_and_diff_of_steps(cli, layout, tmp_path, monkeypatch):
    with cluster(("node0",)) as (node,):
        monkeypatch.setenv("TENPLEXFS_SOCKET", str(node.socket))
        assert cli("job", "create", "gpt", "--layout", layout("two.json", 2, "node0")).status == 0
        empty = cli("inspect", "gpt", "--json")
        assert (empty.status, empty.json["error"]["code"]) == (1, "NOT_FOUND")
        for step, tensor in ((100, W), (200, SPECIAL)):
            save_file({"w": tensor}, tmp_path / "m.safetensors")
            assert cli("import", "gpt", tmp_path / "m.safetensors", "--step", step).status == 0
        (row,) = cli("inspect", "gpt@100", "--json").json["tensors"]
        assert row == {
            "path": "w",
            "shape": [8, 6],
            "dtype": "float32",
            "min": 0.0,
            "max": 47.0,
            "mean": 23.5,
            "nan": 0,
            "inf": 0,
            "zeros": 1,
            "count": 48,
        }
        (row,) = cli("inspect", "gpt", "*", "--json").json["tensors"]
        assert [row[name] for name in ("min", "max", "nan", "inf", "zeros")] == [-7, 47, 1, 1, 0]
        (row,) = cli("inspect", "gpt", "w", "--rank", 1, "--json").json["tensors"]
        assert (row["shape"], row["min"]) == ([4, 6], 24)
        shown = cli("inspect", "gpt@200", "w").out
        assert "float32" in shown and "[8, 6]" in shown

        apart = cli("diff", "gpt@100", "gpt@200", "--json").json
        (row,) = apart["tensors"]
        assert (apart["same"], row["path"], row["change"], row["differing"]) == (0, "w", "values", 3)
        assert row["max_abs"] == 9
        same = cli("diff", "gpt@200", "gpt", "--json").json
        assert (same["same"], same["tensors"]) == (1, [])
        assert "max_abs" in cli("diff", "gpt@100", "gpt@200").out

        for wrong in (("inspect", "gpt@300"), ("inspect", "gpt", "x*"), ("diff", "gpt", "other")):
            refused = cli(*wrong)
            assert refused.status == 1 and len(refused.err.splitlines()) == 1, refused
