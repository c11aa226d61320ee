from __future__ import annotations

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tenplexfs.core.build import build_ptc
from tenplexfs.core.copies import sole_bytes, survives
from tenplexfs.core.dtypes import dtype_of
from tenplexfs.core.ptc import PTC
from tenplexfs.formats.layout_json import parse_layout
from tests.runtime.cluster import layout_json


def brute(ptc: PTC) -> tuple[int, dict[str, int]]:
    """Counts element by element."""
    least, sole = len(ptc.nodes), dict.fromkeys(ptc.nodes, 0)
    for path, names in ptc.names.items():
        tensor = names[0].tensor
        held = [np.zeros(tensor.shape, bool) for _ in ptc.nodes]
        for holder in ptc.holders(path):
            for rank, _ in holder.keys:
                node = list(ptc.nodes).index(ptc.node_of(rank))
                for piece in holder.shard.pieces:
                    held[node][tuple(map(slice, piece.region.start, piece.region.stop))] = True
        count = np.sum(held, axis=0)
        least = min(least, count.min()) if count.size else least
        for node, mine in zip(ptc.nodes, held, strict=True):
            sole[node] += int((mine & (count == 1)).sum()) * dtype_of(tensor.dtype).itemsize
    return max(int(least) - 1, 0), sole


@settings(max_examples=60, deadline=None)
@given(
    st.permutations(range(4)),
    st.integers(0, 4),
    st.sampled_from(
        [{"pp": 2, "tp": 2}, {"pp": 1, "tp": 4}, {"pp": 2, "tp": 1, "dp": 2}, {"dp": 4, "pp": 1, "tp": 1}]
    ),
)
def test_as_counted_element_by_element(ranks, first, mesh):
    nodes = {"a": ranks[:first], "b": ranks[first:]}
    owner = [0, 0, 1, 1] if mesh["pp"] == 2 else [0] * 4
    content = json.loads(layout_json(mesh=mesh, nodes={n: r for n, r in nodes.items() if r}))
    content["tensors"]["layers/{i}/w"]["on"]["pp"]["owner"] = owner
    ptc = build_ptc(parse_layout(json.dumps(content)))
    assert (survives(ptc), sole_bytes(ptc)) == brute(ptc)
