"""What a rank finds of what all ranks saved."""

import json
from dataclasses import dataclass

from tenplexfs.core.build import build_ptc
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.formats.structure import flatten
from tenplexfs.torch.catalog import Catalog


@dataclass
class Opened:
    """Documents of ranks, without a daemon."""

    of_rank: list[int]
    states: list[dict]

    def document(self, index):
        return flatten(self.states[index], lambda leaf: None).document


def test_values_that_only_another_stage_saved_are_found_after_the_stages_are_gone():
    layout = {"format": "tenplexfs-layout", "version": 1, "mesh": {"dp": 2}, "tensors": {}}
    opened = Opened([0, 1], [{"lr": {"blocks.0": 0.1}, "seed": 7}, {"lr": {"blocks.2": 0.2}, "seed": 8}])
    for rank, seed in ((0, 7), (1, 8)):
        catalog = Catalog(build_ptc(parse_layout(json.dumps(layout))), opened, rank, allow_pickle=False)
        assert catalog.items == {"lr.blocks.0": 0.1, "lr.blocks.2": 0.2, "seed": seed}
