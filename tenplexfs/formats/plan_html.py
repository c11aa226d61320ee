"""A plan as one page that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np

from tenplexfs.core.explain import node_bytes, reasons
from tenplexfs.core.matching import Match
from tenplexfs.core.planner import Nodes, Plan
from tenplexfs.core.ptc import PTC
from tenplexfs.formats.plan_svg import HEAT_LEVELS, cut_svgs, heat_svg, hue, mesh_svg, shading_axis
from tenplexfs.formats.text import bytes_text, duration_text, runs_text

__all__ = ["plan_html"]

_MOST_TENSORS = 12
_MOST_REASONS = 16
_MOST_NODES = 24
_GBIT = (10, 100, 400)
_KINDS = (
    ("kept", "kept", "in a file that stays as it is, or one that holds it already"),
    ("local", "local", "on the node, in another rank's file"),
    ("moved", "moved", "over the network"),
)


def plan_html(plan: Plan, *, title: str) -> str:
    """Returns the page: totals, both meshes, node by node, who sends to whom, why, and how tensors are cut.

    Args:
        plan: What is shown.
        title: Plain text.

    Cost: under a megabyte, whatever the number of ranks; seconds for some ten thousand.
    """
    axis = shading_axis(plan)
    cuts = _cuts(plan)
    rules = "".join(
        f"body:has(#tensor>option:nth-child({k}):checked) #cut{k}{{display:block}}"
        for k in range(1, len(cuts) + 1)
    )
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)}</title><style>{_STYLE}{rules}</style></head><body>",
        '<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>'
        '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse"'
        ' patternTransform="rotate(45)">'
        '<rect width="2" height="6" class="hatch"/></pattern></defs></svg>',
        f"<main><h1>{escape(title)}</h1>",
        f'<p class="from">{escape(_mesh_text(plan.old))} <b>→</b> {escape(_mesh_text(plan.new))}</p>',
        *_totals(plan),
        *_meshes(plan, axis),
        *_nodes(plan),
        *_matrix(plan),
        *_reasons(plan),
        *_tensors(plan, cuts),
        "</main></body></html>\n",
    ]
    return "".join(parts)


def _mesh_text(ptc: PTC) -> str:
    mesh = " \N{MULTIPLICATION SIGN} ".join(f"{axis} {size}" for axis, size in ptc.layout.mesh.axes)
    ranks, nodes = ptc.world_size, sum(bool(of) for of in ptc.nodes.values())
    return f"{mesh} ({ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)})"


def _share(part: int, whole: int) -> str:
    share = 100 * part / max(whole, 1)
    text = "< 0.1" if part and share < 0.1 else "> 99.9" if part < whole and share > 99.9 else f"{share:.1f}"
    return f"{escape(text)}&nbsp;%"


def _bar(parts: Sequence[tuple[str, int]], whole: int) -> str:
    drawn = "".join(
        f'<i class="{kind}" style="width:{100 * count / max(whole, 1):.3f}%"></i>'
        for kind, count in parts
        if count
    )
    return f'<div class="bar">{drawn}</div>'


def _totals(plan: Plan) -> Iterator[str]:
    size, operations = plan.totals, plan.operations
    yield '<section><div class="tiles">'
    yield (f'<div class="tile"><b>{bytes_text(size["needed"])}</b><span>needed on the new nodes</span></div>')
    for key, word, what in _KINDS:
        yield (
            f'<div class="tile"><b>{bytes_text(size[key])}</b><span><i class="{key} dot"></i>{word}: {what}, '
            f"{_share(size[key], size['needed'])}</span></div>"
        )
    yield "</div>"
    yield _bar([(key, size[key]) for key, _, _ in _KINDS], size["needed"])
    if not size["moved"]:
        yield "<p>Nothing crosses the network."
    elif size["moved"] == size["moved_lower_bound"]:
        yield "<p>No plan can move less: these bytes are on no rank of the nodes that need them."
    else:
        yield f"<p>No plan can move less than {bytes_text(size['moved_lower_bound'])}."
    yield (
        f" {operations['split']:,} splits, {operations['move']:,} moves, {operations['merge']:,} merges."
        f" {bytes_text(size['padding'])} of padding, never moved.</p>"
    )
    bytes_ = node_bytes(plan)
    busiest = np.maximum(bytes_.received, bytes_.sent)
    if size["moved"]:
        at = int(busiest.argmax())
        way = "receives" if bytes_.received[at] >= bytes_.sent[at] else "sends"
        times = ", ".join(
            f"{duration_text(int(busiest[at]) * 8 / (rate * 1e9))} at {rate} Gbit/s" for rate in _GBIT
        )
        name = escape(plan.nodes[at])
        yield f"<p>The busiest node, {name}, {way} {bytes_text(int(busiest[at]))}: {times}.</p>"
    yield "</section>"


def _meshes(plan: Plan, axis: str | None) -> Iterator[str]:
    yield '<section><h2>Ranks on nodes</h2><div class="pair">'
    for word, ptc in (("Old", plan.old), ("New", plan.new)):
        yield f"<figure><figcaption>{word}: {escape(_mesh_text(ptc))}</figcaption>"
        yield f'<div class="scroll">{mesh_svg(ptc, axis)}</div>'
        count = dict(ptc.layout.mesh.axes).get(axis or "", 1)
        if axis is not None and count > 1:
            keys = _keys({str(k): hue(k, count) for k in range(count)})
            yield f'<p class="key">{escape(axis)} {keys}</p>'
        yield "</figure>"
    yield "</div>"
    if min(plan.old.world_size, plan.new.world_size) <= 64:
        orders = {",".join(axis for axis, _ in ptc.layout.mesh.axes) for ptc in (plan.old, plan.new)}
        yield f'<p class="note">Below each rank: its coordinates ({escape(" or ".join(sorted(orders)))}).</p>'
    yield "</section>"


def _nodes(plan: Plan) -> Iterator[str]:
    of = node_bytes(plan)
    weight = of.received + of.sent
    order = np.arange(len(plan.nodes))
    if len(order) > _MOST_NODES:
        order = np.sort(np.argsort(-weight, kind="stable")[:_MOST_NODES])
    yield "<section><h2>Node by node</h2>"
    if len(plan.nodes) > _MOST_NODES:
        spread = f"{bytes_text(int(of.received.min()))} to {bytes_text(int(of.received.max()))}"
        sent = f"{bytes_text(int(of.sent.min()))} to {bytes_text(int(of.sent.max()))}"
        yield f"<p>Each of {len(plan.nodes)} nodes receives {spread}, and sends {sent}."
        yield f" The {_MOST_NODES} that move most:</p>"
    yield (
        '<div class="scroll"><table><thead><tr><th>node</th><th class="w">ranks</th>'
        "<th>needs</th><th>kept</th><th>local</th><th>receives</th><th>sends</th>"
        '<th class="w barcell"></th></tr></thead><tbody>'
    )
    most = max(int(of.needed.max(initial=0)), 1)
    for k in order.tolist():
        node = plan.nodes[k]
        ranks = [runs_text(ptc.nodes.get(node, ()), most=3) or "none" for ptc in (plan.old, plan.new)]
        move = ranks[0] if ranks[0] == ranks[1] else " → ".join(ranks)
        columns = [int(c[k]) for c in (of.needed, of.kept, of.local, of.received, of.sent)]
        cells = "".join(f"<td>{bytes_text(value) if value else '&ndash;'}</td>" for value in columns)
        bar = _bar([("kept", columns[1]), ("local", columns[2]), ("moved", columns[3])], most)
        yield f'<tr><th>{escape(node)}</th><td class="w">{move}</td>{cells}'
        yield f'<td class="w barcell">{bar}</td></tr>'
    yield "</tbody></table></div></section>"


def _matrix(plan: Plan) -> Iterator[str]:
    yield "<section><h2>Who sends to whom</h2>"
    if not plan.matrix.any():
        yield "<p>Nothing crosses the network.</p></section>"
        return
    drawn, group = heat_svg(plan.matrix, plan.nodes)
    most = int(plan.matrix.max())
    each = f" Each cell is {group} by {group} nodes, in the order of their names." if group > 1 else ""
    yield f'<p class="note">Rows send, columns receive.{each}'
    yield f" The most between two nodes: {bytes_text(most)}.</p>"
    yield f'<div class="scroll">{drawn}</div>'
    levels = "".join(f'<i class="lv b{k}"></i>' for k in range(1, HEAT_LEVELS + 1))
    yield f'<p class="key">little {levels} most</p></section>'


def _reasons(plan: Plan) -> Iterator[str]:
    found = reasons(plan)
    yield (
        '<section><h2>What moves, and why</h2><div class="scroll"><table class="why">'
        "<thead><tr><th>tensors</th><th></th><th>kept</th><th>local</th><th>moved</th>"
        '<th class="w">why</th></tr></thead><tbody>'
    )
    for reason in found[:_MOST_REASONS]:
        cells = "".join(
            f"<td>{bytes_text(value) if value else '&ndash;'}</td>"
            for value in (reason.kept, reason.local, reason.moved)
        )
        why = escape(reason.why.replace(" -> ", "\N{NO-BREAK SPACE}→ "))
        yield (
            f"<tr><th>{escape(reason.name)}</th><td>&times; {reason.tensors}</td>{cells}"
            f'<td class="w y">{why}</td></tr>'
        )
    yield "</tbody></table></div>"
    if len(found) > _MOST_REASONS:
        rest = sum(reason.moved for reason in found[_MOST_REASONS:])
        more = len(found) - _MOST_REASONS
        yield f'<p class="note">{more} more, which move {bytes_text(rest)} together.</p>'
    yield "</section>"


def _cuts(plan: Plan) -> list[tuple[Match, Nodes, int]]:
    """Returns one match for each way in which tensors are cut, and how many are; the heaviest first."""
    found: dict[object, tuple[Match, Nodes, int, int]] = {}
    for match, sources in zip(plan.matches, plan.sources, strict=True):
        if not len(match.boxes):
            continue
        key = tuple(tuple(table for table, _ in side) for side in match.pairs[0].key)
        nbytes = sum(pair.tensor.nbytes for pair in match.pairs)
        first, of, count, total = found.get(key, (match, sources, 0, 0))
        found[key] = (first, of, count + len(match.pairs), total + nbytes)
    heavy = sorted(found.values(), key=lambda f: (-f[3], f[0].pairs[0].tensor.path))
    return [(match, sources, count) for match, sources, count, _ in heavy[:_MOST_TENSORS]]


def _tensors(plan: Plan, cuts: Sequence[tuple[Match, Nodes, int]]) -> Iterator[str]:
    if not cuts:
        return
    yield '<section><h2>How a tensor is cut</h2><select id="tensor" aria-label="Tensor">'
    for match, _, count in cuts:
        tensor = match.pairs[0].tensor
        alike = f" and {count - 1} cut alike" if count > 1 else ""
        yield f"<option>{escape(tensor.path)} {list(tensor.shape)} {tensor.dtype}{alike}</option>"
    yield "</select>"
    for k, (match, sources, _) in enumerate(cuts, 1):
        old, new, note, hues = cut_svgs(plan, match, sources)
        yield f'<div class="cut" id="cut{k}"><div class="pair">'
        yield f"<figure><figcaption>Old: by the node that holds it</figcaption>{old}</figure>"
        yield (
            "<figure><figcaption>New: by the node it comes from; "
            '<i class="dot hatched"></i>crosses the network</figcaption>'
            f"{new}</figure></div>"
        )
        yield f'<p class="note">{escape(note)}. Numbers are ranks; point at a piece for its region.</p>'
        yield f'<p class="key">{_keys(hues)}</p></div>'
    yield "</section>"


def _keys(hues: Mapping[str, int]) -> str:
    """Returns a legend of at most about 16 of the colours."""
    step = -(-len(hues) // 16)
    return " ".join(
        f'<span><i class="dot c" style="--h:{angle}"></i>{escape(name)}</span>'
        for name, angle in list(hues.items())[:: max(step, 1)]
    ) + (" …" if step > 1 else "")


_STYLE = """
:root{--bg:#fbfbfa;--fg:#1d1f22;--dim:#666b73;--line:#dcdee2;--card:#fff;--kept:#9aa3ae;--local:#3f8fc9;
--moved:#dd6b35;--cs:58%;--cl:74%;--ink:#14161a;--hh:22;--h0:94%;--h9:42%}
@media(prefers-color-scheme:dark){:root{--bg:#15171a;--fg:#e7e8ea;--dim:#9aa0a8;--line:#33373d;--card:#1d2024;
--kept:#6d7681;--local:#4a9bd6;--moved:#e57a45;--cs:42%;--cl:62%;--h0:20%;--h9:62%}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:18px;margin:0 0 10px}
p{margin:8px 0}.from{color:var(--dim);margin-bottom:20px}.from b{color:var(--fg)}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px;
margin:16px 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:14px 22px;margin-bottom:14px}
.tile b{display:block;font-size:23px;font-weight:650;line-height:1.3}
.tile span,.note,.key,figcaption{color:var(--dim);font-size:13px}
.bar{display:flex;height:14px;border-radius:4px;overflow:hidden;background:var(--line)}
.bar i{display:block;height:100%}i.kept{background:var(--kept)}i.local{background:var(--local)}
i.moved{background:var(--moved)}
.dot{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:5px;vertical-align:-1px}
.dot.c{background:hsl(var(--h) var(--cs) var(--cl))}
.dot.hatched{background:repeating-linear-gradient(45deg,var(--ink) 0 2px,var(--kept) 2px 5px)}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:18px 28px}
figure{margin:0;min-width:0}figcaption{margin-bottom:8px}
svg{display:block;max-width:100%;height:auto}
.scroll{overflow-x:auto}
.key span{display:inline-block;margin-right:8px;white-space:nowrap}
.lv{display:inline-block;width:22px;height:11px}
.c{fill:hsl(var(--h) var(--cs) var(--cl))}
.hit{fill:transparent}.hit:hover{stroke:var(--fg)}
text{font:11px system-ui,sans-serif;fill:var(--fg)}
.node{font-weight:600;font-size:12px}
.r,.p,.k,.v,.m{text-anchor:middle}.r,.p,.k{fill:var(--ink)}.r{font-weight:650;font-size:14px}.p{font-size:10px}
.k{paint-order:stroke;stroke:#fffb;stroke-width:3px}.e{text-anchor:end}.l{fill:var(--dim)}
.o{fill:none;stroke:var(--ink);stroke-opacity:.65;stroke-width:1}
.hatch{fill:var(--ink);fill-opacity:.5}
.grid{fill:none;stroke:var(--line)}
table{border-collapse:collapse;width:100%;font-size:13px}
th,td{padding:5px 10px 5px 0;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line);
font-variant-numeric:tabular-nums}
th:first-child,.w{text-align:left}tbody th{font-weight:500}thead th{color:var(--dim);font-weight:500}
td.w{padding-left:6px}.y{white-space:normal;min-width:220px;line-height:1.35}
thead th.w{padding-left:6px}.barcell{width:22%;min-width:110px}
select{font:inherit;max-width:100%;padding:5px 8px;margin-bottom:14px;color:inherit;background:var(--bg);
border:1px solid var(--line);border-radius:6px}
.cut{display:none}
@supports not selector(:has(a)){.cut{display:block}}
@media(max-width:520px){main{padding:16px 10px 40px}section{padding:14px 12px}h1{font-size:21px}
.why tbody th{white-space:normal;overflow-wrap:anywhere;min-width:150px}.y{min-width:150px}}
"""
_STYLE += "".join(
    f".h{k}{{fill:color-mix(in hsl,hsl(var(--hh) 75% var(--h9)) {k * 100 // HEAT_LEVELS}%,"
    "hsl(var(--hh) 75% var(--h0)))}"
    f".b{k}{{background:color-mix(in hsl,hsl(var(--hh) 75% var(--h9)) {k * 100 // HEAT_LEVELS}%,"
    "hsl(var(--hh) 75% var(--h0)))}"
    for k in range(1, HEAT_LEVELS + 1)
)
_STYLE += ".t1{fill:var(--fg)}.t2{fill:#fff}@media(prefers-color-scheme:dark){.t2{fill:#14161a}}"
