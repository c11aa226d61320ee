"""What is computed for a transaction. Every function here runs in the process of `runtime.compute`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from tenplexfs.core.build import build_ptc
from tenplexfs.core.copies import sole_bytes, survives
from tenplexfs.core.derive import derive_layout
from tenplexfs.core.held import counted, explicit_layout, whole_shard
from tenplexfs.core.layout import Mesh, TensorEntry, has_braces, place_in_order
from tenplexfs.core.node_part import NodePart, node_part
from tenplexfs.core.paths import name_of_path
from tenplexfs.core.placement import place
from tenplexfs.core.planner import plan
from tenplexfs.core.ptc import PTC
from tenplexfs.core.snapshot import NodeName
from tenplexfs.core.transfers import list_transfers
from tenplexfs.errors import InvalidError
from tenplexfs.formats.layout_json import layout_digest, layout_text, parse_layout
from tenplexfs.formats.values import pack, regroup, unpack, values_by_rank

__all__ = [
    "Expanded",
    "ImportMatch",
    "Resolved",
    "StagePart",
    "Target",
    "expand",
    "layout_of_only_rank",
    "match_import",
    "plan_summary",
    "regroup_values",
    "resolve",
    "sole_copies",
    "stage_part",
]

TensorTable = Mapping[str, tuple[tuple[int, ...], str]]
"""Tensor path -> shape and dtype name."""


@dataclass(frozen=True)
class Target:
    """A layout that somebody wants: given, or derived from the committed one by the sizes of its axes.

    Attributes:
        layout_json: As given; empty when it is to be derived.
        mesh: Axis -> size; axes that are not named keep theirs.
        nodes: Node -> number of devices (0: as many as its share), or None for the committed ones.
        together: Axes whose ranks are to be on one node, or None for the committed ones.
    """

    layout_json: bytes = b""
    mesh: Mapping[str, int] | None = None
    nodes: Mapping[NodeName, int] | None = None
    together: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Resolved:
    """A layout as it would be committed: every rank on a node.

    Attributes:
        nodes: Those that hold ranks, by name.
    """

    layout_json: bytes
    digest: str
    nodes: tuple[NodeName, ...]


@dataclass(frozen=True)
class Expanded:
    """What a committed layout means.

    Attributes:
        survives_node_losses: How many nodes may be lost, whichever they are, without losing state.
    """

    ptc: PTC
    digest: str
    survives_node_losses: int


@dataclass(frozen=True)
class StagePart:
    """What a node needs to stage its part."""

    expanded: Expanded
    part: NodePart


@dataclass(frozen=True)
class ImportMatch:
    """How the tensors of a file become those of a job.

    Attributes:
        layout_json: Of the pseudo snapshot: every tensor whole, on one rank of the importing node.
        names: Canonical tensor path of the job -> path in the file.
        ties: Names in the file that must hold the same bytes, where the job ties them.
    """

    layout_json: bytes
    names: Mapping[str, str]
    ties: tuple[tuple[str, ...], ...]


@lru_cache(maxsize=4)
def _built(layout_json: bytes) -> PTC:
    return build_ptc(parse_layout(layout_json))


def expand(layout_json: bytes) -> Expanded:
    """Returns what a committed layout means."""
    ptc = _built(layout_json)
    return Expanded(ptc, layout_digest(ptc.layout), survives(ptc))


def resolve(
    target: Target,
    committed_json: bytes | None,
    here: NodeName,
    *,
    has_state: bool = False,
    drop: Sequence[str] = (),
    lost: Sequence[NodeName] = (),
) -> Resolved:
    """Returns the layout that ``target`` stands for.

    Args:
        target: What is wanted.
        committed_json: The layout of the job now; None when there is none.
        here: The node that takes all ranks where nobody says otherwise.
        has_state: Whether there are bytes to move, so that ranks are placed where the least is moved.
        drop: Patterns of tensors that the new layout may lack.
        lost: Nodes that have no bytes any more.

    Raises:
        InvalidError: It is refused; one line.
    """
    if target.layout_json:
        known = _built(committed_json).tensors if committed_json is not None else {}
        layout = parse_layout(
            target.layout_json,
            shapes={path: tensor.shape for path, tensor in known.items()},
            dtypes={path: tensor.dtype for path, tensor in known.items()},
        )
    elif committed_json is None or target.mesh is None:
        raise InvalidError("need a layout, or a mesh for a job that has one")
    else:
        nodes: dict[str, int | None] | None = (
            None if target.nodes is None else {node: n or None for node, n in target.nodes.items()}
        )
        layout = derive_layout(parse_layout(committed_json), target.mesh, nodes)
        if target.together is not None:
            layout = replace(layout, keep_together=target.together)
    if committed_json is not None and has_state:
        layout = place(_built(committed_json), layout, drop=drop, lost=lost)
    layout = build_ptc(place_in_order(layout, here)).layout
    holding = tuple(sorted(node for node, ranks in layout.nodes if ranks))
    return Resolved(layout_text(layout), layout_digest(layout), holding)


def sole_copies(layout_json: bytes) -> dict[NodeName, int]:
    """Returns for each node of a committed layout the bytes that no other node holds."""
    return sole_bytes(_built(layout_json))


def plan_summary(
    old_json: bytes,
    new_json: bytes,
    drop: Sequence[str],
    *,
    lost: Sequence[NodeName] = (),
    operations: bool = False,
    values: bytes = b"",
) -> dict[str, Any]:
    """Returns what ``plan --json`` prints.

    Args:
        old_json: The layout now.
        new_json: The layout that is wanted.
        drop: Patterns of tensors that the new layout may lack.
        lost: Nodes that have nothing of the old one any more.
        operations: Whether to list every transfer.
        values: What the old ranks hold beside tensors, packed.
    """
    new = _built(new_json)
    made = plan(_built(old_json), new, drop=drop, lost=lost)
    by_rank = list(values_by_rank(unpack(values), new.world_size))
    transfers = {"transfers": list(list_transfers(made))} if operations else {}
    return {**made.summary(), "values": by_rank, **transfers}


def layout_of_only_rank(tensors: TensorTable, node: NodeName) -> bytes:
    """Returns the layout of a job of one rank, which holds all of every tensor."""
    given = {path: (tuple(shape), dtype) for path, (shape, dtype) in tensors.items()}
    entries = counted(TensorEntry(path, *each) for path, each in given.items() if not has_braces(path))
    whole = {p: (each[0], {0: whole_shard(*each)}) for p, each in given.items() if has_braces(p)}
    layout = explicit_layout(Mesh((("dp", 1),)), whole, entries)
    return layout_text(replace(layout, nodes=((node, (0,)),)))


def regroup_values(values: bytes, layout_json: bytes) -> bytes:
    """Returns what the ranks of a new layout hold beside tensors, given what the old ones held."""
    ptc = _built(layout_json)
    return pack(regroup(unpack(values), [ptc.rank_paths(rank) for rank in ptc.ranks()]))


def stage_part(
    old_json: bytes, new_json: bytes, drop: Sequence[str], lost: Sequence[NodeName], node: NodeName
) -> StagePart:
    """Returns what ``node`` does to make its part of the new snapshot."""
    new, old = expand(new_json), _built(old_json)
    return StagePart(new, node_part(plan(old, new.ptc, drop=drop, lost=lost), node))


def match_import(
    layout_json: bytes, tensors: TensorTable, ignore: Sequence[str], node: NodeName
) -> ImportMatch:
    """Matches the tensors of a file with those of a layout.

    Args:
        layout_json: Of the job.
        tensors: Of the file.
        ignore: Patterns of tensors that the file may have beyond the layout, as paths or as dotted names.
        node: The importing one.

    Raises:
        InvalidError: Names every tensor that is missing on either side, or has another shape or dtype.
    """
    ptc = _built(layout_json)
    found = {path: [p.path for p in names if p.path in tensors] for path, names in ptc.names.items()}
    wrong = [f"{path} is not in the file" for path, names in found.items() if not names]
    for path, names in found.items():
        wanted = ptc.tensors[path]
        for name in names:
            shape, dtype = tensors[name]
            if (shape, dtype) != (wanted.shape, wanted.dtype):
                has, needs = f"{dtype} {list(shape)}", f"{wanted.dtype} {list(wanted.shape)}"
                wrong.append(f"{name} is {has} in the file, {needs} in the layout")
    extra = [path for path in tensors if path not in ptc.tensors and not _matches(path, ignore)]
    wrong += [f"{path} is not in the layout (--ignore PATTERN leaves it)" for path in extra]
    if wrong:
        raise InvalidError(f"import: {len(wrong)} tensors do not fit: " + "; ".join(wrong), tensors=wrong)
    # In the explicit form a path is a path, braces and all.
    held = ((path, ptc.tensors[path]) for path in found)
    whole = {path: (tensor.shape, {0: whole_shard(tensor.shape, tensor.dtype)}) for path, tensor in held}
    source = replace(explicit_layout(Mesh((("file", 1),)), whole), nodes=((node, (0,)),))
    ties = tuple(tuple(names) for names in found.values() if len(names) > 1)
    return ImportMatch(layout_text(source), {path: names[0] for path, names in found.items()}, ties)


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in (path, name_of_path(path)) for pattern in patterns)
