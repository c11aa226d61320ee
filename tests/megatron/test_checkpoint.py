"""Megatron's sharded state dicts through real daemons, at other parallelisms, on gloo ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tenplexfs.core.layout import Mesh
from tenplexfs.formats.layout_json import layout_text
from tenplexfs.megatron import layout_of_ranks
from tests.cluster.daemons import Daemon, Daemons
from tests.megatron.checks import SHAPES, sharded_state
from tests.torch.groups import Ranks

pytestmark = [pytest.mark.cluster, pytest.mark.mount]


def mesh(pp: int, dp: int, tp: int) -> dict[str, int]:
    return {"pp": pp, "dp": dp, "tp": tp}


def even(nodes: list[Daemon], world: int) -> list[Daemon]:
    return [nodes[rank * 2 // max(world, 2)] for rank in range(world)]


@pytest.fixture(scope="module")
def ranks():
    made = Ranks("tests.megatron.checks")
    yield made
    made.end()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with Daemons(tmp_path_factory.mktemp("megatron"), 2, memory="128MiB") as daemons:
        yield daemons.nodes


@pytest.fixture(scope="module")
def saved(ranks, nodes, tmp_path_factory):
    where = tmp_path_factory.mktemp("ranks")
    ranks.run("save_at", where, even(nodes, 4), mesh=mesh(2, 1, 2), step=1)
    return nodes, where


def test_what_is_stored(saved):
    (node, _), _ = saved
    layout = json.loads((node.mount / "gpt" / "layout.json").read_text())
    assert layout["mesh"] == mesh(2, 1, 2)
    assert layout["nodes"] == {"node0": [0, 1], "node1": [2, 3]}
    full = node.mount / "gpt" / "full"
    word = np.load(full / "word_embeddings" / "weight.npy")
    np.testing.assert_array_equal(word, ((np.arange(150) * 3 + 1) % 251).reshape(50, 3))
    assert np.load(full / "decoder" / "layers" / "proj" / "weight.npy").shape == (4, 6, 8)
    assert node.ok("verify")["mismatches"] == []


@pytest.mark.parametrize(
    "target",
    [mesh(2, 1, 2), mesh(1, 1, 4), mesh(4, 1, 1), mesh(1, 2, 2), mesh(1, 4, 1), mesh(1, 1, 1), mesh(2, 2, 2)],
)
def test_it_loads_at_other_parallelisms(ranks, saved, target):
    nodes, where = saved
    world = target["pp"] * target["dp"] * target["tp"]
    found = ranks.run("load_at", where, even(nodes, world), mesh=target, step=1, grid=[2, 2])
    places = {}
    for rank, states in enumerate(found):
        pp, _, tp = np.unravel_index(rank, tuple(target.values()))
        assert places.setdefault((pp, tp), states) == states, "replicas draw the same"
    for generator in range(4):
        assert len({str(states[generator]) for states in places.values()}) == len(places)


def test_what_is_refused(ranks, tmp_path):
    with Daemons(tmp_path, 1) as daemons:
        four = daemons.nodes * 4
        ranks.run("save_at", tmp_path, four, mesh=mesh(1, 1, 4), step=1)
        wanted = {
            "turned": "reconfigure it first",
            "object": "state 'args/lr'",
            "differ": "tensor common: ranks 0 and 1 hold the same part, and their bytes differ",
            "absent": "nope: is not there",
            "gone": "object 'gone' at (0,) of (1,): was not saved",
        }
        for said in ranks.run("refusals", tmp_path, four, mesh=mesh(1, 1, 4)):
            assert {name: text for name, text in wanted.items() if text not in said[name]} == {}, said
        assert daemons.nodes[0].job()["step"] == 1


def test_save_reconfigure_load_and_save_again(ranks, tmp_path):
    """The layout of the next parallelism comes from its state, made without a job: shapes are enough."""
    with Daemons(tmp_path, 2) as daemons:
        a, b = daemons.nodes
        ranks.run("save_at", tmp_path, [a, a, b, b], mesh=mesh(2, 1, 2), step=1)
        grid = [2, 2]
        for step, (target, there) in enumerate([(mesh(4, 1, 1), [a, a, b, b]), (mesh(1, 1, 2), [b, b])], 2):
            states = [sharded_state(rank, target, 0, blank=True) for rank in range(len(there))]
            layout = layout_of_ranks(states, shapes=SHAPES, mesh=Mesh(tuple(target.items())))
            content = json.loads(layout_text(layout))
            content["nodes"] = {
                n.name: [r for r, x in enumerate(there) if x is n] for n in dict.fromkeys(there)
            }
            file = tmp_path / f"{step}.json"
            file.write_text(json.dumps(content))
            a.ok("reconfigure", "gpt", str(file))
            ranks.run("load_at", tmp_path, there, mesh=target, step=step - 1, grid=grid)
            ranks.run("load_and_save", tmp_path, there, mesh=target, step=step)
            grid = [target["pp"], target["tp"]]
            ranks.run("load_at", tmp_path, there, mesh=target, step=step, grid=grid)
        assert b.ok("verify")["mismatches"] == []
