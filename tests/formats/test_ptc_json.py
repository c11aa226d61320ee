"""What the mount shows of a PTC, rank by rank, is the whole PTC."""

import json
from dataclasses import replace

from hypothesis import given, settings

from tenplexfs.core.build import build_ptc
from tenplexfs.core.planner import plan
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.formats.ptc_json import ptc_document
from tests.core.layouts import text, transitions


@settings(max_examples=40, deadline=None)
@given(transitions(count=1))
def test_the_documents_of_all_ranks_are_the_layout_in_its_explicit_form(documents):
    documents[0]["tensors"].pop("tied", None)  # the explicit form has no ties
    ptc = build_ptc(parse_layout(text(documents[0])))
    shown = [json.loads(json.dumps(ptc_document(ptc, rank))) for rank in ptc.ranks()]
    assert [one["node"] for one in shown] == [ptc.node_of(rank) for rank in ptc.ranks()]
    shapes = {path: shape for one in shown for path, shape in one["global"].items()}
    explicit = {
        "format": "tenplexfs-layout",
        "version": 1,
        "nodes": {node: list(ranks) for node, ranks in ptc.nodes.items()},
        "ranks": [one["tensors"] for one in shown],
        "global": shapes,
    }
    again = build_ptc(parse_layout(json.dumps(explicit)))
    for rank in ptc.ranks():
        assert again.rank_paths(rank) == ptc.rank_paths(rank)
        for path in ptc.rank_paths(rank):
            raveled = len(ptc.tensors[path].shape) != 1 and ptc.shard(rank, path).flat
            assert again.shard(rank, path) == replace(ptc.shard(rank, path), flat=raveled)
            assert (again.tensors[path].shape, again.tensors[path].dtype) == (
                ptc.tensors[path].shape,
                ptc.tensors[path].dtype,
            )
    totals = plan(ptc, again).totals
    assert totals["kept"] == totals["needed"]


def test_ties_are_told_beside_the_pieces():
    whole = {"shape": [4], "dtype": "float32", "on": {"pp": 0}}
    tensors = {"embedding": whole, "head": {"alias": "embedding", "on": {"pp": 1}}}
    document = {"format": "tenplexfs-layout", "version": 1, "mesh": {"pp": 2}, "tensors": tensors}
    ptc = build_ptc(parse_layout(json.dumps(document)))
    assert "aliases" not in ptc_document(ptc, 0)
    assert ptc_document(ptc, 1)["aliases"] == {"head": "embedding"}
