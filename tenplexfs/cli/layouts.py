"""``tenplexfs layout make | show | check``, and reading layouts for other commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tenplexfs.cli import show
from tenplexfs.cli.session import Session, command, parse_nodes
from tenplexfs.core.build import build_ptc
from tenplexfs.core.families import Qkv, make_layout
from tenplexfs.core.layout import Layout, place_in_order
from tenplexfs.errors import InvalidError, NotFoundError, TenplexError, UsageError
from tenplexfs.formats.layout_json import layout_digest, layout_to_json, parse_layout
from tenplexfs.storage.safetensors_source import SafetensorsSource

__all__ = ["app", "read_file", "read_layout"]

app = typer.Typer(help="Make and look at layouts: how a job is parallelised.", no_args_is_help=True)


def read_file(path: Path) -> str:
    """Returns the text of ``path``.

    Raises:
        NotFoundError, InvalidError: It cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: no such file") from error
    except UnicodeDecodeError as error:
        raise InvalidError(f"{path}: no UTF-8 text: {error}") from error
    except OSError as error:
        raise InvalidError(f"{path}: {error.strerror}") from error


def read_layout(path: Path) -> Layout:
    """Returns the layout that ``path`` holds; an error names the file."""
    try:
        return parse_layout(read_file(path))
    except TenplexError as error:
        if error.message.startswith(str(path)):
            raise
        raise type(error)(f"{path}: {error.message}", **error.details) from error


@command(app, "make")
def make(
    session: Session,
    *,
    source: Annotated[
        Path,
        typer.Option(
            "--from", metavar="FILE", help="safetensors: a file, an index, or a directory with one."
        ),
    ],
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallelism.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Data parallelism: replicas.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert parallelism.")] = 1,
    nodes: Annotated[
        str, typer.Option(metavar="A,B", help="Names, with devices or without: node0:4,node1:4.")
    ],
    qkv: Annotated[
        str | None,
        typer.Option(metavar="fused|grouped", help="How query, key and value lie where they are one matrix."),
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Key-value heads; else by the config.json beside the file.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write it; else standard output.")
    ] = None,
) -> None:
    """Make a layout for a model by the names of its tensors.

    A dim that does not divide is cut by rule ceil; what is not recognised is replicated; both are said.
    """
    if qkv not in (None, "fused", "grouped"):
        raise UsageError(f"--qkv {qkv}: need fused or grouped")
    named = parse_nodes(nodes)
    devices = {node: count for node, count in named.items() if count is not None}
    if devices and len(devices) < len(named):
        raise UsageError(f"--nodes {nodes!r}: give devices for every node or for none")
    mesh = {"pp": pp, "dp": dp, **({"ep": ep} if ep > 1 else {}), "tp": tp}
    layout, notes = make_layout(
        SafetensorsSource.open(source).tensors,
        mesh=mesh,
        nodes=devices or list(named),
        qkv=_qkv(qkv),
        kv_heads=kv_heads or _kv_heads(source),
    )
    text = show.layout_text(layout)
    build_ptc(parse_layout(text))
    for line in notes:
        show.note(f"note: {line}")
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidError(f"{output}: {error.strerror}") from error
    content = {"path": str(output), "notes": notes}
    session.emit("layout-make", content, lambda: show.note(f"wrote {output}"))


def _qkv(text: str | None) -> Qkv | None:
    return {"fused": "fused", "grouped": "grouped"}.get(text or "")  # type: ignore[return-value]


def _kv_heads(source: Path) -> int | None:
    """Returns the number of key-value heads by the ``config.json`` of the model, if there is one."""
    config = (source if source.is_dir() else source.parent) / "config.json"
    try:
        heads = json.loads(config.read_text()).get("num_key_value_heads")
    except (OSError, ValueError, AttributeError):
        return None
    return heads if isinstance(heads, int) and heads > 0 else None


@command(app, "show")
def show_layout(session: Session, *, layout: Annotated[Path, typer.Argument(help="A layout file.")]) -> None:
    """Show what a layout says, entry by entry."""
    content = layout_to_json(read_layout(layout))
    if session.json:
        show.print_document(content)
        return
    mesh = " ".join(f"{axis}={size}" for axis, size in content.get("mesh", {}).items())
    show.table(
        ["mesh", mesh or "explicit ranks"],
        [(node, _ranks(ranks)) for node, ranks in content["nodes"].items()],
    )
    rows = [(path, *_entry_row(entry)) for path, entry in content.get("tensors", {}).items()]
    show.table(["tensor", "shape", "dtype", "cut", "on"], rows)


def _ranks(ranks: int | list[int]) -> str:
    return f"{ranks} devices" if isinstance(ranks, int) else f"ranks {', '.join(map(str, ranks))}"


def _entry_row(entry: dict[str, Any]) -> tuple[str, ...]:
    shape = "x".join(map(str, entry.get("shape", ()))) or str(
        entry.get("like") or entry.get("alias") or "scalar"
    )
    cuts = []
    for cut in (*entry.get("shard", ()), *entry.get("then", ())):
        how = [str(cut["rule"])] if "rule" in cut else []
        how += [word for word in ("cuts", "sections", "pad_to", "pad_multiple") if word in cut]
        cuts.append(" ".join([f"{cut['axis']}:{'flat' if cut.get('flat') else cut['dim']}", *how]))
    on = [f"{axis}={_where(where)}" for axis, where in entry.get("on", {}).items()]
    return shape, str(entry.get("dtype", "")), "; ".join(cuts), " ".join(on)


def _where(where: object) -> str:
    return f"by {where['by']}" if isinstance(where, dict) else str(where)


@command(app, "check")
def check(session: Session, *, layout: Annotated[Path, typer.Argument(help="A layout file.")]) -> None:
    """Check that a layout is valid and covers every tensor exactly."""
    parsed = read_layout(layout)
    try:
        ptc = build_ptc(place_in_order(parsed))
    except TenplexError as error:
        raise type(error)(f"{layout}: {error.message}", **error.details) from error
    tensors = {tensor.path: tensor for tensor in ptc.tensors.values()}
    content: dict[str, Any] = {
        "path": str(layout),
        "digest": layout_digest(parsed),
        "ranks": ptc.world_size,
        "nodes": {node: list(ranks) for node, ranks in ptc.nodes.items()},
        "tensors": len(tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
    }
    size = show.bytes_text(content["bytes"])
    line = f"{layout}: {ptc.world_size} ranks, {len(tensors)} tensors of {size}, every element covered"
    session.emit("layout-check", content, lambda: typer.echo(line))
