"""Layouts made from the real tensor lists of real models."""

from __future__ import annotations

import json
import math

import pytest

from tenplexfs.core.build import build_ptc
from tenplexfs.core.derive import derive_layout
from tenplexfs.core.families import make_layout
from tenplexfs.errors import InvalidError
from tenplexfs.formats.layout_json import parse_layout

MESH = {"pp": 2, "dp": 1, "tp": 2}
NODES = ["node0", "node1"]


def linear(name, out, into, bias=True):
    return {f"{name}/weight": ((out, into), "float32")} | (
        {f"{name}/bias": ((out,), "float32")} if bias else {}
    )


def conv1d(name, into, out):
    return {f"{name}/weight": ((into, out), "float32"), f"{name}/bias": ((out,), "float32")}


def norm(name, size, bias=True):
    return {f"{name}/{leaf}": ((size,), "float32") for leaf in ("weight", "bias")[: 1 + bias]}


def bert(layers=6, hidden=384, wide=1536, vocabulary=30522, prefix=""):
    model = {
        "embeddings/position_ids": ((1, 512), "int64"),
        "embeddings/word_embeddings/weight": ((vocabulary, hidden), "float32"),
        "embeddings/position_embeddings/weight": ((512, hidden), "float32"),
        "embeddings/token_type_embeddings/weight": ((2, hidden), "float32"),
        **norm("embeddings/LayerNorm", hidden),
        **linear("pooler/dense", hidden, hidden),
    }
    for i in range(layers):
        layer = f"encoder/layer/{i}"
        for part in ("self/query", "self/key", "self/value", "output/dense"):
            model |= linear(f"{layer}/attention/{part}", hidden, hidden)
        model |= linear(f"{layer}/intermediate/dense", wide, hidden) | linear(
            f"{layer}/output/dense", hidden, wide
        )
        model |= norm(f"{layer}/attention/output/LayerNorm", hidden) | norm(
            f"{layer}/output/LayerNorm", hidden
        )
    return {prefix + path: value for path, value in model.items()}


def gpt2(layers=12, hidden=768, vocabulary=50257, prefix=""):
    model = {
        "wte/weight": ((vocabulary, hidden), "float32"),
        "wpe/weight": ((1024, hidden), "float32"),
        **norm("ln_f", hidden),
    }
    for i in range(layers):
        model |= norm(f"h/{i}/ln_1", hidden) | norm(f"h/{i}/ln_2", hidden)
        model |= {f"h/{i}/attn/bias": ((1, 1, 1024, 1024), "float32")}
        model |= conv1d(f"h/{i}/attn/c_attn", hidden, 3 * hidden) | conv1d(
            f"h/{i}/attn/c_proj", hidden, hidden
        )
        model |= conv1d(f"h/{i}/mlp/c_fc", hidden, 4 * hidden) | conv1d(
            f"h/{i}/mlp/c_proj", 4 * hidden, hidden
        )
    return {prefix + path: value for path, value in model.items()}


def llama(layers=4, hidden=4096, kv=1024, wide=14336, vocabulary=128256, experts=0):
    model = {
        "model/embed_tokens/weight": ((vocabulary, hidden), "bfloat16"),
        "model/norm/weight": ((hidden,), "bfloat16"),
        "lm_head/weight": ((vocabulary, hidden), "bfloat16"),
    }
    for i in range(layers):
        layer = f"model/layers/{i}"
        for name, out in (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv), ("o_proj", hidden)):
            model |= linear(f"{layer}/self_attn/{name}", out, hidden, bias=False)
        for name in ("input_layernorm", "post_attention_layernorm"):
            model |= norm(f"{layer}/{name}", hidden, bias=False)
        if experts:
            model |= linear(f"{layer}/block_sparse_moe/gate", experts, hidden, bias=False)
        for e in range(experts):
            for name, out, into in (("w1", wide, hidden), ("w2", hidden, wide), ("w3", wide, hidden)):
                model |= linear(f"{layer}/block_sparse_moe/experts/{e}/{name}", out, into, bias=False)
        if not experts:
            model |= linear(f"{layer}/mlp/gate_proj", wide, hidden, bias=False)
            model |= linear(f"{layer}/mlp/up_proj", wide, hidden, bias=False)
            model |= linear(f"{layer}/mlp/down_proj", hidden, wide, bias=False)
    return model


def neox(layers=4, hidden=512):
    model = linear("gpt_neox/embed_in", 50432, hidden, bias=False) | linear(
        "embed_out", 50432, hidden, bias=False
    )
    model |= norm("gpt_neox/final_layer_norm", hidden)
    for i in range(layers):
        layer = f"gpt_neox/layers/{i}"
        model |= norm(f"{layer}/input_layernorm", hidden) | norm(f"{layer}/post_attention_layernorm", hidden)
        model |= linear(f"{layer}/attention/query_key_value", 3 * hidden, hidden)
        model |= linear(f"{layer}/attention/dense", hidden, hidden)
        model |= linear(f"{layer}/mlp/dense_h_to_4h", 4 * hidden, hidden)
        model |= linear(f"{layer}/mlp/dense_4h_to_h", hidden, 4 * hidden)
    return model


def dims(layout):
    """Key -> the dim that is cut over tp, or None; only the model's own part of the key is kept."""
    return {
        key: entry["shard"][0]["dim"] if "shard" in entry else None
        for key, entry in layout["tensors"].items()
    }


def covered(layout):
    """The paths that the entries of ``layout`` give."""
    paths = []
    for key, entry in layout["tensors"].items():
        counts = entry.get("count", {})
        for n in range(math.prod(counts.values())):
            path = key
            for name, size in counts.items():
                n, index = divmod(n, size)
                path = path.replace(f"{{{name}}}", str(index))
            paths.append(path)
    return paths


@pytest.mark.parametrize(
    "model", [bert(), bert(prefix="bert/"), gpt2(), gpt2(prefix="transformer/"), llama(), neox()]
)
@pytest.mark.parametrize("mesh", [{"pp": 1, "dp": 1, "tp": 1}, {"pp": 3, "dp": 2, "tp": 4}])
def test_every_tensor_is_laid_out_once_with_its_shape(model, mesh):
    layout, notes = make_layout(model, mesh=mesh, nodes=NODES, qkv="fused")
    assert sorted(covered(layout)) == sorted(model)
    assert not [note for note in notes if "not recognised" in note]
    assert list(layout["mesh"]) == ["pp", "dp", "tp"]


def test_bert_is_cut_by_columns_rows_and_vocabulary():
    layout, notes = make_layout(bert(), mesh=MESH, nodes=NODES)
    layer = "encoder/layer/{i}"
    cut = dims(layout)
    assert cut[f"{layer}/attention/self/query/weight"] == cut[f"{layer}/attention/self/query/bias"] == 0
    assert cut[f"{layer}/intermediate/dense/weight"] == cut[f"{layer}/intermediate/dense/bias"] == 0
    assert cut[f"{layer}/attention/output/dense/weight"] == cut[f"{layer}/output/dense/weight"] == 1
    assert cut["embeddings/word_embeddings/weight"] == 0
    for whole in ("attention/output/dense/bias", "output/dense/bias", "output/LayerNorm/weight"):
        assert cut[f"{layer}/{whole}"] is None
    assert cut["pooler/dense/weight"] is None
    tensors = layout["tensors"]
    assert tensors["embeddings/position_ids"]["on"] == {"pp": 0}
    assert tensors["pooler/dense/weight"]["on"] == {"pp": -1}
    assert tensors[f"{layer}/output/dense/bias"]["on"] == {"pp": {"by": "i", "owner": [0, 0, 0, 1, 1, 1]}}
    assert layout["nodes"] == {"node0": [0, 1], "node1": [2, 3]}
    assert notes == []


def test_a_dim_that_does_not_divide_is_cut_by_ceil_and_said_so():
    layout, notes = make_layout(bert(), mesh={"pp": 4, "dp": 1, "tp": 4}, nodes=NODES)
    assert layout["tensors"]["embeddings/word_embeddings/weight"]["shard"] == [
        {"axis": "tp", "dim": 0, "rule": "ceil"}
    ]
    assert "rule" not in layout["tensors"]["encoder/layer/{i}/intermediate/dense/weight"]["shard"][0]
    owner = layout["tensors"]["encoder/layer/{i}/intermediate/dense/weight"]["on"]["pp"]["owner"]
    assert owner == [0, 0, 1, 1, 2, 3]
    assert len(notes) == 1
    assert "embeddings/word_embeddings/weight (dim 0 of 30522 over tp 4)" in notes[0]


def test_a_vocabulary_that_divides_here_is_cut_for_meshes_by_which_it_does_not():
    layout, notes = make_layout(bert(), mesh={"pp": 2, "dp": 1, "tp": 2}, nodes=NODES)
    assert notes == []
    derived = build_ptc(derive_layout(parse_layout(json.dumps(layout)), {"tp": 4, "pp": 1}))
    rows = [derived.shard(rank, "embeddings/word_embeddings/weight").local_shape[0] for rank in range(4)]
    assert rows == [7631, 7631, 7631, 7629]


def test_gpt2_has_conv1d_weights_and_its_fused_matrix_is_never_guessed():
    with pytest.raises(InvalidError, match=r"h/\{i\}/attn/c_attn/weight.*--qkv fused.*--qkv grouped"):
        make_layout(gpt2(), mesh=MESH, nodes=NODES)
    layout, _ = make_layout(gpt2(), mesh=MESH, nodes=NODES, qkv="fused")
    tensors = layout["tensors"]
    third = [768, 768, 768]
    assert tensors["h/{i}/attn/c_attn/weight"]["shard"] == [{"axis": "tp", "dim": 1, "sections": third}]
    assert tensors["h/{i}/attn/c_attn/bias"]["shard"] == [{"axis": "tp", "dim": 0, "sections": third}]
    cut = dims(layout)
    assert (
        cut["h/{i}/mlp/c_fc/weight"],
        cut["h/{i}/mlp/c_proj/weight"],
        cut["h/{i}/attn/c_proj/weight"],
    ) == (1, 0, 0)
    assert cut["h/{i}/mlp/c_proj/bias"] is None
    assert cut["h/{i}/attn/bias"] is None
    grouped, _ = make_layout(gpt2(), mesh=MESH, nodes=NODES, qkv="grouped")
    assert grouped["tensors"]["h/{i}/attn/c_attn/weight"]["shard"] == [{"axis": "tp", "dim": 1}]


def test_gpt2_by_plain_linear_modules_is_cut_the_other_way():
    model = {
        path: (shape[::-1] if "/c_" in path else shape, dtype)
        for path, (shape, dtype) in gpt2(layers=2).items()
    }
    layout, _ = make_layout(model, mesh=MESH, nodes=NODES, qkv="fused")
    cut = dims(layout)
    assert (cut["h/{i}/attn/c_attn/weight"], cut["h/{i}/mlp/c_proj/weight"]) == (0, 1)


def test_llama_with_fewer_key_value_heads_than_ranks():
    layout, _ = make_layout(llama(), mesh={"pp": 1, "dp": 1, "tp": 16}, nodes=NODES, kv_heads=8)
    attention = "model/layers/{i}/self_attn"
    assert layout["tensors"][f"{attention}/k_proj/weight"]["shard"] == [
        {"axis": "tp", "dim": 0, "sections": [{"width": 1024, "ways": 8}]}
    ]
    cut = dims(layout)
    assert (cut[f"{attention}/q_proj/weight"], cut[f"{attention}/o_proj/weight"]) == (0, 1)
    assert (cut["model/layers/{i}/mlp/up_proj/weight"], cut["model/layers/{i}/mlp/down_proj/weight"]) == (
        0,
        1,
    )
    assert cut["model/layers/{i}/input_layernorm/weight"] is None
    assert layout["tensors"]["lm_head/weight"]["on"] == {"pp": -1}
    assert layout["tensors"]["lm_head/weight"]["dtype"] == "bfloat16"


def test_mixtral_experts_are_counted_and_placed_when_the_mesh_has_their_axis():
    model = llama(experts=8)
    layout, _ = make_layout(model, mesh={"pp": 2, "ep": 4, "tp": 2}, nodes=NODES)
    entry = layout["tensors"]["model/layers/{i}/block_sparse_moe/experts/{e}/w2/weight"]
    assert entry["count"] == {"i": 4, "e": 8}
    assert entry["shard"] == [{"axis": "tp", "dim": 1}]
    assert entry["on"]["ep"] == {"by": "e", "owner": [0, 0, 1, 1, 2, 2, 3, 3]}
    assert dims(layout)["model/layers/{i}/block_sparse_moe/gate/weight"] is None
    assert sorted(covered(layout)) == sorted(model)


def test_a_query_wider_than_key_and_value_is_measured_by_the_output_projection():
    model = linear("layers/0/attn/qkv_proj", 2048 + 2 * 512, 2048) | linear(
        "layers/0/attn/o_proj", 2048, 2048
    )
    layout, _ = make_layout(model, mesh=MESH, nodes=NODES, qkv="fused")
    assert layout["tensors"]["layers/{i}/attn/qkv_proj/bias"]["shard"][0]["sections"] == [2048, 512, 512]


def test_what_is_unknown_is_replicated_and_named():
    model = bert(layers=2) | {
        "adapter/magic": ((3, 5), "float32"),
        "encoder/layer/0/lora/A": ((8, 384), "float32"),
    }
    layout, notes = make_layout(model, mesh=MESH, nodes=NODES)
    assert layout["tensors"]["adapter/magic"] == {"shape": [3, 5], "dtype": "float32"}
    assert layout["tensors"]["encoder/layer/0/lora/A"]["on"] == {"pp": 0}
    assert notes == ["not recognised, replicated: adapter/magic, encoder/layer/{i}/lora/A"]


def test_layers_that_differ_have_entries_of_their_own():
    model = bert(layers=2) | linear("encoder/layer/1/intermediate/dense", 512, 384)
    layout, _ = make_layout(model, mesh=MESH, nodes=NODES)
    assert layout["tensors"]["encoder/layer/1/intermediate/dense/weight"]["on"] == {"pp": 1}
    assert sorted(covered(layout)) == sorted(model)


def test_nodes_are_filled_in_order_and_must_have_room():
    counted, _ = make_layout(bert(), mesh=MESH, nodes={"a": 3, "b": 3})
    assert counted["nodes"] == {"a": [0, 1, 2], "b": [3]}
    with pytest.raises(InvalidError, match="4 ranks, the nodes have 2 devices"):
        make_layout(bert(), mesh=MESH, nodes={"a": 1, "b": 1})
    with pytest.raises(InvalidError, match="distinct names"):
        make_layout(bert(), mesh=MESH, nodes=["a", "a"])
    with pytest.raises(InvalidError, match="axis 'tp': need a size >= 1, got 0"):
        make_layout(bert(), mesh={"tp": 0}, nodes=NODES)
