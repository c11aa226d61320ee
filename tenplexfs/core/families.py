"""Layouts of known model families, read off the names of their tensors.

Megatron's way of tensor parallelism: a layer's first matrices are cut by their output, its last by their
input, embeddings and heads by the vocabulary; norms, and the biases that are added after a product cut by its
input, are replicated. Layers are spread evenly over the pipeline's stages, embeddings stand on the first and
what follows the layers on the last. What is not recognised is replicated, and the notes say so.

Source: "Megatron-LM" (arXiv 1909.08053, section 3) and "Efficient Large-Scale Language Model Training"
(arXiv 2104.04473, section 2.2); the names are those of Hugging Face transformers' modules.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tenplexfs.core.layout import has_braces
from tenplexfs.errors import InvalidError

__all__ = ["Qkv", "make_layout"]

Qkv = Literal["fused", "grouped"]
"""How query, key and value lie in one matrix: one after the other, or head group by head group."""

Tensors = Mapping[str, tuple[Sequence[int], str]]
"""Tensor path -> global shape, dtype."""

Kind = Literal["column", "row", "kv", "qkv", "gate_up", "whole"]


def _ends_with(modules: str, leaves: str = "") -> re.Pattern[str]:
    """Returns what matches a path whose end is one of ``modules``, then one of ``leaves`` if any."""
    tail = f"/(?:{'|'.join(leaves.split())})" if leaves else ""
    return re.compile(rf"(?:.*/)?(?:{'|'.join(modules.split())}){tail}")


# What is done with a module of a layer; the first match counts.
_IN_LAYER: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("qkv", _ends_with("c_attn query_key_value qkv_proj linear_qkv Wqkv W_pack qkv")),
    ("kv", _ends_with("k_proj v_proj self/key self/value k_lin v_lin wk wv")),
    ("column", _ends_with("q_proj self/query q_lin wq gate_proj up_proj intermediate/dense c_fc")),
    ("column", _ends_with("dense_h_to_4h linear_fc1 fc1 lin1 fc_in w1 w3")),
    ("gate_up", _ends_with("gate_up_proj")),
    (
        "row",
        _ends_with("o_proj out_proj out_lin wo linear_proj attn/c_proj attention/dense self_attention/dense"),
    ),
    ("row", _ends_with("down_proj output/dense mlp/c_proj dense_4h_to_h linear_fc2 fc2 lin2 fc_out w2")),
    (
        "whole",
        _ends_with(r"\w*(?:[nN]orm|ln|ln_\w+) \w*layer_?norm\w* gate router shared_expert_gate rotary_emb"),
    ),
)
_BUFFER = _ends_with("attn attention", "bias masked_bias")
_LAYER = re.compile(r"(?P<stack>(?:.*?/)?(?:layer|layers|h|blocks|block))/(?P<i>\d+)/(?P<rest>.+)")
_EXPERT = re.compile(r"(?P<before>(?:.*/)?experts)/(?P<e>\d+)/(?P<after>.+)")

# Outside the layers.
_VOCABULARY_FIRST = _ends_with("word_embeddings wte embed_tokens embed_in tok_embeddings", "weight")
_VOCABULARY_LAST = _ends_with(
    "lm_head lm_head/decoder embed_out output_layer predictions predictions/decoder vocab_projector",
    "weight bias",
)
_FIRST = _ends_with("embeddings wpe embed_positions position_embeddings word_embeddings_layernorm", ".+")
_LAST = _ends_with(
    "ln_f norm final_layer_?norm final_norm pooler transform seq_relationship classifier qa_outputs score"
    r" vocab_\w+ lm_head/dense lm_head/layer_norm lm_head/transform",
    ".+",
)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What decides how matrices are cut, beyond their names."""

    tensors: Tensors
    qkv: Qkv | None
    kv_heads: int | None
    conv1d: bool
    tp: int
    own_expert_mesh: bool


def make_layout(
    tensors: Tensors,
    *,
    mesh: Mapping[str, int],
    nodes: Mapping[str, int] | Sequence[str],
    qkv: Qkv | None = None,
    kv_heads: int | None = None,
    expert_mesh: Mapping[str, int] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Returns a layout for a model, as the JSON of a layout file, and notes on what was decided for the user.

    Args:
        tensors: Every tensor of the model.
        mesh: Axes in order. ``pp`` takes stages, ``tp`` cuts matrices, ``ep`` (if there) takes whole
            experts; any other replicates.
        nodes: Names, which share the ranks evenly and in order, or name -> devices, filled in order.
        qkv: How fused query-key-value matrices are laid out. Never guessed.
        kv_heads: Number of key-value heads, where it may be smaller than ``tp``.
        expert_mesh: Another factorisation of the same ranks for the experts, with ``ep``; none of them is cut
            then.

    Raises:
        InvalidError: The mesh or the nodes do not fit, or query, key and value are one matrix and ``qkv`` is
            not given.
    """
    for axis, size in mesh.items():
        if size < 1:
            raise InvalidError(f"mesh: axis {axis!r}: need a size >= 1, got {size}")
    if not tensors:
        raise InvalidError("no tensors to lay out")
    if odd := [path for path in tensors if has_braces(path)]:
        raise InvalidError(
            f"tensor {odd[0]!r}: a path with braces needs the explicit form of a layout, 'ranks'; "
            "elsewhere they mean an index"
        )
    axes = {**mesh, **(expert_mesh or {})}
    _check_experts(tensors, axes.get("ep", 1))
    facts = _Facts(
        tensors,
        qkv,
        kv_heads,
        _is_conv1d(tensors),
        mesh.get("tp", 1),
        own_expert_mesh=expert_mesh is not None,
    )
    entries, notes = _entries(facts, axes)
    layout = {
        "format": "tenplexfs-layout",
        "version": 1,
        "mesh": dict(mesh),
        **({"meshes": {"expert": dict(expert_mesh)}} if expert_mesh else {}),
        "nodes": _place(math.prod(mesh.values()), nodes),
        "tensors": entries,
    }
    return layout, notes


def _check_experts(tensors: Tensors, ep: int) -> None:
    if ep > 1:
        found = {int(expert["e"]) for path in tensors if (expert := _EXPERT.fullmatch(path))}
        if len(found) < ep:
            raise InvalidError(f"ep {ep}: the model has {len(found) or 'no'} experts")


def _place(ranks: int, nodes: Mapping[str, int] | Sequence[str]) -> dict[str, list[int]]:
    """Returns node -> ranks, filled in order."""
    if len(set(nodes)) != len(nodes) or not nodes:
        raise InvalidError(f"nodes: need distinct names, got {list(nodes)}")
    if isinstance(nodes, Mapping):
        counts = dict(nodes)
        if ranks > sum(counts.values()):
            raise InvalidError(
                f"nodes: the mesh has {ranks} ranks, the nodes have {sum(counts.values())} devices"
            )
    else:
        counts = {node: ranks // len(nodes) + (n < ranks % len(nodes)) for n, node in enumerate(nodes)}
    placed, begin = {}, 0
    for node, count in counts.items():
        placed[node] = list(range(begin, min(begin + count, ranks)))
        begin += count
    return {node: members for node, members in placed.items() if members}


def _is_conv1d(tensors: Tensors) -> bool:
    """Says whether GPT-2's modules keep (in, out) weights: their output is the wider dim."""
    shapes = [shape for path, (shape, _) in tensors.items() if re.search(r"(c_attn|c_fc)/weight$", path)]
    return any(len(shape) == 2 and shape[0] <= shape[1] for shape in shapes)


def _entries(facts: _Facts, mesh: Mapping[str, int]) -> tuple[dict[str, Any], list[str]]:
    """Returns the entries of all tensors, one for all layers where they agree, and the notes."""
    layers: dict[str, int] = defaultdict(int)
    experts = 0
    for path in facts.tensors:
        if match := _LAYER.fullmatch(path):
            layers[match["stack"]] = max(layers[match["stack"]], int(match["i"]) + 1)
            if expert := _EXPERT.fullmatch(path):
                experts = max(experts, int(expert["e"]) + 1)

    unknown: dict[str, None] = {}
    uneven: dict[str, None] = {}
    fused: dict[str, None] = {}
    groups: dict[str, list[tuple[dict[str, int], str, dict[str, Any]]]] = defaultdict(list)
    for path, (shape, dtype) in facts.tensors.items():
        key, indices = _template(path)
        entry: dict[str, Any] = {"shape": [int(size) for size in shape], "dtype": dtype}
        kind = _kind(path)
        if facts.own_expert_mesh and "e" in indices:
            entry["mesh"] = "expert"
        elif kind == "qkv" and facts.qkv is None and "tp" in mesh:
            fused[key] = None
        elif kind is None:
            unknown[key] = None
        elif "tp" in mesh and (cut := _cut(facts, path, kind)):
            entry["shard"] = [cut]
            if "rule" in cut and not _divides(cut, shape, facts.tp):
                widths = [
                    item if isinstance(item, int) else item["width"]
                    for item in cut.get("sections", [shape[cut["dim"]]])
                ]
                uneven[f"{key} (dim {cut['dim']} of {'+'.join(map(str, widths))} over tp {facts.tp})"] = None
        groups[key].append((indices, path, entry))
    if fused:
        raise InvalidError(
            f"{_some(fused)}: query, key and value in one matrix: say how they lie,"
            " --qkv fused (one after the other) or --qkv grouped (head by head)",
            tensors=list(fused),
        )

    entries: dict[str, Any] = {}
    for key, members in groups.items():
        entries |= _grouped(key, members, layers, experts, mesh)
    notes = [
        f"not recognised, replicated: {_some(unknown)}" if unknown else "",
        f"does not divide, rule ceil: {_some(uneven)}" if uneven else "",
        *(
            f"{stack}: {count} layers over {mesh['pp']} stages: the last {mesh['pp'] - count} have none"
            for stack, count in layers.items()
            if mesh.get("pp", 1) > count
        ),
    ]
    return entries, [note for note in notes if note]


def _grouped(
    key: str,
    members: list[tuple[dict[str, int], str, dict[str, Any]]],
    layers: Mapping[str, int],
    experts: int,
    mesh: Mapping[str, int],
) -> dict[str, Any]:
    """Returns the entries of the tensors that share ``key``: one, if they are alike and complete."""
    indices, path, entry = members[0]
    match = _LAYER.fullmatch(path)
    sizes = {"i": layers[match["stack"]] if match else 0, "e": experts}
    full = {name: sizes[name] for name in indices}
    if full and len(members) == math.prod(full.values()) and all(other == entry for _, _, other in members):
        on: dict[str, Any] = {}
        if "pp" in mesh:
            on["pp"] = {"by": "i", "owner": _spread(full["i"], mesh["pp"])}
        if "e" in full and "ep" in mesh:
            on["ep"] = {"by": "e", "owner": _spread(full["e"], mesh["ep"])}
        return {key: {**entry, "count": full, **({"on": on} if on else {})}}

    entries: dict[str, Any] = {}
    for member, path, entry in members:
        on = {}
        if "pp" in mesh:
            if "i" in member:
                on["pp"] = _spread(sizes["i"], mesh["pp"])[member["i"]]
            elif (stage := _stage(path)) is not None:
                on["pp"] = stage
        if "e" in member and "ep" in mesh:
            on["ep"] = _spread(experts, mesh["ep"])[member["e"]]
        entries[path] = {**entry, **({"on": on} if on else {})}
    return entries


def _template(path: str) -> tuple[str, dict[str, int]]:
    """Returns ``path`` with ``{i}`` and ``{e}`` for its layer and expert, and their values."""
    match = _LAYER.fullmatch(path)
    if match is None:
        return path, {}
    rest, indices = match["rest"], {"i": int(match["i"])}
    if expert := _EXPERT.fullmatch(rest):
        indices["e"] = int(expert["e"])
        rest = f"{expert['before']}/{{e}}/{expert['after']}"
    return f"{match['stack']}/{{i}}/{rest}", indices


def _kind(path: str) -> Kind | None:
    """Returns what is done with the tensor, or None when its name says nothing."""
    match = _LAYER.fullmatch(path)
    if match is None:
        if _VOCABULARY_FIRST.fullmatch(path) or _VOCABULARY_LAST.fullmatch(path):
            return "column"
        return "whole" if _stage(path) is not None else None
    if _BUFFER.fullmatch(path):
        return "whole"
    module, _, leaf = match["rest"].rpartition("/")
    if leaf not in ("weight", "bias", "gamma", "beta", "inv_freq"):
        return None
    return next((kind for kind, rule in _IN_LAYER if rule.fullmatch(module)), None)


def _stage(path: str) -> int | None:
    """Returns the stage of a tensor outside the layers: 0, -1 (the last), or None for all."""
    if _VOCABULARY_LAST.fullmatch(path):
        return -1
    if _VOCABULARY_FIRST.fullmatch(path) or _FIRST.fullmatch(path):
        return 0
    return -1 if _LAST.fullmatch(path) else None


def _cut(facts: _Facts, path: str, kind: Kind) -> dict[str, Any] | None:
    """Returns the item of ``shard`` that cuts the tensor over tp, or None when it is replicated."""
    shape = facts.tensors[path][0]
    is_matrix = path.endswith("/weight") and len(shape) == 2
    if kind == "whole" or len(shape) not in (1, 2) or (kind == "row" and not is_matrix):
        return None
    conv1d = facts.conv1d and re.search(r"/c_(attn|fc|proj)/weight$", path) is not None
    out = 1 if is_matrix and conv1d else 0
    dim = 1 - out if kind == "row" else out
    size = int(shape[dim])
    widths: list[int] = [size]
    if kind == "gate_up":
        widths = _equal(path, size, 2)
    elif kind == "qkv" and facts.qkv == "fused":
        widths = _qkv_widths(facts, path, size)
    # Fewer key-value heads than ranks: each head is held by several.
    ways = (
        facts.kv_heads
        if facts.kv_heads and facts.tp % facts.kv_heads == 0 and facts.kv_heads < facts.tp
        else None
    )
    is_kv = [kind == "kv"] if len(widths) == 1 else [False, kind == "qkv", kind == "qkv"][: len(widths)]
    sections = [
        {"width": w, "ways": ways} if ways and kv and w % ways == 0 else w
        for w, kv in zip(widths, is_kv, strict=True)
    ]
    cut: dict[str, Any] = {"axis": "tp", "dim": dim}
    if len(sections) > 1 or isinstance(sections[0], dict):
        cut["sections"] = sections
    # A vocabulary that divides by these ranks need not by those of the next mesh: no plan should end there.
    if not _divides(cut, shape, facts.tp) or _LAYER.fullmatch(path) is None:
        cut["rule"] = "ceil"
    return cut


def _divides(cut: Mapping[str, Any], shape: Sequence[int], ways: int) -> bool:
    sections = cut.get("sections", [shape[cut["dim"]]])
    return not any(isinstance(section, int) and section % ways for section in sections)


def _equal(path: str, size: int, parts: int) -> list[int]:
    if size % parts:
        raise InvalidError(f"{path}: {size} rows are not {parts} equal parts")
    return [size // parts] * parts


def _qkv_widths(facts: _Facts, path: str, size: int) -> list[int]:
    """Returns the widths of query, key and value; the query is as wide as the output projection takes."""
    head, _, leaf = path.rpartition("/")
    parent = head.rpartition("/")[0]
    for name in ("o_proj", "out_proj", "c_proj", "dense", "linear_proj"):
        output = facts.tensors.get(f"{parent}/{name}/weight")
        if output is None or len(output[0]) != 2:
            continue
        query = int(output[0][0 if facts.conv1d else 1])
        if query < size and (size - query) % 2 == 0:
            return [query, (size - query) // 2, (size - query) // 2]
        raise InvalidError(
            f"{path}: {size} wide, but {name} takes a query of {query}, and what is left is no key and value:"
            " write its sections by hand"
        )
    return _equal(f"{head}/{leaf}", size, 3)


def _spread(count: int, ways: int) -> list[int]:
    """Returns the owner of each of ``count`` things, spread as `numpy.array_split` does."""
    base, more = divmod(count, ways)
    return [owner for owner in range(ways) for _ in range(base + (owner < more))]


def _some(names: Mapping[str, None], most: int = 6) -> str:
    """Returns the first names, and how many more there are."""
    shown = ", ".join(list(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
