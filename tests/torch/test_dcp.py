"""`dcp.save` and `dcp.load` through real daemons, against DCP's own files, bit for bit, on gloo ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tenplexfs
from tests.cluster.daemons import Daemon, Daemons
from tests.torch.groups import Ranks

pytestmark = [pytest.mark.cluster, pytest.mark.mount]


@pytest.fixture(scope="module")
def ranks():
    made = Ranks()
    yield made
    made.end()


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    return tmp_path_factory.mktemp("dcp")


@pytest.fixture(scope="module")
def nodes(where):
    with Daemons(where, 2, memory="512MiB") as daemons:
        yield daemons.nodes


def even(nodes: list[Daemon], world: int) -> list[Daemon]:
    """The first half of the ranks is on the first node."""
    return [nodes[rank * 2 // max(world, 2)] for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_kind_of_state_comes_back_as_from_dcp(ranks, where, nodes, world):
    (kinds, *_) = ranks.run("every_kind", where, even(nodes, world))
    assert {"fsdp", "tp", "half", "ddp", "plain"} <= set(kinds)
    assert (world < 4) == ("hsdp" not in kinds)


@pytest.mark.parametrize(("saved", "world"), [(4, 1), (4, 2), (1, 4), (4, 8), (8, 4)])
def test_every_kind_of_state_loads_at_other_meshes_as_from_dcp(ranks, where, nodes, saved, world):
    ranks.run("other_meshes", where, even(nodes, world), saved=saved)


def test_the_mount_shows_what_was_saved(where, nodes):
    job = nodes[0].mount / "fsdp-4"
    layout = json.loads((job / "layout.json").read_text())
    assert layout["mesh"] == {"dp": 4}
    assert layout["nodes"] == {"node0": [0, 1], "node1": [2, 3]}
    assert layout["tensors"]["model/head/weight"]["alias"] == "model/emb/weight"
    state = tenplexfs.load(job / "model" / "3")
    assert sorted(state) == ["model", "optim", "schedule"]
    assert "up.weight" in state["model"]
    whole = np.load(job / "full" / "model" / "emb" / "weight.npy")
    np.testing.assert_array_equal(state["model"]["emb.weight"], whole[9:10])
    assert json.loads((job / "model" / "0" / "schedule" / "last_epoch.json").read_text()) == 2
    assert (
        json.loads((nodes[0].mount / "half-4" / "layout.json").read_text())["tensors"]["model/norm/bias"][
            "dtype"
        ]
        == "bfloat16"
    )


def test_caching_async_rank_local_values_and_failures(ranks, where, nodes, tmp_path):
    with Daemons(tmp_path, 2, memory="128MiB") as daemons:
        (said, *_) = ranks.run("save_traps", tmp_path, even(daemons.nodes, 2))
        wanted = {
            "bare": "planner _Bare: has no state_dict",
            "step": "step 3: is at step 7 already",
            "part": "1 of 2 ranks save: all must",
            "id": "give Writer(path, step=) alone",
            "other": "generation 9",
            "absent": "job absent: no such job",
            "missing": "Missing key in checkpoint state_dict: nope",
            "shape": "Size mismatch",
        }
        assert {name: text for name, text in wanted.items() if text not in said[name]} == {}, said
        leaf = json.loads((daemons.nodes[0].mount / "gpt" / "model" / "1" / "own" / "seed.json").read_text())
        assert leaf == 801
        assert daemons.nodes[1].ok("verify")["mismatches"] == []


@pytest.mark.parametrize("world", [4, 8])
def test_pipeline_stages_with_meshes_of_their_own(ranks, nodes, tmp_path, world):
    with Daemons(tmp_path, 2) as daemons:
        ranks.run("stages", tmp_path, even(daemons.nodes, world))
        if world == 8:
            ranks.run("strided", tmp_path, even(daemons.nodes, world))


def test_without_a_process_group(ranks, tmp_path):
    with Daemons(tmp_path, 1) as daemons:
        ranks.run_alone("lone", tmp_path, daemons.nodes[0])


def test_save_reconfigure_load_and_save_again(ranks, tmp_path):
    with Daemons(tmp_path, 2) as daemons:
        a, b = daemons.nodes
        ranks.run("elastic_save", tmp_path, [a, a, b, b], step=1, seed=1)
        before = ranks.run_alone("elastic_read", tmp_path, a)
        for step, mesh, there in [(2, "dp=2", [a, b]), (3, "dp=3", [a, b, b]), (4, "dp=1", [b])]:
            names = ",".join(f"{node.name}:{there.count(node)}" for node in dict.fromkeys(there))
            a.ok("reconfigure", "gpt", "--mesh", mesh, "--nodes", names)
            after = ranks.run_alone("elastic_read", tmp_path, b)
            assert after == before
            placed = {rank: node for node in daemons.nodes for rank in a.job()["nodes"].get(node.name, ())}
            ranks.run("elastic_save", tmp_path, [placed[r] for r in range(len(there))], step=step, seed=step)
            assert a.job()["step"] == step
            before = ranks.run_alone("elastic_read", tmp_path, a)


def test_groups_by_name_and_random_states_by_rank(ranks, tmp_path):
    with Daemons(tmp_path, 2) as daemons:
        a, b = daemons.nodes
        before = ranks.run("policies_save", tmp_path, [a, b])
        target = ["--mesh", "dp=4", "--nodes", "node0:2,node1:2"]
        plan = a.ok("plan", "--job", "gpt", *target)
        found = {
            (each["path"], each["target_rank"]): each.get("source_rank", "derived") for each in plan["values"]
        }
        assert {path for path, _ in found} == {"rng/python", "rng/numpy", "rng/torch"}
        assert [found["rng/torch", rank] for rank in range(4)] == [0, 1, "derived", "derived"]
        a.ok("reconfigure", "gpt", *target)
        placed = {rank: node for node in daemons.nodes for rank in a.job()["nodes"][node.name]}
        after = ranks.run("policies_load", tmp_path, [placed[rank] for rank in range(4)])
        assert all(each["trained"] == before[0]["trained"] for each in after)
        drawn = [each["draws"] for each in after]
        assert drawn[:2] == [each["draws"] for each in before]
        assert len({tuple(each) for each in drawn}) == 4
        a.ok("reconfigure", "gpt", "--mesh", "dp=2", "--nodes", "node0:2")
        assert [each["draws"] for each in ranks.run("policies_load", tmp_path, [a, a])] == drawn[:2]
