"""Geometry and decisions: regions, layouts, the PTC, plans. Pure: no I/O, no clock, no randomness.

Usable by itself. The example of the paper is a model of two tensors, t3 and t4. First (figure 6) it is on
four GPUs, with tensor and data parallelism of degree 2; here two GPUs are a node.

>>> from tenplexfs.core import Cut, Layout, Mesh, TensorEntry, build_ptc, node_part, plan
>>> columns = (Cut(("tp",), dim=1),)
>>> model = tuple(TensorEntry(name, (4, 6), "float32", columns) for name in ("t3", "t4"))
>>> ptc = build_ptc(Layout(
...     Mesh((("dp", 2), ("tp", 2))), model, nodes=(("node0", (0, 1)), ("node1", (2, 3)))
... ))

What rank 3 holds of t3, and which ranks hold the same (replicas):

>>> shard = ptc.shard(3, "t3")
>>> shard.local_shape, str(shard.pieces[0].region)
((4, 3), '[0:4, 3:6]')
>>> [[rank for rank, _ in holder.keys] for holder in ptc.holders("t3")]
[[0, 2], [1, 3]]

Then (figure 7) two GPUs with tensor parallelism become six, with pipeline parallelism of degree 2, so that
each stage has one of the tensors, and tensor parallelism of degree 3:

>>> old = build_ptc(Layout(Mesh((("tp", 2),)), model, nodes=(("node0", (0, 1)),)))
>>> stages = tuple(
...     TensorEntry(name, (4, 6), "float32", columns, on=((("pp",), (stage,)),))
...     for stage, name in enumerate(("t3", "t4"))
... )
>>> new = build_ptc(Layout(
...     Mesh((("pp", 2), ("tp", 3))),
...     stages,
...     nodes=(("node0", (0, 1)), ("node1", (2, 3)), ("node2", (4, 5))),
... ))
>>> made = plan(old, new)

Ranks 1 and 4 need the middle third, which both old halves have a part of: those are *split*, *moved* and
*merged*. The two thirds of t3 that node0 goes on with it has already; the other four cross, 32 bytes each,
and no plan can do with fewer.

>>> made.operations
{'split': 4, 'move': 5, 'merge': 2}
>>> made.totals["local"], made.totals["moved"], made.totals["moved_lower_bound"]
(64, 128, 128)
>>> made.matrix.tolist()
[[0, 64, 64], [0, 0, 0], [0, 0, 0]]

What a node does, array by array, in the coordinates of local arrays; this alone suffices to do it:

>>> for target in node_part(made, "node2").targets:
...     for moves in target.moves:
...         boxes = moves.source_boxes.tolist(), moves.target_boxes.tolist()
...         print(target.keys, moves.way, "from rank", moves.source[0], *boxes)
((4, 't4'),) wire from rank 0 [[[0, 2], [4, 3]]] [[[0, 0], [4, 1]]]
((4, 't4'),) wire from rank 1 [[[0, 0], [4, 1]]] [[[0, 1], [4, 2]]]
((5, 't4'),) wire from rank 1 [[[0, 1], [4, 3]]] [[[0, 0], [4, 2]]]

Source: Tenplex (SOSP 2024), section 4 and its figures 6 and 7.
"""

from tenplexfs.core.build import build_ptc
from tenplexfs.core.derive import derive_layout
from tenplexfs.core.explain import node_bytes, reasons
from tenplexfs.core.layout import (
    ByIndex,
    Cut,
    FlatCut,
    FlatGroup,
    Layout,
    Mesh,
    Section,
    TensorEntry,
)
from tenplexfs.core.node_part import NodePart, Target, node_part
from tenplexfs.core.placement import place
from tenplexfs.core.planner import Plan, plan
from tenplexfs.core.presets import preset_layout, preset_tensors
from tenplexfs.core.ptc import PTC, Holder, Piece, Shard, Tensor
from tenplexfs.core.region import Region

__all__ = [
    "PTC",
    "ByIndex",
    "Cut",
    "FlatCut",
    "FlatGroup",
    "Holder",
    "Layout",
    "Mesh",
    "NodePart",
    "Piece",
    "Plan",
    "Region",
    "Section",
    "Shard",
    "Target",
    "Tensor",
    "TensorEntry",
    "build_ptc",
    "derive_layout",
    "node_bytes",
    "node_part",
    "place",
    "plan",
    "preset_layout",
    "preset_tensors",
    "reasons",
]
