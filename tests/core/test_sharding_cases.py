"""Small layouts that broke other systems, with what every rank must hold, element by element."""

import json
from pathlib import Path

import numpy as np
import pytest

from tenplexfs.core.build import build_ptc
from tenplexfs.formats.layout_json import layout_digest, layout_to_json, parse_layout

CASES = json.loads((Path(__file__).parent / "cases" / "sharding.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_every_rank_holds_what_the_case_says(case):
    ptc = build_ptc(parse_layout(json.dumps(case["layout"])))
    assert ptc.world_size == len(case["expect"])
    for rank, tensors in ((int(rank), tensors) for rank, tensors in case["expect"].items()):
        assert list(ptc.rank_paths(rank)) == sorted(tensors)
        for path, expected in tensors.items():
            shape = ptc.tensors[path].shape
            index = np.arange(int(np.prod(shape))).reshape(shape)
            shard = ptc.shard(rank, path)
            local = np.full(shard.local_shape, -1)
            for piece in shard.pieces:
                source = index[piece.region.as_slices()]
                if shard.flat:
                    local[piece.at[0] : piece.at[0] + source.size] = source.ravel()
                else:
                    local[tuple(slice(a, a + n) for a, n in zip(piece.at, source.shape, strict=True))] = (
                        source
                    )
            assert list(shard.local_shape) == expected["shape"]
            assert local.ravel().tolist() == expected["index"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_json_of_a_layout_reads_back_as_the_same_layout(case):
    layout = parse_layout(json.dumps(case["layout"]))
    again = parse_layout(json.dumps(layout_to_json(layout)))
    assert again == layout
    assert layout_digest(again) == layout_digest(layout)
