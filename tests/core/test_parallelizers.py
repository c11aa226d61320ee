from __future__ import annotations

import pytest

from tenplexfs.core.cost import Devices
from tenplexfs.core.parallelizers import Answer, Auto, Committed, Proposal, Table, same_on_nodes
from tenplexfs.core.presets import PRESETS
from tenplexfs.errors import InvalidError

JOB = Committed({"pp": 4, "dp": 2, "tp": 2}, global_batch=128)
TABLE = Table({4: {"tp": 2, "pp": 2, "dp": 1}, 16: {"tp": 2, "pp": 4, "dp": 2}})


def test_a_table_gives_the_largest_row_that_fits():
    wanted = Answer((Proposal({"pp": 2, "dp": 1, "tp": 2}, ("tp",)),))
    for nodes in ({"a": 4}, {"a": 4, "b": 4}, {"a": 4, "b": 4, "c": 7}):
        assert TABLE.propose(JOB, nodes) == wanted
    assert TABLE.propose(JOB, {f"n{i}": 4 for i in range(4)}).proposals[0].mesh == JOB.mesh
    # what shares matrices does not fit on single devices: then it need not be together
    assert TABLE.propose(JOB, {f"n{i}": 1 for i in range(4)}).proposals[0].together == ()
    assert TABLE.propose(JOB, {"a": 3}) == Answer((), "the table begins with 4 devices, there are 3")


def test_a_row_leads_to_the_same_mesh_wherever_the_job_comes_from():
    table = Table({2: {"tp": 2}, 4: {"tp": 2, "dp": 2}, 8: {"dp": 4}})
    for dp in (1, 2, 4):
        (proposal,) = table.propose(Committed({"dp": dp, "tp": 2}, None), {"a": 3}).proposals
        assert proposal.mesh == {"dp": 1, "tp": 2}
    (proposal,) = table.propose(Committed({"dp": 1, "tp": 2}, None), {"a": 8}).proposals
    assert proposal.mesh == {"dp": 4, "tp": 2}  # what it leaves out stays


def test_a_row_that_does_not_go_with_the_mesh_is_refused():
    only_dp = Committed({"dp": 4})
    with pytest.raises(InvalidError, match="table: axis tp: the job's mesh has dp"):
        TABLE.propose(only_dp, {"a": 4})
    assert Table({4: {"dp": 4, "tp": 1}}).propose(only_dp, {"a": 4}).proposals[0].mesh == {"dp": 4}
    with pytest.raises(InvalidError, match="the row of 4 devices gives the mesh dp=2, ep=4"):
        Table({4: {"dp": 2}}).propose(Committed({"dp": 1, "ep": 4}), {"a": 4})


def test_auto_uses_the_axes_that_the_job_has_under_its_own_names():
    model = PRESETS["gpt3-1.3b"]
    assert model is not None
    auto = Auto(model, Devices(), {}, {"tp": "tensor"})
    answer = auto.propose(Committed({"tensor": 2, "dp": 2, "cp": 2}, 64), {"a": 4, "b": 4})
    assert answer.proposals
    for proposal in answer.proposals:
        assert set(proposal.mesh) == {"tensor", "dp"}
        assert proposal.together == ()  # with context parallelism there is more than it knows of
        assert proposal.mesh["tensor"] * proposal.mesh["dp"] * 2 <= 8
    with pytest.raises(InvalidError, match="global_batch: give it"):
        auto.propose(Committed({"dp": 2}), {"a": 4})


def test_ranks_that_can_stay():
    assert same_on_nodes({"a": 4, "b": 2}, {"a": 4, "b": 4, "c": 1})
    assert not same_on_nodes({"a": 4}, {"a": 3, "b": 4})
    assert not same_on_nodes({"a": 1}, {"b": 1})
