"""Engines of DeepSpeed, as doubles, through a real daemon: other numbers of ranks, and another stage."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tenplexfs.deepspeed import layout_for
from tests.cluster.daemons import Daemons
from tests.torch.groups import Ranks

pytestmark = [pytest.mark.cluster, pytest.mark.mount]


@pytest.fixture(scope="module")
def ranks():
    made = Ranks("tests.deepspeed.checks")
    yield made
    made.end()


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with Daemons(tmp_path_factory.mktemp("deepspeed"), 1, memory="128MiB") as daemons:
        yield daemons.nodes[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_it_loads_at_other_sizes_and_saves_again(ranks, node, tmp_path, stage):
    job = f"zero{stage}"
    ranks.run("save_at", tmp_path, [node] * 2, job=job, stage=stage, step=2)
    layout = json.loads((node.mount / job / "layout.json").read_text())
    assert layout["mesh"] == {"dp": 2}
    assert "ranks" not in layout, "the rule of ZeRO says it all"
    assert len(layout.get("flat_groups", {})) == (6 if stage == 1 else 0)
    whole = np.load(node.mount / job / "full" / "optimizer" / "exp_avg" / "1" / "weight.npy")
    np.testing.assert_array_equal(whole.ravel(), np.arange(21) * 100 + 21)
    for world, other in [(3, stage), (2, 4 - stage)]:
        found = ranks.run("load_at", tmp_path, [node] * world, job=job, stage=other, step=2)
        assert found == [{"who": rank % 2} for rank in range(world)]
    for step, world in [(3, 4), (4, 1)]:
        file = tmp_path / f"{world}.json"
        file.write_bytes(layout_for(node.mount / job, world))
        node.ok("reconfigure", job, str(file))
        ranks.run("load_at", tmp_path, [node] * world, job=job, stage=stage, step=step - 1, save_as=step)
    ranks.run("load_at", tmp_path, [node] * 2, job=job, stage=stage, step=step)
    assert node.ok("verify")["mismatches"] == []


def test_what_is_refused(ranks, node, tmp_path):
    ranks.run("save_at", tmp_path, [node] * 2, job="other", stage=1, step=2)
    wanted = {
        "stage": "in this run; reconfigure it first",
        "order": "in this run; reconfigure it first",
        "none": "need ZeRO stage 1, 2 or 3",
        "mixed": "were saved with other settings",
    }
    for said in ranks.run("refusals", tmp_path, [node] * 2, job="other"):
        assert {name: text for name, text in wanted.items() if text not in said[name]} == {}, said
    assert node.job("other")["step"] == 2
