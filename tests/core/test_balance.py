"""The choice among replicas against the optimum of the flow problem, solved by linear programming."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from tenplexfs.core.balance import balanced_quotas, deal
from tenplexfs.core.build import build_ptc
from tenplexfs.core.derive import derive_layout
from tenplexfs.core.layout import place_in_order
from tenplexfs.core.planner import plan

from .test_placement import gpt


def optimum(candidates, demands, node_count):
    """Returns the smallest possible largest load: minimise t with all flows at most t a node."""
    columns = [(k, node) for k, nodes in enumerate(candidates) for node in nodes]
    equal = np.zeros((len(demands), len(columns) + 1))
    most = np.zeros((node_count, len(columns) + 1))
    most[:, -1] = -1
    for c, (k, node) in enumerate(columns):
        equal[k, c] = 1
        most[node, c] = 1
    cost = np.zeros(len(columns) + 1)
    cost[-1] = 1
    solved = linprog(cost, A_ub=most, b_ub=np.zeros(node_count), A_eq=equal, b_eq=demands)
    assert solved.status == 0
    return solved.fun


@st.composite
def problems(draw):
    nodes = draw(st.integers(1, 7))
    count = draw(st.integers(1, 12))
    sets = st.sets(st.integers(0, nodes - 1), min_size=1)
    candidates = [np.array(sorted(draw(sets))) for _ in range(count)]
    return candidates, [draw(st.integers(1, 10**9)) for _ in range(count)], nodes


@given(problems())
def test_quotas_reach_the_optimum(problem):
    candidates, demands, nodes = problem
    quotas = balanced_quotas(candidates, demands, np.zeros(nodes, np.int64))
    load = np.zeros(nodes)
    for own, quota, demand in zip(candidates, quotas, demands, strict=True):
        assert quota.sum() == demand
        assert (quota >= 0).all()
        load[own] += quota
    assert load.max() <= optimum(candidates, demands, nodes) * 1.05 + len(demands)


@given(st.lists(st.integers(1, 100), min_size=1), st.lists(st.integers(0, 300), min_size=1, max_size=5))
def test_items_are_dealt_out_in_order_and_near_the_quotas(sizes, quotas):
    sizes = np.array(sizes)
    quotas = np.array([*quotas[:-1], max(0, int(sizes.sum()) - sum(quotas[:-1]))])
    got = deal(sizes, 0, quotas)
    assert (np.diff(got) >= 0).all()
    dealt = np.bincount(got, sizes, len(quotas))[:-1]
    reached = np.minimum(np.cumsum(quotas)[:-1], sizes.sum())
    assert (np.abs(np.cumsum(dealt) - reached) <= sizes.max()).all()


EIGHT = {f"n{k}": [2 * k, 2 * k + 1] for k in range(8)}
TRANSITIONS = {
    "dp 2 to 4": (gpt(2, 2, 2, {f"n{k}": [2 * k, 2 * k + 1] for k in range(4)}, 24), {"dp": 4}),
    "dp 4 to 8": (gpt(2, 1, 4, {f"n{k}": [2 * k, 2 * k + 1] for k in range(4)}, 24), {"dp": 8}),
    "tp 2 to 4 under dp": (gpt(2, 1, 8, EIGHT, 24), {"tp": 4, "dp": 4}),
    "pp 2 to 4 under dp": (gpt(1, 2, 8, EIGHT, 24), {"pp": 4, "dp": 4}),
}


@pytest.mark.parametrize("name", TRANSITIONS)
def test_no_node_sends_much_more_than_it_must(name):
    layout, mesh = TRANSITIONS[name]
    sizes = {**dict(layout.mesh.axes), **mesh}
    fresh = derive_layout(layout, mesh, {f"m{k}": 2 for k in range(np.prod(list(sizes.values())) // 2)})
    made = plan(build_ptc(layout), build_ptc(place_in_order(fresh)))
    candidates, demands = [], []
    for match in made.matches:
        for overlap, volume in zip(
            match.row_overlap[match.moved], match.row_volumes[match.moved], strict=True
        ):
            candidates.append(match.held.holders_of(match.overlap_held[[overlap]])[1])
            demands.append(int(volume) * match.element_bytes)
    assert made.totals["moved"] == sum(demands) > 0
    largest = max(node["sends"] for node in made.summary()["nodes"].values())
    assert largest <= optimum(candidates, demands, len(made.nodes)) * 1.05
