"""``tenplexfs layout make | show | check``, and reading layouts for other commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tenplexfs.cli import show
from tenplexfs.cli.pictures import show_memory, show_ranks, show_tensor, tensor_content
from tenplexfs.cli.session import Session, command, parse_nodes
from tenplexfs.core.build import build_ptc
from tenplexfs.core.explain import stored_bytes
from tenplexfs.core.families import Qkv, make_layout
from tenplexfs.core.layout import Layout, place_in_order
from tenplexfs.core.presets import PRESETS, expert_meshes, preset_layout
from tenplexfs.core.ptc import PTC
from tenplexfs.errors import InvalidError, NotFoundError, PreconditionError, TenplexError, UsageError
from tenplexfs.formats.layout_json import layout_digest, layout_to_json, parse_layout
from tenplexfs.formats.text import bytes_text, runs_text
from tenplexfs.storage.safetensors_source import SafetensorsSource

__all__ = [
    "GlobalOption",
    "Known",
    "app",
    "known_of",
    "naming",
    "read_file",
    "read_known",
    "read_layout",
    "write_text",
]

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


GlobalOption = Annotated[
    Path | None,
    typer.Option(
        "--global",
        metavar="FILE",
        help="Global shapes for a layout that gives local ones alone: another layout of the same tensors, "
        'or {"path": [shape], "other": {"shape": [..], "dtype": ".."}}.',
    ),
]

Known = Mapping[str, tuple[tuple[int, ...], str | None]]
"""Tensor path -> global shape, and element type where it is known."""


def known_of(ptc: PTC) -> Known:
    """Returns the tensors of ``ptc``."""
    return {path: (tensor.shape, tensor.dtype) for path, tensor in ptc.tensors.items()}


def read_known(path: Path | None) -> Known:
    """Returns what the file of ``--global`` says.

    Raises:
        InvalidError: It is neither a layout nor shapes by path.
    """
    if path is None:
        return {}
    text = read_file(path)
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise InvalidError(f"{path}: no valid JSON: {error}") from None
    if isinstance(raw, dict) and "format" in raw:
        return known_of(_built(read_layout(path), path))
    out: dict[str, tuple[tuple[int, ...], str | None]] = {}
    for name, value in raw.items() if isinstance(raw, dict) else ():
        shape, dtype = (value.get("shape"), value.get("dtype")) if isinstance(value, dict) else (value, None)
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise InvalidError(f"{path}: {name!r}: need a global shape, as [4, 8], got {json.dumps(value)}")
        out[name.replace(".", "/")] = (tuple(shape), dtype)
    if not out:
        raise InvalidError(f"{path}: need a layout, or an object of tensor paths and global shapes")
    return out


def read_layout(path: Path, known: Known | None = None) -> Layout:
    """Returns the layout that ``path`` holds; an error names the file.

    Args:
        path: Its file.
        known: Tensors whose global shape or element type the explicit form may leave out.
    """
    known = known or {}
    try:
        return parse_layout(
            read_file(path),
            shapes={name: shape for name, (shape, _) in known.items()},
            dtypes={name: dtype for name, (_, dtype) in known.items() if dtype is not None},
        )
    except TenplexError as error:
        if error.message.startswith(str(path)):
            raise
        raise type(error)(f"{path}: {error.message}", **error.details) from error


@contextmanager
def naming(file: Path | None, known: Callable[[], Known] = dict) -> Iterator[None]:
    """Lets what a daemon says of a layout name the file that it is in.

    Args:
        file: The layout's, if it has one.
        known: Returns what the explicit form may leave out.
    """
    try:
        yield
    except (InvalidError, PreconditionError):
        if file is not None:
            _built(read_layout(file, known()), file)  # what is wrong in itself is wrong here, too
        raise


@command(app, "make")
def make(
    session: Session,
    *,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="safetensors: a file, an index, or a directory with one."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"A well-known model instead: {', '.join(PRESETS)}.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallelism.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Data parallelism: replicas.")] = 1,
    ep: Annotated[
        int,
        typer.Option(
            min=1,
            help="Expert parallelism, taken out of dp (else out of dp x tp), as Megatron does.",
        ),
    ] = 1,
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
    optimizer: Annotated[
        str | None, typer.Option(metavar="adam", help="With --model: its state too, in float32.")
    ] = None,
    zero: Annotated[
        bool, typer.Option("--zero", help="With --optimizer: cut its state over the replicas too.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write it; else standard output.")
    ] = None,
) -> None:
    """Make a layout for a model: a well-known one, or any by the names of its tensors.

    A dim that does not divide is cut by rule ceil; what is not recognised is replicated; both are said.
    """
    if (source is None) == (model is None):
        raise UsageError("layout make: need --from or --model, one of the two")
    if model is not None and (qkv is not None or kv_heads is not None):
        raise UsageError("--qkv and --kv-heads go with --from; what --model names is known")
    if model is None and (optimizer is not None or zero):
        raise UsageError("--optimizer and --zero go with --model")
    if qkv not in (None, "fused", "grouped"):
        raise UsageError(f"--qkv {qkv}: need fused or grouped")
    named = parse_nodes(nodes)
    notes: list[str] = []
    if model is not None:
        layout = preset_layout(
            model, tp=tp, pp=pp, dp=dp, ep=ep, nodes=named, optimizer=_optimizer(optimizer), zero=zero
        )
    elif source is not None:
        devices = {node: count for node, count in named.items() if count is not None}
        if devices and len(devices) < len(named):
            raise UsageError(f"--nodes {nodes!r}: give devices for every node or for none")
        mesh, expert_mesh = {"pp": pp, "dp": dp, "tp": tp}, None
        if ep > 1:
            mesh, expert_mesh = expert_meshes(tp=tp, pp=pp, dp=dp, ep=ep)
        layout, notes = make_layout(
            SafetensorsSource.open(source).tensors,
            mesh=mesh,
            nodes=devices or list(named),
            qkv=_qkv(qkv),
            kv_heads=kv_heads or _kv_heads(source),
            expert_mesh=expert_mesh,
        )
    text = show.layout_text(layout)
    build_ptc(parse_layout(text))
    notes += [f"{node}: no rank is left for it" for node in named if node not in layout["nodes"]]
    for line in notes:
        show.note("note: " + line.replace("\n", "\\n"))
    if output is None:
        typer.echo(text, nl=False)
        return
    write_text(output, text)
    content = {"path": str(output), "notes": notes}
    session.emit("layout-make", content, lambda: show.note(f"wrote {output}"))


def write_text(path: Path, text: str) -> None:
    """Writes a file.

    Raises:
        InvalidError: It cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidError(f"{path}: {error.strerror}") from error


def _optimizer(text: str | None) -> Literal["adam"] | None:
    if text not in (None, "adam"):
        raise UsageError(f"--optimizer {text}: need adam")
    return "adam" if text else None


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
def show_layout(
    session: Session,
    *,
    layout: Annotated[Path, typer.Argument(help="A layout file.")],
    tensor: Annotated[
        str | None, typer.Option(metavar="PATH", help="Draw how this tensor is cut, and who holds what.")
    ] = None,
    shapes: GlobalOption = None,
) -> None:
    """Show what a layout says: the entries, and what each rank holds of them."""
    parsed = read_layout(layout, read_known(shapes))
    if tensor is not None:
        ptc, path = _built(parsed, layout), tensor.replace(".", "/")
        session.emit("layout-tensor", tensor_content(ptc, path), lambda: show_tensor(ptc, path))
        return
    content = layout_to_json(parsed)
    if session.json:
        show.print_document(content)
        return
    mesh = " ".join(f"{axis}={size}" for axis, size in content.get("mesh", {}).items())
    show.table(
        ["mesh", mesh or "explicit ranks"],
        [(node, _ranks(ranks)) for node, ranks in content.get("nodes", {}).items()],
    )
    typer.echo()
    entries = {path: _entry_row(entry) for path, entry in content.get("tensors", {}).items()}
    head = ["shape", "dtype", "cut", "on"] if entries else []
    show_ranks(_built(parsed, layout), head, entries)


def _built(parsed: Layout, path: Path) -> PTC:
    try:
        return build_ptc(place_in_order(parsed))
    except TenplexError as error:
        raise type(error)(f"{path}: {error.message}", **error.details) from error


def _ranks(ranks: int | list[int]) -> str:
    return f"{ranks} devices" if isinstance(ranks, int) else f"ranks {runs_text(ranks)}"


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
def check(
    session: Session,
    *,
    layout: Annotated[Path, typer.Argument(help="A layout file.")],
    shapes: GlobalOption = None,
) -> None:
    """Check that a layout is valid and covers every tensor exactly."""
    parsed = read_layout(layout, read_known(shapes))
    ptc = _built(parsed, layout)
    tensors = {tensor.path: tensor for tensor in ptc.tensors.values()}
    stored = stored_bytes(ptc)
    content: dict[str, Any] = {
        "path": str(layout),
        "digest": layout_digest(parsed),
        "ranks": ptc.world_size,
        "nodes": {node: list(ranks) for node, ranks in ptc.nodes.items()},
        "tensors": len(tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "memory": {node: {"bytes": nbytes, "padding": pads} for node, (nbytes, pads) in stored.items()},
    }
    session.emit("layout-check", content, lambda: _show_checked(content, ptc))


def _show_checked(content: dict[str, Any], ptc: PTC) -> None:
    size, total = content["bytes"], sum(of["bytes"] for of in content["memory"].values())
    typer.echo(
        f"{content['path']}: {content['ranks']} ranks, {content['tensors']} tensors of {bytes_text(size)}, "
        "every element covered"
    )
    typer.echo(
        f"pieces and padding fill every shard exactly; the nodes store {bytes_text(total)}, "
        f"{total / max(size, 1):.2f} times the tensors"
    )
    typer.echo()
    show_memory(ptc)
