"""What a person sees of a plan beyond its numbers, and of a layout: why, how long, tables, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from tenplexfs.cli import show
from tenplexfs.core.explain import ranks_alike, reasons, stored_bytes
from tenplexfs.core.planner import Plan
from tenplexfs.core.ptc import PTC, Holder
from tenplexfs.errors import InvalidError, NotFoundError, UsageError
from tenplexfs.formats.blocks import pieces_text
from tenplexfs.formats.text import bytes_text, duration_text, parse_bandwidth, runs_text

__all__ = [
    "estimates",
    "show_estimates",
    "show_memory",
    "show_ranks",
    "show_reasons",
    "show_tensor",
    "tensor_content",
]

_MOST_REASONS = 12
_MOST_GROUPS = 6
_MOST_PIECES = 64


def estimates(content: Mapping[str, Any], bandwidths: Sequence[str]) -> list[dict[str, Any]]:
    """Returns for each speed of the nodes' links how long the plan ``content`` takes at least.

    A link carries both ways at once; the node that sends or receives most decides.

    Raises:
        UsageError: A bandwidth is none.
    """
    node, way, most = "", "receives", 0
    for name, of in content["nodes"].items():
        for word, count in (("receives", of["receives"]), ("sends", of["sends"])):
            if count > most:
                node, way, most = name, word, count
    found = []
    for text in bandwidths:
        try:
            rate = parse_bandwidth(text)
        except InvalidError as error:
            raise UsageError(f"--{error.message}") from error
        found.append({"bandwidth": text, "seconds": most / rate, "node": node, "way": way, "bytes": most})
    return found


def show_estimates(found: Sequence[Mapping[str, Any]]) -> None:
    """Prints how long a plan takes."""
    if not found or not found[0]["bytes"]:
        return
    first = found[0]
    times = ", ".join(f"{duration_text(each['seconds'])} at {each['bandwidth']}" for each in found)
    typer.echo(f"at least {times}: {first['node']} {first['way']} {bytes_text(first['bytes'])}")


def show_reasons(plan: Plan) -> None:
    """Prints what becomes of each entry's tensors, and why."""
    found = reasons(plan)
    if not found:
        return
    rows = [
        (
            reason.name,
            f"x {reason.tensors}",
            *(bytes_text(n) if n else "-" for n in (reason.kept, reason.local, reason.moved)),
            reason.why,
        )
        for reason in found[:_MOST_REASONS]
    ]
    show.table(["tensors", "", "kept", "local", "moved", "why"], rows, numbers=(1, 2, 3, 4))
    if rest := found[_MOST_REASONS:]:
        typer.echo(f"and {len(rest)} more, which move {bytes_text(sum(r.moved for r in rest))} together")
    typer.echo()


def show_ranks(ptc: PTC, head: Sequence[str], entries: Mapping[str, tuple[str, ...]]) -> None:
    """Prints the entries of a layout with their local shapes: a column for all ranks that are alike.

    Args:
        ptc: Of the layout.
        head: What the words of an entry are.
        entries: Key of an entry and some words on it; entries that differ in their name alone are one row.
    """
    groups = ranks_alike(ptc)
    shown = groups[:_MOST_GROUPS]
    keys = dict.fromkeys(key for group in shown for key in group.shapes)
    alike: dict[tuple[str, ...], list[str]] = {}
    for key in keys:
        words = entries.get(key, ("",) * len(head))
        alike.setdefault((*words, *(_shapes_text(g.shapes.get(key, {})) for g in shown)), []).append(key)
    rows: list[tuple[object, ...]] = [
        (names[0] + (f" and {len(names) - 1} alike" if len(names) > 1 else ""), *words)
        for words, names in alike.items()
    ]
    rows.append(("bytes a rank", *("",) * len(head), *(bytes_text(group.nbytes) for group in shown)))
    heads = [f"rank{'s' * (len(g.ranks) > 1)} {runs_text(g.ranks, most=4)}" for g in shown]
    show.table(["tensor", *head, *heads], rows)
    if rest := groups[_MOST_GROUPS:]:
        ranks = sum(len(group.ranks) for group in rest)
        typer.echo(f"and {len(rest)} more groups of {ranks} ranks (--tensor shows one tensor on all ranks)")


def _shapes_text(counts: Mapping[tuple[int, ...], int]) -> str:
    parts = []
    for shape, count in counts.items():
        text = "x".join(map(str, shape)) or "scalar"
        parts.append(text if count == 1 else f"{count} of {text}")
    return ", ".join(parts) or "-"


def tensor_content(ptc: PTC, path: str) -> dict[str, Any]:
    """Returns how one tensor is cut, for machines.

    Raises:
        NotFoundError: There is no such tensor; names some that are like it.
    """
    holders, tensor = _holders(ptc, path), ptc.tensors[path]
    return {
        "tensor": path,
        "canonical": tensor.path,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "shards": [
            {
                "held": [{"rank": rank, "path": shown} for rank, shown in holder.keys],
                "local_shape": list(holder.shard.local_shape),
                "pieces": [
                    {"start": list(p.region.start), "stop": list(p.region.stop), "at": list(p.at)}
                    for p in holder.shard.pieces
                ],
                "padding": [
                    {"start": list(box.start), "stop": list(box.stop)} for box in holder.shard.padding
                ],
            }
            for holder in holders
        ],
    }


def _holders(ptc: PTC, path: str) -> tuple[Holder, ...]:
    if path not in ptc.tensors:
        leaf = path.rpartition("/")[2]
        like = [known for known in ptc.tensors if known.endswith(leaf)] or list(ptc.tensors)
        more = f" and {len(like) - 5} more" if len(like) > 5 else ""
        raise NotFoundError(f"no tensor {path!r}; there are: {', '.join(like[:5]) or 'none'}{more}")
    return ptc.holders(path)


def show_tensor(ptc: PTC, path: str) -> None:
    """Prints how one tensor is cut: a picture, and who holds what.

    Raises:
        NotFoundError: There is no such tensor; names some that are like it.
    """
    holders, tensor = _holders(ptc, path), ptc.tensors[path]
    names = [p.path for p in ptc.names[tensor.path]]
    tied = f", tied: {', '.join(names)}" if len(names) > 1 else ""
    typer.echo(f"{path}: {tensor.dtype} {list(tensor.shape)}, {bytes_text(tensor.nbytes)}{tied}")
    pieces = [
        (piece.region, runs_text(sorted({rank for rank, _ in holder.keys}), most=3))
        for holder in holders
        for piece in holder.shard.pieces
    ]
    if pieces:
        typer.echo(pieces_text(tensor.shape, pieces, height=32))
    rows = []
    for holder in holders[:_MOST_PIECES]:
        ranks = sorted({rank for rank, _ in holder.keys})
        nodes = dict.fromkeys(ptc.node_of(rank) for rank in ranks)
        regions = [f"{piece.region} at {list(piece.at)}" for piece in holder.shard.pieces]
        more = f" and {len(regions) - 4} more" if len(regions) > 4 else ""
        local = "x".join(map(str, holder.shard.local_shape)) or "scalar"
        padding = sum(box.volume for box in holder.shard.padding)
        rows.append(
            (
                runs_text(ranks, most=6),
                ", ".join(list(nodes)[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else ""),
                local,
                (", ".join(regions[:4]) or "nothing") + more,
                padding or "-",
            )
        )
    show.table(["ranks", "nodes", "local", "pieces", "padding"], rows, numbers=(4,))
    if len(holders) > _MOST_PIECES:
        typer.echo(f"and {len(holders) - _MOST_PIECES} more shards")


def show_memory(ptc: PTC) -> None:
    """Prints what each node stores; nodes that store as much as the one before are taken together."""
    rows: list[tuple[list[str], int, int, int]] = []
    for node, (nbytes, padding) in stored_bytes(ptc).items():
        ranks = len(ptc.nodes[node])
        if rows and rows[-1][1:] == (ranks, nbytes, padding):
            rows[-1][0].append(node)
        else:
            rows.append(([node], ranks, nbytes, padding))
    shown = [
        (
            ", ".join(nodes) if len(nodes) < 3 else f"{nodes[0]} to {nodes[-1]} ({len(nodes)})",
            ranks,
            bytes_text(nbytes),
            bytes_text(padding) if padding else "-",
        )
        for nodes, ranks, nbytes, padding in rows
    ]
    show.table(["node", "ranks", "stores", "of it padding"], shown, numbers=(1, 2, 3))
