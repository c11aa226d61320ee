"""The drawings of a plan as SVG: meshes on nodes, who sends to whom, and how a tensor is cut.

Ranks and pairs of nodes are drawn one by one while a person can tell them apart; beyond that by nodes, and by
groups of nodes. Colours are classes, of which the page says what they are in the light and in the dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

import numpy as np

from tenplexfs.core.explain import drawn_dims
from tenplexfs.core.layout import Mesh
from tenplexfs.core.matching import Match, Side
from tenplexfs.core.planner import Nodes, Plan
from tenplexfs.core.ptc import PTC
from tenplexfs.core.region import Boxes, Ints
from tenplexfs.formats.text import bytes_text, runs_text

__all__ = ["HEAT_LEVELS", "cut_svgs", "heat_svg", "hue", "mesh_svg", "shading_axis"]

HEAT_LEVELS = 8
_BIG_RANKS = 64
_MOST_RANKS = 4096
_MOST_NODES = 40
_MOST_BOXES = 256
_LABEL = 18
_WIDTH = 440


def hue(index: int, count: int) -> int:
    """Returns the hue of thing ``index`` of ``count``, in degrees; neighbours differ."""
    return round(360 * index / max(count, 1) + 205) % 360


def _svg(width: float, height: float, label: str, body: Sequence[str], *, scale: float = 1.0) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" style="width:{width * scale:g}px" role="img" '
        f'aria-label="{escape(label)}">{"".join(body)}</svg>'
    )


def _short(text: str, most: int) -> str:
    return escape(text if len(text) <= most else text[: most - 1] + "…")


def shading_axis(plan: Plan) -> str | None:
    """Returns the axis by whose coordinate ranks are coloured: stages where there are any."""
    sizes: dict[str, int] = {}
    for ptc in (plan.old, plan.new):
        for axis, size in ptc.layout.mesh.axes:
            sizes[axis] = max(size, sizes.get(axis, 1))
    wide = [axis for axis, size in sizes.items() if size > 1]
    return "pp" if "pp" in wide else next(iter(wide), None)


def _coordinates(mesh: Mesh, axis: str | None) -> tuple[Ints, int]:
    sizes = dict(mesh.axes)
    if axis is None or axis not in sizes:
        return np.zeros(mesh.size, np.int64), 1
    return mesh.coordinates((axis,)), sizes[axis]


def mesh_svg(ptc: PTC, axis: str | None) -> str:
    """Draws which ranks are on which node, coloured by their coordinate on ``axis``."""
    label = f"{ptc.world_size} ranks on {len(ptc.nodes)} nodes"
    if ptc.world_size <= _BIG_RANKS:
        return _few_ranks(ptc, axis, label)
    return _many_ranks(ptc, axis, label)


def _few_ranks(ptc: PTC, axis: str | None, label: str) -> str:
    shade, count = _coordinates(ptc.layout.mesh, axis)
    places = [ptc.layout.mesh.coordinates((name,)).tolist() for name, _ in ptc.layout.mesh.axes]
    wide, high, gap, per_row = 50, 36, 4, 8
    body, y = [], 0
    for node, ranks in ptc.nodes.items():
        rows = max(1, math.ceil(len(ranks) / per_row))
        body.append(f'<text x="0" y="{y + 12}" class="node">{_short(node, 52)}</text>')
        for k, rank in enumerate(ranks):
            x, top = k % per_row * (wide + gap), y + 18 + k // per_row * (high + gap)
            at = ",".join(str(place[rank]) for place in places)
            body.append(
                f'<rect x="{x}" y="{top}" width="{wide}" height="{high}" rx="4" '
                f'style="--h:{hue(int(shade[rank]), count)}" class="c"/>'
                f'<text x="{x + wide / 2:g}" y="{top + 16}" class="r">{rank}</text>'
                f'<text x="{x + wide / 2:g}" y="{top + 29}" class="p">{escape(at)}</text>'
            )
        y += 18 + rows * (high + gap) + 10
    widest = min(per_row, max((len(ranks) for ranks in ptc.nodes.values()), default=1))
    return _svg(max(widest * (wide + gap), 216), max(y - 10, 1), label, body)


def _many_ranks(ptc: PTC, axis: str | None, label: str) -> str:
    """Draws ranks as dots, or nodes as dots where there are too many; one path for each colour."""
    shade, count = _coordinates(ptc.layout.mesh, axis)
    nodes = [(node, ranks) for node, ranks in ptc.nodes.items() if ranks]
    by_node = ptc.world_size > _MOST_RANKS
    most = 1 if by_node else max(len(ranks) for _, ranks in nodes)
    columns, cell = min(most, 8), 8
    wide = columns * cell + (1 if by_node else 6)
    high = math.ceil(most / columns) * cell + (1 if by_node else 6)
    per_row = max(1, _WIDTH // wide)
    paths: dict[int, list[str]] = {}
    hits = []
    for n, (node, ranks) in enumerate(nodes):
        x, y = n % per_row * wide, n // per_row * high
        for k, rank in enumerate(ranks[:1] if by_node else ranks):
            dot = f"M{x + k % columns * cell} {y + k // columns * cell}h7v7h-7z"
            paths.setdefault(int(shade[rank]), []).append(dot)
        if not by_node:
            hits.append(
                f'<rect x="{x - 2}" y="{y - 2}" width="{wide - 3}" height="{high - 3}" rx="2" class="hit">'
                f"<title>{escape(node)}: ranks {runs_text(ranks, most=6)}</title></rect>"
            )
    drawn = [
        f'<path d="{"".join(dots)}" style="--h:{hue(k, count)}" class="c"/>'
        for k, dots in sorted(paths.items())
    ]
    height = math.ceil(len(nodes) / per_row) * high
    body = [f'<g transform="translate(2 2)">{"".join(drawn)}{"".join(hits)}</g>']
    return _svg(per_row * wide + 2, height + 2, label, body)


def heat_svg(matrix: Ints, nodes: Sequence[str]) -> tuple[str, int]:
    """Draws who (row) sends how much to whom (column).

    Returns:
        The drawing, and how many nodes each cell stands for on a side.
    """
    group = math.ceil(len(nodes) / _MOST_NODES)
    edges = np.arange(0, len(nodes), group)
    cells = np.add.reduceat(np.add.reduceat(matrix, edges, axis=0), edges, axis=1)
    labels = [nodes[a] for a in edges.tolist()]
    ends = [nodes[min(a + group, len(nodes)) - 1] for a in edges.tolist()]
    names = [a if a == b else f"{a} to {b}" for a, b in zip(labels, ends, strict=True)]
    count = len(names)
    is_roomy = count <= 10
    side = max(12, 560 // count)
    wide, high = (64, 30) if is_roomy else (side, side)
    left = 10 + 6.4 * min(max(map(len, labels)), _LABEL)
    top = 22.0 if is_roomy else left
    most = max(int(cells.max()), 1)
    body = []
    for k in range(0, count, 1 if count <= 24 else math.ceil(count / 20)):
        x, y = left + (k + 0.5) * wide, top + (k + 0.5) * high + 4
        body.append(f'<text x="{left - 6:g}" y="{y:g}" class="l e">{_short(labels[k], _LABEL)}</text>')
        if is_roomy:
            body.append(f'<text x="{x:g}" y="{top - 6:g}" class="l m">{_short(labels[k], 9)}</text>')
        else:
            at = f'x="{x + 4:g}" y="{top - 6:g}" transform="rotate(-90 {x + 4:g} {top - 6:g})"'
            body.append(f'<text {at} class="l">{_short(labels[k], _LABEL)}</text>')
    size = f'width="{count * wide}" height="{count * high}"'
    body.append(f'<rect x="{left:g}" y="{top:g}" {size} class="grid"/>')
    for i, j in zip(*(index.tolist() for index in np.nonzero(cells)), strict=True):
        value = int(cells[i, j])
        level = min(HEAT_LEVELS, 1 + value * HEAT_LEVELS // (most + 1))
        x, y, text = left + j * wide, top + i * high, bytes_text(value)
        body.append(
            f'<rect x="{x:g}" y="{y:g}" width="{wide - 1}" height="{high - 1}" class="h{level}">'
            f"<title>{escape(names[i])} sends {text} to {escape(names[j])}</title></rect>"
        )
        if is_roomy:
            at = f'x="{x + wide / 2:g}" y="{y + high / 2 + 4:g}"'
            body.append(f'<text {at} class="v {"t2" if level > HEAT_LEVELS // 2 else "t1"}">{text}</text>')
    return _svg(left + count * wide + 2, top + count * high + 2, "bytes between nodes", body), group


def cut_svgs(plan: Plan, match: Match, sources: Nodes) -> tuple[str, str, str, dict[str, int]]:
    """Draws the first tensor of ``match``: as it is cut now, and as it will be.

    The old cut is coloured by the node that holds a piece; the new one by the node that its bytes come from,
    hatched where they cross to some node that needs them.

    Returns:
        Both drawings, a line on what they leave out, and the hue of each node that holds some of it.
    """
    shape = match.pairs[0].tensor.shape
    frame = _Frame(shape, match.held.atoms, match.wanted.atoms)
    nodes = plan.nodes
    every = np.arange(len(match.held.atoms))
    owner, node_numbers = match.held.holders_of(every)
    first = node_numbers[np.searchsorted(owner, every)]
    holding = np.unique(node_numbers).tolist()
    hues = {node: hue(k, len(holding)) for k, node in enumerate(holding)}
    old = frame.draw(
        match.held.atoms,
        hues=[hues[node] for node in first.tolist()],
        titles=lambda k: f"{_region(match.held.atoms[k])}: {_holders(match.held, k)}",
        labels=lambda k: _ranks_of(match.held, k),
        label="the old cut",
    )
    # A piece that crosses is of the node that sends it; any other of the node that holds it in the old cut.
    comes_from = first[match.overlap_held]
    crosses = np.zeros(len(match.boxes), bool)
    crossing = match.row_overlap[match.moved]
    comes_from[crossing], crosses[crossing] = sources[:, 0], True

    def how(k: int) -> str:
        way = f"sent by {nodes[comes_from[k]]}" if crosses[k] else "on its nodes already"
        return f"{_region(match.boxes[k])}: {way}, for {_holders(match.wanted, int(match.overlap_wanted[k]))}"

    parts = frame.draw(
        match.boxes,
        hues=[hues[node] for node in comes_from.tolist()],
        titles=how,
        labels=lambda k: [],
        label="the new cut",
        hatched=crosses,
        outlines=match.wanted.atoms,
        outline_labels=lambda k: _ranks_of(match.wanted, k),
    )
    note = frame.note(len(match.held.atoms), len(match.boxes))
    return old, parts, note, {nodes[node]: angle for node, angle in hues.items()}


class _Frame:
    """Where a tensor's boxes lie in a drawing: the two dims that are cut most."""

    def __init__(self, shape: tuple[int, ...], *cuts: Boxes) -> None:
        self.shape = shape
        boxes = np.concatenate(cuts)
        self.dims = drawn_dims(shape, boxes)
        self.hidden = [
            d for d in range(len(shape)) if d not in self.dims and len(np.unique(boxes[:, :, d])) > 2
        ]
        rows, columns = (shape[d] for d in self.dims) if len(self.dims) == 2 else (1, 1)
        self.height = min(max(_WIDTH * rows / max(columns, 1), 90), 300) if len(self.dims) == 2 else 56

    def note(self, *counts: int) -> str:
        """Returns what the drawing leaves out, and what its sides are."""
        parts = []
        if len(self.dims) == 2:
            down, across = self.dims
            parts.append(
                f"dim {down} ({self.shape[down]}) goes down, dim {across} ({self.shape[across]}) across"
            )
        elif self.dims:
            parts.append(f"dim 0 ({self.shape[0]}) goes across")
        else:
            parts.append("a single value")
        if self.hidden:
            parts.append(f"dim {', '.join(map(str, self.hidden))} is cut too")
        if max(counts) > _MOST_BOXES:
            parts.append(f"of {max(counts)} pieces, those that can be told apart are drawn")
        return "; ".join(parts)

    def place(self, boxes: Boxes) -> Iterator[tuple[int, tuple[float, float, float, float]]]:
        """Yields index, x, y, width, height of each box; of many, one for each small square."""
        lows, sizes = np.zeros((len(boxes), 2)), np.full((len(boxes), 2), (float(_WIDTH), self.height))
        for column, dim in enumerate(reversed(self.dims)):
            scale = (_WIDTH, self.height)[column] / max(self.shape[dim], 1)
            lows[:, column] = boxes[:, 0, dim] * scale
            sizes[:, column] = (boxes[:, 1, dim] - boxes[:, 0, dim]) * scale
        chosen, side = np.arange(len(boxes)), 0
        while len(chosen) > _MOST_BOXES:
            side = side * 2 or 1
            chosen = np.sort(np.unique(lows // side, axis=0, return_index=True)[1])
        for k, (x, y), (w, h) in zip(
            chosen.tolist(), lows[chosen].tolist(), sizes[chosen].tolist(), strict=True
        ):
            yield k, (x, y, max(w, side), max(h, side))

    def draw(
        self,
        boxes: Boxes,
        *,
        hues: Sequence[int],
        titles: Callable[[int], str],
        labels: Callable[[int], list[int]],
        label: str,
        hatched: Sequence[bool] | Ints | None = None,
        outlines: Boxes | None = None,
        outline_labels: Callable[[int], list[int]] | None = None,
    ) -> str:
        """Draws boxes with a title each, and over them outlines with labels."""
        body = []
        for k, (x, y, w, h) in self.place(boxes):
            at = f'x="{x:.5g}" y="{y:.5g}" width="{max(w, 0.3):.4g}" height="{max(h, 0.3):.4g}"'
            body.append(
                f'<g><title>{escape(titles(k))}</title><rect {at} style="--h:{hues[k]}" class="c"/>'
                + (f'<rect {at} fill="url(#hatch)"/>' if hatched is not None and hatched[k] else "")
                + "</g>"
            )
        edged = boxes if outlines is None else outlines
        texts = labels if outline_labels is None else outline_labels
        lines = []
        for k, (x, y, w, h) in self.place(edged):
            if w >= 3 and h >= 3:
                lines.append(f"M{x:.5g} {y:.5g}h{w:.4g}v{h:.4g}h-{w:.4g}z")
            text = _fitting(texts(k), w) if w >= 14 and h >= 13 else ""
            if text:
                at = f'x="{x + w / 2:.5g}" y="{y + h / 2 + 4:.5g}"'
                body.append(f'<text {at} class="k">{escape(text)}</text>')
        body.append(f'<path d="{"".join(lines)}" class="o"/>')
        return _svg(_WIDTH, self.height, label, ['<g transform="translate(1 1) scale(.995)">', *body, "</g>"])


def _region(box: Ints) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(*box.tolist(), strict=True)) + "]"


def _ranks_of(side: Side, atom: int) -> list[int]:
    """Returns the ranks that hold an atom."""
    pieces = side.members[0][side.members[1] == atom]
    found: set[int] = set()
    for place, index in zip(
        side.piece_place[pieces].tolist(), side.piece_index[pieces].tolist(), strict=True
    ):
        table, mask = (side.ptc.tables[side.key[place][0]], side.ptc.masks[side.key[place][1]])
        found |= set(np.flatnonzero(mask & (table.of_rank == table.piece_cell[index])).tolist())
    return sorted(found)


def _holders(side: Side, atom: int) -> str:
    ranks = _ranks_of(side, atom)
    nodes: Mapping[str, None] = dict.fromkeys(side.ptc.node_of(rank) for rank in ranks)
    names = list(nodes)
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {runs_text(ranks, most=4)} on {shown}"


def _fitting(ranks: list[int], width: float) -> str:
    """Returns as much of the ranks as fits into a piece."""
    if not ranks:
        return ""
    texts = [runs_text(ranks), runs_text(ranks, most=3), runs_text(ranks, most=1), f"{ranks[0]} …"]
    return next((text for text in texts if len(text) * 6.4 < width), "")
