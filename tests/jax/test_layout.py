"""Layouts of JAX shardings, against the shards that JAX put on eight devices of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tenplexfs.core.build import build_ptc
from tenplexfs.formats.layout_json import parse_layout
from tests.holding import held


@pytest.fixture(scope="module")
def told():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("shardings.py"))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["specs", "mixed", "pipeline", "single", "tuples"])
def test_every_rank_holds_what_its_device_got(told, name):
    case = told["cases"][name]
    ptc = build_ptc(parse_layout(json.dumps(case["layout"])))
    for rank in range(ptc.world_size) if case["held"] else ():
        expected = case["held"].get(str(rank), {})
        assert list(ptc.rank_paths(rank)) == sorted(expected)
        for path, local in expected.items():
            np.testing.assert_array_equal(held(ptc, rank, path).ravel(), np.ravel(local), err_msg=path)


def test_named_shardings_are_said_by_their_axes(told):
    layout = told["cases"]["specs"]["layout"]
    assert layout["mesh"] == {"data": 2, "fsdp": 2, "model": 2}
    assert "ranks" not in layout
    assert layout["tensors"]["layers/swapped"]["shard"] == [
        {"axis": ["model", "fsdp"], "dim": 0},
        {"axis": "data", "dim": 1},
    ]
    assert layout["tensors"]["half"]["dtype"] == "bfloat16"
    assert told["cases"]["pipeline"]["layout"]["tensors"]["b"]["on"] == {"pp": 1}


def test_what_the_mesh_cannot_say_is_said_rank_by_rank(told):
    layout = told["cases"]["mixed"]["layout"]
    assert list(layout["tensors"]) == ["turned", "one"]
    assert set(layout["global"]) == {"other", "part"}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("uneven", "tensor 'a/b': shape [7, 4]: "),
        ("outside", "is not of the mesh whose places are the ranks: give mesh"),
        ("key", "tensor 'k': dtype key<fry>: unknown; keys are stored by jax.random.key_data"),
        ("list", "tensor 'w': list: need a jax.Array"),
        ("twice", "tensor 'a/b': two names of the state give this path"),
        ("unreduced", "tensor 'w': sums over ['fsdp'] are not yet taken"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(told, name, part):
    message = told["messages"][name]
    assert part in message
    assert "\n" not in message
