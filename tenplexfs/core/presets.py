"""Layouts of well-known models at their published sizes, cut by Megatron's rules.

A layer's first matrices are cut by their output (query, key, value and the halves of a gated MLP each on its
own), its last ones by their input, vocabularies by their rows, padded; norms, routers and the biases added
after a product cut by its input are replicated. Stages take even runs of the layers.
Names are Megatron-Core's.

Source: "Megatron-LM" (arXiv 1909.08053, section 3); the sizes: BERT (1810.04805), GPT-3 (2005.14165, table
2.1), Llama 3 (2407.21783, table 3), Mixtral (2401.04088, table 1), ResNet (1512.03385, table 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tenplexfs.core.derive import with_nodes
from tenplexfs.core.layout import Layout, Mesh, expand_name, place_in_order
from tenplexfs.core.resnet import resnet50_tensors
from tenplexfs.errors import InvalidError, NotFoundError

__all__ = ["PRESETS", "Transformer", "expert_meshes", "parameter_count", "preset_layout", "preset_tensors"]

_PAD_MULTIPLE = 128
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Transformer:
    """The sizes of a model, and the few ways in which families differ.

    Attributes:
        layers: Number of layers.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key-value heads.
        ffn: Inner width of the MLP, of one half where it is gated.
        vocab: Rows of the embedding, not padded.
        positions: Rows of the learned position embedding; 0 for none.
        experts: Experts of a layer; 0 for a dense MLP.
        gated: Whether the MLP is SwiGLU.
        has_bias: Whether matrices and norms have biases.
        is_tied: Whether the output layer is the embedding.
        has_bert_heads: Token types, pooler, and the heads for masked words and next sentences.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    positions: int = 0
    experts: int = 0
    gated: bool = False
    has_bias: bool = True
    is_tied: bool = True
    has_bert_heads: bool = False


def _gpt3(layers: int, hidden: int, heads: int) -> Transformer:
    return Transformer(layers, hidden, heads, heads, 4 * hidden, 50257, positions=2048)


def _llama(layers: int, hidden: int, heads: int, ffn: int, vocab: int, experts: int = 0) -> Transformer:
    return Transformer(
        layers, hidden, heads, 8, ffn, vocab, experts=experts, gated=True, has_bias=False, is_tied=False
    )


PRESETS: Mapping[str, Transformer | None] = {
    "bert-large": Transformer(24, 1024, 16, 16, 4096, 30522, positions=512, has_bert_heads=True),
    # The paper's table gives GPT-3 XL 24 heads of 128, which are not its 2,048 wide; 16 are.
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-2.7b": _gpt3(32, 2560, 32),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    "gpt3-175b": _gpt3(96, 12288, 96),
    "llama3-8b": _llama(32, 4096, 32, 14336, 128256),
    "llama3-405b": _llama(126, 16384, 128, 53248, 128256),
    "mixtral-8x7b": _llama(32, 4096, 32, 14336, 32000, experts=8),
    "resnet50": None,
}
"""Name and sizes; None is the one that is no transformer."""


def preset_tensors(name: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns path -> (global shape, dtype) of all parameters and buffers; tied ones under one name.

    Raises:
        NotFoundError: There is no such preset; names them all.
    """
    model = _preset(name)
    if model is None:
        return resnet50_tensors()
    mesh = {"pp": 1, "dp": 1, "ep": 1, "tp": 1}
    found = {}
    for key, entry in _entries(model, mesh, None).items():
        if "alias" in entry:
            continue
        counts = entry.get("count", {})
        for values in np.ndindex(*counts.values()):
            path = expand_name(key, dict(zip(counts, values, strict=True)))
            found[path] = (tuple(entry["shape"]), entry["dtype"])
    return found


def parameter_count(name: str) -> int:
    """Returns the number of parameters of a preset, ties once, buffers not.

    >>> parameter_count("llama3-8b")
    8030261248

    Raises:
        NotFoundError: There is no such preset.
    """
    tensors = preset_tensors(name).items()
    return sum(math.prod(shape) for path, (shape, _) in tensors if not _is_buffer(path))


def preset_layout(
    name: str,
    *,
    tp: int,
    pp: int,
    dp: int,
    ep: int = 1,
    nodes: Mapping[str, int | None] | Sequence[str],
    optimizer: Literal["adam"] | None = None,
    zero: bool = False,
) -> dict[str, Any]:
    """Returns a layout of a well-known model, as the JSON of a layout file.

    Args:
        name: One of `PRESETS`.
        tp: Ranks that share each matrix.
        pp: Stages.
        dp: Replicas of what is no expert. There are pp x dp x tp ranks, as in Megatron.
        ep: Ranks that share the experts; out of dp, or where it does not divide dp, out of dp x tp, by a mesh
            of the experts' own in which no expert is cut.
        nodes: Names, which share the ranks evenly and in order, or name -> devices, filled in order.
        optimizer: ``adam`` adds the float32 master copy (unless the parameter is float32), m and v.
        zero: Whether those are raveled and cut over the replicas too.

    Raises:
        NotFoundError: There is no such preset.
        InvalidError: The sizes do not fit the model, or the nodes do not fit the sizes.
    """
    model = _preset(name)
    for axis, size in {"tp": tp, "pp": pp, "dp": dp, "ep": ep}.items():
        if size < 1:
            raise InvalidError(f"{name}: {axis}: need a size >= 1, got {size}")
    if ep > 1 and (model is None or not model.experts):
        raise InvalidError(f"{name}: ep {ep}: the model has no experts")
    mesh: dict[str, int] = {"pp": pp, "dp": dp, "tp": tp}
    expert_mesh: dict[str, int] | None = None
    if model is not None:
        _check(name, model, mesh, ep)
    if model is not None and model.experts:
        try:
            mesh, expert_mesh = expert_meshes(tp=tp, pp=pp, dp=dp, ep=ep)
        except InvalidError as error:
            raise InvalidError(f"{name}: {error}") from None
    if model is None:
        entries: dict[str, _Entry] = {
            path: {"shape": list(shape), "dtype": dtype}
            for path, (shape, dtype) in resnet50_tensors().items()
        }
    else:
        entries = _entries(model, mesh, expert_mesh)
    if optimizer is not None:
        entries |= _adam(entries, mesh, zero=zero)
    elif zero:
        raise InvalidError(f"{name}: zero cuts the state of an optimizer: say which")
    named = nodes if isinstance(nodes, Mapping) else dict.fromkeys(nodes)
    if not named or len(named) != len(nodes):
        raise InvalidError(f"nodes: need distinct names, got {list(nodes)}")
    placed = place_in_order(with_nodes(Layout(Mesh(tuple(mesh.items()))), named))
    return {
        "format": "tenplexfs-layout",
        "version": 1,
        "mesh": mesh,
        **({"meshes": {"expert": expert_mesh}} if expert_mesh else {}),
        "nodes": {node: list(ranks) for node, ranks in placed.nodes},
        "tensors": entries,
    }


def expert_meshes(*, tp: int, pp: int, dp: int, ep: int) -> tuple[dict[str, int], dict[str, int] | None]:
    """Returns the mesh of a model with experts, and a mesh of the experts' own where they need one.

    There are pp x dp x tp ranks, as in Megatron: ``ep`` is taken out of ``dp``, or where it does not divide
    it, out of dp x tp.

    >>> expert_meshes(tp=1, pp=2, dp=4, ep=2)
    ({'pp': 2, 'dp': 2, 'ep': 2, 'tp': 1}, None)
    >>> expert_meshes(tp=4, pp=1, dp=2, ep=8)
    ({'pp': 1, 'dp': 2, 'tp': 4}, {'pp': 1, 'edp': 1, 'ep': 8})

    Raises:
        InvalidError: It divides neither.
    """
    if dp % ep == 0:
        return {"pp": pp, "dp": dp // ep, "ep": ep, "tp": tp}, None
    if dp * tp % ep == 0:
        return {"pp": pp, "dp": dp, "tp": tp}, {"pp": pp, "edp": dp * tp // ep, "ep": ep}
    raise InvalidError(f"ep {ep} divides neither dp {dp} nor dp x tp {dp * tp}")


def _is_buffer(path: str) -> bool:
    return path.rpartition("/")[2] in _BUFFERS


def _preset(name: str) -> Transformer | None:
    if name not in PRESETS:
        raise NotFoundError(f"no model {name!r}: known are {', '.join(PRESETS)}")
    return PRESETS[name]


def _check(name: str, model: Transformer, mesh: Mapping[str, int], ep: int) -> None:
    tp, kv = mesh["tp"], model.kv_heads
    if model.heads % tp or (kv % tp and tp % kv):
        raise InvalidError(f"{name}: tp {tp} does not divide {model.heads} heads and {kv} key-value heads")
    if mesh["pp"] > model.layers:
        raise InvalidError(f"{name}: pp {mesh['pp']}: the model has {model.layers} layers")
    if model.experts and ep > model.experts:
        raise InvalidError(f"{name}: ep {ep}: the model has {model.experts} experts")


def _spread(count: int, ways: int) -> list[int]:
    return [owner for owner, part in enumerate(np.array_split(range(count), ways)) for _ in part]


class _Entries:
    """Collects entries; what all of a group share is given once."""

    def __init__(self, found: dict[str, _Entry], prefix: str, has_bias: bool, common: _Entry) -> None:
        self._found, self._prefix, self._has_bias, self._common = found, prefix, has_bias, common

    def add(self, key: str, shape: Sequence[int], shard: _Entry | None = None) -> None:
        cuts = {"shard": [shard]} if shard else {}
        self._found[self._prefix + key] = {
            "shape": list(shape),
            "dtype": "bfloat16",
            **cuts,
            **self._common,
        }

    def column(self, key: str, out: int, inner: int, cut: _Entry | None) -> None:
        """Adds a matrix cut by its output, and its bias, cut alike."""
        self.add(f"{key}/weight", (out, inner), cut)
        if self._has_bias:
            self.add(f"{key}/bias", (out,), cut)

    def row(self, key: str, out: int, inner: int, *, is_cut: bool = True) -> None:
        """Adds a matrix cut by its input, and its bias, replicated."""
        self.add(f"{key}/weight", (out, inner), {"axis": "tp", "dim": 1} if is_cut else None)
        if self._has_bias:
            self.add(f"{key}/bias", (out,))

    def norm(self, key: str, width: int) -> None:
        self.add(f"{key}/weight", (width,))
        if self._has_bias:
            self.add(f"{key}/bias", (width,))


def _entries(
    model: Transformer, mesh: Mapping[str, int], expert_mesh: Mapping[str, int] | None
) -> dict[str, _Entry]:
    hidden, tp = model.hidden, mesh["tp"]
    found: dict[str, _Entry] = {}
    owner = _spread(model.layers, mesh["pp"])
    rows = {"axis": "tp", "dim": 0}
    vocabulary = {**rows, "pad_multiple": _PAD_MULTIPLE}

    first = _Entries(found, "embedding/", model.has_bias, {"on": {"pp": 0}})
    first.add("word_embeddings/weight", (model.vocab, hidden), vocabulary)
    if model.positions:
        first.add("position_embeddings/weight", (model.positions, hidden))
    if model.has_bert_heads:
        first.add("tokentype_embeddings/weight", (2, hidden))
        first.norm("layernorm", hidden)

    common: _Entry = {"count": {"i": model.layers}, "on": {"pp": {"by": "i", "owner": owner}}}
    layer = _Entries(found, "decoder/layers/{i}/", model.has_bias, common)
    layer.norm("input_layernorm", hidden)
    kv_width = hidden // model.heads * model.kv_heads
    kv = {"width": kv_width, "ways": model.kv_heads} if tp > model.kv_heads else kv_width
    qkv = {**rows, "sections": [hidden, kv, kv]}
    layer.column("self_attention/linear_qkv", hidden + 2 * kv_width, hidden, qkv)
    layer.row("self_attention/linear_proj", hidden, hidden)
    layer.norm("pre_mlp_layernorm", hidden)
    wide = model.ffn * (1 + model.gated)
    gate = {**rows, "sections": [model.ffn] * 2} if model.gated else rows
    if model.experts:
        layer.add("mlp/router/weight", (model.experts, hidden))
        experts = {
            "count": {**common["count"], "e": model.experts},
            "on": {
                **common["on"],
                "ep": {"by": "e", "owner": _spread(model.experts, _ep(mesh, expert_mesh))},
            },
            **({"mesh": "expert"} if expert_mesh else {}),
        }
        layer = _Entries(found, "decoder/layers/{i}/mlp/experts/{e}/", model.has_bias, experts)
        layer.column("linear_fc1", wide, hidden, None if expert_mesh else gate)
        layer.row("linear_fc2", hidden, model.ffn, is_cut=expert_mesh is None)
    else:
        layer.column("mlp/linear_fc1", wide, hidden, gate)
        layer.row("mlp/linear_fc2", hidden, model.ffn)

    last = _Entries(found, "", model.has_bias, {"on": {"pp": -1}})
    if model.has_bert_heads:
        for key in ("pooler/dense", "lm_head/dense"):
            last.row(key, hidden, hidden, is_cut=False)
        last.norm("lm_head/layernorm", hidden)
        last.row("binary_head", 2, hidden, is_cut=False)
        last.add("output_layer/bias", (model.vocab,), vocabulary)
    else:
        last.norm("decoder/final_layernorm", hidden)
    if model.is_tied:
        found["output_layer/weight"] = {"alias": "embedding/word_embeddings/weight", "on": {"pp": -1}}
    else:
        last.add("output_layer/weight", (model.vocab, hidden), vocabulary)
    return found


def _ep(mesh: Mapping[str, int], expert_mesh: Mapping[str, int] | None) -> int:
    return (expert_mesh or mesh)["ep"]


def _adam(entries: Mapping[str, _Entry], mesh: Mapping[str, int], *, zero: bool) -> dict[str, _Entry]:
    """Returns the optimizer's entries: master copy, first and second moment, float32."""
    found = {}
    for part in ("master", "m", "v"):
        for key, entry in entries.items():
            if "alias" in entry or _is_buffer(key) or (part == "master" and entry["dtype"] == "float32"):
                continue
            like: _Entry = {"like": key, "dtype": "float32"}
            if zero:
                like["then"] = [{"axis": _replicas(entry, mesh), "flat": True}]
            found[f"optimizer/{part}/{key}"] = like
    return found


def _replicas(entry: _Entry, mesh: Mapping[str, int]) -> str | list[str]:
    """Returns the axes over which a parameter is replicated, tensor parallelism apart."""
    if entry.get("mesh") == "expert":
        return "edp"
    if "ep" in mesh and "ep" not in entry.get("on", {}):
        return ["dp", "ep"]
    return "dp"
