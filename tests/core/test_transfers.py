"""The written-out list is carried out alone, and held against the oracle, which knows nothing of plans."""

import numpy as np
from hypothesis import given, settings

from tenplexfs.core.build import build_ptc
from tenplexfs.core.planner import plan
from tenplexfs.core.transfers import list_transfers
from tenplexfs.formats.layout_json import parse_layout

from .layouts import held, text, transitions


def box(start, stop):
    return tuple(slice(a, b) for a, b in zip(start, stop, strict=True))


@settings(max_examples=60)
@given(transitions())
def test_the_list_alone_carries_the_plan_out(documents):
    old, new = (build_ptc(parse_layout(text(document))) for document in documents)
    old_held = [held(documents[0], rank) for rank in old.ranks()]
    new_held = [held(documents[1], rank) for rank in new.ranks()]
    made = plan(old, new)
    arrays = [{path: np.full(a.shape, -1) for path, a in paths.items()} for paths in new_held]
    times = [{path: np.zeros(a.shape, int) for path, a in paths.items()} for paths in new_held]
    crossed = 0
    for one in list_transfers(made):
        rank, path = one["target_rank"], one["tensor"]
        source = old_held[one["source_rank"]][one.get("source_tensor", path)]
        value = source[box(one["source_start"], one["source_stop"])]
        into = box(one["target_start"], one["target_stop"])
        arrays[rank][path][into] = value.reshape(arrays[rank][path][into].shape)
        times[rank][path][into] += 1
        if one["wire"]:
            assert old.node_of(one["source_rank"]) != new.node_of(rank)
            crossed += value.size * new.tensors[path].itemsize
    assert crossed == made.totals["moved"]
    for rank in new.ranks():
        listed = {new.tensors[path].path: path for path, count in times[rank].items() if count.any()}
        for path, expected in new_held[rank].items():
            name = listed.get(new.tensors[path].path, path)
            assert np.array_equal(arrays[rank][name], expected), (rank, path)
            assert np.array_equal(times[rank][name], expected >= 0)
